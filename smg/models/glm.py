"""GLM-4.5 to GLM-5: calls as key and value tags (chat templates of GLM-4.5 and 4.7), thoughts in ``<think>`` blocks.

GLM-4.5 writes one element per line; GLM-4.7 and later write none of the newlines::

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

A block counts only when it is complete, so a call is sent as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.machine import ToolMachine
from smg.models.scan import Markers
from smg.models.structural import after_thought, json_schema, tag, triggered
from smg.models.typed_values import ParameterTypes, ValueStyle, quote, to_json, write_value

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_STYLE = ValueStyle(infer="lenient")

_OPENERS = Markers([_OPEN])
_VALUE_ENDS = Markers([_VALUE_END])
_NAME_END = re.compile(r"[\s<]")
_NOT_BLANK = re.compile(r"\S")


class GlmParser(ToolMachine):
    """``lines``: the name must follow its tag directly and be followed by a newline (GLM-4.5); otherwise white space
    may stand between all elements (GLM-4.7, which reads the other layout too)."""

    def __init__(self, tools: Sequence[ToolSpec], *, lines: bool) -> None:
        super().__init__()
        self._types = ParameterTypes(tools)
        self._lines = lines
        self._tail = ""
        self._step: Callable[[str, int], int] = self._outside
        self._parts: list[str] = []  # pieces of the element that is being read
        self._name = ""
        self._key = ""
        self._values: dict[str, str] = {}  # JSON text by key

    def _run(self, text: str) -> None:
        if self._tail:
            text = self._tail + text
            self._tail = ""
        pos, size = 0, len(text)
        while pos < size:
            pos = self._step(text, pos)

    def _end(self) -> None:
        tail, self._tail = self._tail, ""
        if self._step == self._outside:
            self._text(tail)
        elif not self._calls:
            self._text(self._take_held() + tail)
        self._step = self._outside

    def _outside(self, text: str, pos: int) -> int:
        at, marker = _OPENERS.search(text, pos)
        self._text(text[pos:at])
        if not marker:
            self._tail = text[at:]
            return len(text)
        self._held.append(marker)
        self._parts, self._values = [], {}
        self._step = self._in_name
        return at + len(marker)

    def _reject(self, pos: int) -> int:
        """Not a call: everything up to ``pos`` is content, and scanning goes on there."""
        self._text(self._take_held())
        self._step = self._outside
        return pos

    def _take(self, text: str, pos: int, end: int) -> int:
        self._held.append(text[pos:end])
        return end

    def _in_name(self, text: str, pos: int) -> int:
        if not self._lines and not self._parts:
            pos = self._skip_blank(text, pos)
        found = _NAME_END.search(text, pos)
        end = found.start() if found is not None else len(text)
        if end > pos:
            self._parts.append(text[pos:end])
            self._take(text, pos, end)
        if found is None:
            return end
        if not self._parts or (self._lines and found.group() != "\n"):
            return self._reject(end)
        self._name = "".join(self._parts)
        self._step = self._between
        return end

    def _skip_blank(self, text: str, pos: int) -> int:
        found = _NOT_BLANK.search(text, pos)
        return self._take(text, pos, found.start() if found is not None else len(text))

    def _expect(self, text: str, pos: int, *literals: str) -> tuple[int, str]:
        """Behind white space: (position behind the literal, literal). Without one, the literal is empty and the
        position is the end of the text while there is hope, else where the block was rejected."""
        pos = self._skip_blank(text, pos)
        for literal in literals:
            if text.startswith(literal, pos):
                return self._take(text, pos, pos + len(literal)), literal
            if literal.startswith(text[pos : pos + len(literal)]):
                self._tail = text[pos:]
                return len(text), ""
        return self._reject(pos), ""

    def _between(self, text: str, pos: int) -> int:
        pos, literal = self._expect(text, pos, _KEY, _CLOSE)
        if literal == _KEY:
            self._parts = []
            self._step = self._in_key
        elif literal:
            self._held.clear()
            pairs = ",".join(f"{quote(key)}:{value}" for key, value in self._values.items())
            self._whole_call(self._name, "{" + pairs + "}")
            self._step = self._outside
        return pos

    def _in_key(self, text: str, pos: int) -> int:
        end = text.find("<", pos)
        if end < 0:
            end = len(text)
        if end > pos:
            self._parts.append(text[pos:end])
            return self._take(text, pos, end)
        pos, literal = self._expect(text, pos, _KEY_END)
        if literal:
            self._key = "".join(self._parts).strip()
            self._step = self._before_value
        return pos

    def _before_value(self, text: str, pos: int) -> int:
        pos, literal = self._expect(text, pos, _VALUE)
        if literal:
            self._parts = []
            self._step = self._in_value
        return pos

    def _in_value(self, text: str, pos: int) -> int:
        at, marker = _VALUE_ENDS.search(text, pos)
        self._parts.append(text[pos:at])
        self._take(text, pos, at)
        if not marker:
            self._tail = text[at:]
            return len(text)
        types, members = self._types.of(self._name, self._key)
        self._values[self._key] = to_json("".join(self._parts), types, _STYLE, members)
        self._step = self._between
        return self._take(text, at, at + len(marker))


def _parser_45(tools: Sequence[ToolSpec]) -> OutputParser:
    return GlmParser(tools, lines=True)


def _parser_47(tools: Sequence[ToolSpec]) -> OutputParser:
    return GlmParser(tools, lines=False)


def _encode(text: str, calls: Sequence[ToolCall], newline: str) -> str:
    def block(call: ToolCall) -> str:
        pairs = "".join(
            f"{_KEY}{key}{_KEY_END}{newline}{_VALUE}{write_value(value, _VALUE_END, _STYLE)}{_VALUE_END}{newline}"
            for key, value in call.arguments.items()
        )
        return f"{_OPEN}{call.name}{newline}{pairs}{_CLOSE}"

    return text + newline.join(map(block, calls))


def _encode_45(text: str, calls: Sequence[ToolCall]) -> str:
    return _encode(text, calls, "\n")


def _encode_47(text: str, calls: Sequence[ToolCall]) -> str:
    return _encode(text, calls, "")


_MARKERS = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END)


def _structural_tag(request: TagRequest, newline: str, end: str | list[str]) -> dict[str, Any]:
    calls = [
        tag(f"{_OPEN}{tool.name}{newline}", json_schema(tool.parameters, "glm_xml"), end)
        for tool in request.tools
        if tool.name
    ]
    return after_thought(triggered([_OPEN], calls), request, "</think>", "<think>", "</think>", *_MARKERS)


def _structural_tag_45(request: TagRequest) -> dict[str, Any]:
    return _structural_tag(request, "\n", ["\n" + _CLOSE, _CLOSE])


def _structural_tag_47(request: TagRequest) -> dict[str, Any]:
    return _structural_tag(request, "", _CLOSE)


_SPECIAL = frozenset(_MARKERS)

FAMILY: Family = Family(
    name="glm",
    tools=(
        ToolFormat(
            name="glm45_moe",
            parser=_parser_45,
            stems=("glm-4.5", "glm-4.6"),
            openers=(_OPEN,),
            special_tokens=_SPECIAL,
            structural_tag=_structural_tag_45,
            encode=_encode_45,
        ),
        ToolFormat(
            name="glm47_moe",
            parser=_parser_47,
            stems=("glm-4.7", "glm-5"),
            openers=(_OPEN,),
            special_tokens=_SPECIAL,
            structural_tag=_structural_tag_47,
            tag_by_default=True,
            encode=_encode_47,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="glm45",
            rank=7,
            patterns=("glm45", "glm47", "glm-5"),
            open="<think>",
            close="</think>",
            thinking_toggle=True,
        ),
    ),
)
