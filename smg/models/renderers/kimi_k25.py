"""TypeScript tool declarations of Kimi-K2.5 (the format of the checkpoint's ``tool_declaration_ts.py``).

Kimi-K2.5 renders with its Jinja template, which prints ``tools_ts_str`` when it is defined and the tools as JSON
otherwise.
"""

from __future__ import annotations

from typing import Any

from smg.models.renderers.common import compact_json, function_object

_MAX_DEPTH = 32
_INDENT = "  "
_DEFS = "#/$defs/"
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_TYPES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}


class _NotExpressibleError(Exception):
    """A schema that has no TypeScript form."""


def tools_to_typescript(tools: list[dict[str, Any]] | None) -> str | None:
    """The declarations of ``tools`` as a TypeScript namespace, or None when there is none or a schema cannot be
    expressed."""
    try:
        functions = [
            _function(function_object(tool))
            for tool in tools or ()
            if tool.get("type", "function") == "function" and tool.get("function")
        ]
    except _NotExpressibleError:
        return None
    if not functions:
        return None
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


def template_variables(tools: list[dict[str, Any]] | None) -> dict[str, str]:
    """What the Jinja template of Kimi-K2.5 gets besides the usual variables; replaces template kwargs of the same
    name."""
    declarations = tools_to_typescript(tools)
    return {} if declarations is None else {"tools_ts_str": declarations}


def _function(function: dict[str, Any]) -> str:
    schema = function["parameters"]
    if isinstance(schema, bool):
        schema = {}
    if not isinstance(schema, dict):
        raise _NotExpressibleError
    definitions = schema.get("$defs")
    types = _Types(definitions if isinstance(definitions, dict) else {})
    body = types.object(schema, "", 0)
    interfaces = [types.interface(name, definition) for name, definition in types.definitions.items()]
    if types.refers_to_itself:
        interfaces.insert(0, f"interface parameters {body}")
        body = "parameters"
    declaration = f"type {function['name']} = (_: {body}) => any;"
    return "\n".join(part for part in (*interfaces, _comment(function.get("description"), ""), declaration) if part)


def _comment(text: Any, indent: str) -> str:
    if not isinstance(text, str) or not text:
        return ""
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


def _comments(schema: Any, indent: str) -> list[str]:
    """Description, constraints and default of a schema as comment lines."""
    if not isinstance(schema, dict):
        return []
    lines = [_comment(schema.get("description"), indent)]
    kind = schema.get("type")
    names = _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
    constraints = [f"{name}: {_plain(schema[name])}" for name in names if name in schema]
    lines.append(_comment(", ".join(constraints), indent))
    if "default" in schema:
        default = schema["default"]
        lines.append(f"{indent}// Default: {default if isinstance(default, bool) else compact_json(default)}")
    return [line for line in lines if line]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else compact_json(value)


def _literal(value: Any) -> str:
    """A value of an enum: strings quoted as they are, constants in Python's spelling."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if value is None or isinstance(value, bool) else compact_json(value)


class _Types:
    """Writes the types of one function's parameters. ``refers_to_itself`` is known once they are written."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self.definitions = definitions
        self.refers_to_itself = False

    def interface(self, name: str, schema: Any) -> str:
        description = _comment(schema.get("description"), "") if isinstance(schema, dict) else ""
        declaration = f"interface {name} {self.type(schema, '', 0)}"
        return f"{description}\n{declaration}" if description else declaration

    def type(self, schema: Any, indent: str, depth: int) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if not isinstance(schema, dict):
            raise _NotExpressibleError
        if depth > _MAX_DEPTH or not schema:
            return "any"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if isinstance(schema.get("anyOf"), list):
            return " | ".join(self.type(member, indent, depth + 1) for member in schema["anyOf"])
        if isinstance(schema.get("enum"), list):
            return " | ".join(map(_literal, schema["enum"]))
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_TYPES.get(word, word) for word in kind if isinstance(word, str))
        if kind == "object":
            return self.object(schema, indent, depth)
        if kind == "array":
            return self._array(schema, indent, depth)
        if not isinstance(kind, str):
            raise _NotExpressibleError
        return "number" if kind == "integer" else kind

    def _reference(self, target: Any) -> str:
        if target == "#":
            self.refers_to_itself = True
            return "parameters"
        if not isinstance(target, str) or not target.startswith(_DEFS) or target[len(_DEFS) :] not in self.definitions:
            raise _NotExpressibleError
        return target[len(_DEFS) :]

    def _array(self, schema: dict[str, Any], indent: str, depth: int) -> str:
        if "items" not in schema:
            return "Array<any>"
        items = schema["items"]
        inner = indent + _INDENT
        comments = _comments(items, inner)
        if not comments:
            return f"Array<{self.type(items, indent, depth + 1)}>"
        return "\n".join(("Array<", *comments, inner + self.type(items, inner, depth + 1), indent + ">"))

    def object(self, schema: dict[str, Any], indent: str, depth: int) -> str:
        """An object type: required fields first, each group in code-point order, then ``additionalProperties``."""
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            properties = {}
        required = schema.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        inner = indent + _INDENT
        fields: list[str] = []
        for name in sorted(properties, key=lambda name: (name not in needed, name)):
            mark = "" if name in needed else "?"
            kind = self.type(properties[name], inner, depth + 1)
            fields.append("\n".join((*_comments(properties[name], inner), f"{inner}{name}{mark}: {kind}")))
        if "additionalProperties" in schema:
            extra = schema["additionalProperties"]
            kind = "never" if extra is False else self.type(extra, inner, depth + 1)
            fields.append(f"{inner}[k: string]: {kind}")
        if not fields:
            return "{}"
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}"
