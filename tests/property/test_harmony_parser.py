"""The Harmony parser: chunking does not matter, nothing is lost, nothing raises."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from smg.detok.stop import StopMatcher
from smg.messages import ContentDelta, ParserEvent, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from smg.models.harmony import HarmonyParser, HarmonyTextParser
from smg.models.harmony.tokens import CALL, CHANNEL, CONTROL_TOKENS, END, MESSAGE, RETURN, START, TOKEN_IDS

# Any text token is one character of this vocabulary.
ALPHABET = 'abcdefghijklmnopqrstuvwxyz .=<|>{}:"0'
WORDS = [
    "analysis",
    "commentary",
    "final",
    "assistant",
    " to=functions.f",
    " json",
    "functions.f",
    "{}",
    "ab c",
    " ",
    "<|end",
]
CONTROLS = re.compile("|".join(map(re.escape, TOKEN_IDS)))


class Decoder:
    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(ALPHABET[token] for token in token_ids)

    def finish(self) -> str:
        return ""


def tokens_of(text: str) -> list[int]:
    tokens: list[int] = []
    position = 0
    for match in CONTROLS.finditer(text):
        tokens += [ALPHABET.index(character) for character in text[position : match.start()]]
        tokens.append(TOKEN_IDS[match.group()])
        position = match.end()
    return tokens + [ALPHABET.index(character) for character in text[position:]]


def fields(events: Sequence[ParserEvent]) -> tuple[str, str, list[list[str | bool]]]:
    content = reasoning = ""
    calls: list[list[str | bool]] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append([event.name, "", False])
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(calls) - 1
            assert calls[-1][2] is False
            calls[-1][1] = str(calls[-1][1]) + event.fragment
        elif isinstance(event, ToolCallEnd):
            assert event.index == len(calls) - 1
            calls[-1][2] = True
    return content, reasoning, calls


def parse(
    tokens: Sequence[int], cuts: Sequence[int], stops: Sequence[str] = ()
) -> tuple[tuple[str, str, list[list[str | bool]]], int, str, str | None]:
    parser = HarmonyParser(Decoder, (lambda: StopMatcher(stops, keep=True)) if stops else None)
    events: list[ParserEvent] = []
    position = 0
    for cut in cuts:
        events += parser.feed(tokens[position : position + cut])
        position += cut
    events += parser.feed(tokens[position:])
    events += parser.finish()
    return fields(events), parser.reasoning_tokens, parser.finish_reason("length"), parser.matched_stop


outputs = st.lists(st.sampled_from([*TOKEN_IDS, *WORDS]), max_size=24).map("".join)
chunks = st.lists(st.integers(1, 5), max_size=40)


@settings(max_examples=100, deadline=None)
@given(outputs, chunks)
def test_chunking_of_tokens_does_not_matter(text: str, cuts: list[int]) -> None:
    tokens = tokens_of(text)
    assert parse(tokens, cuts) == parse(tokens, ())
    assert parse(tokens, [1] * len(tokens)) == parse(tokens, ())


@settings(max_examples=100, deadline=None)
@given(outputs, chunks)
def test_chunking_with_stop_strings_does_not_matter(text: str, cuts: list[int]) -> None:
    tokens = tokens_of(text)
    assert parse(tokens, cuts, ["nal", "b c", "<|s"]) == parse(tokens, (), ["nal", "b c", "<|s"])


@settings(max_examples=100, deadline=None)
@given(outputs, chunks)
def test_text_and_tokens_agree(text: str, cuts: list[int]) -> None:
    parser = HarmonyTextParser()
    events: list[ParserEvent] = []
    position = 0
    for cut in cuts:
        events += parser.feed(text[position : position + cut])
        position += cut
    events += parser.feed(text[position:])
    events += parser.finish()
    assert fields(events) == parse(tokens_of(text), ())[0]


plain = st.text(ALPHABET, max_size=12).filter(lambda text: not CONTROLS.search(text))
messages = st.lists(
    st.tuples(st.sampled_from(["analysis", "commentary", "final", "call"]), plain), min_size=1, max_size=6
)


@settings(max_examples=100, deadline=None)
@given(messages, chunks)
def test_well_formed_answers_come_back_whole(said: list[tuple[str, str]], cuts: list[int]) -> None:
    text = ""
    content, thoughts, calls = "", [], []
    for kind, body in said:
        if kind == "call":
            text += f"{START}assistant{CHANNEL}commentary to=functions.f json{MESSAGE}{body}{CALL}"
            calls.append(["f", body, True])
        else:
            text += f"{START}assistant{CHANNEL}{kind}{MESSAGE}{body}{RETURN if kind == 'final' else END}"
            if kind == "final":
                content += body
            elif body:
                thoughts.append(body)
    tokens = tokens_of(text.removeprefix(f"{START}assistant"))
    (got, _, reason, _) = parse(tokens, cuts)
    assert got == (content, "\n".join(thoughts), calls)
    assert reason == ("tool_calls" if calls else "length")


@settings(max_examples=60, deadline=None)
@given(plain)
def test_text_without_any_control_token_is_content(text: str) -> None:
    (content, reasoning, calls), *_ = parse(tokens_of(text), ())
    if not text.strip() or re.match(r"\s*(assistant\b\s*)?to=", text):
        assert content in ("", text)
    else:
        assert content == text
    assert (reasoning, calls) == ("", [])


def test_control_ids_are_distinct() -> None:
    assert len(set(CONTROL_TOKENS)) == len(TOKEN_IDS) == 7
