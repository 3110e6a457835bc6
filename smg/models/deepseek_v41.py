"""DeepSeek V4.1: DSML with a space in front of every name, calls in a ``calls`` block.

The model writes exactly two newlines between its answer and the block; they belong to neither. A block also ends a
thought that was left open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg.models.dsml import BAR, BREAK, dialect, encode_dsml
from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.reasoning_blocks import deepseek_v41_parser
from smg.models.structural import (
    Tag,
    any_text,
    const,
    either,
    in_order,
    json_schema,
    sequence,
    star,
    tag,
    tags,
    with_definitions,
)
from smg.models.tagged import TaggedParser
from smg.models.typed_values import any_text_fits, declared_types, only_listed

_FORMAT = dialect("calls", space=" ", blank_before=BREAK, bare_calls=True, comma=", ", colon=": ")
_OPEN = _FORMAT.openers[0]


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return TaggedParser(_FORMAT, tools)


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    return encode_dsml(_FORMAT, text, calls)


_TEXT = any_text(_FORMAT.parameter_close, _FORMAT.invoke_close, _FORMAT.closer)


def _any_parameters() -> Tag:
    """Any parameters; the values follow their own type attribute."""
    value = either([sequence(const('true">'), _TEXT), sequence(const('false">'), json_schema(True))])
    key = sequence({"type": "regex", "pattern": '[^"]+'}, const('" string="'), value)
    return star(tag(f'{_FORMAT.parameter} name="', key, _FORMAT.parameter_close + "\n"))


def _declared_parameters(schema: dict[str, Any]) -> Tag:
    def parameter(key: str, each: Any) -> Tag:
        forms = [sequence(const('false">'), json_schema(with_definitions(each, schema)))]
        if members := only_listed(each, schema):
            forms = [sequence(const('true">'), either([const(member) for member in members]))]
        elif any_text_fits(each, schema):
            only_text = declared_types(each, schema) == {"string"}
            forms = [sequence(const('true">'), _TEXT), *(() if only_text else forms)]
        content = sequence(const('" string="'), either(forms))
        return tag(f'{_FORMAT.parameter} name="{key}', content, _FORMAT.parameter_close + "\n")

    return in_order(schema, parameter)


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    """By default names and markup are forced and the values are free; ``native`` holds them to the schema too."""
    calls = [
        tag(
            f'{_FORMAT.invoke} name="{tool.name}">\n',
            _declared_parameters(tool.parameters)
            if request.native and tool.parameters.get("properties")
            else _any_parameters(),
            _FORMAT.invoke_close + "\n",
        )
        for tool in request.tools
        if tool.name
    ]
    return {"format": sequence(const(f"{BREAK}{_OPEN}\n"), tags(calls, ""), const(_FORMAT.closer))}


FAMILY: Family = Family(
    name="deepseek_v41",
    tools=(
        ToolFormat(
            name="deepseek_v41",
            parser=_parser,
            stems=(
                "deepseek-v4.1",
                "deepseek-v41",
                "deepseek_v41",
                "deepseek-ai/deepseek-v4.1",
                "deepseek-ai/deepseek-v41",
            ),
            special_tokens=frozenset({BAR}),
            structural_tag=_structural_tag,
            tag_by_default=True,
            encode=_encode,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="deepseek_v41",
            rank=2,
            patterns=("deepseek-v4.1", "deepseek_v41", "deepseek-v41"),
            open="<think>",
            close="</think>",
            thinking_toggle=True,
            parser=deepseek_v41_parser,
        ),
    ),
)
