"""The stop matcher against a naive one that reads character by character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from smg.detok.stop import StopMatcher

ALPHABET = "ab#"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if keep else text[: end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(ALPHABET, max_size=30), stops=STOPS, keep=st.booleans(), cuts=st.lists(st.integers(1, 6), max_size=30)
)
def test_any_cut_gives_what_reading_by_character_gives(
    text: str, stops: list[str], keep: bool, cuts: list[int]
) -> None:
    matcher = StopMatcher(stops, keep=keep)
    released, position = "", 0
    for size in [*cuts, len(text) + 1]:
        released += matcher.feed(text[position : position + size])
        position += size
    released += matcher.finish()
    assert (released, matcher.matched) == naive(text, stops, keep)


@given(text=st.text(ALPHABET, max_size=20), stops=STOPS)
def test_holds_back_only_what_can_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = matcher.feed(text)
    if matcher.matched is None:
        held = text[len(released) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[start:]) for stop in stops for start in range(len(released)))
