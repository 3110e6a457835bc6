"""Formats of no particular family: text as it is, and JSON call objects anywhere in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from smg.messages import ContentDelta, ParserEvent
from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.json_stream import CallArrayReader, CallReader
from smg.models.machine import ToolMachine, call_object

_BRACKET = re.compile(r"[{\[]")
_NAMES, _ARGUMENTS = ("name", "function"), ("arguments", "parameters")

# An array that fails is read again from behind its bracket, because an array inside it may stand. That often, at most.
_MAX_RETRIES = 4

_TEXT, _OBJECT, _DATA, _ARRAY = range(4)


class Passthrough:
    """Leaves the text alone."""

    def feed(self, text: str) -> list[ParserEvent]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        return []


class JsonParser(ToolMachine):
    """Objects with a name and arguments, or arrays that hold such objects. The text has no marker, so when the request
    declares tools only a declared name makes a call. ``needs_arguments``: an object without arguments is no call.

    Places are counted from the start of the text (``_offset`` is the place of the piece at hand). ``_start`` is where
    the value that is being read began; the part of it that came with earlier pieces is in ``_held`` while it may still
    turn out to be content. An array is only consumed when it is complete. If it fails, its calls stay calls
    (``_consumed``: their places) and the rest of it is read again as text.
    """

    separators: ClassVar[re.Pattern[str]] = re.compile(r"[\s,;]*")

    def __init__(self, tools: Sequence[ToolSpec], *, needs_arguments: bool = False) -> None:
        super().__init__()
        self._declared = frozenset(tool.name for tool in tools)
        self._needs_arguments = needs_arguments
        self._state = _TEXT
        self._offset = 0
        self._start = 0
        self._call = CallReader(_NAMES, _ARGUMENTS)
        self._array = CallArrayReader(_NAMES, _ARGUMENTS)
        self._array_calls = 0
        self._element_start = 0
        self._consumed: dict[int, int] = {}
        self._horizon = 0  # the farthest place an array failed at
        self._retries = 0
        self._steps = (self._in_text, self._in_object, self._in_data, self._in_array)

    def feed(self, text: str) -> list[ParserEvent]:
        if self._state == _TEXT and self._gap is None and _BRACKET.search(text) is None:
            self._offset += len(text)
            return [ContentDelta(text)] if text else []
        return super().feed(text)

    def _run(self, text: str) -> None:
        pos = 0
        while pos < len(text):
            pos = self._steps[self._state](text, pos)
            if pos < 0:  # an array failed: on from behind its bracket
                if self._held:
                    text = self._take_held() + text
                    self._offset = self._start
                pos = self._start - self._offset
                self._text(text[pos])
                pos += 1
        if self._state == _ARRAY or (self._state == _OBJECT and not self._open):
            self._held.append(text[max(0, self._start - self._offset) :])
        self._offset += len(text)

    def _end(self) -> None:
        while self._state == _ARRAY and not self._array_calls:
            text = self._take_held()
            self._horizon, self._offset = self._offset, self._start
            self._state = _TEXT
            self._text(text[0])
            self._offset += 1
            self._run(text[1:])
        if self._state == _ARRAY and self._array.element is not None:
            self._settle(self._array.element)
        elif self._state == _OBJECT and not self._settle(self._call) and not (self._calls and self._call.name):
            self._text(self._take_held())
        self._release_gap()

    def _declares(self, name: str) -> bool:
        return not self._declared or name in self._declared

    def _accepts(self, call: CallReader) -> bool:
        return self._declares(call.name) and (call.has_arguments or not self._needs_arguments)

    def _in_text(self, text: str, pos: int) -> int:
        bracket = _BRACKET.search(text, pos)
        if bracket is None:
            self._text(text[pos:])
            return len(text)
        found = bracket.start()
        self._text(text[pos:found])
        self._start = self._offset + found
        if self._start in self._consumed:
            self._gap = []
            return self._consumed.pop(self._start) - self._offset
        if bracket.group() == "{":
            self._call = CallReader(_NAMES, _ARGUMENTS)
            self._state = _OBJECT
        elif self._may_try_array():
            self._array = CallArrayReader(_NAMES, _ARGUMENTS)
            self._array_calls = 0
            self._state = _ARRAY
        else:
            self._text("[")
            return found + 1
        return found

    def _may_try_array(self) -> bool:
        if self._start >= self._horizon:
            self._retries = 0
            self._consumed.clear()
            return True
        self._retries += 1
        return self._retries <= _MAX_RETRIES

    def _value_so_far(self, text: str, end: int) -> str:
        return self._take_held() + text[max(0, self._start - self._offset) : end]

    def _in_object(self, text: str, pos: int) -> int:
        call = self._call
        end = call.feed(text, pos)
        if call.done or call.failed:
            value = self._value_so_far(text, end)
            if not self._settle(call):
                self._text(value)
            self._state = _TEXT
        elif self._progress(call):
            self._held.clear()
        elif call.name and not self._declares(call.name):
            self._text(self._value_so_far(text, end))
            self._state = _DATA
        return end

    def _in_data(self, text: str, pos: int) -> int:
        """An object that is known to be no call."""
        call = self._call
        end = call.feed(text, pos)
        call.fragments.clear()
        self._text(text[pos:end])
        if call.done or call.failed:
            self._state = _TEXT
        return end

    def _in_array(self, text: str, pos: int) -> int:
        array = self._array
        element = array.element
        end = array.feed(text, pos)
        if array.element is not None and element is None:
            self._element_start = self._offset + end
        elif element is not None:
            self._read_element(element, end)
        if array.failed:
            self._horizon = max(self._horizon, self._offset + end)
            self._state = _TEXT
            return -1
        if array.done:
            value = self._value_so_far(text, end)
            if self._array_calls:
                self._gap = []
            else:
                self._text(value)
            self._state = _TEXT
        return end

    def _read_element(self, element: CallReader, end: int) -> None:
        was_open = self._open
        if element.done or element.failed:
            if self._settle(element):
                self._consumed[self._element_start] = self._offset + end
                self._array_calls += not was_open
            self._array.element = None
        elif self._progress(element):
            self._array_calls += not was_open


def _json(tools: Sequence[ToolSpec]) -> OutputParser:
    return JsonParser(tools)


def _passthrough(tools: Sequence[ToolSpec]) -> OutputParser:
    return Passthrough()


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    if len(calls) == 1:
        return text + call_object(calls[0])
    return f"{text}[{', '.join(map(call_object, calls))}]" if calls else text


def _structural_tag(request: TagRequest) -> dict[str, Any]:
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
    return {
        "format": {
            "type": "tag",
            "begin": "[",
            "content": {"type": "tags_with_separator", "tags": calls, "separator": ", ", "at_least_one": True},
            "end": "]",
        }
    }


FAMILY: Family = Family(
    name="generic",
    tools=(
        ToolFormat(name="passthrough", parser=_passthrough),
        ToolFormat(
            name="json",
            parser=_json,
            stems=(
                "gpt-4",
                "gpt-4o",
                "gpt-3.5",
                "claude-",
                "gemini-",
                "gemma-",
                "palm-",
                "llama-",
                "meta-llama-",
                "glm-",
            ),
            structural_tag=_structural_tag,
            encode=_encode,
        ),
    ),
    reasoning=(
        ReasoningFormat(name="base", rank=18, open="<think>", close="</think>"),
        ReasoningFormat(name="passthrough", rank=19),
    ),
)
