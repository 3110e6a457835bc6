"""Laws of the tool-call formats with tagged parameters, over generated calls and over garbage."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smg.messages import ContentDelta, ParserEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from smg.models.family import ToolCall, ToolSpec
from smg.models.registry import tool_format

NAMES = (
    "qwen_xml",
    "minimax_m2",
    "minimax_m3",
    "glm45_moe",
    "glm47_moe",
    "step3",
    "deepseek32",
    "deepseek_v4",
    "deepseek_v41",
    "kimi_k3",
    "inkling",
)

SCHEMA = {
    "type": "object",
    "$defs": {"Code": {"type": "string"}},
    "properties": {
        "text": {"type": "string"},
        "code": {"$ref": "#/$defs/Code"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "rows": {"type": "array", "items": {"type": "integer"}},
        "names": {"type": "array", "items": {"type": "string"}},
        "place": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "floors": {"type": "array", "items": {"type": "number"}}},
        },
    },
}
TOOLS = (ToolSpec("write_file", SCHEMA), ToolSpec("my-tool.v2", SCHEMA))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["", " ", "\n", "  indented\n", "null", "None", "007", "true", '"quoted"', '"', "[1]", "</parameter>", "<|close|>"]
)
floats = st.floats(allow_nan=False, allow_infinity=False)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": texts,
    "code": texts,
    "maybe": texts | st.none(),
    "count": st.integers(),
    "ratio": floats | st.integers(),
    "flag": st.booleans(),
    "rows": st.lists(st.integers(), max_size=4),
    "names": st.lists(texts, max_size=3),
    "place": st.fixed_dictionaries({}, optional={"street": texts, "floors": st.lists(floats, max_size=3)}),
}
calls = st.lists(
    st.builds(
        ToolCall,
        st.sampled_from([tool.name for tool in TOOLS]),
        st.fixed_dictionaries({}, optional=VALUES),
    ),
    min_size=1,
    max_size=3,
)
# The answer around the calls: no character that begins a marker, and no white space that a format strips or ends with.
answers = st.text(string.ascii_letters + " .,é\n", max_size=20).map(lambda text: text and text + ".")

Result = tuple[str, list[tuple[str, str]]]


def collect(events: list[ParserEvent]) -> Result:
    content: list[str] = []
    found: list[tuple[str, list[str]]] = []
    ended = 0
    for event in events:
        if isinstance(event, ContentDelta):
            content.append(event.text)
        elif isinstance(event, ToolCallStart):
            assert event.index == len(found) == ended
            found.append((event.name, []))
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(found) - 1 == ended
            found[-1][1].append(event.fragment)
        elif isinstance(event, ToolCallEnd):
            assert event.index == ended
            ended += 1
    assert ended == len(found)
    return "".join(content), [(name, "".join(pieces)) for name, pieces in found]


def run(name: str, pieces: list[str]) -> Result:
    parser = tool_format(name).parser(TOOLS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return collect(events + parser.finish())


def encoded(name: str, text: str, wanted: list[ToolCall]) -> str:
    encode = tool_format(name).encode
    assert encode is not None
    return encode(text, wanted)


@pytest.mark.parametrize("name", NAMES)
@given(text=answers, wanted=calls)
@settings(max_examples=60, deadline=None)
def test_encoded_calls_read_back(name: str, text: str, wanted: list[ToolCall]) -> None:
    content, found = run(name, [encoded(name, text, wanted)])
    assert content == text
    assert [(call, json.loads(arguments)) for call, arguments in found] == [
        (call.name, call.arguments) for call in wanted
    ]


@pytest.mark.parametrize("name", NAMES)
@given(text=answers, wanted=calls, data=st.data())
@settings(max_examples=40, deadline=None)
def test_chunking_does_not_matter(name: str, text: str, wanted: list[ToolCall], data: st.DataObject) -> None:
    output = encoded(name, text, wanted)
    if data.draw(st.booleans()):
        output = output[: data.draw(st.integers(0, len(output)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    pieces = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    whole = run(name, [output])
    assert run(name, pieces) == whole
    assert run(name, list(output)) == whole
    for _, arguments in whole[1]:
        json.loads(arguments)


@pytest.mark.parametrize("name", NAMES)
def test_every_split_point(name: str) -> None:
    wanted = [
        ToolCall(
            "write_file", {"text": ' a "b"\n</x>', "maybe": "nul", "count": 4, "place": {"street": "</parameter"}}
        ),
        ToolCall("my-tool.v2", {}),
        ToolCall("write_file", {"rows": [1, 2], "flag": True, "maybe": None}),
    ]
    output = encoded(name, "Two < three.", wanted)
    whole = run(name, [output])
    assert [json.loads(arguments) for _, arguments in whole[1]] == [call.arguments for call in wanted]
    for at in range(len(output)):
        assert run(name, [output[:at], output[at:]]) == whole


def soup(name: str) -> st.SearchStrategy[str]:
    """Garbage made of the format's own pieces."""
    output = encoded(name, "said", [ToolCall("write_file", {"text": "a", "count": 1}), ToolCall("nope", {"x": [1]})])
    special = sorted(tool_format(name).special_tokens)
    pieces: list[str] = [*special]
    start = 0
    for at in range(1, len(output) + 1):
        if at == len(output) or output[at] in "<>\n" or output[at - 1] in ">\n":
            pieces.append(output[start:at])
            start = at
    other = ["<", ">", "\n", " ", '"', "{", "}", "text", "null", "｜DSML｜", "<｜end▁of▁sentence｜>", "]<]", "\ud7ff"]
    return st.lists(st.sampled_from([*pieces, *other]), max_size=40).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_garbage(name: str, data: st.DataObject) -> None:
    text = data.draw(soup(name))
    whole = run(name, [text])
    assert run(name, list(text)) == whole
    for _, arguments in whole[1]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=50, deadline=None)
