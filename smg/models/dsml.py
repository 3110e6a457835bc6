"""DSML, the tool-call markup of DeepSeek V3.2 and later (``encoding_dsv32.py`` and its successors in the checkpoints).

::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">text</｜DSML｜parameter>
    <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

The dialects differ in the name of the block and in a space in front of every name. The type of a value is in the
markup: ``string="true"`` is text as it stands, anything else JSON. The schema of the tool plays no part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from smg.models.family import TagRequest, ToolCall
from smg.models.structural import after_thought, json_schema, tag, tags, triggered
from smg.models.tagged import ATTRIBUTE_NAME, TaggedFormat
from smg.models.typed_values import dump, marker_free

BAR = "｜DSML｜"
END_OF_SENTENCE = "<｜end▁of▁sentence｜>"
BREAK = "\n\n"
"""What the prompt encoder writes between the answer and a block."""

_PARAMETER = re.compile(
    r"""\s+name\s*=\s*(?P<quote>["'])(?P<name>(?:(?!(?P=quote))[^<])*)(?P=quote)"""
    r"""(?:\s+string\s*=\s*["'](?P<string>true|false)["'])?\s*"""
)


def dialect(block: str, space: str = "", **rules: Any) -> TaggedFormat:
    """The format whose blocks are called ``block``, with ``space`` in front of every name and further ``rules``."""
    mark = BAR + space
    return TaggedFormat(
        openers=(f"<{mark}{block}>",),
        closer=f"</{mark}{block}>",
        invoke=f"<{mark}invoke",
        invoke_close=f"</{mark}invoke>",
        parameter=f"<{mark}parameter",
        parameter_close=f"</{mark}parameter>",
        invoke_header=ATTRIBUTE_NAME,
        parameter_header=_PARAMETER,
        json_body=True,
        dropped=(END_OF_SENTENCE,),
        **rules,
    )


def _parameter(declared: TaggedFormat, key: str, value: Any) -> str:
    close = declared.parameter_close
    as_text = isinstance(value, str) and close not in value and END_OF_SENTENCE not in value
    written = value if as_text else marker_free(value)
    return f'{declared.parameter} name="{key}" string="{"true" if as_text else "false"}">{written}{close}\n'


def encode_dsml(declared: TaggedFormat, text: str, calls: Sequence[ToolCall]) -> str:
    """The output of a model that says ``text`` and makes ``calls``."""
    if not calls:
        return text
    invokes = "".join(
        f'{declared.invoke} name="{call.name}">\n'
        f"{''.join(_parameter(declared, key, value) for key, value in call.arguments.items())}"
        f"{declared.invoke_close}\n"
        for call in calls
    )
    return f"{text}{BREAK if text else ''}{declared.openers[0]}\n{invokes}{declared.closer}"


def dsml_tag(declared: TaggedFormat, request: TagRequest) -> dict[str, Any]:
    """Structural tag with the tools' schemas, for the dialects without a space."""
    opener = declared.openers[0]
    calls = [
        tag(
            f"{declared.invoke} name={dump(tool.name)}>",
            json_schema(tool.parameters, "deepseek_xml"),
            f"\n{declared.invoke_close}",
        )
        for tool in request.tools
        if tool.name
    ]
    block = tag(opener + "\n", tags(calls, "\n"), "\n" + declared.closer)
    return after_thought(triggered([opener], [block]), request, "</think>", "<think>", "</think>", opener)
