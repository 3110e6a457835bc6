"""The laws that every registered tool format obeys, on outputs that its own encoder writes.

Each format's peculiarities have tests of their own; these ask the registry, so a new family is held to them at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smg.messages import ContentDelta, ParserEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from smg.models.family import ToolCall, ToolSpec
from smg.models.registry import TOOL_PARSERS, tool_format

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "rows": {"type": "array", "items": {"type": "integer"}},
        "more": {"type": "object"},
    },
}
TOOLS = [ToolSpec("find", SCHEMA), ToolSpec("put_it", SCHEMA)]
WRITTEN = [name for name in TOOL_PARSERS if tool_format(name).encode is not None]

texts = st.text(st.sampled_from('ab <>/|=[](){}"\\\n_:,é鯨'), max_size=20)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "count": st.integers(-(10**20), 10**20),
        "flag": st.booleans(),
        "rows": st.lists(st.integers(0, 99), min_size=1, max_size=3),
        "more": st.dictionaries(st.sampled_from(["a", "b"]), st.just("x"), min_size=1),
    },
)
calls = st.lists(st.builds(ToolCall, st.sampled_from(["find", "put_it"]), arguments), min_size=1, max_size=3)

Result = tuple[str, list[tuple[str, Any]]]


def collect(events: Iterable[ParserEvent]) -> Result:
    """Content and calls; checks that each call starts and ends once, in order, around valid JSON."""
    content: list[str] = []
    found: list[list[str]] = []
    ended = 0
    for event in events:
        match event:
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(index, name):
                assert index == len(found) == ended
                found.append([name, ""])
            case ToolCallArguments(index, fragment):
                assert index == ended == len(found) - 1
                found[-1][1] += fragment
            case ToolCallEnd(index):
                assert index == ended == len(found) - 1
                ended += 1
    assert ended == len(found)
    return "".join(content), [(name, json.loads(text)) for name, text in found]


def read(name: str, pieces: Sequence[str]) -> Result:
    parser = tool_format(name).parser(TOOLS)
    return collect([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=25, deadline=None)
@given(wanted=calls, places=st.lists(st.integers(1, 30), min_size=1))
def test_what_a_model_writes_comes_back(name: str, wanted: list[ToolCall], places: list[int]) -> None:
    encode = tool_format(name).encode
    assert encode is not None
    output = encode("Well.", wanted)
    result = read(name, [output])
    assert result[0].strip() == "Well."
    assert result[1] == [(call.name, call.arguments) for call in wanted]
    assert read(name, cut(output, 1)) == result
    pieces, rest = [], output
    for size in places:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert read(name, [*pieces, rest]) == result


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(max_examples=25, deadline=None)
@given(wanted=calls, data=st.data())
def test_a_cut_or_garbled_output_reads_the_same_in_pieces(
    name: str, wanted: list[ToolCall], data: st.DataObject
) -> None:
    declared = tool_format(name)
    output = declared.encode("Well.", wanted) if declared.encode is not None else repr(wanted)
    at = data.draw(st.integers(0, len(output)))
    marks = ["", "<", "x", *declared.openers, *sorted(declared.special_tokens)]
    text = output[:at] + data.draw(st.sampled_from(marks)) + data.draw(st.sampled_from(["", output[at:], output]))
    result = read(name, [text])
    for size in (1, 2, 5):
        assert read(name, cut(text, size)) == result


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(text=st.text(st.sampled_from("ab <>/-\n.,é鯨"), max_size=60))
@settings(max_examples=25, deadline=None)
def test_text_without_a_call_is_content(name: str, text: str) -> None:
    content, found = read(name, cut(text, 3))
    assert not found
    assert content.strip() == text.strip()
