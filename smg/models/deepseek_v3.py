"""DeepSeek-V3, R1 and V3.1: tool calls between control tokens, ``<think>`` reasoning.

Formats as written by the published chat templates: V3 and R1 put the arguments into a fenced code block behind
``function`` and the name, V3.1 (and V3.2-Exp) writes the name, a separator and the JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.sections import SectionFormat, SectionMachine

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_END_OF_TURN = "<｜end▁of▁sentence｜>"


def _declare(*, fenced: bool) -> SectionMachine:
    return SectionMachine(
        SectionFormat(
            open=_BEGIN,
            close=_END,
            call_open=_CALL,
            call_close=_CALL_END,
            separator=_SEP,
            end_of_turn=_END_OF_TURN,
            read_header=str.strip,
            fenced=fenced,
            wrap=True,
        )
    )


_FENCED = _declare(fenced=True)
_PLAIN = _declare(fenced=False)


def _parser_v3(tools: Sequence[ToolSpec]) -> OutputParser:
    return _FENCED.parser()


def _parser_v31(tools: Sequence[ToolSpec]) -> OutputParser:
    return _PLAIN.parser()


def _head_v3(name: str) -> str:
    return f"{_CALL}function{_SEP}{name}\n```json\n"


def _head_v31(name: str) -> str:
    return f"{_CALL}{name}{_SEP}"


_TAIL_V3 = f"\n```{_CALL_END}"
_TAIL_V31 = _CALL_END


def _encoder(head: Callable[[str], str], tail: str, between: str) -> Callable[[str, Sequence[ToolCall]], str]:
    def encode(text: str, calls: Sequence[ToolCall]) -> str:
        if not calls:
            return text
        blocks = (head(call.name) + json.dumps(call.arguments, ensure_ascii=False) + tail for call in calls)
        return f"{text}{_BEGIN}{between.join(blocks)}{_END}"

    return encode


def _tagger(head: Callable[[str], str], tail: str, between: str) -> Callable[[TagRequest], dict[str, Any]]:
    def structural_tag(request: TagRequest) -> dict[str, Any]:
        calls = [
            {
                "type": "tag",
                "begin": head(tool.name),
                "content": {"type": "json_schema", "json_schema": tool.parameters},
                "end": tail,
            }
            for tool in request.tools
            if tool.name
        ]
        section = {
            "type": "tag",
            "begin": _BEGIN,
            "content": {"type": "tags_with_separator", "tags": calls, "separator": between, "at_least_one": True},
            "end": _END,
        }
        return {"format": {"type": "triggered_tags", "triggers": [_BEGIN], "tags": [section], "at_least_one": True}}

    return structural_tag


FAMILY: Family = Family(
    name="deepseek_v3",
    tools=(
        ToolFormat(
            name="deepseek",
            parser=_parser_v3,
            stems=("deepseek-v3", "deepseek-ai/deepseek-v3"),
            openers=(_BEGIN,),
            special_tokens=_FENCED.declared.markers,
            structural_tag=_tagger(_head_v3, _TAIL_V3, "\n"),
            encode=_encoder(_head_v3, _TAIL_V3, "\n"),
        ),
        ToolFormat(
            name="deepseek31",
            parser=_parser_v31,
            stems=(
                "deepseek-v3.1",
                "deepseek-ai/deepseek-v3.1",
                "deepseek-v3.2-exp",
                "deepseek-ai/deepseek-v3.2-exp",
            ),
            openers=(_BEGIN,),
            special_tokens=_PLAIN.declared.markers,
            structural_tag=_tagger(_head_v31, _TAIL_V31, ""),
            encode=_encoder(_head_v31, _TAIL_V31, ""),
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="deepseek_r1",
            rank=1,
            patterns=("deepseek-r1",),
            open="<think>",
            close="</think>",
            starts_in_reasoning=True,
        ),
        ReasoningFormat(
            name="deepseek_v31",
            rank=4,
            patterns=("deepseek-v3.1", "deepseek-v3-1"),
            open="<think>",
            close="</think>",
            thinking_toggle=True,
        ),
    ),
)
