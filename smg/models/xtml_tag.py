"""Structural tag of Kimi-K3: forced calls in the ``tools`` channel, every argument under its own tag and type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smg.models.family import TagRequest, ToolSpec
from smg.models.structural import Tag, any_text, const, either, json_schema, optional, sequence, star, triggered
from smg.models.typed_values import resolve

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_TOOLS = f"{_OPEN}tools{_SEP}"
_ARGUMENT_END = const(f"{_CLOSE}argument{_SEP}")
_TEXT = any_text(_CLOSE, _OPEN, _SEP)
_ATTRIBUTE = any_text('"', "<|")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _typed_value(schema: Mapping[str, Any], kind: str, root: Mapping[str, Any]) -> tuple[str, Tag] | None:
    """(type attribute, value) for a property of the single type ``kind``; None when it has no form of its own."""
    if kind == "string":
        members = schema.get("enum")
        if isinstance(members, list) and members and all(isinstance(each, str) for each in members):
            return "string", either([const(each) for each in members])
        return "string", _TEXT
    if kind in ("integer", "number"):
        return "number", json_schema(dict(schema))
    if kind == "boolean":
        return "boolean", json_schema({"type": "boolean"})
    if kind == "null":
        return "null", const("null")
    if kind in ("object", "array"):
        # A reference inside the property points into the tool's definitions, so they travel with it.
        local = '"$ref"' in json.dumps(schema)
        return kind, json_schema({**schema, **_definitions(root)} if local else dict(schema))
    return None


def _argument(key: str, schema: Any, root: Mapping[str, Any]) -> Tag:
    target = schema
    if isinstance(schema, dict) and "$ref" in schema:
        target = resolve(root, schema["$ref"])
    kind = target.get("type") if isinstance(target, dict) else None
    typed = None
    if isinstance(kind, str) and isinstance(target, dict):
        typed = _typed_value(target if kind == "string" else schema, kind, root)
    opening = f'{_OPEN}argument key="{_escape(key)}" type="'
    if typed is None:
        return sequence(const(opening), _ATTRIBUTE, const(f'"{_SEP}'), _TEXT, _ARGUMENT_END)
    name, value = typed
    return sequence(const(f'{opening}{name}"{_SEP}'), value, _ARGUMENT_END)


def _arguments(parameters: Mapping[str, Any]) -> Tag:
    properties = parameters.get("properties")
    if not isinstance(properties, dict) or not properties:
        opening = const(f'{_OPEN}argument key="')
        middle = const('" type="')
        anything = sequence(opening, _ATTRIBUTE, middle, _ATTRIBUTE, const(f'"{_SEP}'), _TEXT, _ARGUMENT_END)
        return star(anything)
    required = parameters.get("required")
    items: list[Tag] = []
    for key, schema in properties.items():
        item = _argument(key, schema, parameters)
        needed = isinstance(required, list) and key in required
        items.append(item if needed else optional(item))
    return sequence(*items)


def _call(tool: ToolSpec) -> Tag:
    return sequence(
        const(f'{_OPEN}call tool="{_escape(tool.name)}" index="'),
        {"type": "regex", "pattern": "[1-9][0-9]*"},
        const(f'"{_SEP}'),
        _arguments(tool.parameters),
        const(f"{_CLOSE}call{_SEP}"),
    )


def kimi_k3_tag(request: TagRequest) -> dict[str, Any]:
    """At least one call in a ``tools`` channel, which may follow the thought or the response directly."""
    calls = {"type": "plus", "content": either([_call(tool) for tool in request.tools if tool.name])}
    openings = (_TOOLS, f"{_CLOSE}think{_SEP}", f"{_CLOSE}response{_SEP}")
    begins = (_TOOLS, *(closing + _TOOLS for closing in openings[1:]))
    tags = [{"begin": begin, "content": calls, "end": f"{_CLOSE}tools{_SEP}"} for begin in begins]
    return {"format": triggered(openings, tags)}
