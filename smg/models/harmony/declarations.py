"""Function declarations in a Harmony developer message: TypeScript types, as gpt-oss was trained on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from smg.models.family import ToolSpec
from smg.models.renderers.common import compact_json

_MAX_DEPTH = 32
_NESTED = "    "
_VARIANT = "   "
_SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def developer_text(instructions: str, functions: Sequence[ToolSpec]) -> str:
    """The text of the developer message; parts that are absent are left out."""
    parts: list[str] = []
    if instructions:
        parts.append(f"# Instructions\n\n{instructions}")
    if functions:
        declared = "\n\n".join(map(_function, functions))
        parts.append(f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{declared}\n\n}} // namespace functions")
    return "\n\n".join(parts)


def _function(function: ToolSpec) -> str:
    lines = [f"// {line}" for line in _lines(function.description)]
    parameters = _type(function.parameters, "", 0) if function.parameters else "any"
    lines.append(f"type {function.name} = (_: {parameters}) => any;")
    return "\n".join(lines)


def _lines(text: str) -> list[str]:
    """The lines of a description: a carriage return in front of a line feed belongs to it, a line feed at the end ends
    the last line."""
    if not text:
        return []
    *lines, last = text.split("\n")
    lines = [line.removesuffix("\r") for line in lines]
    return [*lines, last] if last else lines


def _json(value: Any) -> str:
    """Compact JSON with numbers as ``1e-7`` and ``1e22``."""
    text = compact_json(value)
    return _EXPONENT.sub(r"e\1\2", text) if isinstance(value, float) else text


_EXPONENT = re.compile(r"e(?:\+|(-))0*(\d+)")


def _text_of(schema: Any, key: str) -> str | None:
    value = schema.get(key) if isinstance(schema, dict) else None
    return value if isinstance(value, str) else None


def _type(schema: Any, indent: str, depth: int) -> str:
    """A type. ``indent`` is that of the lines of its own that it may have."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return "any"
    if isinstance(schema.get("oneOf"), list):
        variants = schema["oneOf"]
        return "".join(_variant(variant, indent, depth, _comment(variant, enum_as_json=True)) for variant in variants)
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join("number" if word == "integer" else word for word in kind if isinstance(word, str)) or "any"
    if kind == "object":
        return _object(schema, indent, depth)
    if kind == "array":
        return f"{_type(schema['items'], indent, depth + 1)}[]" if "items" in schema else "Array<any>"
    if kind == "string" and isinstance(schema.get("enum"), list):
        return " | ".join(f'"{value}"' for value in schema["enum"] if isinstance(value, str)) or "string"
    return _SCALARS.get(kind, "any") if isinstance(kind, str) else "any"


def _variant(variant: Any, indent: str, depth: int, comment: str) -> str:
    """One line of a ``oneOf``, with the line feed in front of it."""
    kind = _nullable(variant, _type(variant, indent + _VARIANT, depth + 1))
    return f"\n{indent} | {kind}{comment}"


def _nullable(schema: Any, kind: str) -> str:
    nullable = isinstance(schema, dict) and schema.get("nullable") is True
    return f"{kind} | null" if nullable and "null" not in kind else kind


def _default(schema: dict[str, Any], *, enum_as_json: bool = False) -> str:
    """The default of a schema as comments show it: JSON, but text as it is, in quotes. One of an enum has no quotes, or
    is JSON after all where a type is not a property's."""
    value = schema["default"]
    if not isinstance(value, str) or (enum_as_json and schema.get("enum")):
        return _json(value)
    return value if schema.get("enum") else f'"{value}"'


def _comment(variant: Any, *, described: bool = True, enum_as_json: bool = False) -> str:
    """Description and default as a comment behind a variant."""
    parts: list[str] = []
    description = _text_of(variant, "description")
    if described and description is not None:
        parts.append(description)
    if isinstance(variant, dict) and "default" in variant:
        parts.append("default: " + _default(variant, enum_as_json=enum_as_json))
    return " // " + " ".join(parts) if parts else ""


def _object(schema: dict[str, Any], indent: str, depth: int) -> str:
    parts: list[str] = []
    description = _text_of(schema, "description")
    if description is not None:
        parts.append(f"{indent}// {description}\n")
    parts.append("{\n")
    properties = schema.get("properties")
    required = schema.get("required")
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    for name, value in properties.items() if isinstance(properties, dict) else ():
        mark = "" if name in needed else "?"
        parts.append(_property(f"{indent}{name}{mark}:", value, indent, depth))
    parts.append(f"{indent}}}")
    return "".join(parts)


def _property(head: str, schema: Any, indent: str, depth: int) -> str:
    """One property, with the comment lines in front of it. ``head`` is its name up to the colon."""
    if not isinstance(schema, dict):
        return f"{head} any,\n"
    lines = _property_comments(schema, indent)
    variants = schema.get("oneOf")
    if isinstance(variants, list):
        if "default" in schema:
            lines.append(f"{indent}// default: {_default(schema)}")
        said = _text_of(schema, "description")
        shown: list[str] = []
        for index, variant in enumerate(variants):
            # The property's description stands for that of its first variant, and is not said twice.
            described = said is None or (index > 0 and _text_of(variant, "description") != said)
            shown.append(_variant(variant, indent, depth, _comment(variant, described=described)))
        return "\n".join((*lines, f"{head}{''.join(shown)}\n{indent},\n"))
    kind = _nullable(schema, _type(schema, indent + _NESTED, depth + 1))
    default = f" // default: {_default(schema)}" if "default" in schema else ""
    return "\n".join((*lines, f"{head} {kind},{default}\n"))


def _property_comments(schema: dict[str, Any], indent: str) -> list[str]:
    """Title, description and examples of a property; one with variants has its examples before the description, and
    no description that its first variant repeats."""
    lines: list[str] = []
    title = _text_of(schema, "title")
    if title is not None:
        lines += [f"{indent}// {title}", f"{indent}//"]
    described: list[str] = []
    description = _text_of(schema, "description")
    variants = schema.get("oneOf")
    first = variants[0] if isinstance(variants, list) and variants else None
    if description is not None and description != _text_of(first, "description"):
        described.append(f"{indent}// {description}")
    shown: list[str] = []
    examples = schema.get("examples")
    if isinstance(examples, list) and examples:
        shown.append(f"{indent}// Examples:")
        shown += [f'{indent}// - "{example}"' for example in examples if isinstance(example, str)]
    return [*lines, *shown, *described] if isinstance(variants, list) else [*lines, *described, *shown]
