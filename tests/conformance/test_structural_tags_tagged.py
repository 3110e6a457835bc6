"""Structural tags of the tagged tool-call formats: the exact form of the ones that engines get by default, and what
xgrammar makes of all of them (skipped where it is not installed)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smg.models.family import TagRequest, ToolCall, ToolSpec
from smg.models.registry import tool_format

SITE = {"type": "object", "properties": {"site": {"type": "string"}}, "required": ["site"]}
TOOLS = (ToolSpec("get_wind", SITE), ToolSpec("list_beacons"))

RICH = {
    "type": "object",
    "$defs": {"Point": {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}},
    "properties": {
        "site": {"type": "string"},
        "count": {"type": "integer"},
        "deep": {
            "type": "object",
            "properties": {"rows": {"type": "array", "items": {"type": "integer"}}},
            "required": ["rows"],
        },
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"type": "string", "enum": ["x", "y"]},
        "point": {"$ref": "#/$defs/Point"},
        "flag": {"type": "boolean"},
    },
    "required": ["site"],
}
RICH_TOOLS = (
    ToolSpec("get_wind", RICH),
    ToolSpec("list_beacons"),
    ToolSpec("ring", {"type": "object", "properties": {}}),
)

FORMATS = (
    "qwen_xml",
    "minimax_m2",
    "minimax_m3",
    "glm45_moe",
    "glm47_moe",
    "step3",
    "deepseek32",
    "deepseek_v4",
    "deepseek_v41",
    "kimi_k3",
    "inkling",
)
REASONING_FREE = ("deepseek_v41", "kimi_k3", "inkling")


def tag_of(name: str, tools: tuple[ToolSpec, ...], *, thinking: bool = False) -> dict[str, Any]:
    build = tool_format(name).structural_tag
    assert build is not None
    return build(TagRequest(tools, thinking=thinking))


def test_default_tags() -> None:
    assert {name for name in FORMATS if tool_format(name).tag_by_default} == {
        "glm47_moe",
        "deepseek_v41",
        "kimi_k3",
        "inkling",
    }


GLM = {
    "type": "triggered_tags",
    "triggers": ["<tool_call>"],
    "tags": [
        {
            "type": "tag",
            "begin": "<tool_call>get_wind",
            "content": {"type": "json_schema", "json_schema": SITE, "style": "glm_xml"},
            "end": "</tool_call>",
        },
        {
            "type": "tag",
            "begin": "<tool_call>list_beacons",
            "content": {"type": "json_schema", "json_schema": {}, "style": "glm_xml"},
            "end": "</tool_call>",
        },
    ],
    "at_least_one": True,
}


def test_glm47() -> None:
    assert tag_of("glm47_moe", TOOLS) == {"format": GLM}
    marks = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    thought = {"type": "any_text", "excludes": ["<think>", "</think>", *marks]}
    assert tag_of("glm47_moe", TOOLS, thinking=True) == {
        "format": {
            "type": "sequence",
            "elements": [{"type": "tag", "begin": "", "content": thought, "end": "</think>"}, GLM],
        }
    }


def test_inkling() -> None:
    def call(name: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {
            "begin": f'<|content_invoke_tool_json|>{{"name":"{name}","args":',
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "}<|end_message|>",
        }

    assert tag_of("inkling", TOOLS) == {
        "format": {
            "type": "triggered_tags",
            "triggers": ["<|content_invoke_tool_json|>"],
            "tags": [call("get_wind", SITE), call("list_beacons", {})],
            "at_least_one": True,
        }
    }


def test_deepseek_v41() -> None:
    closes = ["</｜DSML｜ parameter>", "</｜DSML｜ invoke>", "</｜DSML｜ calls>"]
    text = {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": 'true">'}, {"type": "any_text", "excludes": closes}],
    }
    other = {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": 'false">'}, {"type": "json_schema", "json_schema": True}],
    }
    parameter = {
        "type": "tag",
        "begin": '<｜DSML｜ parameter name="',
        "content": {
            "type": "sequence",
            "elements": [
                {"type": "regex", "pattern": '[^"]+'},
                {"type": "const_string", "value": '" string="'},
                {"type": "or", "elements": [text, other]},
            ],
        },
        "end": "</｜DSML｜ parameter>\n",
    }
    invokes = [
        {
            "type": "tag",
            "begin": f'<｜DSML｜ invoke name="{name}">\n',
            "content": {"type": "star", "content": parameter},
            "end": "</｜DSML｜ invoke>\n",
        }
        for name in ("get_wind", "list_beacons")
    ]
    elements = [
        {"type": "const_string", "value": "\n\n<｜DSML｜ calls>\n"},
        {"type": "tags_with_separator", "tags": invokes, "separator": "", "at_least_one": True},
        {"type": "const_string", "value": "</｜DSML｜ calls>"},
    ]
    for thinking in (False, True):
        assert tag_of("deepseek_v41", TOOLS, thinking=thinking) == {
            "format": {"type": "sequence", "elements": elements}
        }


def test_kimi_k3() -> None:
    site = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": '<|open|>argument key="site" type="string"<|sep|>'},
            {"type": "any_text", "excludes": ["<|close|>", "<|open|>", "<|sep|>"]},
            {"type": "const_string", "value": "<|close|>argument<|sep|>"},
        ],
    }
    call = {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": '<|open|>call tool="get_wind" index="'},
            {"type": "regex", "pattern": "[1-9][0-9]*"},
            {"type": "const_string", "value": '"<|sep|>'},
            {"type": "sequence", "elements": [site]},
            {"type": "const_string", "value": "<|close|>call<|sep|>"},
        ],
    }
    built = tag_of("kimi_k3", TOOLS[:1])["format"]
    assert built["triggers"] == ["<|open|>tools<|sep|>", "<|close|>think<|sep|>", "<|close|>response<|sep|>"]
    assert [each["begin"] for each in built["tags"]] == [
        "<|open|>tools<|sep|>",
        "<|close|>think<|sep|><|open|>tools<|sep|>",
        "<|close|>response<|sep|><|open|>tools<|sep|>",
    ]
    for each in built["tags"]:
        assert each["content"] == {"type": "plus", "content": {"type": "or", "elements": [call]}}
        assert each["end"] == "<|close|>tools<|sep|>"


def test_kimi_k3_definitions_travel_with_references() -> None:
    schema = {
        "definitions": {"P": {"type": "integer"}},
        "properties": {"list": {"type": "array", "items": {"$ref": "#/definitions/P"}}},
    }
    text = json.dumps(tag_of("kimi_k3", (ToolSpec("f", schema),)))
    sent = {"type": "array", "items": {"$ref": "#/definitions/P"}, "definitions": {"P": {"type": "integer"}}}
    assert json.dumps(sent) in text


def test_names_are_escaped_and_empty_names_left_out() -> None:
    tools = (ToolSpec('a"&b'), ToolSpec(""))
    assert (
        "a&quot;&amp;b"
        in tag_of("kimi_k3", tools)["format"]["tags"][0]["content"]["content"]["elements"][0]["elements"][0]["value"]
    )
    assert tag_of("inkling", tools)["format"]["tags"][0]["begin"].startswith(
        '<|content_invoke_tool_json|>{"name":"a\\"&b",'
    )
    assert len(tag_of("inkling", tools)["format"]["tags"]) == 1


GOOD = [
    [ToolCall("get_wind", {"site": "Cape Moil"})],
    [ToolCall("get_wind", {"site": "two\nlines", "count": 3})],
    [ToolCall("get_wind", {"site": "", "deep": {"rows": [1, 2]}})],
    [ToolCall("get_wind", {"site": "x", "maybe": "hi", "kind": "y"})],
    [ToolCall("get_wind", {"site": "x", "point": {"k": 1}, "flag": True})],
    [ToolCall("list_beacons", {})],
    [ToolCall("ring", {})],
    [ToolCall("get_wind", {"site": "x"}), ToolCall("ring", {})],
]
# deepseek_v41 is constrained in its markup only, not by the schema.
BAD = [[ToolCall("nope", {})], [ToolCall("get_wind", {})], [ToolCall("get_wind", {"site": "x", "count": "many"})]]


def written(name: str, wanted: list[ToolCall], *, thinking: bool) -> str:
    encode = tool_format(name).encode
    assert encode is not None
    text = encode("", wanted)
    if name == "deepseek_v41":
        text = "\n\n" + text
    if name == "inkling":  # the tag begins behind the header, and xgrammar writes JSON with spaces
        text = "".join(
            f'<|content_invoke_tool_json|>{{"name":"{call.name}","args":{json.dumps(call.arguments)}}}<|end_message|>'
            for call in wanted
        )
    close = "</mm:think>" if name == "minimax_m3" else "</think>"
    return f"So be it.{close}{text}" if thinking and name not in REASONING_FREE else text


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_xgrammar_accepts_what_the_model_writes(name: str, thinking: bool) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    testing = pytest.importorskip("xgrammar.testing")
    tag = json.dumps(tag_of(name, RICH_TOOLS, thinking=thinking))
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    for wanted in GOOD:
        text = written(name, wanted, thinking=thinking)
        assert testing._is_grammar_accept_string(grammar, text), text
    for unwanted in BAD if name != "deepseek_v41" else BAD[:1]:
        text = written(name, unwanted, thinking=thinking)
        assert not testing._is_grammar_accept_string(grammar, text), text
    assert not testing._is_grammar_accept_string(grammar, "No call at all.")
