"""Reasoning parsers: chain-of-thought text apart from the answer.

Every format is a small table of states. A state says where text goes (reasoning, content, or nowhere) and which markers
mean something in it; a marker is dropped or kept and leads to a state. One machine runs all tables, so the laws of
``smg.models.family`` hold for every format at once:

* text is emitted as soon as no marker of the current state can begin in it; only a tail that is a proper prefix of such
  a marker waits for the next delta, and ``finish`` releases it to the side of the current state;
* nothing is trimmed: white space around markers stays in the field it was written in;
* a delta is scanned once, plus at most one marker's length of held text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from smg.messages import ContentDelta, ParserEvent, ReasoningDelta
from smg.models.family import ReasoningFormat, ReasoningParser

Side = type[ReasoningDelta] | type[ContentDelta]


class Found(NamedTuple):
    """A marker in the text: ``text[start:end]``; ``key`` names it in the state's table."""

    start: int
    end: int
    key: str


class Markers(Protocol):
    """The markers of one state. ``first`` is the character that every one of them begins with."""

    first: str

    def find(self, text: str, start: int) -> Found | None:
        """The leftmost marker that begins at or after ``start``."""

    def hold(self, text: str, start: int) -> int:
        """Where the longest tail of ``text[start:]`` that could still become a marker begins (``len(text)``: none)."""

    def residue(self, tail: str) -> str:
        """What a held tail is worth when the output ends: normally the text itself."""


class Literals:
    """Markers that are fixed strings. All must begin with the same character."""

    __slots__ = ("_longest", "_pattern", "_prefixes", "first")

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.first = markers[0][0]
        ordered = sorted(markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)))
        self._prefixes = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self._longest = len(ordered[0])

    def find(self, text: str, start: int) -> Found | None:
        match = self._pattern.search(text, start)
        return Found(match.start(), match.end(), match.group()) if match else None

    def hold(self, text: str, start: int) -> int:
        at = text.find(self.first, max(start, len(text) - self._longest + 1))
        while at >= 0:
            if text[at:] in self._prefixes:
                return at
            at = text.find(self.first, at + 1)
        return len(text)

    def residue(self, tail: str) -> str:
        return tail


class Move(NamedTuple):
    """What a marker does: enter state ``to``; ``keep`` leaves the marker in the text, on the side of the new state."""

    to: str
    keep: bool = False


class Rules(NamedTuple):
    """One state as it is declared.

    ``moves``: marker key -> move. ``markers`` finds them (None: built from the keys). ``other``: the state entered at
    the first character of ordinary text that ``blank`` does not match; that character is read again there.
    """

    side: Side | None
    moves: Mapping[str, Move] = {}
    markers: Markers | None = None
    other: str = ""
    blank: str = ""


class State:
    """One state, linked. ``first`` is "" when no marker means anything here."""

    __slots__ = ("first", "leave", "markers", "moves", "other", "side")

    def __init__(self, rules: Rules) -> None:
        self.side = rules.side
        self.markers = rules.markers or (Literals(tuple(rules.moves)) if rules.moves else None)
        self.first = self.markers.first if self.markers else ""
        self.leave = re.compile(f"[^{rules.blank}]" if rules.blank else ".", re.DOTALL) if rules.other else None
        self.moves: dict[str, tuple[State, bool]] = {}
        self.other: State = self


def link(table: Mapping[str, Rules]) -> dict[str, State]:
    """The states of a declared table, connected. Done once per format; states are shared by all parsers of it."""
    states = {name: State(rules) for name, rules in table.items()}
    for name, rules in table.items():
        states[name].moves = {key: (states[move.to], move.keep) for key, move in rules.moves.items()}
        if rules.other:
            states[name].other = states[rules.other]
    return states


