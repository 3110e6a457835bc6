"""Forced calls and output formats as constraints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smg.api.tools import AUTO, NONE, REQUIRED, ToolChoice, parse_choice
from smg.engines.base import BuildError, Constraint
from smg.models.constraints import (
    callable_tools,
    engine_constraint,
    forced_mode,
    output_constraint,
    tool_constraint,
)
from smg.models.grammar_check import GrammarChecker
from smg.models.prompt import PromptError
from smg.models.registry import TOOL_PARSERS, ParserNames, select_parsers, tool_format

WIND = {"type": "object", "properties": {"site": {"type": "string"}}, "required": ["site"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_wind", "description": "d", "parameters": WIND, "strict": True}},
    {"type": "function", "function": {"name": "list_beacons"}},
]
TAGGED = {"mistral", "deepseek_v41", "glm47_moe", "kimik2", "kimi_k3", "inkling"}
NAMED = ToolChoice("function", ("get_wind",))


def flagged(parser: str) -> Any:
    return select_parsers("acme", flags=ParserNames(tool=parser))


@pytest.mark.parametrize("choice", [AUTO, NONE, ToolChoice("auto", ("get_wind",)), ToolChoice("required", ())])
def test_nothing_is_forced(choice: ToolChoice) -> None:
    assert tool_constraint(TOOLS, choice, flagged("mistral")) is None


def test_a_list_of_calls() -> None:
    made = tool_constraint(TOOLS, REQUIRED, select_parsers("mistral-large"))
    assert made is not None
    assert (made.forced, made.constraint.kind, made.constraint.origin) == ("array", "json_schema", "tool")
    assert made.constraint.value == (
        '{"type":"array","minItems":1,"items":{"type":"object","anyOf":['
        '{"properties":{"name":{"type":"string","enum":["get_wind"]},"parameters":{"type":"object","properties":'
        '{"site":{"type":"string"}},"required":["site"]}},"required":["name","parameters"]},'
        '{"properties":{"name":{"type":"string","enum":["list_beacons"]},"parameters":{}},'
        '"required":["name","parameters"]}]}}'
    )


def test_a_named_function() -> None:
    made = tool_constraint(TOOLS, NAMED, select_parsers("qwen3"))
    assert made is not None
    assert (made.forced, json.loads(made.constraint.value)) == ("function:get_wind", WIND)


def test_allowed_tools_limit_the_constraint() -> None:
    choice = parse_choice(
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "list_beacons"}]}
    )
    assert callable_tools(TOOLS, choice) == TOOLS[1:]
    made = tool_constraint(TOOLS, choice, select_parsers("qwen3"))
    assert made is not None
    assert [branch["properties"]["name"]["enum"] for branch in json.loads(made.constraint.value)["items"]["anyOf"]] == [
        ["list_beacons"]
    ]


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_structural_tags_by_default(parser: str) -> None:
    made = tool_constraint(TOOLS, REQUIRED, flagged(parser))
    assert made is not None
    tagged = made.constraint.kind == "structural_tag"
    assert tagged == (parser in TAGGED)
    assert made.forced == ("tag" if tagged else "array")
    named = tool_constraint(TOOLS, NAMED, flagged(parser))
    assert named is not None
    if tagged:
        assert "list_beacons" not in named.constraint.value


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_native_tags(parser: str) -> None:
    """Every format can be written as a structural tag; plain text is none."""
    selection = select_parsers("acme", ParserNames(tool=parser))
    made = tool_constraint(TOOLS, REQUIRED, selection, native=True)
    assert made is not None
    if parser == "passthrough":
        assert (made.constraint.kind, made.forced) == ("json_schema", "array")
        return
    assert (made.constraint.kind, made.forced) == ("structural_tag", "tag")
    assert set(json.loads(made.constraint.value)) == {"format"}


def test_a_grammar_that_begins_with_the_thought() -> None:
    plain = tool_constraint(TOOLS, REQUIRED, flagged("glm47_moe"))
    thinking = tool_constraint(TOOLS, REQUIRED, flagged("glm47_moe"), thinking=True)
    deferred = tool_constraint(TOOLS, REQUIRED, flagged("glm47_moe"), thinking=True, decoding_start="after_reasoning")
    assert plain is not None
    assert thinking is not None
    assert (plain.reasons, thinking.reasons) == (False, True)
    assert "</think>" in thinking.constraint.value
    assert deferred == plain
    assert tool_constraint(TOOLS, REQUIRED, flagged("kimik2"), thinking=True) == tool_constraint(
        TOOLS, REQUIRED, flagged("kimik2")
    )


@pytest.mark.parametrize(
    ("parser", "leads"),
    [
        ("mistral", ("[TOOL_CALLS]",)),
        ("deepseek_v41", ("\n\n<｜DSML｜ calls>\n",)),
        ("kimik2", ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")),
        ("qwen", ("<tool_call>",)),
        ("json", ("[",)),
        ("llama", ("<|python_tag|>",)),
        ("passthrough", ("[{",)),
    ],
)
def test_how_a_forced_answer_begins(parser: str, leads: tuple[str, ...]) -> None:
    made = tool_constraint(TOOLS, REQUIRED, flagged(parser), native=True)
    assert made is not None
    assert made.leads == leads


def test_a_native_call_comes_behind_the_thought() -> None:
    selection = select_parsers("qwen3-8b")
    plain = tool_constraint(TOOLS, REQUIRED, selection, native=True)
    thinking = tool_constraint(TOOLS, REQUIRED, selection, native=True, thinking=True)
    assert plain is not None
    assert thinking is not None
    assert not plain.reasons
    assert thinking.reasons
    thought, calls = json.loads(thinking.constraint.value)["format"]["elements"]
    assert (thought["end"], calls) == ("</think>", json.loads(plain.constraint.value)["format"])


def test_tools_without_a_name_have_no_tag() -> None:
    nameless = [{"type": "function", "function": {"name": ""}}]
    made = tool_constraint(nameless, REQUIRED, flagged("mistral"))
    assert made is not None
    assert made.forced == "array"


@pytest.mark.parametrize(
    ("parser", "name", "tagged"),
    [
        ("glm47_moe", "get wind", False),
        ("glm47_moe", "get-wind.v2", True),
        ("kimik2", "a:b", False),
        ("deepseek_v41", 'a"b', False),
        ("kimi_k3", 'a"b', True),
        ("mistral", "get wind", True),
        ("mistral", "get\nwind", False),
        ("pythonic", "f(x)", False),
    ],
)
def test_a_name_that_the_format_cannot_carry_has_no_tag(parser: str, name: str, tagged: bool) -> None:
    made = tool_constraint([{"type": "function", "function": {"name": name}}], REQUIRED, flagged(parser), native=True)
    assert made is not None
    assert (made.constraint.kind == "structural_tag") == tagged
    assert made.forced == ("tag" if tagged else "array")


def tool_with(name: str, definition: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": definition}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_definitions_are_collected() -> None:
    same = [tool_with("a", {"type": "string", "minLength": 1}), tool_with("b", {"minLength": 1, "type": "string"})]
    made = tool_constraint(same, REQUIRED, select_parsers("acme"))
    assert made is not None
    assert json.loads(made.constraint.value)["$defs"] == {"X": {"type": "string", "minLength": 1}}


def test_conflicting_definitions() -> None:
    tools = [tool_with("a", {"const": 1}), tool_with("b", {"const": True})]
    with pytest.raises(PromptError) as caught:
        tool_constraint(tools, REQUIRED, select_parsers("acme"))
    assert caught.value.code == "invalid_tool_configuration"
    assert caught.value.message == ("Invalid tool configuration: Tool definition 'X' has multiple conflicting schemas")
    for choice in (AUTO, ToolChoice("function", ("a",)), ToolChoice("required", ("b",))):
        tool_constraint(tools, choice, select_parsers("acme"))
    tool_constraint(tools, REQUIRED, flagged("mistral"))


def test_output_formats() -> None:
    schema = {"type": "object", "properties": {"é": {"maximum": 2**70}}}
    assert output_constraint() is None
    assert output_constraint({"type": "text"}) is None
    assert output_constraint({"type": "json_object"}) == Constraint("json_schema", '{"type":"object"}')
    made = output_constraint({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert made == Constraint("json_schema", f'{{"type":"object","properties":{{"é":{{"maximum":{2**70}}}}}}}')
    assert output_constraint(regex="a+") == Constraint("regex", "a+")
    assert output_constraint(ebnf="root ::= x") == Constraint("ebnf", "root ::= x")
    with pytest.raises(PromptError) as caught:
        output_constraint({"type": "json_object"}, regex="a")
    assert caught.value.code == "invalid_request_parameters"


def test_which_constraint_an_engine_gets() -> None:
    tool, output = Constraint("json_schema", "{}", "tool"), Constraint("regex", "a")
    for kind in ("vllm", "sglang", "trtllm", "tokenspeed"):
        assert engine_constraint(kind, None, None) is None
        assert engine_constraint(kind, tool, None) is tool
        assert engine_constraint(kind, None, output) is output
        assert engine_constraint(kind, tool, output) is (tool if kind == "vllm" else output)


def test_mlx_refuses() -> None:
    tool, output = Constraint("structural_tag", "{}", "tool"), Constraint("regex", "a")
    with pytest.raises(BuildError, match="constraint: structural_tag"):
        engine_constraint("mlx", tool, None)
    with pytest.raises(BuildError, match="response_format"):
        engine_constraint("mlx", None, output, response_format=True)
    with pytest.raises(BuildError, match="constraints"):
        engine_constraint("mlx", None, output, chat=False)
    for kind in ("structural_tag", "regex", "ebnf"):
        with pytest.raises(BuildError, match=f"constraint: {kind}"):
            engine_constraint("mlx", None, Constraint(kind, "{}"))
    assert engine_constraint("mlx", None, None) is None


def test_how_the_answer_is_read() -> None:
    made = tool_constraint(TOOLS, REQUIRED, select_parsers("acme"))
    output = Constraint("regex", "a")
    assert forced_mode(None, output, ["sglang"]) == ""
    assert forced_mode(made, None, ["sglang"]) == "array"
    assert forced_mode(made, output, ["vllm"]) == "array"
    assert forced_mode(made, output, ["sglang", "trtllm"]) is None


def test_compile_check() -> None:
    checker = GrammarChecker()
    if not checker.available:
        pytest.skip("xgrammar is not installed")
    try:
        for parser in TOOL_PARSERS:
            for thinking in (False, True):
                selection = select_parsers("acme", flags=ParserNames(parser, "qwen3"))
                made = tool_constraint(TOOLS, REQUIRED, selection, native=True, thinking=thinking)
                assert made is not None
                assert checker.check(made.constraint) is None, (parser, thinking)
        for kind, value in (
            ("regex", "(un"),
            ("ebnf", "root ::= ("),
            ("json_schema", '{"type": "objec"}'),
            ("json_schema", "[1"),
            ("structural_tag", '{"format": {"type": "nope"}}'),
        ):
            assert checker.check(Constraint(kind, value)), value
            assert checker.check(Constraint(kind, value)), "remembered"
        assert checker.check(Constraint("regex", "a+")) is None
    finally:
        checker.close()


def test_compile_check_is_bounded() -> None:
    checker = GrammarChecker(seconds=0.0, max_chars=10)
    if not checker.available:
        pytest.skip("xgrammar is not installed")
    try:
        assert "longer than 10 characters" in (checker.check(Constraint("regex", "a" * 11)) or "")
        assert "to compile" in (checker.check(Constraint("regex", "a+")) or "")
    finally:
        checker.close()


def test_no_check_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    checker = GrammarChecker()
    assert not checker.available
    assert checker.check(Constraint("regex", "(un")) is None


def test_every_tag_default_has_a_tag() -> None:
    for parser in TOOL_PARSERS:
        declared = tool_format(parser)
        assert declared.tag_by_default == (parser in TAGGED)
        assert not declared.tag_by_default or declared.structural_tag is not None
