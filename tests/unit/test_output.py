"""The parser of one choice: order of the stages, constrained answers, ids, token counts, the command-line tool."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from click.testing import CliRunner

from smg.messages import (
    ContentDelta,
    ParserEvent,
    ParserPlan,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from smg.models.family import ToolCall
from smg.models.output import ResponseParser, tool_call_id, tool_specs
from smg.models.registry import TOOL_PARSERS, tool_format
from smg.parse_tool import parse_command, parse_lines

TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "find"}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "moss"}}\n</tool_call>'
ARRAY = ("[{",)


def plan(**changes: Any) -> ParserPlan:
    return ParserPlan(**({"tools": json.dumps(TOOLS).encode()} | changes))


def run(given: ParserPlan, *pieces: str) -> list[ParserEvent]:
    parser = ResponseParser(given)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def text(events: list[ParserEvent], kind: type[ContentDelta] | type[ReasoningDelta] = ContentDelta) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def calls(events: list[ParserEvent]) -> list[tuple[str, Any]]:
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    fragments = [
        "".join(e.fragment for e in events if isinstance(e, ToolCallArguments) and e.index == index)
        for index in range(len(names))
    ]
    return [(name, json.loads(arguments)) for name, arguments in zip(names, fragments, strict=True)]


def test_no_parser_passes_text_through() -> None:
    assert run(ParserPlan(), "<think>", "", "a") == [ContentDelta("<think>"), ContentDelta("a")]
    assert run(plan(tool="passthrough"), CALL) == [ContentDelta(CALL)]


def test_a_call_inside_the_thought_stays_there() -> None:
    events = run(plan(reasoning="qwen3", armed=True, tool="qwen"), f"so {CALL} no</think>fine {CALL}")
    assert text(events, ReasoningDelta) == f"so {CALL} no"
    assert calls(events) == [("find", {"q": "moss"})]
    assert text(events) == "fine "


def test_reasoning_comes_first_in_one_delta() -> None:
    events = ResponseParser(plan(reasoning="qwen3", armed=True)).feed("plan</think>ok")
    assert events == [ReasoningDelta("plan"), ContentDelta("ok")]


def test_held_text_goes_through_the_tool_parser() -> None:
    assert text(run(plan(reasoning="qwen3", tool="qwen"), "a <thi")) == "a <thi"
    assert text(run(plan(reasoning="qwen3", tool="qwen"), "a <tool_c")) == "a <tool_c"


def test_only_the_first_call() -> None:
    events = run(plan(tool="qwen", parallel=False), CALL + "\n" + CALL + " end")
    assert calls(events) == [("find", {"q": "moss"})]
    assert sum(isinstance(event, ToolCallEnd) for event in events) == 1
    assert text(events).strip() == "end"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_forced_answers(size: int) -> None:
    def fed(given: ParserPlan, output: str) -> list[ParserEvent]:
        return run(given, *[output[at : at + size] for at in range(0, len(output), size)])

    array = '[{"name": "find", "parameters": {"q": "a"}}, {"name": "stop", "parameters": {}}]'
    events = fed(plan(forced="array", tool="qwen"), array)
    assert calls(events) == [("find", {"q": "a"}), ("stop", {})]
    assert calls(fed(plan(forced="function:find"), ' {"q": "b"}\n')) == [("find", {"q": "b"})]
    assert calls(fed(plan(forced="array", reasoning="qwen3", armed=True), f"hm</think>\n\n{array}")) == calls(events)
    assert text(fed(plan(forced="array"), "sorry, no")) == "sorry, no"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_constrained_answer_without_its_thought(size: int) -> None:
    """An engine that applies the grammar from the first token on leaves no room for the thought."""
    for forced, leads, output in (
        ("array", ARRAY, '\n[ {"name": "find", "parameters": {"q": "a"}}]'),
        ("function:find", ('{"', "{}"), '{ "q": "a"}'),
        ("tag", ("[", "<tool_call>"), CALL.replace("moss", "a")),
    ):
        given = plan(forced=forced, leads=leads, tool="qwen", reasoning="qwen3", armed=True)
        events = run(given, *[output[at : at + size] for at in range(0, len(output), size)])
        assert calls(events) == [("find", {"q": "a"})]
        assert text(events, ReasoningDelta) == ""


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_forced_call_of_kimi_k2_may_lack_its_section(size: int) -> None:
    call = '<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"q": "a"}<|tool_call_end|>'
    for output in (call, "\n" + call, f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"):
        pieces = [output[at : at + size] for at in range(0, len(output), size)]
        events = run(plan(forced="tag", tool="kimik2"), *pieces)
        assert (calls(events), text(events).strip()) == ([("find", {"q": "a"})], "")
    assert text(run(plan(forced="tag", tool="kimik2"), "<|tool", "_")) == "<|tool_"
    assert text(run(plan(tool="kimik2"), call)) == call


THOUGHT = "I could write <tool_call> here.\n"


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("whole", [False, True])
def test_a_call_in_a_thought(size: int, whole: bool) -> None:
    def read(output: str) -> list[ParserEvent]:
        parser = ResponseParser(plan(reasoning="qwen3", armed=True, tool="qwen"), whole=whole)
        events = [event for at in range(0, len(output), size) for event in parser.feed(output[at : at + size])]
        return events + parser.finish()

    events = read(THOUGHT + CALL)
    assert (text(events, ReasoningDelta), calls(events)) == (THOUGHT, [("find", {"q": "moss"})])
    assert text(events).strip() == ""
    for output in (THOUGHT, THOUGHT + CALL[:30], THOUGHT + "<tool_", THOUGHT + '<tool_call>{"x": 1}</tool_call>'):
        events = read(output)
        assert (text(events, ReasoningDelta), text(events), calls(events)) == (output, "", [])
    events = read(f"{THOUGHT}{CALL} No.</think>{CALL}")
    assert text(events, ReasoningDelta) == f"{THOUGHT}{CALL} No."
    assert calls(events) == [("find", {"q": "moss"})]


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if tool_format(name).openers])
def test_a_call_in_a_thought_in_every_format(name: str) -> None:
    encode = tool_format(name).encode
    assert encode is not None
    output = "Hm, < [.\n" + encode("", [ToolCall("find", {"q": "moss"}), ToolCall("stop", {})])
    for size in (1, 2, 3, 7, len(output)):
        pieces = [output[at : at + size] for at in range(0, len(output), size)]
        events = run(plan(reasoning="qwen3", armed=True, tool=name), *pieces)
        assert (text(events, ReasoningDelta).rstrip(), text(events).strip()) == ("Hm, < [.", "")
        assert calls(events) == [("find", {"q": "moss"}), ("stop", {})]


def test_tokens_of_a_call_in_a_thought_are_no_reasoning() -> None:
    for call in ([CALL], list(CALL)):
        for thought in (["one", " two"], ["one", " <tool_call>", " two"]):
            parser = ResponseParser(plan(reasoning="qwen3", armed=True, tool="qwen"))
            for piece in (*thought, *call):
                parser.feed_pieces([piece])
            parser.finish()
            assert parser.reasoning_tokens == len(thought)


def test_reasoning_streams_past_a_mentioned_marker() -> None:
    parser = ResponseParser(plan(reasoning="qwen3", armed=True, tool="qwen"))
    assert text(parser.feed(THOUGHT), ReasoningDelta) == THOUGHT
    assert text(parser.feed("More."), ReasoningDelta) == "More."


def test_a_thought_that_begins_like_json() -> None:
    for output in ("[the user wants", "{maybe", "[", " ", " " * 400):
        events = run(plan(forced="array", leads=ARRAY, reasoning="qwen3", armed=True), *output)
        assert (text(events, ReasoningDelta), text(events)) == (output, "")


def test_token_counts() -> None:
    def count(*pieces: str, at_once: bool = False, **changes: Any) -> int:
        parser = ResponseParser(plan(reasoning="qwen3", armed=True, **changes))
        events = []
        for batch in [pieces] if at_once else [[piece] for piece in pieces]:
            events += parser.feed_pieces(batch)
        events += parser.finish()
        assert text(events, ReasoningDelta) + "|" + text(events) == expected
        return parser.reasoning_tokens

    for at_once in (False, True):
        expected = "ab|cd"
        assert count("a", "b", "</think>", "c", "d", at_once=at_once) == 2
        assert count("<think>", "ab</th", "ink>", "cd", at_once=at_once) == 1
        assert count("", "", "ab", "", "</think>", "c", "", "d", at_once=at_once) == 3
        expected = "</this|"
        assert count("</th", "is", at_once=at_once) == 2
        expected = "a</th|"
        assert count("a", "</th", at_once=at_once) == 2
        expected = "|x"
        assert count("</", "think>", "x", at_once=at_once) == 0
        expected = "[x|"
        assert count("[", "x", at_once=at_once, forced="array", leads=ARRAY) == 2


def test_pieces_and_text_agree() -> None:
    output = f"pl<an</think>\n{CALL}tail"
    whole = run(plan(reasoning="qwen3", armed=True, tool="qwen"), output)
    parser = ResponseParser(plan(reasoning="qwen3", armed=True, tool="qwen"))
    events = parser.feed_pieces(list(output)) + parser.finish()
    assert (text(events), text(events, ReasoningDelta), calls(events)) == (
        text(whole),
        text(whole, ReasoningDelta),
        calls(whole),
    )
    assert sum(isinstance(event, ReasoningDelta) for event in events) == 1, "one tick, one reasoning event"


def test_call_ids() -> None:
    parser = ResponseParser(plan(id_style="kimi", id_offset=3))
    assert parser.call_id(ToolCallStart(1, "find")) == "functions.find:4"
    assert tool_call_id("kimi_k3", "find", 0) == "find_0"
    first, second = (tool_call_id("call", "find", 0) for _ in range(2))
    assert first != second
    assert re.fullmatch(r"call_[0-9a-f]{24}", first)


def test_tool_specs_leave_out_what_is_no_function() -> None:
    assert [spec.name for spec in tool_specs([*TOOLS, {"type": "mcp"}, 7, {"function": {"name": 3}}])] == [
        "find",
        "stop",
    ]


def parse(*lines: Any, events: bool = False) -> list[dict[str, Any]]:
    out = io.StringIO()
    texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    parse_lines(texts, out, events=events)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_parse_lines() -> None:
    answers = parse(
        {"id": 1, "text": f"<think>a</think>b{CALL}", "model": "qwen3-8b", "tools": TOOLS},
        "not json",
        {"id": "two", "text": "x", "tool_parser": "hermes"},
        b'{"id": 3, "text": "\xff"}',
        "",
        {"id": 4, "chunks": ["a</th", "ink>b"], "reasoning_parser": "qwen3", "thinking": True},
        {"id": 5, "text": "a</think>b", "reasoning_parser": "deepseek_r1", "starts_in_reasoning": False},
        {"id": 6, "text": CALL, "model": "qwen3-8b", "tool_parser": "passthrough", "tools": TOOLS},
        {"id": 7, "text": '{"q": 1}', "model": "qwen3-8b", "tools": TOOLS, "tool_choice": NAMED},
        {"id": 8},
        {"id": 9, "text": 5},
    )  # fmt: skip
    assert [answer["id"] for answer in answers] == [1, None, "two", None, 4, 5, 6, 7, 8, 9]
    assert answers[0]["reasoning_content"] == "a"
    assert answers[0]["content"] == "b"
    (call,) = answers[0]["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("find", {"q": "moss"})
    assert answers[2]["error"] == "unknown tool-call parser 'hermes'"
    assert (answers[4]["reasoning_content"], answers[4]["content"]) == ("a", "b")
    assert (answers[5]["reasoning_content"], answers[5]["content"]) == ("", "a</think>b")
    assert (answers[6]["content"], answers[6]["tool_calls"]) == (CALL, [])
    assert [call["name"] for call in answers[7]["tool_calls"]] == ["find"]
    assert all("error" in answers[index] for index in (1, 3, 8, 9))


def test_parse_events() -> None:
    (answer,) = parse({"chunks": ["a", "</think>b"], "model": "qwen3", "thinking": True}, events=True)
    assert answer["events"] == [[{"reasoning_content": "a"}], [{"content": "b"}], []]


def test_parse_command() -> None:
    result = CliRunner().invoke(parse_command, ["-"], input='{"id": 1, "text": "x"}\n')
    assert result.exit_code == 0
    assert json.loads(result.output) == {"id": 1, "content": "x", "reasoning_content": "", "tool_calls": []}
    listed = CliRunner().invoke(parse_command, ["--list"])
    assert "qwen_xml" in listed.output
    assert "deepseek_r1" in listed.output
