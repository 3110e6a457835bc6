"""Values of tag formats: declared types, conversion, inference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smg.models.family import ToolSpec
from smg.models.typed_values import (
    JSON_TYPES,
    NOT_DECLARED,
    ParameterTypes,
    ValueStyle,
    declared_types,
    string_members,
    to_json,
)

JSON = ValueStyle(infer="json", strip="newline")
LENIENT = ValueStyle(infer="lenient")
SCALAR = ValueStyle(infer="scalar")
TRIMMED = ValueStyle(infer="lenient", strip="all")


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "string", "enum": [1]}, {"string"}),
        (
            {"enum": [1, "a", None, True, 2.5, [], {}]},
            set(JSON_TYPES),
        ),
        ({"const": 1.5}, {"number"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}]}]}, {"string", "null"}),
        ({"allOf": [{"$ref": "#/$defs/Code"}]}, {"string"}),
        ({"$ref": "#/$defs/a~1b~0", "description": "x"}, {"integer"}),
        ({"$ref": "#/$defs/Loop"}, {"null"}),
        ({"$ref": "#/$defs/Nowhere"}, set()),
        ({"$ref": "https://example.org/schema"}, set()),
        ({"properties": {"a": {}}, "items": {}}, set()),
        ({"type": "surprise"}, set()),
        ({"type": {"not": "a type"}, "anyOf": "neither"}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_declared_types(schema: Any, types: set[str]) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]}
    root = {"$defs": {"Code": {"type": "string"}, "a/b~": {"type": "integer"}, "Loop": loop}}
    assert declared_types(schema, root) == types


def test_hostile_schema_costs_its_size() -> None:
    """References that fan out eight deep: visited once each, not once per path."""
    levels = {f"L{level}": {"anyOf": [{"$ref": f"#/$defs/L{level + 1}"}] * 50} for level in range(8)}
    root = {"$defs": {**levels, "L8": {"type": "string"}}}
    assert declared_types({"$ref": "#/$defs/L1"}, root) == {"string"}
    assert declared_types({"anyOf": [{"$ref": "#/$defs/L0"}]}, root) == set()


def test_parameter_types() -> None:
    types = ParameterTypes([ToolSpec("f", {"properties": {"a": {"type": "string"}}}), ToolSpec("g", {"properties": 3})])
    assert types.of("f", "a") == ({"string"}, set())
    for function, parameter in (("f", "b"), ("g", "a"), ("h", "a")):
        assert types.of(function, parameter) == NOT_DECLARED


@pytest.mark.parametrize(
    ("types", "text", "style", "value"),
    [
        ("string", "007", LENIENT, '"007"'),
        ("string", '"x"', LENIENT, '"x"'),
        ("string", '"x', LENIENT, '"\\"x"'),
        ("string", ' "x"', LENIENT, '" \\"x\\""'),
        ("string", '\n"x"\n', JSON, '"x"'),
        ("string", "\n  a\n\n", JSON, '"  a\\n"'),
        ("string", " a ", TRIMMED, '"a"'),
        ("string", "", SCALAR, '""'),
        ("integer", " +005\n", JSON, "5"),
        ("integer", "-0", JSON, "0"),
        ("integer", "1" * 5000, JSON, "1" * 5000),
        ("integer", "12.0", JSON, "12.0"),
        ("integer", "many", JSON, '"many"'),
        ("number", "1.50", JSON, "1.50"),
        ("number", "1e999", JSON, '"1e999"'),
        ("number", "NaN", LENIENT, '"NaN"'),
        ("boolean", "True", SCALAR, "true"),
        ("boolean", "yes", SCALAR, '"yes"'),
        ("boolean", "1", SCALAR, "1"),
        ("object", '{"a": [1]}', SCALAR, '{"a": [1]}'),
        ("object", "{'a': 1}", JSON, "\"{'a': 1}\""),
        ("array", "[1, 2", JSON, '"[1, 2"'),
        ("array", "[" * 100_000, JSON, '"' + "[" * 100_000 + '"'),
        ("null", "null", SCALAR, "null"),
        ("null", "None", SCALAR, "null"),
    ],
)
def test_one_declared_type(types: str, text: str, style: ValueStyle, value: str) -> None:
    assert to_json(text, frozenset({types}), style) == value


@pytest.mark.parametrize(
    ("types", "text", "value"),
    [
        ("string null", "null", "null"),
        ("string null", "7", '"7"'),
        ("string null", "true", '"true"'),
        ("string null", "  a", '"  a"'),
        ("integer string", "9", "9"),
        ("number string", "9", "9"),
        ("object string", "[1]", '"[1]"'),
        ("object string", "5", '"5"'),
        ("array null", "[1]", "[1]"),
        ("integer null", "x", '"x"'),
    ],
)
@pytest.mark.parametrize("style", [LENIENT, SCALAR])
def test_several_declared_types(types: str, text: str, style: ValueStyle, value: str) -> None:
    assert to_json(text, frozenset(types.split()), style) == value


@pytest.mark.parametrize(
    ("text", "qwen", "lenient", "scalar"),
    [
        ("007", '"007"', "7", "7"),
        (" 5 ", "5", "5", '" 5 "'),
        (".5", '".5"', "0.5", "0.5"),
        ("1.", '"1."', "1.0", "1.0"),
        ("1e3", "1e3", "1e3", "1e3"),
        ("True", "true", "true", "true"),
        ("None", "null", "null", "null"),
        (" true", "true", "true", '" true"'),
        ("[1, 2]", "[1, 2]", "[1, 2]", '"[1, 2]"'),
        ('{"a": 1}', '{"a": 1}', '{"a": 1}', '"{\\"a\\": 1}"'),
        ("", '""', '""', '""'),
        (" word ", '"word"', '"word"', '" word "'),
        ("1" * 3000 + "x", '"' + "1" * 3000 + 'x"', '"' + "1" * 3000 + 'x"', '"' + "1" * 3000 + 'x"'),
    ],
)
def test_inference(text: str, qwen: str, lenient: str, scalar: str) -> None:
    assert to_json(text, frozenset(), JSON) == qwen
    assert to_json(text, frozenset(), LENIENT) == lenient
    assert to_json(text, frozenset(), SCALAR) == scalar


def test_listed_strings_stand_without_the_white_space_around_them() -> None:
    root = {"$defs": {"K": {"enum": ["low", " high", 3]}}}
    members = string_members({"anyOf": [{"$ref": "#/$defs/K"}, {"const": "none"}, {"type": "null"}]}, root)
    assert members == {"low", " high", "none"}
    for text, value in (("\n low\t", "low"), (" high", " high"), (" other ", " other "), (" high ", " high ")):
        assert to_json(text, frozenset({"string"}), ValueStyle("lenient"), members) == json.dumps(value)
