"""The parser of one choice, as the plan of its request describes it: reasoning first, tool calls in what is left.

Only content reaches the tool parser, so a call that is written inside a thought stays in the reasoning, unless the
thought is never closed (``open_thought``).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from smg.messages import (
    ContentDelta,
    ParserEvent,
    ParserPlan,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from smg.models.family import OutputParser, ReasoningParser, ToolSpec
from smg.models.forced import forced_parser
from smg.models.machine import parse_whole
from smg.models.open_thought import OpenThought
from smg.models.reasoning import reasoning_parser
from smg.models.registry import PASSTHROUGH, reasoning_format, tool_format
from smg.models.scan import Markers

_TOOL_EVENTS = (ToolCallStart, ToolCallArguments, ToolCallEnd)

# A constrained answer shows what it is in its first characters; more blanks than this in front of it decide nothing.
_LEAD_LIMIT = 256


def tool_specs(tools: Sequence[Any]) -> tuple[ToolSpec, ...]:
    """The declared functions of a request's tool list (OpenAI chat shape). Other entries are left out."""
    specs = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        description = function.get("description")
        specs.append(
            ToolSpec(
                name=function["name"],
                parameters=parameters if isinstance(parameters, dict) else {},
                description=description if isinstance(description, str) else "",
                strict=function.get("strict") is True,
            )
        )
    return tuple(specs)


def tool_call_id(style: str, name: str, number: int) -> str:
    """An id for a call. ``style`` as in ``ParserPlan.id_style``; ``number`` counts the calls of the whole conversation
    (``id_offset`` plus the call's index), ``name`` is the function's. Only the Kimi styles use the last two."""
    if style == "kimi":
        return f"functions.{name}:{number}"
    if style == "kimi_k3":
        return f"{name}_{number}"
    return f"call_{secrets.token_hex(12)}"


class _ConstrainedLead:
    """Reads the beginning of an answer that a grammar forces although the prompt opened a thought.

    Some engines let the model think first, others apply the grammar from the first token on; with those there is no
    thought and no close marker. One of the ``leads`` at the very beginning tells the second kind.
    """

    __slots__ = ("_leads", "_size", "_start", "pieces")

    def __init__(self, leads: Sequence[str]) -> None:
        self.pieces: list[str] = []
        self._size = 0
        self._start = ""
        self._leads = tuple("".join(lead.split()) for lead in leads)

    def decide(self, text: str) -> bool | None:
        """True: the answer begins, False: a thought does, None: not known yet. ``pieces`` is all that was read."""
        self.pieces.append(text)
        self._size += len(text)
        self._start += "".join(text.split())
        if self._start.startswith(self._leads):
            return True
        possible = any(lead.startswith(self._start) for lead in self._leads)
        return None if possible and self._size <= _LEAD_LIMIT else False


