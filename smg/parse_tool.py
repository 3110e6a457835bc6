"""``smg parse``: the gateway's output parsers on text from a file, one JSON document per line.

Input, one object per line (all members but ``text`` or ``chunks`` are optional)::

    {"id": any, "text": str | "chunks": [str], "model": str, "tool_parser": str, "reasoning_parser": str,
     "tools": [chat tools], "tool_choice": any, "thinking": bool, "starts_in_reasoning": bool}

A parser that is not named is detected from ``model``; ``"passthrough"`` means none. Calls are parsed unless ``tools``
is an empty list or ``tool_choice`` is ``"none"``; a forced ``tool_choice`` reads the answer as its constraint says.
``thinking`` true starts the parser of a model with a thinking toggle in reasoning, as the gateway does when a request
turns thinking on; ``starts_in_reasoning`` sets the start outright.

Output, in the same order: ``{"id", "content", "reasoning_content", "tool_calls": [{"id", "name", "arguments"}]}`` with
``arguments`` as JSON text, or ``{"id", "error"}``. With events, ``"events"`` lists the deltas of each chunk; the last
list holds those of the end of the output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, BinaryIO, TextIO

import click
import msgspec

from smg.api.errors import ApiError
from smg.api.tools import AUTO, ToolChoice, check_choice, parse_choice
from smg.messages import (
    ContentDelta,
    ParserEvent,
    ParserPlan,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from smg.models.constraints import tool_constraint
from smg.models.family import ReasoningFormat
from smg.models.output import ResponseParser, tool_specs
from smg.models.prompt import PromptError
from smg.models.registry import (
    PASSTHROUGH,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserNames,
    call_id_style,
    check_flags,
    select_parsers,
    unstarted,
)


class Line(msgspec.Struct):
    """One line of input."""

    id: Any = None
    text: str | None = None
    chunks: list[str] | None = None
    model: str = ""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    thinking: bool | None = None
    starts_in_reasoning: bool | None = None


class _Answer:
    """Adds up events to a complete message."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def add(self, parser: ResponseParser, events: Iterable[ParserEvent]) -> list[dict[str, Any]]:
        """Takes the events of one chunk; returns them as plain deltas."""
        return [self._add(parser, event) for event in events]

    def _add(self, parser: ResponseParser, event: ParserEvent) -> dict[str, Any]:
        match event:
            case ContentDelta(text):
                self.content.append(text)
                return {"content": text}
            case ReasoningDelta(text):
                self.reasoning.append(text)
                return {"reasoning_content": text}
            case ToolCallStart(index, name):
                self.calls.append({"id": parser.call_id(event), "name": name})
                self._arguments.append([])
                return {"tool_call": index, "id": self.calls[-1]["id"], "name": name}
            case ToolCallArguments(index, fragment):
                self._arguments[index].append(fragment)
                return {"tool_call": index, "arguments": fragment}
            case ToolCallEnd(index):
                return {"tool_call": index, "end": True}

    def message(self) -> dict[str, Any]:
        return {
            "content": "".join(self.content),
            "reasoning_content": "".join(self.reasoning),
            "tool_calls": [
                call | {"arguments": "".join(parts)} for call, parts in zip(self.calls, self._arguments, strict=True)
            ],
        }


def parse_lines(lines: Iterable[str | bytes], out: TextIO, *, events: bool = False) -> int:
    """Parses every line and writes one answer for each, in order. Returns how many lines were in error; blank lines are
    skipped. ``lines`` is any source of lines (bytes are UTF-8), such as an open file."""
    failed = 0
    for line in lines:
        if not line.strip():
            continue
        answer = _answer(line, events)
        failed += "error" in answer
        out.write(json.dumps(answer) + "\n")
    return failed


def _answer(text: str | bytes, events: bool) -> dict[str, Any]:
    identity: Any = None
    try:
        document = json.loads(text)
        identity = document.get("id") if isinstance(document, dict) else None
        line = msgspec.convert(document, Line)
        chunks = _chunks(line)
        parser = ResponseParser(plan_of(line), whole=line.text is not None)
    except (ApiError, PromptError) as error:
        return {"id": identity, "error": error.message}
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        return {"id": identity, "error": str(error) or type(error).__name__}
    answer = _Answer()
    deltas = [answer.add(parser, parser.feed(chunk)) for chunk in chunks]
    deltas.append(answer.add(parser, parser.finish()))
    result = {"id": identity} | answer.message()
    return result | {"events": deltas} if events else result


def _chunks(line: Line) -> list[str]:
    if line.chunks is not None and line.text is None:
        return line.chunks
    if line.text is not None and line.chunks is None:
        return [line.text]
    raise ValueError("a line needs either 'text' or 'chunks'")


def plan_of(line: Line) -> ParserPlan:
    """The parser plan that the gateway would make. Raises ``ValueError``, ``ApiError`` or ``PromptError``."""
    override = ParserNames(line.tool_parser or "", line.reasoning_parser or "")
    check_flags(override)
    selection = select_parsers(line.model, override)
    tools = line.tools or []
    choice = _choice(line, tools)
    armed, reasoning = _start(line, selection.reasoning)
    parses = line.tools != [] and choice.mode != "none"
    forced = tool_constraint(tools, choice, selection)
    return ParserPlan(
        reasoning=reasoning,
        armed=armed,
        tool=selection.tool.name if parses else None,
        forced=forced.forced if forced is not None else "",
        leads=forced.leads if forced is not None else (),
        tools=json.dumps(tools).encode() if parses and tools else b"",
        id_style=call_id_style(line.model),
    )


def _choice(line: Line, tools: list[dict[str, Any]]) -> ToolChoice:
    if line.tool_choice is None:
        return AUTO
    choice = parse_choice(line.tool_choice)
    check_choice(choice, {spec.name for spec in tool_specs(tools)})
    return choice


def _start(line: Line, declared: ReasoningFormat | None) -> tuple[bool, str | None]:
    """Whether the parser starts in reasoning, and its name."""
    if declared is None or declared.name == PASSTHROUGH:
        return False, None
    if line.starts_in_reasoning is not None:
        name = declared.name if line.starts_in_reasoning else unstarted(declared).name
        return line.starts_in_reasoning, name
    return line.thinking is True and declared.thinking_toggle, declared.name


@click.command("parse")
@click.argument("source", type=click.File("rb"), default="-")
@click.option("--events", is_flag=True, help="Also list the deltas of every chunk.")
@click.option("--list", "listing", is_flag=True, help="List the registered parsers and exit.")
def parse_command(source: BinaryIO, events: bool, listing: bool) -> None:
    """Run the output parsers on JSON lines from SOURCE (default: standard input)."""
    if listing:
        click.echo("tool parsers: " + " ".join(TOOL_PARSERS))
        click.echo("reasoning parsers: " + " ".join(REASONING_PARSERS))
        return
    parse_lines(source, sys.stdout, events=events)
