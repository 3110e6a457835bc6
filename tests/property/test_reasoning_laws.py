"""The laws of reasoning parsers, for every registered format and arbitrary text with markers in it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smg.messages import ContentDelta, ParserEvent, ReasoningDelta
from smg.models.reasoning import encode_reasoning, reasoning_parser
from smg.models.reasoning_blocks import INKLING_TOKENS
from smg.models.registry import REASONING_PARSERS, reasoning_format

MARKERS = [
    "<think>",
    "</think>",
    "<mm:think>",
    "</mm:think>",
    "◁think▷",
    "◁/think▷",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<｜DSML｜ calls>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    *sorted(INKLING_TOKENS),
]
XTML = [f"<|{way}|>{name}<|sep|>" for way in ("open", "close") for name in ("think", "response", "message", "tools")]
FRAGMENTS = st.one_of(
    st.sampled_from(MARKERS + XTML),
    st.sampled_from(MARKERS + XTML).flatmap(lambda marker: st.integers(1, len(marker)).map(lambda size: marker[:size])),
    st.text(alphabet="<|/> \n\u00a0\u001cthinksep◁aé", max_size=6),
)
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)
PLAIN = st.text(alphabet=st.characters(exclude_characters="<◁", exclude_categories=("Cs",)), max_size=40)


def run(name: str, armed: bool, pieces: list[str]) -> list[ParserEvent]:
    parser = reasoning_parser(reasoning_format(name), armed=armed)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    assert not parser.holding
    assert parser.finish() == []
    return events


def sides(events: list[ParserEvent]) -> tuple[str, str]:
    assert all(isinstance(event, ReasoningDelta | ContentDelta) and event.text for event in events)
    return (
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        "".join(event.text for event in events if isinstance(event, ContentDelta)),
    )


def runs(events: list[ParserEvent]) -> list[tuple[type, str]]:
    """Neighbours of one side joined: the order of the text across both sides."""
    joined: list[tuple[type, str]] = []
    for event in events:
        assert isinstance(event, ReasoningDelta | ContentDelta)
        if joined and joined[-1][0] is type(event):
            joined[-1] = (type(event), joined[-1][1] + event.text)
        else:
            joined.append((type(event), event.text))
    return joined


@pytest.mark.parametrize("name", REASONING_PARSERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, armed=st.booleans(), data=st.data())
def test_chunking_does_not_matter(name: str, text: str, armed: bool, data: st.DataObject) -> None:
    whole = runs(run(name, armed, [text]))
    assert runs(run(name, armed, list(text))) == whole
    borders = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]
    assert runs(run(name, armed, pieces)) == whole


@pytest.mark.parametrize("name", REASONING_PARSERS)
@settings(max_examples=40, deadline=None)
@given(text=PLAIN, armed=st.booleans())
def test_text_without_markers_is_kept(name: str, text: str, armed: bool) -> None:
    reasoning, content = sides(run(name, armed, list(text)))
    assert reasoning + content == text
    declared = reasoning_format(name)
    thinks = (armed or declared.starts_in_reasoning) and name != "passthrough"
    assert (reasoning if thinks else content) == text


@pytest.mark.parametrize("name", REASONING_PARSERS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS, armed=st.booleans())
def test_only_markers_disappear(name: str, text: str, armed: bool) -> None:
    if name == "inkling":
        return  # headers and text calls are dropped by their format
    kept = "".join(text for _, text in runs(run(name, armed, [text])))
    position = 0
    for character in kept:
        position = text.index(character, position) + 1


@pytest.mark.parametrize("name", [name for name in REASONING_PARSERS if name != "passthrough"])
@settings(max_examples=40, deadline=None)
@given(reasoning=PLAIN, content=PLAIN, armed=st.booleans())
def test_what_a_model_writes_comes_back(name: str, reasoning: str, content: str, armed: bool) -> None:
    text = encode_reasoning(reasoning_format(name), reasoning, content, armed=armed)
    assert sides(run(name, armed, list(text))) == (reasoning, content)


@pytest.mark.parametrize("name", REASONING_PARSERS)
@pytest.mark.parametrize("piece", ["<", "<|open|>", "<|open|>  ", "</mm:thin", "◁/thin", " <thi", "<think>a</think>"])
def test_time_is_linear(name: str, piece: str) -> None:
    def seconds(count: int) -> float:
        parser = reasoning_parser(reasoning_format(name), armed=True)
        start = time.process_time()
        for _ in range(count):
            parser.feed(piece)
        parser.feed(piece * count)
        parser.finish()
        return time.process_time() - start

    small = min(seconds(500) for _ in range(3))
    assert min(seconds(4000) for _ in range(2)) < 8 * 6 * small + 0.01


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_held_text_is_bounded(name: str) -> None:
    parser = reasoning_parser(reasoning_format(name), armed=True)
    fed = released = 0
    for piece in ["<|close|>", *[" "] * 1000, "x"]:
        fed += len(piece)
        released += sum(len(event.text) for event in parser.feed(piece))  # type: ignore[union-attr]
        assert fed - released <= 200