class ResponseParser:
    """Parser of one choice: ``feed`` text that is free of stop strings, then ``finish`` once.

    ``whole``: tool calls are only read at the end, by the rule for complete texts (``machine.parse_whole``).
    The events of one call come in the order of the text. ``separates_reasoning``: a reasoning parser runs (usage then
    reports reasoning tokens, zero included). ``reasoning_tokens`` counts what ``feed_pieces`` was given.
    """

    __slots__ = (
        "_first_only",
        "_lead",
        "_pending",
        "_pending_text",
        "_plan",
        "_reasoning",
        "_sieve",
        "_thought_tokens",
        "_tool",
        "_whole",
        "reasoning_tokens",
        "separates_reasoning",
    )

    def __init__(self, plan: ParserPlan, *, whole: bool = False) -> None:
        self._plan = plan
        self._whole: list[str] | None = [] if whole else None
        self._reasoning: ReasoningParser | None = None
        self._lead: _ConstrainedLead | None = None
        self._tool = _tool_parser(plan)
        self._sieve: OpenThought | None = None
        self._thought_tokens = -1  # reasoning tokens in front of a call that began inside the thought
        self._first_only = not plan.parallel
        self._pending = 0
        self._pending_text = ""
        self.reasoning_tokens = 0
        self.separates_reasoning = plan.reasoning is not None
        if plan.reasoning is not None:
            self._reasoning = reasoning_parser(reasoning_format(plan.reasoning), armed=plan.armed)
            if plan.leads and self._reasoning.in_reasoning:
                self._lead = _ConstrainedLead(plan.leads)
            openers = _openers(plan)
            trial = _tool_parser(plan) if openers is not None else None
            if openers is not None and trial is not None:
                self._sieve = OpenThought(openers, trial)

    @property
    def in_reasoning(self) -> bool:
        """Whether the next ordinary text is chain-of-thought."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    def call_id(self, start: ToolCallStart) -> str:
        """A new id for the call that ``start`` announces; ask once per call."""
        return tool_call_id(self._plan.id_style, start.name, self._plan.id_offset + start.index)

    def feed(self, text: str) -> list[ParserEvent]:
        if self._lead is not None:
            text = "".join(self._decided(self._lead, text))
        if self._reasoning is None:
            return self._answer(text)
        events = self._reasoning.feed(text)
        if self._sieve is not None:
            events = self._sieve.sift(events)
        return events if self._tool is None else self._chain(events)

    def feed_pieces(self, pieces: Sequence[str]) -> list[ParserEvent]:
        """``feed`` for text that came as tokens, one piece each ("" for a token that completed no character), with the
        count of reasoning tokens: those whose text reaches into the reasoning, markers left out. A piece that was held
        back, or empty, counts with the one that released it."""
        if (lead := self._lead) is not None:
            pieces = [ready for piece in pieces for ready in self._decided(lead, piece)]
        reasoning = self._reasoning
        if reasoning is None:
            return self._answer("".join(pieces))
        events = self._feed_counting(reasoning, pieces)
        if len(events) > 1:
            events = _merged(events)
        return events if self._tool is None else self._chain(events)

    def _feed_counting(self, reasoning: ReasoningParser, pieces: Sequence[str]) -> list[ParserEvent]:
        """The events of ``pieces``, and the count of those that are reasoning. Only where a marker may be are pieces
        looked at one by one."""
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        if not text:
            self._pending += len(pieces)
            return []
        sieve, counted = self._sieve, self.reasoning_tokens
        alone = len(pieces) == 1 or sieve is None or not sieve.concerns(text)
        events = reasoning.whole(text) if alone else None
        if events is not None:
            empty = 0
            while not pieces[-1 - empty]:
                empty += 1
            if events and type(events[0]) is ReasoningDelta:
                self.reasoning_tokens += self._pending + len(pieces) - empty
            self._pending = empty
            return events if sieve is None else self._sifted(sieve, events, counted)
        if len(pieces) > 1:
            half = len(pieces) // 2
            return self._feed_counting(reasoning, pieces[:half]) + self._feed_counting(reasoning, pieces[half:])
        events = reasoning.feed(text)
        self._count(text, events, reasoning.holding)
        return events if sieve is None else self._sifted(sieve, events, counted)

    def _sifted(self, sieve: OpenThought, events: list[ParserEvent], counted: int) -> list[ParserEvent]:
        """What the sieve lets through; ``counted``: the reasoning tokens in front of ``events``."""
        events = sieve.sift(events)
        if not sieve.holding:
            self._thought_tokens = -1
        elif self._thought_tokens < 0:
            self._thought_tokens = counted
        return events

    def finish(self) -> list[ParserEvent]:
        """Everything that was held back. Call once, after the last ``feed``."""
        events: list[ParserEvent] = []
        if self._lead is not None:
            pieces, self._lead = self._lead.pieces, None
            events += self.feed_pieces(pieces)
        if self._reasoning is not None:
            tail = self._reasoning.finish()
            if tail and type(tail[0]) is ReasoningDelta:
                self.reasoning_tokens += self._pending
            if self._sieve is not None:
                tail = self._sieve.sift(tail)
            events += tail if self._tool is None else self._chain(tail)
        if self._sieve is not None:
            thought, answer = self._sieve.finish()
            events += thought
            if answer:
                self.reasoning_tokens = max(0, self._thought_tokens)
                events += self._answer(answer)
        if self._tool is not None:
            if self._whole is not None:
                events += self._calls(parse_whole(self._tool, "".join(self._whole)))
            else:
                events += self._calls(self._tool.finish())
        return events

    def _decided(self, lead: _ConstrainedLead, text: str) -> list[str]:
        """What may be parsed now: nothing while the lead is undecided."""
        if self._lead is None:
            return [text]
        answer = lead.decide(text)
        if answer is None:
            return []
        self._lead = None
        if answer:
            self._reasoning = None
        return lead.pieces

    def _count(self, piece: str, events: list[ParserEvent], holding: bool) -> None:
        if not events and holding:
            self._pending += 1
            self._pending_text += piece
            return
        for event in events:
            if type(event) is ReasoningDelta:
                released = event.text.startswith(self._pending_text)
                self.reasoning_tokens += 1 + (self._pending if released else 0)
                break
        if self._pending:
            self._pending, self._pending_text = 0, ""

    def _answer(self, text: str) -> list[ParserEvent]:
        if self._tool is not None:
            if self._whole is not None:
                self._whole.append(text)
                return []
            return self._calls(self._tool.feed(text))
        return [ContentDelta(text)] if text else []

    def _chain(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if len(events) == 1 and type(event := events[0]) is ContentDelta:
            return self._answer(event.text)
        out: list[ParserEvent] = []
        for event in events:
            if type(event) is ContentDelta:
                out += self._answer(event.text)
            else:
                out.append(event)
        return out

    def _calls(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if not self._first_only:
            return events
        return [event for event in events if not isinstance(event, _TOOL_EVENTS) or event.index == 0]


def _tool_parser(plan: ParserPlan) -> OutputParser | None:
    if not plan.forced and (plan.tool is None or plan.tool == PASSTHROUGH):
        return None
    specs = tool_specs(msgspec.json.decode(plan.tools)) if plan.tools else ()
    if plan.forced and plan.forced != "tag":
        return forced_parser(plan.forced, specs)
    declared = tool_format(plan.tool or PASSTHROUGH)
    if plan.forced and declared.forced_parser is not None:
        return declared.forced_parser(specs)
    return declared.parser(specs)


@lru_cache(maxsize=256)
def _marker_set(openers: tuple[str, ...]) -> Markers:
    return Markers(openers)


def _openers(plan: ParserPlan) -> Markers | None:
    """The markers of calls in the format that the answer is read with."""
    if plan.tool is None or plan.forced not in ("", "tag"):
        return None
    openers = tool_format(plan.tool).openers
    return _marker_set(openers) if openers else None


def _merged(events: list[ParserEvent]) -> list[ParserEvent]:
    """Neighbouring text events of one kind joined."""
    out: list[ParserEvent] = []
    kind: type[ReasoningDelta] | type[ContentDelta] | None = None
    run: list[str] = []
    for event in events:
        if not isinstance(event, ReasoningDelta | ContentDelta):
            continue
        if type(event) is not kind:
            if kind is not None:
                out.append(kind("".join(run)))
            kind, run = type(event), []
        run.append(event.text)
    if kind is not None:
        out.append(kind("".join(run)))
    return out
