"""Mistral and Mixtral: ``[TOOL_CALLS]`` and a JSON array, or (tokenizers from v11 on) ``[TOOL_CALLS]NAME[ARGS]{...}``.

Formats as in the published chat templates and mistral-common's tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from smg.messages import ContentDelta, ParserEvent
from smg.models.family import Family, OutputParser, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.json_stream import CallArrayReader, JsonReader
from smg.models.machine import SPACE, ToolMachine, call_object
from smg.models.scan import Markers

_MARKER = "[TOOL_CALLS]"
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_END_OF_TURN = "</s>"

_OPENER = Markers([_MARKER])
_BEHIND_CALLS = Markers([_MARKER, _END_OF_TURN])

_LONGEST_NAME = 256
_WORD = re.compile(r"[\w.\-]+")

_TEXT, _OPENED, _ARRAY, _NAME, _OBJECT_START, _OBJECT = range(6)


class MistralParser(ToolMachine):
    """A marker whose array yields no call is text, and the next marker is tried. ``_held``: the marker and what follows
    it, while no call of it was announced."""

    separators: ClassVar[re.Pattern[str]] = re.compile("(?!)")  # nothing stands between blocks

    def __init__(self) -> None:
        super().__init__()
        self._state = _TEXT
        self._name = ""
        self._calls_here = False
        self._array = CallArrayReader()
        self._pieces: list[str] = []
        self._object = JsonReader(self._pieces, compact=False)
        self._steps = (
            self._in_text,
            self._opened,
            self._in_array,
            self._in_name,
            self._object_start,
            self._in_object,
        )

    def feed(self, text: str) -> list[ParserEvent]:
        if self._state == _TEXT and not self._rest and not self._calls and "[" not in text:
            return [ContentDelta(text)] if text else []
        return super().feed(text)

    def _end(self) -> None:
        element = self._array.element
        if self._state == _ARRAY and element is not None:
            self._settle(element)
        elif self._state == _OBJECT:
            self._finish_arguments(self._object)
        if self._state == _TEXT or not self._calls:
            self._text(self._take_held() + self._rest)

    def _in_text(self, text: str, pos: int) -> int:
        found, marker = (_BEHIND_CALLS if self._calls else _OPENER).search(text, pos)
        self._text(text[pos:found])
        if not marker:
            self._rest = text[found:]
            return len(text)
        if marker == _MARKER:
            self._held = [marker]
            self._calls_here = False
            self._state = _OPENED
        return found + len(marker)

    def _not_a_call(self, end: int) -> int:
        self._text(self._take_held())
        self._state = _TEXT
        return end

    def _opened(self, text: str, pos: int) -> int:
        end = SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        self._held.append(text[pos:end])
        if end == len(text):
            return end
        if text[end] == "[":
            self._array = CallArrayReader()
            self._state = _ARRAY
        elif len(self._held) == 2 and end == pos and _WORD.match(text, end):
            self._state = _NAME
        else:
            return self._not_a_call(end)
        return end

    # the array form

    def _in_array(self, text: str, pos: int) -> int:
        array = self._array
        element = array.element
        end = array.feed(text, pos)
        if element is not None and element is array.element:
            if element.done or element.failed:
                self._settle(element)
                array.element = None
            else:
                self._progress(element)
        if not self._calls_here:
            self._held.append(text[pos:end])
        if array.done or array.failed:
            return self._not_a_call(end)
        return end

    def _begin_call(self, name: str) -> None:
        super()._begin_call(name)
        self._held.clear()
        self._calls_here = True

    # the name form

    def _in_name(self, text: str, pos: int) -> int:
        """``NAME[ARGS]`` or ``NAME[CALL_ID]ID[ARGS]``; the undecided text waits, it is short."""
        name = _WORD.match(text, pos)
        end = name.end() if name else pos
        tail = text[end : end + len(_CALL_ID)]
        if tail == _CALL_ID:
            word = _WORD.match(text, end + len(_CALL_ID))
            end = word.end() if word else end + len(_CALL_ID)
            tail = text[end : end + len(_CALL_ID)]
        if end - pos > 2 * _LONGEST_NAME or not name:
            return self._not_a_call(pos)
        if tail.startswith(_ARGS):
            self._name = name.group()
            self._held.append(text[pos : end + len(_ARGS)])
            self._state = _OBJECT_START
            return end + len(_ARGS)
        if _ARGS.startswith(tail) or _CALL_ID.startswith(tail):
            self._rest = text[pos:]
            return len(text)
        return self._not_a_call(pos)

    def _object_start(self, text: str, pos: int) -> int:
        end = SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        self._held.append(text[pos:end])
        if end == len(text):
            return end
        if text[end] != "{":
            return self._not_a_call(end)
        self._pieces.clear()
        self._object.reset(self._pieces)
        self._state = _OBJECT
        return end

    def _in_object(self, text: str, pos: int) -> int:
        end = self._object.feed(text, pos)
        if not self._stream(self._name, self._pieces):
            self._held.append(text[pos:end])
        if self._object.done or self._object.failed:
            if not self._finish_arguments(self._object):
                return self._not_a_call(end)
            self._state = _TEXT
        return end


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return MistralParser()


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    return f"{text}{_MARKER} [{', '.join(map(call_object, calls))}]" if calls else text


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    calls = [
        {
            "begin": f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": tool.parameters},
            "end": "}",
        }
        for tool in request.tools
        if tool.name
    ]
    array = {
        "begin": f"{_MARKER} [",
        "content": {"type": "tags_with_separator", "tags": calls, "separator": ", ", "at_least_one": True},
        "end": "]",
    }
    return {"format": {"type": "triggered_tags", "triggers": [_MARKER], "tags": [array], "at_least_one": True}}


FAMILY: Family = Family(
    name="mistral",
    tools=(
        ToolFormat(
            name="mistral",
            parser=_parser,
            stems=("mistral-", "mixtral-"),
            openers=(_MARKER,),
            special_tokens=frozenset({_MARKER, _ARGS, _CALL_ID}),
            structural_tag=_structural_tag,
            tag_by_default=True,
            encode=_encode,
        ),
    ),
)
