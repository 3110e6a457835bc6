"""Reading an answer that a JSON schema forced to be a tool call.

Such an answer has no markers: it is the array of ``{"name": ..., "parameters": ...}`` objects of the constraint, or the
arguments of the one function that was asked for. An engine without a grammar backend may answer anything; what isn't
such JSON is content.
"""

from __future__ import annotations

from collections.abc import Sequence

from smg.messages import ContentDelta, ParserEvent
from smg.models.family import OutputParser, ToolSpec
from smg.models.generic import JsonParser
from smg.models.json_stream import JsonReader
from smg.models.machine import SPACE, ToolMachine

_BLANK, _VALUE, _BEHIND, _TEXT = range(4)


class NamedParser(ToolMachine):
    """The whole text is the arguments of function ``name``, white space around it allowed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._state = _BLANK
        self._pieces: list[str] = []
        self._reader = JsonReader(self._pieces)

    def _run(self, text: str) -> None:
        pos = 0
        if self._state == _BLANK:
            pos = SPACE.match(text).end()  # type: ignore[union-attr]  # matches the empty text too
            self._held.append(text[:pos])
            if pos < len(text):
                self._state = _VALUE
        if self._state == _VALUE:
            pos = self._read(text, pos)
        if self._state == _BEHIND:
            self._behind(text[pos:])
        elif self._state == _TEXT:
            self._content(text[pos:])

    def _read(self, text: str, pos: int) -> int:
        reader = self._reader
        end = reader.feed(text, pos)
        if self._stream(self._name, self._pieces):
            self._held.clear()
        else:
            self._held.append(text[pos:end])
        if reader.done or reader.failed:
            self._finish_arguments(reader)
            self._content(self._take_held())
            self._state = _BEHIND if reader.done else _TEXT
        return end

    def _behind(self, text: str) -> None:
        """More than white space behind the value: the whole was no call, as far as that can still be said."""
        self._text(text)
        if self._gap is None:
            self.broken.append(0)
            self._state = _TEXT

    def _content(self, text: str) -> None:
        if text:
            super()._content(text)

    def _end(self) -> None:
        if self._state == _VALUE:
            self._reader.end()
            self._stream(self._name, self._pieces)
            if not self._finish_arguments(self._reader):
                self._content(self._take_held())
        elif self._state == _BLANK:
            self._content(self._take_held())


class ArrayParser:
    """The whole text is the array of calls (a single object is taken for an array of one). An answer that begins with
    anything else ignored the constraint and is content as it stands."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._calls = JsonParser(tools, needs_arguments=True)
        self._constrained: bool | None = None
        self._blanks = ""

    @property
    def broken(self) -> list[int]:
        """Calls that turned out broken (``machine.parse_whole``)."""
        return self._calls.broken

    def feed(self, text: str) -> list[ParserEvent]:
        if self._constrained is None:
            text = self._blanks + text
            begin = text.lstrip()
            if not begin:
                self._blanks = text
                return []
            self._constrained = begin[0] in "[{"
        if self._constrained:
            return self._calls.feed(text)
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        if self._constrained is None:
            return [ContentDelta(self._blanks)] if self._blanks else []
        return self._calls.finish() if self._constrained else []


def forced_parser(mode: str, tools: Sequence[ToolSpec]) -> OutputParser:
    """The parser for ``ParserPlan.forced``: "array", or "function:NAME". Raises ``ValueError`` for any other mode."""
    if mode == "array":
        return ArrayParser(tools)
    kind, colon, name = mode.partition(":")
    if kind != "function" or not colon or not name:
        raise ValueError(f"unknown forced mode {mode!r}")
    return NamedParser(name)
