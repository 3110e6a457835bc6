"""Inkling: a conversation of typed blocks (TML), in the answer and in the prompt alike.

::

    <|message_model|>HEADER<|content_text|>text<|end_message|>
    <|message_model|>NAME<|content_invoke_tool_json|>{"name": NAME, "args": {...}}<|end_message|>
    <|content_model_end_sampling|>

The header carries nothing that counts; a call is named by its JSON. A block of a call that is not one (invalid JSON,
arguments that are no object, a name that is not declared) is markup without meaning and is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.json_stream import CallReader
from smg.models.machine import ToolMachine, compact
from smg.models.reasoning_blocks import encode_inkling, inkling_parser
from smg.models.scan import Markers
from smg.models.structural import json_schema, triggered

_MESSAGE = "<|message_model|>"
_TEXT = "<|content_text|>"
_THINKING = "<|content_thinking|>"
_CALL = "<|content_invoke_tool_json|>"
_TEXT_CALL = "<|content_invoke_tool_text|>"
_END = "<|end_message|>"
_END_SAMPLING = "<|content_model_end_sampling|>"

_MARKERS = Markers([_MESSAGE, _TEXT, _THINKING, _CALL, _TEXT_CALL, _END, _END_SAMPLING])
_ENDS = Markers([_END, _END_SAMPLING])


class InklingParser(ToolMachine):
    """Calls are sent as a whole: only a complete block shows whether it is one."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self._names = frozenset(tool.name for tool in tools)
        self._call = CallReader(("name",), ("args",))
        self._tail = ""
        self._step: Callable[[str, int], int] = self._in_text

    def _run(self, text: str) -> None:
        if self._tail:
            text = self._tail + text
            self._tail = ""
        pos, size = 0, len(text)
        while pos < size:
            pos = self._step(text, pos)

    def _end(self) -> None:
        tail, self._tail = self._tail, ""
        if self._step == self._in_text:
            self._text(tail)
        self._step = self._in_text

    def _in_text(self, text: str, pos: int) -> int:
        at, marker = _MARKERS.search(text, pos)
        self._text(text[pos:at])
        return self._marker(text, at, marker)

    def _in_header(self, text: str, pos: int) -> int:
        at, marker = _MARKERS.search(text, pos)
        return self._marker(text, at, marker)

    def _marker(self, text: str, at: int, marker: str) -> int:
        if not marker:
            self._tail = text[at:]
            return len(text)
        if marker == _CALL:
            self._call = CallReader(("name",), ("args",))
            self._step = self._in_call
        elif marker == _TEXT_CALL:
            self._step = self._to_end
        else:
            self._step = self._in_header if marker == _MESSAGE else self._in_text
        return at + len(marker)

    def _in_call(self, text: str, pos: int) -> int:
        call = self._call
        pos = call.feed(text, pos)
        if call.done:
            arguments = "".join(call.fragments)
            if call.name and arguments.startswith("{") and (not self._names or call.name in self._names):
                self._whole_call(call.name, arguments)
        if call.done or call.failed:
            self._step = self._to_end
        return pos

    def _to_end(self, text: str, pos: int) -> int:
        at, marker = _ENDS.search(text, pos)
        return self._marker(text, at, marker)


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return InklingParser(tools)


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    said = f"{_MESSAGE}{_TEXT}{text}{_END}" if text else ""
    return said + "".join(
        f"{_MESSAGE}{call.name}{_CALL}{compact({'name': call.name, 'args': call.arguments})}{_END}" for call in calls
    )


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    calls = [
        {
            "begin": f'{_CALL}{{"name":{json.dumps(tool.name, ensure_ascii=False)},"args":',
            "content": json_schema(tool.parameters),
            "end": "}" + _END,
        }
        for tool in request.tools
        if tool.name
    ]
    return {"format": triggered([_CALL], calls)}


_SPECIAL = frozenset(_MARKERS.markers)

FAMILY: Family = Family(
    name="inkling",
    tools=(
        ToolFormat(
            name="inkling",
            parser=_parser,
            stems=("inkling",),
            special_tokens=_SPECIAL,
            structural_tag=_structural_tag,
            tag_by_default=True,
            encode=_encode,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="inkling",
            rank=17,
            patterns=("inkling",),
            open="<|content_thinking|>",
            close="<|end_message|>",
            needs_special_tokens=True,
            special_tokens=_SPECIAL,
            parser=inkling_parser,
            encode=encode_inkling,
        ),
    ),
)
