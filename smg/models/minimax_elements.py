"""The tool calls of MiniMax-M3: nested elements whose tags all carry a namespace token (chat template of the model).

Written here with ``NS`` for the token ``]<]minimax[>[``::

    NS<tool_call>
    NS<invoke name="NAME">NS<KEY>textNS</KEY>NS<LIST>NS<item>1NS</item>NS</LIST>NS</invoke>
    NS</tool_call>

A block counts only when it is closed, so its calls are sent when its end is seen. Because every tag follows the
namespace token, other angle brackets in a value are data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from smg.models.family import ToolCall, ToolSpec
from smg.models.machine import ToolMachine
from smg.models.scan import Markers
from smg.models.typed_values import ValueStyle, declared_types, quote, resolve, to_json, write_value

NAMESPACE = "]<]minimax[>["
BLOCK, BLOCK_END = NAMESPACE + "<tool_call>", NAMESPACE + "</tool_call>"
INVOKE_END = NAMESPACE + "</invoke>"

_INVOKE = NAMESPACE + "<invoke"
_STYLE = ValueStyle(infer="scalar")
_MAX_DEPTH = 64
_TEXT_KEY = "$text"

_OPENERS = Markers([BLOCK])
_ENDS = Markers([BLOCK_END])
_NOT_BLANK = re.compile(r"\S")
_TAG = re.compile(r"<(/?)([^<>]*)>")
_INVOKE_TAG = re.compile(r"""invoke\s+name\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))\s*""")
_COMPOSED = ("oneOf", "anyOf", "allOf")
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)


class _Tag(NamedTuple):
    """One tag and the text behind it. ``name`` "" stands for a namespace token without a tag."""

    closes: bool
    name: str
    text: str


def _tags(block: str) -> list[_Tag]:
    """The tags of a block; text in front of the first one is left out."""
    found = []
    for piece in block.split(NAMESPACE)[1:]:
        tag = _TAG.match(piece)
        if tag is None:
            found.append(_Tag(False, "", piece))
        else:
            found.append(_Tag(bool(tag.group(1)), tag.group(2), piece[tag.end() :]))
    return found


class _Schemas:
    """What the schema of one tool says about its elements. Answers are remembered: a schema may be large."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._children: dict[tuple[int, str], Any] = {}
        self._containers: dict[int, str] = {}

    def _target(self, schema: Any) -> Any:
        for _ in range(8):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = resolve(self._root, schema["$ref"])
        return schema

    def container(self, schema: Any) -> str:
        """ "array", "object" or "": the container that ``schema`` declares."""
        known = self._containers.get(id(schema))
        if known is None:
            known = self._containers[id(schema)] = self._container(schema, 0)
        return known

    def _container(self, schema: Any, depth: int) -> str:
        schema = self._target(schema)
        if not isinstance(schema, dict) or depth > 8:
            return ""
        declared = schema.get("type")
        kinds = [kind for kind in declared if kind != "null"] if isinstance(declared, list) else [declared]
        if len(kinds) == 1 and kinds[0] in ("array", "object"):
            return str(kinds[0])
        structural = [key for key in schema if key not in _ANNOTATIONS]
        if len(structural) != 1 or structural[0] not in _COMPOSED:
            return ""
        branches = schema[structural[0]]
        if not isinstance(branches, list) or (structural[0] == "allOf" and len(branches) != 1):
            return ""
        others = [each for each in branches if not isinstance(each, dict) or each.get("type") != "null"]
        return self._container(others[0], depth + 1) if len(others) == 1 else ""

    def child(self, schema: Any, name: str) -> Any:
        """Schema of the element ``name`` inside an element of ``schema``; None when it declares none."""
        key = (id(schema), name)
        if key not in self._children:
            self._children[key] = self._search(schema, name)
        return self._children[key]

    def _search(self, schema: Any, name: str) -> Any:
        """The first schema that declares the child: this one, or a branch of a composed one, depth first."""
        is_list = self.container(schema) == "array"
        seen: set[int] = set()
        todo = [schema]
        while todo:
            node = self._target(todo.pop())
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            properties = node.get("properties")
            if is_list and "items" in node:
                return node["items"]
            if not is_list and isinstance(properties, dict) and name in properties:
                return properties[name]
            branches = [each for key in _COMPOSED for each in _list(node.get(key))]
            todo.extend(reversed(branches))
        return None

    def leaf(self, text: str, schema: Any) -> str:
        """JSON text of an element without children."""
        if not text or text.isspace():
            container = self.container(schema)
            if container:
                return "[]" if container == "array" else "{}"
        return to_json(text, declared_types(schema, self._root), _STYLE)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class _Malformed(NamedTuple):
    """Where an element turned out not to be closed properly."""

    at: int


