"""Tool calls in a marked section: every call is a header and a JSON value between control tokens (DeepSeek, Kimi).

The value is JSON, so a marker inside a string is data. Once the value is complete the call counts, whatever closing
markers are missing. Text inside the section outside calls is dropped, as are malformed calls; a section without any
call is content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from smg.messages import ContentDelta, ParserEvent
from smg.models.json_stream import JsonReader
from smg.models.machine import SPACE, ToolMachine
from smg.models.scan import Markers


@dataclass(frozen=True, slots=True)
class SectionFormat:
    """The markers of a section format.

    ``separator`` ends the header of a call; ``read_header`` makes a name of the header, "" when it is malformed.
    ``fenced``: the header is the word ``function``, and behind the separator come the name, a line break and the line
    `````json``. ``wrap``: a value that is no object becomes ``{"value": V}``; without it such a call is malformed.
    ``end_of_turn`` is swallowed behind calls.
    """

    open: str
    close: str
    call_open: str
    call_close: str
    separator: str
    end_of_turn: str
    read_header: Callable[[str], str]
    fenced: bool = False
    wrap: bool = False

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({self.open, self.close, self.call_open, self.call_close, self.separator})


_TEXT, _SECTION, _HEADER, _NAME, _FENCE, _VALUE_START, _OBJECT, _OTHER = range(8)


class SectionMachine:
    """A section format with its marker sets, shared by all parsers of the format."""

    def __init__(self, declared: SectionFormat) -> None:
        edges = (declared.call_open, declared.close)
        ends = (declared.call_open, declared.call_close, declared.close)
        self.declared = declared
        self.first = declared.open[0]
        self.opener = Markers([declared.open])
        self.behind_calls = Markers([declared.open, declared.end_of_turn])
        self.edges = Markers(edges)
        self.header = Markers([declared.separator, *ends])
        self.line = Markers(["\n", *ends])

    def parser(self) -> SectionParser:
        return SectionParser(self)


class SectionParser(ToolMachine):
    """Runs a ``SectionMachine`` for one choice. ``_held`` is the section so far while it has no call."""

    def __init__(self, machine: SectionMachine) -> None:
        super().__init__()
        self._machine = machine
        self._format = machine.declared
        self._state = _TEXT
        self._silent = True  # no call in this section yet
        self._header: list[str] = []
        self._name = ""
        self._pieces: list[str] = []
        self._reader = JsonReader(self._pieces, compact=False)
        in_header = self._in_header
        self._steps = (
            self._in_text,
            self._in_section,
            in_header,
            in_header,
            in_header,
            self._value_start,
            self._in_object,
            self._in_other,
        )

    def feed(self, text: str) -> list[ParserEvent]:
        state = self._state
        if state == _OBJECT:
            self._events = events = list[ParserEvent]()
            pos = self._in_object(text, 0)
            if pos < len(text):
                self._run(text[pos:])
            return events
        if state == _TEXT and self._gap is None and not self._rest and self._machine.first not in text:
            return [ContentDelta(text)] if text else []
        return super().feed(text)

    def _end(self) -> None:
        state = self._state
        if state == _TEXT:
            self._text(self._rest)
        else:
            self._keep(self._rest)
            if state == _OTHER:
                self._reader.end()
                self._end_other()
            elif state == _OBJECT:
                self._finish_arguments(self._reader)
            self._end_section()
        self._release_gap()

    def _keep(self, text: str) -> None:
        if self._silent:
            self._held.append(text)

    def _advance(self, markers: Markers, text: str, pos: int) -> tuple[int, str]:
        """Go to the next marker: its index and the marker. Without one the undecided tail waits."""
        found, marker = markers.search(text, pos)
        if not marker:
            self._rest = text[found:]
        return found, marker

    def _in_text(self, text: str, pos: int) -> int:
        markers = self._machine.behind_calls if self._calls else self._machine.opener
        found, marker = self._advance(markers, text, pos)
        self._text(text[pos:found])
        if not marker:
            return len(text)
        if marker == self._format.open:
            self._silent = True
            self._held = [marker]
            self._state = _SECTION
        return found + len(marker)

    def _in_section(self, text: str, pos: int) -> int:
        found, marker = self._advance(self._machine.edges, text, pos)
        self._keep(text[pos:found])
        if not marker:
            return len(text)
        self._keep(marker)
        if marker == self._format.call_open:
            self._header.clear()
            self._state = _HEADER
        else:
            self._end_section()
            self._state = _TEXT
        return found + len(marker)

    def _end_section(self) -> None:
        held = self._take_held()
        if self._silent and not (self._calls and self._format.call_open in held):
            self._text(held)

    def _in_header(self, text: str, pos: int) -> int:
        markers = self._machine.header if self._state == _HEADER else self._machine.line
        found, marker = self._advance(markers, text, pos)
        self._keep(text[pos:found])
        self._header.append(text[pos:found])
        if not marker:
            return len(text)
        if marker not in (self._format.separator, "\n"):
            self._state = _SECTION
            return found
        self._keep(marker)
        header = "".join(self._header).strip()
        self._header.clear()
        self._state = self._next_state(header)
        return found + len(marker)

    def _next_state(self, header: str) -> int:
        """``header`` is a complete part of the header; the state that reads what follows."""
        if self._state == _FENCE:
            return _VALUE_START if header == "```json" else _SECTION
        if self._format.fenced and self._state == _HEADER:
            return _NAME if header == "function" else _SECTION
        self._name = header if self._state == _NAME else self._format.read_header(header)
        if not self._name:
            return _SECTION
        return _FENCE if self._state == _NAME else _VALUE_START

    def _value_start(self, text: str, pos: int) -> int:
        end = SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        self._keep(text[pos:end])
        if end < len(text):
            self._pieces.clear()
            self._reader.reset(self._pieces)
            if text[end] == "{":
                self._state = _OBJECT
            else:
                self._state = _OTHER if self._format.wrap else _SECTION
        return end

    def _in_object(self, text: str, pos: int) -> int:
        reader = self._reader
        end = reader.feed(text, pos)
        if not self._stream(self._name, self._pieces):
            self._keep(text[pos:end])
        if reader.done or reader.failed:
            self._finish_arguments(reader)
            self._state = _SECTION
        return end

    def _begin_call(self, name: str) -> None:
        super()._begin_call(name)
        self._held.clear()
        self._silent = False

    def _in_other(self, text: str, pos: int) -> int:
        end = self._reader.feed(text, pos)
        self._keep(text[pos:end])
        if self._reader.done or self._reader.failed:
            self._end_other()
        return end

    def _end_other(self) -> None:
        if self._reader.done:
            self._whole_call(self._name, '{"value": ' + "".join(self._pieces) + "}")
        self._state = _SECTION
