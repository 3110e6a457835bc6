"""Recorded outputs of the tool formats whose payload is JSON or a Python literal, in every way of cutting them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smg.messages import (
    ContentDelta,
    ParserEvent,
    ParserPlan,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from smg.models.family import OutputParser, ToolCall, ToolSpec
from smg.models.machine import parse_whole
from smg.models.output import ResponseParser
from smg.models.registry import tool_format

DATA = json.loads((Path(__file__).parent / "tool_parsers_json_body.json").read_text())
CASES: list[dict[str, Any]] = DATA["cases"]
REPORTS: list[dict[str, Any]] = DATA["reports"]

TOKENS = re.compile(r"<[|｜][^>]{1,40}[|｜]>|</?\w+>|\[TOOL_CALLS\]| ?\w{1,8}|\s+|.", re.DOTALL)

Result = tuple[str, list[tuple[str, str]]]


def chunkings(text: str) -> Iterator[list[str]]:
    """Whole, by character, by token-like pieces, and at random."""
    yield [text]
    yield list(text)
    yield TOKENS.findall(text)
    for seed in range(2):
        draw = random.Random(seed)
        pieces, at = [], 0
        while at < len(text):
            size = draw.choice((1, 2, 3, 5, 8, 20))
            pieces.append(text[at : at + size])
            at += size
        yield pieces


def collect(events: list[ParserEvent]) -> Result:
    """Content and calls (name, argument text); checks that the events are well-formed."""
    content: list[str] = []
    calls: list[tuple[str, str]] = []
    ended = 0
    for event in events:
        if isinstance(event, ContentDelta):
            assert event.text
            content.append(event.text)
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls) == ended
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            assert event.index == ended == len(calls) - 1
            assert event.fragment
            calls[-1] = (calls[-1][0], calls[-1][1] + event.fragment)
        elif isinstance(event, ToolCallEnd):
            assert event.index == ended == len(calls) - 1
            json.loads(calls[-1][1])
            ended += 1
    assert ended == len(calls)
    return "".join(content), calls


def run(parser: OutputParser, pieces: list[str]) -> Result:
    events: list[ParserEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    return collect(events + parser.finish())


def begins_like(early: Any, complete: Any) -> bool:
    """Whether ``early`` is ``complete`` closed too early."""
    if isinstance(complete, dict) and isinstance(early, dict):
        return all(key in complete and begins_like(value, complete[key]) for key, value in early.items())
    if isinstance(complete, str) and isinstance(early, str):
        return complete.startswith(early)
    return bool(early == complete)


def matches(result: Result, expected: dict[str, Any]) -> bool:
    content, calls = result
    if content != expected["content"] and (expected["content"] or content.strip()):
        return False
    if [name for name, _ in calls] != [call["name"] for call in expected["tool_calls"]]:
        return False
    return all(
        begins_like(json.loads(text), call["arguments"])
        if call.get("partial")
        else json.loads(text) == call["arguments"]
        for (_, text), call in zip(calls, expected["tool_calls"], strict=True)
    )


def specs(tools: list[dict[str, Any]]) -> list[ToolSpec]:
    return [ToolSpec(tool["name"], tool["parameters"]) for tool in tools]


def ids(cases: list[dict[str, Any]]) -> list[str]:
    return [case["id"] for case in cases]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_case(case: dict[str, Any]) -> None:
    make, tools = tool_format(case["parser"]).parser, specs(case["tools"])
    results = [run(make(tools), pieces) for pieces in chunkings(case["text"])]
    assert all(result == results[0] for result in results)
    assert matches(results[0], case["expect"]) or matches(results[0], case.get("stream", case["expect"]))


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_case_not_streamed(case: dict[str, Any]) -> None:
    parser = tool_format(case["parser"]).parser(specs(case["tools"]))
    assert matches(collect(parse_whole(parser, case["text"])), case["expect"])


@pytest.mark.parametrize("case", REPORTS, ids=ids(REPORTS))
def test_report(case: dict[str, Any]) -> None:
    expected = case["expect"]
    tools = [{"type": "function", "function": tool} for tool in case["tools"]]
    reasoning_names = {"kimik2": "kimi_thinking", "cohere": "cohere_cmd"}
    plan = ParserPlan(
        reasoning=reasoning_names[case["parser"]] if "reasoning" in expected else None,
        tool=case["parser"],
        tools=json.dumps(tools).encode(),
    )
    for pieces in [*chunkings(case["text"]), case.get("chunks", [case["text"]])]:
        parser = ResponseParser(plan)
        events: list[ParserEvent] = []
        for piece in pieces:
            events += parser.feed(piece)
        events += parser.finish()
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        content, calls = collect([event for event in events if not isinstance(event, ReasoningDelta)])
        assert [(name, json.loads(text)) for name, text in calls] == [
            (call["name"], call["arguments"]) for call in expected["calls"]
        ]
        assert reasoning.split() == expected.get("reasoning", "").split()
        if "content" in expected:
            assert content.split() == expected["content"].split()


@pytest.mark.parametrize("name", ["json", "llama", "mistral", "qwen", "deepseek", "deepseek31", "kimik2"])
def test_arguments_stream(name: str) -> None:
    """A long string value arrives in about as many fragments as pieces."""
    declared = tool_format(name)
    assert declared.encode is not None
    words = "".join(f"word{number} " for number in range(100))
    text = declared.encode("", [ToolCall("write_file", {"text": words})])
    parser = declared.parser([ToolSpec("write_file", {})])
    events = [event for piece in re.findall(r"\S+\s*", text) for event in parser.feed(piece)]
    fragments = [event for event in events if isinstance(event, ToolCallArguments)]
    assert len(fragments) >= 100
    start = next(index for index, event in enumerate(events) if isinstance(event, ToolCallStart))
    assert not any(isinstance(event, ContentDelta) for event in events[start:])


SLIPS = [
    ("qwen", '<tool_call>\n{"name": "f", "arguments": {}}}\n</tool_call> Done.', " Done."),
    ("qwen", '<tool_call>\n{"name": "f", "arguments": {}}\n<tool_call>\n{"name": "f", "arguments": {}}', ""),
    ("qwen", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>', ""),
    ("mistral", "Now: [TOOL_CALLS]f[CALL_ID]a1B2[ARGS]{}[TOOL_CALLS]f[ARGS] {} Done.", "Now:  Done."),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1', ""),
    ("mistral", "[TOOL_CALLS]f [ARGS]{}", "[TOOL_CALLS]f [ARGS]{}"),
    ("mistral", "[TOOL_CALLS]f{}", "[TOOL_CALLS]f{}"),
    ("json", '[[{"name": "f", "arguments": {}}]', "["),
    ("json", '[{"name": "f", "arguments": {}}, 1, oops]', "[, 1, oops]"),
    ("json", '["a", {"name": "f", "arguments": {}}, ["b"', ""),
    ("json", '["{", {"x": 1}, ["b"', '["{", {"x": 1}, ["b"'),
    ("pythonic", "[Smith (1999) says it. [f()]", "[Smith (1999) says it. "),
    ("pythonic", ' {"name": "f", "parameters": {}} [f(a=1)]', ""),
    ("llama", ' <|python_tag|> {"name": "f", "parameters": {}};', " "),
    ("cohere", '<|START_ACTION|>{"tool_name": "f"}<|END_ACTION|><|END_OF_TURN_TOKEN|>', ""),
    ("sarashina", "<|tool_calls|>: [{'name': 'f'}]</s>", ":"),
    ("kimik2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|im_end|>", ""),
]


@pytest.mark.parametrize(("name", "text", "content"), SLIPS)
def test_slips_of_models(name: str, text: str, content: str) -> None:
    results = [run(tool_format(name).parser([ToolSpec("f")]), pieces) for pieces in chunkings(text)]
    assert all(result == results[0] for result in results)
    assert results[0][0] == content
    assert {call for call, _ in results[0][1]} == (set() if content == text else {"f"})
