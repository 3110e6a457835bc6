"""Llama 3.2 and Llama 4: JSON calls behind an optional ``<|python_tag|>``, and Python-style call lists.

Formats as in Meta's published prompt formats: ``{"name": ..., "parameters": {...}}`` objects separated by ``;`` (Llama
3.x, and Llama 4 at times), ``[name(key=value), ...]`` (Llama 4 and 3.2's zero-shot calls).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from smg.messages import ContentDelta, ParserEvent
from smg.models.family import Family, OutputParser, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.json_stream import CallReader
from smg.models.machine import SPACE, ToolMachine, call_object, compact
from smg.models.python_literal import CallListReader
from smg.models.scan import Markers
from smg.models.structural import (
    Tag,
    after_thought,
    const,
    either,
    json_schema,
    optional,
    sequence,
    tag,
    tags,
    with_definitions,
)

_TAG = "<|python_tag|>"
_LIST_START, _LIST_END = "<|python_start|>", "<|python_end|>"
_ENDS_OF_TURN = ("<|eom_id|>", "<|eot_id|>")

_OPENER = Markers([_TAG])
_BEHIND_CALLS = Markers([_TAG, *_ENDS_OF_TURN])
_LIST_MARKERS = Markers([_LIST_START, _LIST_END])

_BETWEEN, _CALL, _DATA, _TEXT, _OPENED = range(5)


class ObjectSequence(ToolMachine):
    """JSON call objects one after another at the start of the text, then other text, which a subclass reads.

    Without a marker in front (``_tagged``) only a declared name makes a call, when the request declares any. The first
    thing that is no call ends the sequence; an object that is no call is content as a whole.
    """

    separators: ClassVar[re.Pattern[str]] = re.compile(r"[\s,;]*")

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self._declared = frozenset(tool.name for tool in tools)
        self._state = _BETWEEN
        self._tagged = False
        self._call = CallReader()
        self._gap = []
        self._steps = (self._between, self._in_call, self._in_data, self._in_text, self._opened)

    def _in_text(self, text: str, pos: int) -> int:
        raise NotImplementedError

    def _opened(self, text: str, pos: int) -> int:
        raise NotImplementedError

    def _accepts(self, call: CallReader) -> bool:
        return self._tagged or not self._declared or call.name in self._declared

    def _between(self, text: str, pos: int) -> int:
        """Separators; in front of the first call only white space is one."""
        pattern = self.separators if self._calls else SPACE
        end = pattern.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        self._text(text[pos:end])
        if end < len(text):
            if text[end] == "{":
                self._begin_object()
            else:
                if not self._calls:
                    self._release_gap()
                self._state = _TEXT
        return end

    def _begin_object(self) -> None:
        self._call = CallReader()
        self._state = _CALL

    def _in_call(self, text: str, pos: int) -> int:
        call = self._call
        end = call.feed(text, pos)
        if self._progress(call):
            self._held.clear()
        else:
            self._held.append(text[pos:end])
        if call.done or call.failed:
            if self._settle(call):
                self._state = _BETWEEN if call.done else _TEXT
            else:
                self._text(self._take_held())
                self._state = _TEXT
        elif not self._open and call.name and not self._accepts(call):
            self._text(self._take_held())
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

    def _end(self) -> None:
        if self._state == _CALL and not self._settle(self._call) and not self._calls:
            self._text(self._take_held())
        elif self._state in (_TEXT, _OPENED):
            self._text(self._take_held() + self._rest)
        if not self._calls:
            self._release_gap()


class LlamaParser(ObjectSequence):
    """The sequence is at the start of the text or behind ``<|python_tag|>``. Other text behind the tag is content, tag
    included."""

    def feed(self, text: str) -> list[ParserEvent]:
        if self._state == _TEXT and self._gap is None and not self._rest and "<" not in text:
            return [ContentDelta(text)] if text else []
        return super().feed(text)

    def _in_text(self, text: str, pos: int) -> int:
        found, marker = (_BEHIND_CALLS if self._calls else _OPENER).search(text, pos)
        self._text(text[pos:found])
        if not marker:
            self._rest = text[found:]
            return len(text)
        if marker == _TAG:
            self._held = [marker]
            self._state = _OPENED
        return found + len(marker)

    def _opened(self, text: str, pos: int) -> int:
        end = SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        self._held.append(text[pos:end])
        if end < len(text):
            if text[end] == "{":
                self._tagged = True
                self._begin_object()
            else:
                self._text(self._take_held())
                self._state = _TEXT
        return end


class PythonicParser(ObjectSequence):
    """``[name(key=value), ...]`` anywhere in the text; the list markers are removed first.

    A list is reported when it is complete, since any element can still make it text. Llama 4 also writes the JSON form
    at the start of the text.
    """

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__(tools)
        self._list = CallListReader()
        self._marker_rest = ""

    def feed(self, text: str) -> list[ParserEvent]:
        text = self._marker_rest + text
        self._marker_rest = ""
        if "<" in text:
            text = self._without_markers(text)
        if self._state == _TEXT and self._gap is None and "[" not in text:
            return [ContentDelta(text)] if text else []
        return super().feed(text)

    def finish(self) -> list[ParserEvent]:
        rest, self._marker_rest = self._marker_rest, ""
        events = super().feed(rest)
        return events + super().finish()

    def _without_markers(self, text: str) -> str:
        pieces: list[str] = []
        pos = 0
        while True:
            found, marker = _LIST_MARKERS.search(text, pos)
            pieces.append(text[pos:found])
            if not marker:
                self._marker_rest = text[found:]
                return "".join(pieces)
            pos = found + len(marker)

    def _in_text(self, text: str, pos: int) -> int:
        found = text.find("[", pos)
        if found < 0:
            found = len(text)
        else:
            self._list = CallListReader()
            self._state = _OPENED
        self._text(text[pos:found])
        return found

    def _opened(self, text: str, pos: int) -> int:
        calls = self._list
        end = calls.feed(text, pos)
        self._held.append(text[pos:end])
        if calls.failed:
            self._text(self._take_held())
            self._state = _TEXT
        elif calls.done:
            self._held.clear()
            for name, arguments in calls.calls:
                self._whole_call(name, compact(arguments))
            self._gap = None
            self._state = _TEXT
        return end


def _llama(tools: Sequence[ToolSpec]) -> OutputParser:
    return LlamaParser(tools)


def _pythonic(tools: Sequence[ToolSpec]) -> OutputParser:
    return PythonicParser(tools)


def _encode_llama(text: str, calls: Sequence[ToolCall]) -> str:
    return text + _TAG + "; ".join(call_object(call, "parameters") for call in calls) if calls else text


def _encode_pythonic(text: str, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return text
    written = (
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})" for call in calls
    )
    return f"{text}[{', '.join(written)}]"


def _tag_llama(request: TagRequest) -> dict[str, Any]:
    """The tag and the calls, to the end of the answer: the format has no closing marker that free text could follow."""
    calls = [
        tag(
            f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "parameters": ',
            json_schema(tool.parameters),
            "}",
        )
        for tool in request.tools
        if tool.name
    ]
    return {"format": sequence(const(_TAG), tags(calls, "; "))}


def _keywords(schema: dict[str, Any]) -> Tag:
    """The keyword arguments of a call, in declared order: the required ones, then any of the others. Values are JSON,
    which is a Python literal but for the spelling of its constants; the parser knows both."""
    properties = schema.get("properties")
    required = schema.get("required")
    needed = required if isinstance(required, list) else ()
    first: list[Tag] = []
    rest: list[Tag] = []
    for key, each in properties.items() if isinstance(properties, dict) else ():
        argument = sequence(const(f"{key}="), json_schema(with_definitions(each, schema)))
        (first if key in needed else rest).append(argument)
    if not first and not rest:
        return const("")
    if first:
        joined = [first[0], *(sequence(const(", "), each) for each in first[1:])]
        return sequence(*joined, *(optional(sequence(const(", "), each)) for each in rest))
    # Without a required argument any of them may be the first that is written.
    starts = [
        sequence(rest[at], *(optional(sequence(const(", "), each)) for each in rest[at + 1 :]))
        for at in range(len(rest))
    ]
    return optional(either(starts))


def _tag_pythonic(request: TagRequest) -> dict[str, Any]:
    calls = [tag(f"{tool.name}(", _keywords(tool.parameters), ")") for tool in request.tools if tool.name]
    return after_thought(tag("[", tags(calls, ", "), "]"), request, "</think>", "<think>", "</think>")


FAMILY: Family = Family(
    name="llama",
    tools=(
        ToolFormat(
            name="pythonic",
            parser=_pythonic,
            stems=("llama-4", "meta-llama-4", "deepseek-"),
            special_tokens=frozenset({_LIST_START, _LIST_END}),
            structural_tag=_tag_pythonic,
            encode=_encode_pythonic,
        ),
        ToolFormat(
            name="llama",
            parser=_llama,
            stems=("llama-3.2", "meta-llama-3.2"),
            openers=(_TAG,),
            special_tokens=frozenset({_TAG}),
            structural_tag=_tag_llama,
            encode=_encode_llama,
        ),
    ),
)
