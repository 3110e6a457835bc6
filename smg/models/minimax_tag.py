"""Structural tag of MiniMax-M3: forced calls as nested elements, in the order in which the schema declares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smg.models.family import TagRequest
from smg.models.minimax_elements import BLOCK, BLOCK_END, INVOKE_END, NAMESPACE, invoke_open
from smg.models.structural import (
    Tag,
    after_thought,
    any_text,
    const,
    either,
    in_order,
    json_schema,
    plus,
    sequence,
    star,
    tag,
    tags,
    triggered,
    with_definitions,
)
from smg.models.typed_values import any_text_fits, declared_types, dump, resolve

_MAX_DEPTH = 8
_TEXT = any_text(NAMESPACE)
_BOOLEAN = either([const(word) for word in ("true", "false", "True", "False")])


def _element(name: str, value: Tag) -> Tag:
    return sequence(const(f"{NAMESPACE}<{name}>"), value, const(f"{NAMESPACE}</{name}>"))


def _members(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Tag:
    """The properties of an object. A property that can only be null has no element."""
    properties = schema.get("properties")
    declared = properties if isinstance(properties, dict) else {}
    shown = {key: each for key, each in declared.items() if declared_types(each, root) != {"null"}}
    return in_order({**schema, "properties": shown}, lambda key, each: _element(key, _value(each, root, depth + 1)))


def _scalar(target: Mapping[str, Any], types: frozenset[str], root: Mapping[str, Any]) -> Tag:
    members = target.get("enum")
    if isinstance(members, list) and members:
        return either([const(each if isinstance(each, str) else dump(each)) for each in members])
    if types == {"boolean"}:
        return _BOOLEAN
    return _TEXT if any_text_fits(target, root) else json_schema(with_definitions(target, root))


def _value(schema: Any, root: Mapping[str, Any], depth: int) -> Tag:
    target = resolve(root, schema["$ref"]) if isinstance(schema, dict) and "$ref" in schema else schema
    if not isinstance(target, dict) or depth > _MAX_DEPTH:
        return any_text(INVOKE_END, BLOCK_END)
    types = declared_types(target, root)
    if types == {"array"}:
        items = _element("item", _value(target.get("items"), root, depth + 1))
        return plus(items) if target.get("minItems") else star(items)
    if types == {"object"} and isinstance(target.get("properties"), dict):
        return _members(target, root, depth)
    if types & {"array", "object"} or not types:
        return any_text(INVOKE_END, BLOCK_END)
    return _scalar(target, types, root)


def element_tag(request: TagRequest) -> dict[str, Any]:
    """At least one invocation in a block."""
    calls = []
    for tool in request.tools:
        if tool.name:
            declared = isinstance(tool.parameters.get("properties"), dict)
            free = any_text(INVOKE_END, invoke_open("")[:-2], BLOCK_END)
            arguments = _members(tool.parameters, tool.parameters, 0) if declared else free
            calls.append(tag(invoke_open(tool.name), arguments, INVOKE_END + "\n"))
    block = tag(BLOCK + "\n", tags(calls, ""), BLOCK_END)
    return after_thought(triggered([BLOCK], [block]), request, "</mm:think>", NAMESPACE)
