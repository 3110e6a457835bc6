"""Reasoning parsers against recorded outputs, delivered whole, by character and in random pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from smg.messages import ContentDelta, ParserEvent, ParserPlan, ReasoningDelta, ToolCallArguments, ToolCallStart
from smg.models.output import ResponseParser
from smg.models.reasoning import reasoning_parser
from smg.models.registry import detect_reasoning, detect_tool, reasoning_format

DATA = json.loads((Path(__file__).parent / "reasoning.json").read_text())


def cuts(text: str) -> Iterable[tuple[str, list[str]]]:
    """Named ways to deliver a text."""
    yield "whole", [text]
    yield "characters", list(text)
    random_source = random.Random(text)
    for name, largest in (("short pieces", 4), ("long pieces", 13)):
        pieces, at = [], 0
        while at < len(text):
            size = random_source.randint(1, largest)
            pieces.append(text[at : at + size])
            at += size
        yield name, pieces


def joined(events: Iterable[ParserEvent], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@pytest.mark.parametrize("case", DATA["parsers"], ids=lambda case: case["id"])
def test_parser(case: dict[str, Any]) -> None:
    for name, pieces in cuts(case["text"]):
        parser = reasoning_parser(reasoning_format(case["parser"]), armed=case.get("armed", False))
        events = [event for piece in pieces for event in parser.feed(piece)]
        events += parser.finish()
        got = {"reasoning": joined(events, ReasoningDelta), "content": joined(events, ContentDelta)}
        assert got == case["expect"], name
        assert parser.finish() == [], "a second finish has nothing left"


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("case", DATA["reports"], ids=lambda case: case["id"])
def test_reported_outputs(case: dict[str, Any]) -> None:
    """Whole answers: detection, reasoning and calls together."""
    expect = case["expect"]
    separate = case.get("request", {}).get("separate_reasoning", True)
    plan = ParserPlan(
        reasoning=detect_reasoning(case["model_name"]) if separate else None,
        tool=detect_tool(case["model_name"]) if "tools" in case else None,
        tools=json.dumps(case.get("tools", [])).encode(),
    )
    assert plan.reasoning in (case["parser"], None)
    for name, pieces in cuts(case["text"]):
        parser = ResponseParser(plan)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        content, reasoning = joined(events, ContentDelta), joined(events, ReasoningDelta)
        if not expect.get("exact"):
            content, reasoning = squeezed(content), squeezed(reasoning)
        assert reasoning == expect["reasoning"], name
        assert content == expect["content"] if "content" in expect else expect["content_contains"] in content, name
        names = [event.name for event in events if isinstance(event, ToolCallStart)]
        assert names == [call["name"] for call in expect.get("calls", [])], name
        for index, call in enumerate(expect.get("calls", [])):
            fragments = [e.fragment for e in events if isinstance(e, ToolCallArguments) and e.index == index]
            assert json.loads("".join(fragments)) == call["arguments"], name
