"""Kimi-K2, K2-Thinking and K2.5: tool calls between control tokens with ids ``functions.NAME:N``; reasoning tags.

Format as written by the published chat template and tool-call guide of Kimi-K2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from smg.messages import ContentDelta, ParserEvent, ReasoningDelta
from smg.models.family import (
    Family,
    OutputParser,
    ReasoningFormat,
    TagRequest,
    ToolCall,
    ToolFormat,
    ToolSpec,
)
from smg.models.reasoning import BlockParser, Move, Rules, link
from smg.models.sections import SectionFormat, SectionMachine

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_ID = re.compile(r"(?:functions\.)?([^\s<:]+):[0-9]+")


def _name_of(header: str) -> str:
    found = _ID.fullmatch(header)
    return found[1] if found else ""


_MACHINE = SectionMachine(
    SectionFormat(
        open=_BEGIN,
        close=_END,
        call_open=_CALL,
        call_close=_CALL_END,
        separator=_ARGUMENTS,
        end_of_turn="<|im_end|>",
        read_header=_name_of,
    )
)


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return _MACHINE.parser()


class _ForcedParser:
    """The tag lets the first call come without the section around it; such an answer is read as if it were there."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._inner = _parser(tools)
        self._begin = ""
        self._begun = False

    @property
    def broken(self) -> Sequence[int]:
        """Calls that turned out broken (``machine.parse_whole``)."""
        return getattr(self._inner, "broken", ())

    def feed(self, text: str) -> list[ParserEvent]:
        if self._begun:
            return self._inner.feed(text)
        self._begin += text
        start = self._begin.lstrip()
        if len(start) < len(_CALL) and _CALL.startswith(start):
            return []
        return self._inner.feed(self._decided(_BEGIN if start.startswith(_CALL) else ""))

    def finish(self) -> list[ParserEvent]:
        if self._begun:
            return self._inner.finish()
        return self._inner.feed(self._decided("")) + self._inner.finish()

    def _decided(self, opener: str) -> str:
        self._begun = True
        return opener + (self._begin.lstrip() if opener else self._begin)


def _head(name: str, number: int) -> str:
    return f"{_CALL}functions.{name}:{number}{_ARGUMENTS}"


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    if not calls:
        return text
    blocks = (
        _head(call.name, number) + json.dumps(call.arguments, ensure_ascii=False) + _CALL_END
        for number, call in enumerate(calls)
    )
    return f"{text}{_BEGIN}{''.join(blocks)}{_END}"


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    """Two tags per tool: the first call of a section opens it, further calls don't."""
    tags = [
        {
            "begin": opener + _head(tool.name, number),
            "content": {"type": "json_schema", "json_schema": tool.parameters},
            "end": _CALL_END,
        }
        for number, tool in enumerate(request.tools)
        if tool.name
        for opener in (_BEGIN, "")
    ]
    return {"format": {"type": "triggered_tags", "triggers": [_BEGIN, _CALL], "tags": tags, "at_least_one": True}}


class _Unclear(ReasoningDelta, tag="unclear", frozen=True):
    """Text from a section opener inside an open thought on. Never leaves this module."""


class _Closed(ReasoningDelta, tag="closed", frozen=True):
    """The tag that closes such a thought. Never leaves this module either."""


_THINKING = link(
    {
        "plain": Rules(ContentDelta, {"<think>": Move("reason")}),
        "reason": Rules(
            ReasoningDelta,
            {"<think>": Move("reason"), "</think>": Move("done"), _BEGIN: Move("unclear", keep=True)},
        ),
        "unclear": Rules(_Unclear, {"<think>": Move("unclear"), "</think>": Move("closed", keep=True)}),
        "closed": Rules(_Closed, other="done"),
        "done": Rules(ContentDelta),
    }
)


class ThinkingParser:
    """``<think>`` tags of models that sometimes go over to a call without closing the thought.

    A section inside the thought waits: if the thought is closed later, the model only thought about the call; if the
    output ends first, the thought ended at the section and the rest is content.
    """

    def __init__(self, armed: bool) -> None:
        self._tags = BlockParser(_THINKING["reason" if armed else "plain"])
        self._unclear: list[str] = []

    @property
    def in_reasoning(self) -> bool:
        return self._tags.in_reasoning or bool(self._unclear)

    @property
    def holding(self) -> bool:
        return self._tags.holding or bool(self._unclear)

    def whole(self, text: str) -> list[ParserEvent] | None:
        return None if self._unclear else self._tags.whole(text)

    def feed(self, text: str) -> list[ParserEvent]:
        return self._sorted(self._tags.feed(text))

    def finish(self) -> list[ParserEvent]:
        events = self._sorted(self._tags.finish())
        if self._unclear:
            events.append(ContentDelta("".join(self._unclear)))
            self._unclear.clear()
        return events

    def _sorted(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """``events`` with the unclear text held back until the thought is closed."""
        out: list[ParserEvent] = []
        for event in events:
            if isinstance(event, _Unclear):
                self._unclear.append(event.text)
            elif isinstance(event, _Closed):
                out.append(ReasoningDelta("".join(self._unclear)))
                self._unclear.clear()
            else:
                out.append(event)
        return out


FAMILY: Family = Family(
    name="kimi_k2",
    tools=(
        ToolFormat(
            name="kimik2",
            parser=_parser,
            stems=("kimi-k2",),
            special_tokens=_MACHINE.declared.markers,
            structural_tag=_structural_tag,
            tag_by_default=True,
            forced_parser=_ForcedParser,
            encode=_encode,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="kimi_thinking",
            rank=8,
            patterns=("kimi-k2-thinking",),
            open="<think>",
            close="</think>",
            starts_in_reasoning=True,
            parser=ThinkingParser,
        ),
        ReasoningFormat(
            name="kimi_k25",
            rank=9,
            patterns=("kimi-k2.5",),
            open="<think>",
            close="</think>",
            thinking_toggle=True,
            parser=ThinkingParser,
        ),
        ReasoningFormat(name="kimi", rank=11, patterns=("kimi",), open="◁think▷", close="◁/think▷"),
    ),
)
