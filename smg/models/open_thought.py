"""Calls in a thought that is never closed.

Models sometimes go over from a thought to a call without closing the thought. While the output goes on, nobody can
tell that from a model that only thinks about a call, so reasoning is held back from the beginning of a call on. If the
thought is closed later, the text was reasoning; if the output ends first and the call is complete, the thought ended
where the call began.
"""

from __future__ import annotations

from smg.messages import ContentDelta, ParserEvent, ReasoningDelta, ToolCallStart
from smg.models.family import OutputParser
from smg.models.scan import Markers


class OpenThought:
    """Takes the events of a reasoning parser and holds back what may be a call. From the first of ``markers`` on,
    ``trial``, a tool parser of its own, reads the reasoning too: what it calls content is reasoning at once."""

    __slots__ = ("_calls", "_held", "_markers", "_reading", "_trial")

    def __init__(self, markers: Markers, trial: OutputParser) -> None:
        self._markers = markers
        self._trial = trial
        self._reading = False
        self._calls: set[int] = set()
        self._held: list[str] = []

    @property
    def holding(self) -> bool:
        """Whether a call may have begun."""
        return bool(self._held)

    def concerns(self, text: str) -> bool:
        """Whether a call may go on or begin in ``text``."""
        return bool(self._held) or self._markers.may_start(text)

    def sift(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """``events`` without what is held back now, and with what was held back and is reasoning after all."""
        if not self._reading and not self._held and not any(map(self._may_begin, events)):
            return events
        out: list[ParserEvent] = []
        for event in events:
            if type(event) is ReasoningDelta:
                text = event.text if self._reading else self._search(event.text, out)
                if text:
                    self._read(text, out)
            else:
                out += self._released()
                out.append(event)
        return out

    def finish(self) -> tuple[list[ParserEvent], str]:
        """At the end of the output: reasoning that was held back, and the text behind the thought."""
        if self._reading:
            self._note(self._trial.finish())
            if self._calls - set(getattr(self._trial, "broken", ())):
                text = "".join(self._held)
                self._held.clear()
                return [], text
        return self._released(), ""

    def _may_begin(self, event: ParserEvent) -> bool:
        return type(event) is ReasoningDelta and self._markers.may_start(event.text)

    def _search(self, text: str, out: list[ParserEvent]) -> str:
        """The text from the first marker on; the text in front of it goes to ``out``."""
        text = "".join(self._held) + text
        at, marker = self._markers.search(text)
        if at:
            out.append(ReasoningDelta(text[:at]))
        self._reading = bool(marker)
        self._held = [] if marker or at == len(text) else [text[at:]]
        return text[at:] if marker else ""

    def _read(self, text: str, out: list[ParserEvent]) -> None:
        self._held.append(text)
        size = self._note(self._trial.feed(text))
        if size:
            held = "".join(self._held)
            out.append(ReasoningDelta(held[:size]))
            self._held = [held[size:]] if size < len(held) else []

    def _note(self, events: list[ParserEvent]) -> int:
        """Remembers the calls of the trial; how much text it found to be no call before the first of them."""
        size = 0
        for event in events:
            if isinstance(event, ToolCallStart):
                self._calls.add(event.index)
            elif isinstance(event, ContentDelta) and not self._calls:
                size += len(event.text)
        return size

    def _released(self) -> list[ParserEvent]:
        """All that is held back, as reasoning. The thought is over, or the output is."""
        text = "".join(self._held)
        self._held.clear()
        self._calls.clear()
        self._reading = False
        return [ReasoningDelta(text)] if text else []