class _Reader:
    """Reads the elements of one invocation from ``tags``. Methods return (JSON text, index of the next tag)."""

    def __init__(self, tags: Sequence[_Tag], schemas: _Schemas) -> None:
        self._tags = tags
        self._schemas = schemas

    def arguments(self, at: int, schema: Any) -> tuple[str, int] | _Malformed:
        """The parameters of the invocation whose tag is ``at``. Other text between them ends the list."""
        tags = self._tags
        members: dict[str, list[str]] = {}
        text = tags[at].text
        at += 1
        while at < len(tags):
            tag = tags[at]
            if tag.closes and tag.name == "invoke":
                return _object(members), at + 1
            if text and not text.isspace():
                at += 1
                continue
            if tag.closes or not tag.name:
                return _Malformed(at)
            read = self._element(at, self._schemas.child(schema, tag.name), None, 0)
            if isinstance(read, _Malformed):
                return read
            value, at = read
            members.setdefault(tag.name, []).append(value)
            text = tags[at - 1].text
        return _Malformed(at)

    def _element(self, at: int, schema: Any, parent: str | None, depth: int) -> tuple[str, int] | _Malformed:
        tags, schemas = self._tags, self._schemas
        name, first = tags[at].name, tags[at].text
        texts = [first]
        members: list[tuple[str, str]] = []
        at += 1
        while at < len(tags) and depth < _MAX_DEPTH:
            tag = tags[at]
            if tag.closes and tag.name == name:
                return self._value(schema, members, texts), at + 1
            if tag.closes:
                # An empty container may lack its closing tag; the next one is its parent's then.
                empty = not members and (not first or first.isspace()) and schemas.container(schema)
                if not (empty and tag.name == parent):
                    return _Malformed(at)
                return schemas.leaf("", schema), at
            if not tag.name:
                return _Malformed(at)
            read = self._element(at, schemas.child(schema, tag.name), name, depth + 1)
            if isinstance(read, _Malformed):
                return read
            value, at = read
            members.append((tag.name, value))
            if tags[at - 1].closes and tags[at - 1].name == tag.name:
                texts.append(tags[at - 1].text)
        return _Malformed(at)

    def _value(self, schema: Any, members: list[tuple[str, str]], texts: list[str]) -> str:
        if not members:
            return self._schemas.leaf(texts[0], schema)
        if self._schemas.container(schema) == "array":
            return "[" + ",".join(value for _, value in members) + "]"
        grouped: dict[str, list[str]] = {}
        for key, value in members:
            grouped.setdefault(key, []).append(value)
        text = "".join(texts).strip()
        if text:
            key = _TEXT_KEY
            while key in grouped:
                key = "$" + key
            grouped[key] = [quote(text)]
        return _object(grouped)


def _object(members: dict[str, list[str]]) -> str:
    """JSON object; a name that occurred several times has a list of its values."""
    pairs = (
        f"{quote(key)}:{values[0] if len(values) == 1 else '[' + ','.join(values) + ']'}"
        for key, values in members.items()
    )
    return "{" + ",".join(pairs) + "}"


class ElementParser(ToolMachine):
    """Incremental as far as the format allows: text is sent at once, a block when it is closed."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        super().__init__()
        self._parameters = {tool.name: tool.parameters for tool in tools}
        self._schemas: dict[str, _Schemas] = {}
        self._tail = ""
        self._step: Callable[[str, int], int] = self._outside

    def _run(self, text: str) -> None:
        if self._tail:
            text = self._tail + text
            self._tail = ""
        pos, size = 0, len(text)
        while pos < size:
            pos = self._step(text, pos)

    def _end(self) -> None:
        tail, self._tail = self._tail, ""
        if self._step == self._outside:
            self._text(tail)
        elif not self._calls:
            self._text(self._take_held() + tail)
        self._step = self._outside

    def _outside(self, text: str, pos: int) -> int:
        at, marker = _OPENERS.search(text, pos)
        self._text(text[pos:at])
        if not marker:
            self._tail = text[at:]
            return len(text)
        self._held.append(marker)
        self._step = self._before_invoke
        return at + len(marker)

    def _before_invoke(self, text: str, pos: int) -> int:
        """An opener is ordinary text unless an invocation follows."""
        found = _NOT_BLANK.search(text, pos)
        at = found.start() if found is not None else len(text)
        self._held.append(text[pos:at])
        if text.startswith(_INVOKE, at):
            self._step = self._in_block
        elif _INVOKE.startswith(text[at:]):
            self._tail = text[at:]
            return len(text)
        else:
            self._text(self._take_held())
            self._step = self._outside
        return at

    def _in_block(self, text: str, pos: int) -> int:
        at, marker = _ENDS.search(text, pos)
        self._held.append(text[pos:at])
        if not marker:
            self._tail = text[at:]
            return len(text)
        block = self._take_held()
        calls = self._read(block)
        for name, arguments in calls:
            self._whole_call(name, arguments)
        if not calls:
            self._text(block + marker)
        self._step = self._outside
        return at + len(marker)

    def _read(self, block: str) -> list[tuple[str, str]]:
        tags = _tags(block)
        calls = []
        at = 0
        while at < len(tags):
            found = _INVOKE_TAG.fullmatch(tags[at].name) if not tags[at].closes else None
            name = next((group for group in found.groups() if group), "").strip() if found is not None else ""
            if not name:
                at += 1
                continue
            schema = self._parameters.get(name)
            schemas = self._schemas.get(name)
            if schemas is None:
                schemas = self._schemas[name] = _Schemas(schema or {})
            read = _Reader(tags, schemas).arguments(at, schema)
            if isinstance(read, _Malformed):
                at = max(at + 1, read.at)
            else:
                calls.append((name, read[0]))
                at = read[1]
        return calls


# --------------------------------------------------------------------------------------------------
# Writing


def invoke_open(name: str) -> str:
    return f'{_INVOKE} name="{name}">'


def _write(name: str, value: Any) -> str:
    if isinstance(value, dict):
        body = _write_all(value.items())
    elif isinstance(value, list):
        body = _write_all(("item", each) for each in value)
    else:
        body = write_value(value, NAMESPACE, _STYLE)
    return f"{NAMESPACE}<{name}>{body}{NAMESPACE}</{name}>"


def _write_all(members: Iterable[tuple[str, Any]]) -> str:
    return "".join(_write(name, value) for name, value in members)


def write_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """The output of a model that says ``text`` and makes ``calls`` in one block."""
    if not calls:
        return text
    invokes = "".join(f"{invoke_open(call.name)}{_write_all(call.arguments.items())}{INVOKE_END}\n" for call in calls)
    return f"{text}{BLOCK}\n{invokes}{BLOCK_END}"