class _Output:
    """Collects the pieces of one delta; neighbouring pieces of one side become one event."""

    __slots__ = ("_pieces", "_side", "events")

    def __init__(self) -> None:
        self.events: list[ParserEvent] = []
        self._pieces: list[str] = []
        self._side: Side | None = None

    def add(self, side: Side | None, text: str) -> None:
        if side is None or not text:
            return
        if side is not self._side:
            self.flush()
            self._side = side
        self._pieces.append(text)

    def flush(self) -> list[ParserEvent]:
        if self._pieces and self._side is not None:
            self.events.append(self._side("".join(self._pieces)))
            self._pieces.clear()
        return self.events


class BlockParser:
    """Runs a linked table. One instance per choice; the states are shared and never change."""

    __slots__ = ("_held", "_state")

    def __init__(self, start: State) -> None:
        self._state = start
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        return self._state.side is ReasoningDelta

    @property
    def holding(self) -> bool:
        return self._held != ""

    def whole(self, text: str) -> list[ParserEvent] | None:
        state = self._state
        if self._held or state.leave is not None or (state.first and state.first in text):
            return None
        return [state.side(text)] if text and state.side is not None else []

    def feed(self, text: str) -> list[ParserEvent]:
        events = self.whole(text)
        return self._run(self._held + text).flush() if events is None else events

    def _run(self, text: str) -> _Output:
        out = _Output()
        at = 0
        while True:
            state = self._state
            markers = state.markers
            if markers is None:
                end, found = len(text), None
            else:
                found = markers.find(text, at)
                end = found.start if found else markers.hold(text, at)
            if state.leave is not None and (other := state.leave.search(text, at, end)):
                out.add(state.side, text[at : other.start()])
                at, self._state = other.start(), state.other
                continue
            out.add(state.side, text[at:end])
            if found is None:
                self._held = text[end:]
                return out
            self._state, keep = state.moves[found.key]
            if keep:
                out.add(self._state.side, text[found.start : found.end])
            at = found.end

    def finish(self) -> list[ParserEvent]:
        tail, self._held = self._held, ""
        state = self._state
        if tail and state.markers is not None:
            tail = state.markers.residue(tail)
        return [state.side(tail)] if tail and state.side is not None else []


def tag_states(opening: str, closing: str) -> dict[str, State]:
    """The table of formats with one open and one close marker.

    Before the thought the close marker is ordinary text; inside it further open markers vanish (also one that the model
    repeats after a prompt that already opened the thought); behind it both are text, so an answer may quote them.
    """
    return link(
        {
            "plain": Rules(ContentDelta, {opening: Move("reason")}),
            "reason": Rules(ReasoningDelta, {opening: Move("reason"), closing: Move("done")}),
            "done": Rules(ContentDelta),
        }
    )


class Passthrough:
    """Leaves all text in the content; arming has no effect."""

    in_reasoning = False
    holding = False

    def feed(self, text: str) -> list[ParserEvent]:
        return [ContentDelta(text)] if text else []

    def whole(self, text: str) -> list[ParserEvent] | None:
        return self.feed(text)

    def finish(self) -> list[ParserEvent]:
        return []


_TAG_STATES: dict[tuple[str, str], dict[str, State]] = {}


def reasoning_parser(declared: ReasoningFormat, *, armed: bool = False) -> ReasoningParser:
    """A fresh parser of one choice. ``armed``: the first character already belongs to the thought."""
    if declared.parser is not None:
        return declared.parser(armed or declared.starts_in_reasoning)
    if not declared.open:
        return Passthrough()
    key = (declared.open, declared.close)
    if (states := _TAG_STATES.get(key)) is None:
        states = _TAG_STATES[key] = tag_states(*key)
    return BlockParser(states["reason" if armed or declared.starts_in_reasoning else "plain"])


def encode_reasoning(declared: ReasoningFormat, reasoning: str, content: str, *, armed: bool = False) -> str:
    """The output of a model of this format that thinks ``reasoning`` and answers ``content``; ``armed`` as above."""
    started = armed or declared.starts_in_reasoning
    if declared.encode is not None:
        return declared.encode(reasoning, content, started)
    if not declared.open:
        return reasoning + content
    if not reasoning and not started:
        return content
    return f"{'' if started else declared.open}{reasoning}{declared.close}{content}"
