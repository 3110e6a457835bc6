"""Step-3: calls as tagged parameters inside a section of control tokens (chat template of Step-3).

The control tokens are written with ASCII underscores and full-width bars::

    <｜tool_calls_begin｜>
    <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">
    <steptml:parameter name="KEY">VALUE</steptml:parameter>
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.structural import (
    Tag,
    after_thought,
    any_text,
    const,
    either,
    in_order,
    json_schema,
    tag,
    tags,
    triggered,
    with_definitions,
)
from smg.models.tagged import ATTRIBUTE_NAME, TaggedFormat, TaggedParser
from smg.models.typed_values import ValueStyle, any_text_fits, only_listed, write_value

_SECTION, _SECTION_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
_PARAMETER_CLOSE = "</steptml:parameter>"
_STYLE = ValueStyle(infer="lenient", strip="all")

_FORMAT = TaggedFormat(
    openers=(_SECTION,),
    closer=_SECTION_END,
    invoke="<steptml:invoke",
    invoke_close="</steptml:invoke>",
    parameter="<steptml:parameter",
    parameter_close=_PARAMETER_CLOSE,
    invoke_header=ATTRIBUTE_NAME,
    parameter_header=ATTRIBUTE_NAME,
    style=_STYLE,
    keep_empty=True,
    close_required=True,
    call_open=_CALL,
    call_lead=re.compile(rf"\s*function\s*{_SEPARATOR}\s*"),
    call_stops=(_CALL_END,),
)


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return TaggedParser(_FORMAT, tools)


def _open(name: str) -> str:
    return f'{_CALL}function{_SEPARATOR}<steptml:invoke name="{name}">'


def _call(call: ToolCall) -> str:
    parameters = "".join(
        f'<steptml:parameter name="{key}">{write_value(value, _PARAMETER_CLOSE, _STYLE)}{_PARAMETER_CLOSE}'
        for key, value in call.arguments.items()
    )
    return f"{_open(call.name)}{parameters}</steptml:invoke>{_CALL_END}"


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    section = "\n".join([_SECTION, *map(_call, calls), _SECTION_END]) if calls else ""
    return text + section


def _value(schema: Any, root: dict[str, Any]) -> Tag:
    """A value of a declared parameter: text where the schema leaves it free or lists it, else JSON."""
    if any_text_fits(schema, root):
        return any_text("</steptml:", _CALL_END, _SECTION_END)
    if members := only_listed(schema, root):
        return either([const(each) for each in members])
    return json_schema(with_definitions(schema, root))


def _parameters(schema: dict[str, Any]) -> Tag:
    def parameter(key: str, each: Any) -> Tag:
        return tag(f'<steptml:parameter name="{key}">', _value(each, schema), _PARAMETER_CLOSE)

    return in_order(schema, parameter)


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    calls = [
        tag(_open(tool.name), _parameters(tool.parameters), f"</steptml:invoke>{_CALL_END}")
        for tool in request.tools
        if tool.name
    ]
    section = tag(_SECTION + "\n", tags(calls, "\n"), "\n" + _SECTION_END)
    return after_thought(triggered([_SECTION], [section]), request, "</think>", "<think>", "</think>", _SECTION, _CALL)


FAMILY: Family = Family(
    name="step3",
    tools=(
        ToolFormat(
            name="step3",
            parser=_parser,
            stems=("step3", "step-3"),
            openers=(_SECTION,),
            special_tokens=frozenset({_SECTION, _SECTION_END, _CALL, _CALL_END, _SEPARATOR}),
            structural_tag=_structural_tag,
            encode=_encode,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="step3",
            rank=12,
            patterns=("step3",),
            open="<think>",
            close="</think>",
            starts_in_reasoning=True,
        ),
    ),
)