def test_plain_text_is_content(name: str, text: str) -> None:
    assume("｜" not in text and not any(token in text for token in tool_format(name).special_tokens))
    assert run(name, list(text)) == (text, [])


# Text that invites a machine to look at the same characters again, as a function of its length.
HOSTILE: dict[str, Callable[[int], str]] = {
    "openers": lambda size: (
        "<tool_call>\n<function=" * (size // 20) + "<tool_call>a<arg_key>k</arg_key>" * (size // 30)
    ),
    "edges": lambda size: "<" * size,
    "blank": lambda size: " \n" * (size // 2),
    "blank tag": lambda size: "<tool_call>" + " " * size,
    "blank value": lambda size: "<tool_call>\n<function=write_file><parameter=maybe>" + " " * size,
    "long name": lambda size: "<tool_call>\n<function=" + "n" * size,
    "namespace": lambda size: (
        "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=x>" + "]<]minimax[>[<a>" * (size // 16)
    ),
    "dsml": lambda size: '<｜DSML｜tool_calls><｜DSML｜invoke name="x">{' + '"' * size,
    "channels": lambda size: "<|open|>tools<|sep|>" + '<|open|>call tool="a"' * (size // 20),
    "channel blank": lambda size: "<|open|>" + " " * size + "<|open|>" * (size // 8),
    "blocks": lambda size: '<|content_invoke_tool_json|>{"name":"' * (size // 37),
    "section": lambda size: "<｜tool_calls_begin｜>" + "<｜tool_call_begin｜>function" * (size // 27),
    "newlines": lambda size: "<tool_call>\n<function=write_file><parameter=text>" + "\n" * size,
}


def seconds(name: str, text: str) -> float:
    best = float("inf")
    for _ in range(2):
        parser = tool_format(name).parser(TOOLS)
        start = time.process_time()
        for character in text:
            parser.feed(character)
        parser.finish()
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("shape", HOSTILE)
def test_work_is_linear(shape: str) -> None:
    """Eight times the text, one character at a time: quadratic work would take 64 times as long."""
    for name in NAMES:
        small, large = HOSTILE[shape](1_000), HOSTILE[shape](8_000)
        assert seconds(name, large) < 24 * max(seconds(name, small), 0.002), name
