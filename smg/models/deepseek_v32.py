"""DeepSeek V3.2: DSML calls in a ``function_calls`` block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg.models.dsml import BAR, dialect, dsml_tag, encode_dsml
from smg.models.family import Family, OutputParser, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.tagged import TaggedParser

_FORMAT = dialect("function_calls", strip_before=True)


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return TaggedParser(_FORMAT, tools)


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    return encode_dsml(_FORMAT, text, calls)


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    return dsml_tag(_FORMAT, request)


FAMILY: Family = Family(
    name="deepseek_v32",
    tools=(
        ToolFormat(
            name="deepseek32",
            parser=_parser,
            stems=("deepseek-v3.2", "deepseek-ai/deepseek-v3.2"),
            openers=_FORMAT.openers,
            special_tokens=frozenset({BAR}),
            structural_tag=_structural_tag,
            encode=_encode,
        ),
    ),
)
