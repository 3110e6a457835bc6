"""Cases of the tool-call formats with tagged parameters, in several chunkings.

``expect`` is the result of a complete answer. ``stream`` is the other legal result of a stream that breaks off inside a
call that was already announced: a call marked ``partial`` has a beginning of the given arguments.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smg.messages import ContentDelta, ParserEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from smg.models.machine import parse_whole
from smg.models.output import tool_specs
from smg.models.registry import tool_format

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("tool_parsers_tagged.json").read_text("utf-8"))
TOKENS = re.compile(r"<[^<>\s]*>|\w+|\s+|.")

Result = tuple[str, list[tuple[str, Any]]]


def collect(events: list[ParserEvent]) -> Result:
    """Content and calls; checks that every call starts once, ends once and has valid JSON."""
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    ended = 0
    for event in events:
        if isinstance(event, ContentDelta):
            assert event.text
            content.append(event.text)
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls) == ended
            calls.append((event.name, []))
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(calls) - 1 == ended
            calls[-1][1].append(event.fragment)
        else:
            assert isinstance(event, ToolCallEnd)
            assert event.index == ended
            ended += 1
    assert ended == len(calls)
    return "".join(content), [(name, json.loads("".join(pieces))) for name, pieces in calls]


def stream(case: dict[str, Any], pieces: list[str]) -> list[ParserEvent]:
    parser = tool_format(case["parser"]).parser(tool_specs(case["tools"]))
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def chunkings(case: dict[str, Any]) -> Iterator[list[str]]:
    text = case["text"]
    yield [text]
    yield list(text)
    yield TOKENS.findall(text) if "\n" not in TOKENS.sub("", text) else list(text)
    if "chunks" in case:
        yield case["chunks"]
    for seed, longest in ((1, 7), (2, 25)):
        rng = random.Random(seed)
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, longest)
            pieces.append(text[at : at + size])
            at += size
        yield pieces


def begins(part: Any, whole: dict[str, Any]) -> bool:
    return all(
        key in whole and (value == whole[key] or (isinstance(value, str) and str(whole[key]).startswith(value)))
        for key, value in part.items()
    )


def fits(result: Result, wanted: dict[str, Any], loose: bool) -> bool:
    content, calls = result
    text = wanted["content"]
    if text is not None:
        same = content.split() == text.split() if loose else content == text
        if not same and (content.strip() or text.strip()):
            return False
    if len(calls) != len(wanted["tool_calls"]):
        return False
    return all(
        name == call["name"]
        and (begins(arguments, call["arguments"]) if call.get("partial") else arguments == call["arguments"])
        for (name, arguments), call in zip(calls, wanted["tool_calls"], strict=True)
    )


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_stream(case: dict[str, Any]) -> None:
    loose = case.get("loose_space", False)
    results = [collect(stream(case, pieces)) for pieces in chunkings(case)]
    assert any(fits(results[0], case[key], loose) for key in ("expect", "stream") if key in case), results[0]
    for other in results[1:]:
        assert other == results[0]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_complete_answer(case: dict[str, Any]) -> None:
    parser = tool_format(case["parser"]).parser(tool_specs(case["tools"]))
    result = collect(parse_whole(parser, case["text"]))
    assert fits(result, case["expect"], case.get("loose_space", False)), result


def test_numbers_keep_their_form() -> None:
    """Integers and floats that are equal in value are told apart by their text."""
    case = {
        "parser": "glm47_moe",
        "tools": [{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "number"}}}}}],
    }
    text = "<tool_call>f<arg_key>n</arg_key><arg_value>{}</arg_value></tool_call>"
    for number in ("2", "2.0", "1e400", "9007199254740993", "0.1000000000000000055"):
        events = stream(case, [text.format(number)])
        written = "".join(event.fragment for event in events if isinstance(event, ToolCallArguments))
        assert written == f'{{"n":{number}}}' if number != "1e400" else written == '{"n":"1e400"}'


@pytest.mark.parametrize("case", [each for each in CASES if "min_argument_deltas" in each], ids=lambda case: case["id"])
def test_long_strings_arrive_in_pieces(case: dict[str, Any]) -> None:
    events = stream(case, TOKENS.findall(case["text"]))
    deltas = [event for event in events if isinstance(event, ToolCallArguments)]
    assert len(deltas) >= case["min_argument_deltas"]
