"""DeepSeek V4: DSML calls in a ``tool_calls`` block, thoughts in ``<think>`` blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg.models.dsml import BAR, dialect, dsml_tag, encode_dsml
from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.tagged import TaggedParser

_FORMAT = dialect("tool_calls", strip_before=True)


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return TaggedParser(_FORMAT, tools)


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    return encode_dsml(_FORMAT, text, calls)


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    return dsml_tag(_FORMAT, request)


FAMILY: Family = Family(
    name="deepseek_v4",
    tools=(
        ToolFormat(
            name="deepseek_v4",
            parser=_parser,
            stems=("deepseek-v4", "deepseek-ai/deepseek-v4"),
            openers=_FORMAT.openers,
            special_tokens=frozenset({BAR}),
            structural_tag=_structural_tag,
            encode=_encode,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="deepseek_v4",
            rank=3,
            patterns=("deepseek-v4", "deepseek_v4"),
            open="<think>",
            close="</think>",
            thinking_toggle=True,
        ),
    ),
)
