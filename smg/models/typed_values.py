"""Argument values of tag formats: from the text between two tags to JSON, guided by the tool's schema.

Formats that write parameters as tagged text carry no types; the type comes from the JSON schema of the declared tool.
The functions here return JSON *text*, not values: numbers keep every digit the model wrote, containers and string
literals that are valid JSON already pass through as written.

A parameter with one declared type is converted to it; with several, the first that fits in a fixed order. Text that
fits no declared type, or that has none, is inferred. What may be inferred, and how white space counts, differs from
format to format and is a ``ValueStyle``.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Literal, NamedTuple, NoReturn

from smg.models.family import ToolSpec

JSON_TYPES = ("null", "integer", "number", "boolean", "object", "array", "string")
"""All JSON types, in the order in which several declared types are tried."""

_REF_DEPTH = 8
_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_LOOSE_FLOAT = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_JSON_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)\Z")
_CONSTANTS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_FIRST_CHARACTER_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}

Types = frozenset[str]
UNDECLARED: Types = frozenset()


@dataclass(frozen=True, slots=True)
class ValueStyle:
    """How one format family reads a value.

    ``infer``: "json" (JSON of any kind and Python's constants), "lenient" (these and loose integers and floats:
    ``007``, ``.5``) or "scalar" (constants and loose numbers, no containers, no trimming).
    ``strip``: white space of a declared string: "none" (kept), "newline" (one newline after the opening and one before
    the closing tag belong to the markup) or "all".
    """

    infer: Literal["json", "lenient", "scalar"]
    strip: Literal["none", "newline", "all"] = "none"


def quote(text: str) -> str:
    """``text`` as a JSON string literal; characters outside ASCII stay as they are."""
    return encode_basestring(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def is_json(text: str) -> bool:
    """Whether ``text`` is one JSON value in the strict sense (no NaN, no trailing comma, bounded nesting)."""
    try:
        json.loads(text, parse_constant=_refuse_constant, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return False
    return True


def _integer(text: str) -> str:
    """Canonical JSON integer of text that matches ``_INTEGER``, without a conversion that limits its size."""
    digits = text.lstrip("+-").lstrip("0") or "0"
    return "-" + digits if text[0] == "-" and digits != "0" else digits


def _finite(text: str) -> bool:
    return math.isfinite(float(text))


# --------------------------------------------------------------------------------------------------
# Declared types


def resolve(root: Mapping[str, Any], ref: object) -> object:
    """Target of a local reference (``#/a/b``, ``~0`` and ``~1`` unescaped), or None."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    node: object = root
    for part in ref[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _own_types(node: Mapping[str, Any]) -> Iterable[str]:
    """Types a schema node declares by itself: ``type``, or else its ``enum`` and ``const`` members."""
    declared = node.get("type")
    if isinstance(declared, str):
        return (declared,)
    if isinstance(declared, list):
        return [name for name in declared if isinstance(name, str)]
    members = node["enum"] if isinstance(node.get("enum"), list) else []
    constant = [node["const"]] if "const" in node else []
    return {_json_type(value) for value in [*members, *constant]}


def declared_types(schema: object, root: Mapping[str, Any]) -> Types:
    """The JSON types ``schema`` allows, or an empty set when it declares none.

    ``type`` decides where it is given; otherwise the branches of ``anyOf``, ``oneOf`` and ``allOf``, the ``enum``
    members and ``const`` are united. A local ``$ref`` (resolved against ``root``) adds its target's types. Every node
    is visited once and references are followed at most eight deep, so a hostile schema costs no more than its size.
    """
    return frozenset(name for node in _nodes(schema, root) for name in _own_types(node) if name in JSON_TYPES)


def string_members(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The strings that ``schema`` lists with ``enum`` or ``const``."""
    found: set[str] = set()
    for node in _nodes(schema, root):
        members = node.get("enum")
        listed = [*(members if isinstance(members, list) else ()), node.get("const")]
        found.update(each for each in listed if isinstance(each, str))
    return frozenset(found)


_LOOSE = {
    *("type", "anyOf", "oneOf", "allOf", "$ref", "title", "description", "default", "examples", "deprecated"),
    *("readOnly", "writeOnly", "$comment"),
}
"""Keywords that say nothing about the text of a string."""


def any_text_fits(schema: object, root: Mapping[str, Any]) -> bool:
    """Whether every text, read as a parameter, is a value of ``schema``."""
    types = declared_types(schema, root)
    return (not types or "string" in types) and all(_LOOSE.issuperset(node) for node in _nodes(schema, root))


def only_listed(schema: object, root: Mapping[str, Any]) -> Sequence[str]:
    """The strings that ``schema`` lists when it allows nothing else, sorted; else none."""
    if declared_types(schema, root) != {"string"}:
        return ()
    plain = all({*_LOOSE, "enum", "const"}.issuperset(node) for node in _nodes(schema, root))
    return sorted(string_members(schema, root)) if plain else ()


def _nodes(schema: object, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """``schema`` and the nodes that say what types it allows."""
    seen: set[int] = set()
    todo: deque[tuple[object, int]] = deque([(schema, 0)])
    while todo:
        node, depth = todo.popleft()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if "type" not in node:
            for keyword in ("anyOf", "oneOf", "allOf"):
                branches = node.get(keyword)
                if isinstance(branches, list):
                    todo.extend((branch, depth) for branch in branches)
        if "$ref" in node and depth < _REF_DEPTH:
            todo.append((resolve(root, node["$ref"]), depth + 1))


class Declared(NamedTuple):
    """What the schema says about a parameter: its types and, where it lists strings, those."""

    types: Types = UNDECLARED
    members: frozenset[str] = frozenset()


NOT_DECLARED = Declared()


class ParameterTypes:
    """Declarations of the parameters of a request's tools, looked up once per parameter."""

    __slots__ = ("_found", "_schemas")

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._found: dict[tuple[str, str], Declared] = {}

    def of(self, function: str, parameter: str) -> Declared:
        """The declaration of ``parameter`` of ``function``; empty when either is not declared."""
        key = (function, parameter)
        declared = self._found.get(key)
        if declared is None:
            root = self._schemas.get(function)
            properties = root.get("properties") if isinstance(root, dict) else None
            declared = NOT_DECLARED
            if root is not None and isinstance(properties, dict):
                schema = properties.get(parameter)
                declared = Declared(declared_types(schema, root), string_members(schema, root))
            self._found[key] = declared
        return declared


# --------------------------------------------------------------------------------------------------
# Conversion


def _infer(text: str, style: ValueStyle) -> tuple[str, str]:
    """(JSON type, JSON text) of a value whose type is not declared."""
    if style.infer == "scalar":
        trimmed = text
    else:
        trimmed = text.strip()
        if trimmed and is_json(trimmed):
            if _JSON_INTEGER.match(trimmed):
                return "integer", trimmed
            if not _JSON_NUMBER.match(trimmed):
                return _FIRST_CHARACTER_TYPES[trimmed[0]], trimmed
            if _finite(trimmed):
                return "number", trimmed
    constant = _CONSTANTS.get(trimmed)
    if constant is not None:
        return _FIRST_CHARACTER_TYPES[constant[0]], constant
    if style.infer != "json":
        if _INTEGER.match(trimmed):
            return "integer", _integer(trimmed)
        if _LOOSE_FLOAT.match(trimmed) and _finite(trimmed):
            return "number", trimmed if _JSON_NUMBER.match(trimmed) else repr(float(trimmed))
    return "", quote(trimmed)


def string_text(text: str, style: ValueStyle) -> str:
    """A declared string without the white space that belongs to the markup."""
    if style.strip == "all":
        return text.strip()
    if style.strip == "newline":
        return text.removeprefix("\n").removesuffix("\n")
    return text


def _as_string(text: str, style: ValueStyle) -> str:
    literal = text.strip() if style.strip != "none" else text
    if len(literal) > 1 and literal[0] == '"' and literal[-1] == '"' and is_json(literal):
        return literal
    return quote(string_text(text, style))


def _as_type(text: str, name: str, style: ValueStyle) -> str | None:
    """JSON text of ``text`` read as the declared type ``name``, or None when it does not fit."""
    if name == "string":
        return _as_string(text, style)
    trimmed = text.strip()
    if name == "integer":
        return _integer(trimmed) if _INTEGER.match(trimmed) else None
    if name == "number":
        return trimmed if _JSON_NUMBER.match(trimmed) and _finite(trimmed) else None
    if name == "boolean":
        constant = _CONSTANTS.get(trimmed)
        return constant if constant in ("true", "false") else None
    if name == "null":
        return "null" if trimmed == "null" else None
    return trimmed if trimmed and is_json(trimmed) else None


def _first_fit(text: str, types: Types, style: ValueStyle) -> str | None:
    """The first of several declared types that accepts ``text``; a container type accepts only its own kind."""
    first = _FIRST_CHARACTER_TYPES.get(text.lstrip()[:1])
    for name in JSON_TYPES:
        if name in types and (name not in ("object", "array") or name == first):
            value = _as_type(text, name, style)
            if value is not None:
                return value
    return None


def to_json(text: str, types: Types, style: ValueStyle, members: frozenset[str] = frozenset()) -> str:
    """JSON text of a parameter value.

    ``text`` is everything between the opening and the closing tag; ``types`` are the declared JSON types (empty:
    undeclared), ``members`` the strings that the schema lists: grammars allow white space around those. Never fails:
    what cannot be read becomes a JSON string.
    """
    if members and text not in members and text.strip() in members:
        return quote(text.strip())
    if len(types) == 1:
        (name,) = types
        exact = _as_type(text, name, style)
        return exact if exact is not None else _infer(text, style)[1]
    kind, inferred = _infer(text, style)
    if not types:
        return inferred
    if kind in types or (kind == "integer" and "number" in types):
        return inferred
    fitting = _first_fit(text, types, style)
    return fitting if fitting is not None else inferred


# --------------------------------------------------------------------------------------------------
# Writing


def dump(value: Any) -> str:
    """``value`` as JSON text the way models write it."""
    return json.dumps(value, ensure_ascii=False)


def marker_free(value: Any) -> str:
    """``value`` as JSON text without any ``<`` and so without any marker."""
    return dump(value).replace("<", "\\u003c")


def write_value(value: Any, close: str, style: ValueStyle, layout: str = "") -> str:
    """The text of a value between its tags, with ``layout`` (white space) on both sides.

    A string is written as it is where that reads back unchanged, else as a JSON string literal. ``close`` is the
    closing tag.
    """
    if isinstance(value, str):
        written = layout + value + layout
        ambiguous = value.strip().startswith('"') or value.strip() in _CONSTANTS
        if string_text(written, style) == value and close not in written and not ambiguous:
            return written
    return layout + marker_free(value) + layout
