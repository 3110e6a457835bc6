"""Qwen3-Coder and Qwen3.5 on: calls as tagged parameters (chat template of Qwen3-Coder).

::

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The newlines around a value belong to the template: exactly one on each side is not part of the value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from smg.models.family import Family, OutputParser, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.structural import after_thought, json_schema, tag, triggered
from smg.models.tagged import TaggedFormat, TaggedParser
from smg.models.typed_values import ValueStyle, write_value

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"(?P<name>[^<>]*)")
_STYLE = ValueStyle(infer="json", strip="newline")

_FORMAT = TaggedFormat(
    openers=(_OPEN,),
    closer=_CLOSE,
    invoke="<function=",
    invoke_close="</function>",
    parameter="<parameter=",
    parameter_close="</parameter>",
    invoke_header=_NAME,
    parameter_header=_NAME,
    style=_STYLE,
    opener_needs_call=True,
    comma=", ",
    colon=": ",
)


def parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return TaggedParser(_FORMAT, tools)


def _call(call: ToolCall) -> str:
    parameters = "".join(
        f"<parameter={key}>{write_value(value, _FORMAT.parameter_close, _STYLE, layout=chr(10))}</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"{_OPEN}\n<function={call.name}>\n{parameters}</function>\n{_CLOSE}"


def encode(text: str, calls: Sequence[ToolCall]) -> str:
    return text + "\n".join(map(_call, calls))


def structural_tag(request: TagRequest) -> dict[str, Any]:
    calls = [
        tag(
            f"{_OPEN}\n<function={tool.name}>",
            json_schema(tool.parameters, "qwen_xml"),
            f"\n</function>\n{_CLOSE}",
        )
        for tool in request.tools
        if tool.name
    ]
    return after_thought(triggered([_OPEN], calls), request, "</think>", "<think>", "</think>", _OPEN, _CLOSE)


def tool_format(name: str, stems: tuple[str, ...] = ()) -> ToolFormat:
    """The format under ``name``: other families use it too."""
    return ToolFormat(
        name=name,
        parser=parser,
        stems=stems,
        openers=(_OPEN,),
        special_tokens=frozenset({_OPEN, _CLOSE}),
        structural_tag=structural_tag,
        encode=encode,
    )


_NAMES = ("qwen3.5", "qwen3.6", "qwen3.8", "qwen3-coder")

FAMILY: Family = Family(
    name="qwen_coder",
    tools=(
        tool_format("qwen_xml", (*_NAMES, *(f"qwen/{name}" for name in _NAMES), "nemotron-3")),
        tool_format("qwen_coder"),
    ),
)
