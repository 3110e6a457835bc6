"""What the tool-call machines have in common: numbering of calls, and the text around them.

A machine has one method per state (``_steps``), which reads the text from a place on and returns the place where the
next state goes on. ``_rest`` is the undecided end of the last piece, read again in front of the next one; ``_held`` is
text that may still turn out to be content. ``_end`` is told that no more text comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from smg.messages import ContentDelta, ParserEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from smg.models.family import OutputParser, ToolCall
from smg.models.json_stream import CallReader, JsonReader

Step = Callable[[str, int], int]

SPACE = re.compile(r"\s*")


def compact(value: Any) -> str:
    """JSON text without white space, non-ASCII as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class ToolMachine:
    """Base of the tool-call parsers.

    ``broken`` lists the calls that were announced but whose payload turned out incomplete or invalid: their arguments
    were closed to valid JSON where they stopped. ``separators`` is what the format may write between call blocks:
    such text behind a block waits (``_gap``) and is dropped when another block follows, else it is content.
    """

    separators: ClassVar[re.Pattern[str]] = SPACE

    def __init__(self) -> None:
        self.broken: list[int] = []
        self._events: list[ParserEvent] = []
        self._calls = 0
        self._open = False
        self._gap: list[str] | None = None
        self._held: list[str] = []
        self._rest = ""
        self._state = 0
        self._steps: tuple[Step, ...] = ()

    def feed(self, text: str) -> list[ParserEvent]:
        self._events = events = list[ParserEvent]()
        if text:
            self._run(text)
        return events

    def finish(self) -> list[ParserEvent]:
        self._events = events = list[ParserEvent]()
        self._end()
        return events

    def _run(self, text: str) -> None:
        if self._rest:
            text = self._rest + text
            self._rest = ""
        pos, size = 0, len(text)
        while pos < size:
            pos = self._steps[self._state](text, pos)

    def _end(self) -> None:
        raise NotImplementedError

    # text

    def _text(self, text: str) -> None:
        """Text outside calls."""
        if not text:
            return
        gap = self._gap
        if gap is not None:
            gap.append(text)
            if self.separators.fullmatch(text):
                return
            text = "".join(gap)
            self._gap = None
        self._content(text)

    def _content(self, text: str) -> None:
        self._events.append(ContentDelta(text))

    def _release_gap(self) -> None:
        gap, self._gap = self._gap, None
        if gap:
            self._content("".join(gap))

    def _take_held(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held

    # calls

    def _begin_call(self, name: str) -> None:
        self._gap = None
        self._open = True
        self._events.append(ToolCallStart(self._calls, name))
        self._calls += 1

    def _arguments(self, fragment: str) -> None:
        if fragment:
            self._events.append(ToolCallArguments(self._calls - 1, fragment))

    def _end_call(self, *, broken: bool = False) -> None:
        if broken:
            self.broken.append(self._calls - 1)
        self._open = False
        self._gap = []
        self._events.append(ToolCallEnd(self._calls - 1))

    def _whole_call(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        self._arguments(arguments)
        self._end_call()

    # calls whose arguments are a JSON object of their own

    def _stream(self, name: str, pieces: list[str]) -> bool:
        """Send the argument text that a reader wrote to ``pieces``, after announcing ``name``. True once announced."""
        if pieces:
            if not self._open:
                self._begin_call(name)
            self._arguments("".join(pieces))
            pieces.clear()
        return self._open

    def _finish_arguments(self, reader: JsonReader) -> bool:
        """``reader`` is complete, invalid or cut off. True when the call was announced; it is ended then."""
        if not self._open:
            return False
        if not reader.done:
            self._arguments(reader.close())
        self._end_call(broken=not reader.done)
        return True

    # calls that are read as JSON objects with a name in them

    def _accepts(self, call: CallReader) -> bool:
        """Whether an object that has a name and something under its arguments may be announced."""
        return True

    def _progress(self, call: CallReader) -> bool:
        """Send what ``call`` has by now. True once it is announced."""
        fragments = call.fragments
        if fragments and (self._open or (call.name and self._accepts(call))):
            if not self._open:
                self._begin_call(call.name)
            self._arguments("".join(fragments))
            fragments.clear()
        return self._open

    def _settle(self, call: CallReader) -> bool:
        """``call`` is complete, invalid or cut off. True when it was announced; it is ended then."""
        if not self._progress(call):
            return False
        if not call.done:
            self._arguments(call.close())
        self._end_call(broken=not call.done)
        return True


class TrimmedMachine(ToolMachine):
    """Content without white space at both ends; white space inside waits until text follows."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = False
        self._tail: list[str] = []

    def _only_text(self, text: str) -> list[ParserEvent]:
        """The events of a piece that is known to be text."""
        self._events = events = list[ParserEvent]()
        self._text(text)
        return events

    def _content(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        body = text.rstrip()
        if body:
            self._tail.append(body)
            super()._content("".join(self._tail))
            self._tail.clear()
        if len(body) < len(text):
            self._tail.append(text[len(body) :])

    def _end_call(self, *, broken: bool = False) -> None:
        super()._end_call(broken=broken)
        self._gap = None


def call_object(call: ToolCall, arguments: str = "arguments") -> str:
    """``{"name": ..., "arguments": ...}`` as chat templates write it."""
    return json.dumps({"name": call.name, arguments: call.arguments}, ensure_ascii=False)


def parse_whole(parser: OutputParser, text: str) -> list[ParserEvent]:
    """The events of a complete text, for answers that are not streamed.

    The same machine, fed once. A stream can't take an announced call back, a complete answer can: calls that turned
    out broken (``ToolMachine.broken``) are left out and the others numbered anew; if none is left, the text has no
    call and is content as a whole, unless the format drops its markup in any case (``drops_broken``).
    """
    events = parser.feed(text)
    events += parser.finish()
    broken = frozenset[int](getattr(parser, "broken", ()))
    if not broken:
        return events
    kept = [event for event in events if getattr(event, "index", -1) not in broken]
    called = any(isinstance(event, ToolCallStart) for event in kept)
    if not called and not getattr(parser, "drops_broken", False):
        return [ContentDelta(text)]
    return [_renumbered(event, broken) for event in kept]


def _renumbered(event: ParserEvent, broken: Sequence[int] | frozenset[int]) -> ParserEvent:
    if isinstance(event, ToolCallStart):
        return ToolCallStart(event.index - sum(gone < event.index for gone in broken), event.name)
    if isinstance(event, ToolCallArguments):
        return ToolCallArguments(event.index - sum(gone < event.index for gone in broken), event.fragment)
    if isinstance(event, ToolCallEnd):
        return ToolCallEnd(event.index - sum(gone < event.index for gone in broken))
    return event
