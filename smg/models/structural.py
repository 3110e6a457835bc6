"""Pieces of structural tags: the constraint language with which a forced call is generated in a model's own format.

The values are plain dictionaries in the form xgrammar reads (``{"format": {"type": ...}}``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smg.models.family import TagRequest

Tag = dict[str, Any]


def const(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def sequence(*elements: Tag) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Tag]) -> Tag:
    return {"type": "or", "elements": list(elements)}


def optional(content: Tag) -> Tag:
    return {"type": "optional", "content": content}


def star(content: Tag) -> Tag:
    """Any number of repetitions, none included."""
    return {"type": "star", "content": content}


def plus(content: Tag) -> Tag:
    """Any number of repetitions, at least one."""
    return {"type": "plus", "content": content}


def any_text(*excludes: str) -> Tag:
    return {"type": "any_text", "excludes": list(excludes)}


def json_schema(schema: Any, style: str = "") -> Tag:
    """A value of ``schema``; ``style`` names the notation when it isn't JSON."""
    content = {"type": "json_schema", "json_schema": schema}
    return {**content, "style": style} if style else content


def tag(begin: str, content: Tag, end: str | list[str]) -> Tag:
    """``content`` between two markers; of several ``end`` markers any will do."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags(each: Sequence[Tag], separator: str) -> Tag:
    """At least one of the tags, with ``separator`` between two."""
    return {"type": "tags_with_separator", "tags": list(each), "separator": separator, "at_least_one": True}


def triggered(triggers: Sequence[str], each: Sequence[Tag]) -> Tag:
    """One of the tags, then free text and further tags: each begins where one of ``triggers`` shows up."""
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(each), "at_least_one": True}


def in_order(parameters: Mapping[str, Any], item: Callable[[str, Any], Tag]) -> Tag:
    """The properties of a schema in declared order, each written as ``item(name, schema)``; others than the required
    ones may be left out."""
    properties = parameters.get("properties")
    required = parameters.get("required")
    items = [
        item(key, each) if isinstance(required, list) and key in required else optional(item(key, each))
        for key, each in (properties.items() if isinstance(properties, dict) else ())
    ]
    return sequence(*items) if items else const("")


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """``schema`` as a root of its own: with the definitions of ``root`` that its references point to."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**definitions, **schema} if isinstance(schema, dict) else schema


def after_thought(calls: Tag, request: TagRequest, close: str, *excludes: str) -> Tag:
    """The complete structural tag for ``calls``. When the prompt ends inside an open thought the model first has to end
    it with ``close``; ``excludes`` keeps the markers of calls (and of thoughts) out of it."""
    if not request.thinking:
        return {"format": calls}
    return {"format": sequence(tag("", any_text(*excludes), close), calls)}


def beginnings(form: Tag) -> tuple[str, ...]:
    """The texts that an answer in this format begins with; none where it may begin with anything."""
    kind = form["type"]
    if kind == "const_string":
        return (form["value"],)
    if kind == "triggered_tags":
        return tuple(form["triggers"])
    if kind == "tag":
        return (form["begin"],) if form["begin"] else beginnings(form["content"])
    if kind == "sequence":
        return beginnings(form["elements"][0])
    inner = form["tags"] if kind == "tags_with_separator" else form.get("elements", ())
    return tuple(text for each in inner for text in beginnings({"type": "tag", **each}))
