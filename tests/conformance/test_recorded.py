"""Recorded outputs in ``families/``, one file per family: whatever is put there is run.

A file is a list of cases, ``{"id", "parser", "text", "expect"}``. With ``reasoning`` in ``expect`` the parser is a
reasoning parser (``armed``: the text begins inside the thought), else a tool parser (``tools``: the declared tools, as
in the chat API or just ``{"name", "parameters"}``).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smg.messages import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from smg.models.family import OutputParser
from smg.models.machine import parse_whole
from smg.models.output import tool_specs
from smg.models.reasoning import reasoning_parser
from smg.models.registry import REASONING_PARSERS, TOOL_PARSERS, reasoning_format, tool_format

FILES = sorted((Path(__file__).parent / "families").glob("*.json"))
CASES: list[dict[str, Any]] = [case for path in FILES for case in json.loads(path.read_text("utf-8"))]


def parser_of(case: dict[str, Any]) -> OutputParser:
    if "reasoning" in case["expect"]:
        assert case["parser"] in REASONING_PARSERS
        return reasoning_parser(reasoning_format(case["parser"]), armed=case.get("armed", False))
    assert case["parser"] in TOOL_PARSERS
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in case.get("tools", ())]
    return tool_format(case["parser"]).parser(tool_specs(tools))


def pieces(text: str) -> Iterator[list[str]]:
    """Whole, by 1 to 5 characters, at random."""
    yield [text]
    for size in range(1, 6):
        yield [text[at : at + size] for at in range(0, len(text), size)]
    source = random.Random(text)
    cuts = sorted(source.randrange(len(text) + 1) for _ in range(5))
    yield [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def result(events: list[Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """The fields of ``expect`` that ``kinds`` names."""
    found: dict[str, Any] = {"content": "".join(event.text for event in events if isinstance(event, ContentDelta))}
    if "reasoning" in kinds:
        found["reasoning"] = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        return found
    calls = [{"name": event.name, "arguments": ""} for event in events if isinstance(event, ToolCallStart)]
    for event in events:
        if isinstance(event, ToolCallArguments):
            calls[event.index]["arguments"] += event.fragment
    return found | {"tool_calls": [call | {"arguments": json.loads(call["arguments"])} for call in calls]}


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    expected = case["expect"]
    assert result(parse_whole(parser_of(case), case["text"]), expected) == expected
    for cut in pieces(case["text"]):
        parser = parser_of(case)
        events = [event for piece in cut for event in parser.feed(piece)] + parser.finish()
        assert result(events, expected) == expected
