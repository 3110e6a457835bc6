"""Sarashina 2.2: a Python literal, a list of ``{'name': ..., 'arguments': {...}}``, behind ``<|tool_calls|>``.

Format as written by the published chat template of sarashina2.2-instruct.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from smg.messages import ParserEvent
from smg.models.family import Family, OutputParser, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.json_stream import unwrap_object
from smg.models.machine import SPACE, TrimmedMachine, compact
from smg.models.python_literal import LiteralReader
from smg.models.scan import Markers

_MARKER = "<|tool_calls|>"
_OPENER = Markers([_MARKER])
_BEHIND_CALLS = Markers([_MARKER, "</s>"])
_BRACKETS = Markers(["[", "{"])

_START, _TEXT, _MARKED, _LITERAL = range(4)


class SarashinaParser(TrimmedMachine):
    """The marker is never content. Without it only a list at the very start of the text counts, and in it, when the
    request declares tools, only declared names. The calls are reported when the literal is complete."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self._declared = frozenset(tool.name for tool in tools)
        self._state = _START
        self._marked = False
        self._literal = LiteralReader()
        self._steps = (self._start, self._in_text, self._in_marked, self._in_literal)

    def feed(self, text: str) -> list[ParserEvent]:
        if self._state == _TEXT and not self._rest and "<" not in text:
            return self._only_text(text)
        return super().feed(text)

    def _end(self) -> None:
        self._text(self._take_held() + self._rest)

    def _start(self, text: str, pos: int) -> int:
        end = SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        if end < len(text):
            if text[end] == "[":
                self._begin_literal()
            else:
                self._state = _TEXT
        return end

    def _begin_literal(self) -> None:
        self._literal = LiteralReader()
        self._state = _LITERAL

    def _in_text(self, text: str, pos: int) -> int:
        found, marker = (_BEHIND_CALLS if self._calls else _OPENER).search(text, pos)
        self._text(text[pos:found])
        if not marker:
            self._rest = text[found:]
            return len(text)
        if marker == _MARKER:
            self._marked = True
            self._state = _MARKED
        return found + len(marker)

    def _in_marked(self, text: str, pos: int) -> int:
        found, bracket = _BRACKETS.search(text, pos)
        self._text(text[pos:found])
        if bracket:
            self._begin_literal()
        return found

    def _in_literal(self, text: str, pos: int) -> int:
        literal = self._literal
        end = literal.feed(text, pos)
        self._held.append(text[pos:end])
        if literal.done or literal.failed:
            calls = self._calls_of(literal.value) if literal.done else []
            if calls:
                self._held.clear()
                for name, arguments in calls:
                    self._whole_call(name, arguments)
            else:
                self._text(self._take_held())
            self._state = _TEXT
        return end

    def _calls_of(self, value: object) -> list[tuple[str, str]]:
        calls = []
        for element in value if isinstance(value, list) else [value]:
            if not isinstance(element, dict):
                continue
            name = element.get("name")
            if not isinstance(name, str) or not name.strip():
                continue
            if self._marked or not self._declared or name.strip() in self._declared:
                calls.append((name.strip(), _arguments(element)))
        return calls


def _arguments(element: dict[str, Any]) -> str:
    value = element["arguments"] if "arguments" in element else element.get("parameters")
    if value is None:
        return "{}"
    written = compact(value)
    return unwrap_object(written) if isinstance(value, str) else written


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return SarashinaParser(tools)


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return text
    return f"{text}{_MARKER}{[{'name': call.name, 'arguments': call.arguments} for call in calls]!r}"


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    """JSON spelling, which is a Python literal to the parser."""
    calls = [
        {
            "type": "tag",
            "begin": f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": tool.parameters},
            "end": "}",
        }
        for tool in request.tools
        if tool.name
    ]
    section = {
        "type": "tag",
        "begin": f"{_MARKER}[",
        "content": {"type": "tags_with_separator", "tags": calls, "separator": ", ", "at_least_one": True},
        "end": "]",
    }
    return {"format": {"type": "triggered_tags", "triggers": [_MARKER], "tags": [section], "at_least_one": True}}


FAMILY: Family = Family(
    name="sarashina",
    tools=(
        ToolFormat(
            name="sarashina",
            parser=_parser,
            stems=("sarashina",),
            openers=(_MARKER,),
            special_tokens=frozenset({_MARKER}),
            structural_tag=_structural_tag,
            encode=_encode,
        ),
    ),
)
