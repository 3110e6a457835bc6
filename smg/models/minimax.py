"""MiniMax-M2 and MiniMax-M3 (chat templates of the models).

M2 writes tagged parameters::

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>

M3 writes nested elements, see ``smg.models.minimax_elements``. Values are raw text: entities are not decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.minimax_elements import BLOCK, NAMESPACE, ElementParser, write_calls
from smg.models.minimax_tag import element_tag
from smg.models.reasoning_blocks import minimax_m3_parser
from smg.models.structural import after_thought, json_schema, tag, tags, triggered
from smg.models.tagged import ATTRIBUTE_NAME, TaggedFormat, TaggedParser
from smg.models.typed_values import ValueStyle, write_value

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_PARAMETER_CLOSE = "</parameter>"
_STYLE = ValueStyle(infer="scalar")

_M2 = TaggedFormat(
    openers=(_OPEN,),
    closer=_CLOSE,
    invoke="<invoke",
    invoke_close="</invoke>",
    parameter="<parameter",
    parameter_close=_PARAMETER_CLOSE,
    invoke_header=ATTRIBUTE_NAME,
    parameter_header=ATTRIBUTE_NAME,
    style=_STYLE,
    opener_needs_call=True,
    comma=", ",
    colon=": ",
)


def _parser_m2(tools: Sequence[ToolSpec]) -> OutputParser:
    return TaggedParser(_M2, tools)


def _invoke(call: ToolCall) -> str:
    parameters = "".join(
        f'<parameter name="{key}">{write_value(value, _PARAMETER_CLOSE, _STYLE)}{_PARAMETER_CLOSE}\n'
        for key, value in call.arguments.items()
    )
    return f'<invoke name="{call.name}">\n{parameters}</invoke>\n'


def _encode_m2(text: str, calls: Sequence[ToolCall]) -> str:
    return f"{text}{_OPEN}\n{''.join(map(_invoke, calls))}{_CLOSE}" if calls else text


def _structural_tag_m2(request: TagRequest) -> dict[str, Any]:
    calls = [
        tag(f'<invoke name="{tool.name}">', json_schema(tool.parameters, "minimax_xml"), "\n</invoke>")
        for tool in request.tools
        if tool.name
    ]
    block = tag(_OPEN + "\n", tags(calls, "\n"), "\n" + _CLOSE)
    return after_thought(triggered([_OPEN], [block]), request, "</think>", "<think>", "</think>", _OPEN, _CLOSE)


def _parser_m3(tools: Sequence[ToolSpec]) -> OutputParser:
    return ElementParser(tools)


FAMILY: Family = Family(
    name="minimax",
    tools=(
        ToolFormat(
            name="minimax_m2",
            parser=_parser_m2,
            stems=("minimax",),
            openers=(_OPEN,),
            special_tokens=frozenset({_OPEN, _CLOSE}),
            structural_tag=_structural_tag_m2,
            encode=_encode_m2,
        ),
        ToolFormat(
            name="minimax_m3",
            parser=_parser_m3,
            stems=("minimax-m3", "minimaxai/minimax-m3", "mm-m3"),
            openers=(BLOCK,),
            special_tokens=frozenset({NAMESPACE}),
            structural_tag=element_tag,
            encode=write_calls,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="minimax_m3",
            rank=13,
            patterns=("minimax-m3", "mm-m3"),
            open="<mm:think>",
            close="</mm:think>",
            thinking_toggle=True,
            parser=minimax_m3_parser,
        ),
        ReasoningFormat(
            name="minimax",
            rank=14,
            patterns=("minimax", "minimax-m2", "mm-m2"),
            open="<think>",
            close="</think>",
            starts_in_reasoning=True,
        ),
    ),
)
