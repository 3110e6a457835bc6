"""JSON bodies to typed requests, and every way that can fail.

``BodyDecoder`` wraps a typed ``msgspec`` decoder: one pass over the bytes on the good path. Only when that pass fails
is the
failure examined: which rule was broken (``code``), where (``param``, or line and column for text that is not JSON).

Two styles of refusal exist. The "api" style answers 400 with a JSON envelope. The "extractor" style answers in plain
text:
415 without a JSON content type, 400 for text that is not JSON, 422 for JSON of another shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from smg.api.errors import ApiError

T = TypeVar("T")

MAX_DEPTH = 128

_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_PATH = re.compile(r" - at `(.*)`$", re.DOTALL)
_OFFSET = re.compile(r" \(byte (\d+)\)$")
_BOUND = re.compile(r"Expected `int` (>=|<=)")
_GOT = re.compile(r"Expected .*got `(\w+)`")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]|(\[\.\.\.\])")
_NO_STRUCTURE = bytes(set(range(256)) - set(b'{}[]"'))
_AS_BRACES = bytes.maketrans(b"[]", b"{}")
# A pattern is twice as fast as ``bytes.count`` where the name is rare.
_MODEL = re.compile(rb'"model"')
_STRING = re.compile(rb'"[^"]*"')
_JSON_NAMES = {str: "str", bool: "bool", int: "int", float: "float", type(None): "null", list: "array", dict: "object"}


def _without_escapes(body: bytes) -> bytes:
    """The text without its backslashes and the characters they escape."""
    pieces = body.split(b"\\")
    kept = [pieces[0]]
    escaped = False
    for piece in pieces[1:]:
        if escaped or not piece:  # an empty piece: the backslash is escaped by another one
            kept.append(piece)
            escaped = not escaped
        else:
            kept.append(piece[1:])
    return b"".join(kept)


def nesting_exceeds(body: bytes, limit: int) -> bool:
    """Whether brackets outside strings nest deeper than ``limit``. Also right, if meaningless, for text that is not
    JSON.

    Works by whole-buffer byte operations, because it looks at every body before the parser does: count brackets, and
    only if there are many, drop escapes and strings, then peel ``{}`` (all brackets as braces) from the inside once
    per level."""
    # Dropping a rare byte takes a tenth of the time that counting it does.
    if 2 * len(body) - len(body.replace(b"{", b"")) - len(body.replace(b"[", b"")) <= limit:
        return False
    if b"\\" in body:
        body = _without_escapes(body)
    left = body.translate(_AS_BRACES, _NO_STRUCTURE).replace(b'""', b"")
    if b'"' in left:
        left = _STRING.sub(b"", left)
    for _ in range(limit):
        peeled = left.replace(b"{}", b"")
        if len(peeled) == len(left):
            break
        left = peeled
    return left.count(b"{") > limit or b"{}" in left


def is_json_content_type(value: str | None) -> bool:
    """``application/json`` or ``application/<anything>+json``, parameters and case ignored."""
    if value == "application/json":
        return True
    if not value:
        return False
    essence = value.partition(";")[0].strip().lower()
    return essence == "application/json" or (essence.startswith("application/") and essence.endswith("+json"))


def screened(body: bytes, headers: Mapping[str, str]) -> bool:
    """Whether a body passes what ``BodyDecoder`` checks beside its shape."""
    return (
        is_json_content_type(headers.get("content-type"))
        and not nesting_exceeds(body, MAX_DEPTH)
        and not _names_two_models(body)
    )


def _position(body: bytes, message: str) -> tuple[int, int]:
    """Line and column (both from 1) of a syntax error; column 0 for an empty body."""
    found = _OFFSET.search(message)
    if found:
        offset = int(found[1])
    else:
        try:
            body.decode()
            offset = len(body) - 1
        except UnicodeDecodeError as error:
            offset = error.start
    line = body.count(b"\n", 0, max(offset, 0)) + 1
    return line, offset - body.rfind(b"\n", 0, max(offset, 0))


def _steps(path: str) -> list[tuple[str, str, str]]:
    return _STEP.findall(path.removeprefix("$"))


def _resolve(body: bytes, path: str, got: str) -> tuple[str, Any]:
    """The request path as clients write it (``messages[0].role``), and the value found there.

    The decoder does not name the key of a map entry; it is the first entry whose JSON type is the one it complained
    about.
    """
    value: Any = json.loads(body)
    text = ""
    for name, index, entry in _steps(path):
        if entry:
            keys = list(value) if isinstance(value, dict) else []
            name = next((key for key in keys if _JSON_NAMES[type(value[key])] == got), keys[0] if keys else "")
        if index:
            text += f"[{index}]"
            value = value[int(index)] if isinstance(value, list) and int(index) < len(value) else None
        else:
            text += f".{name}" if text else name
            value = value.get(name) if isinstance(value, dict) else None
    return text, value


def _names_two_models(body: bytes) -> bool:
    """Whether the top-level object has ``model`` twice: what one reader checked, another would run."""
    if len(_MODEL.findall(body)) < 2:
        return False
    outer: list[tuple[str, Any]] = []

    def keep_last(pairs: list[tuple[str, Any]]) -> None:
        outer[:] = pairs

    try:
        json.loads(body, object_pairs_hook=keep_last)
    except (ValueError, RecursionError):
        return False
    return sum(key == "model" for key, _ in outer) > 1


class BodyDecoder(Generic[T]):
    """Decodes request bodies of one API into ``model``.

    ``style`` is "api" or "extractor". ``unions`` names the nodes whose inside is not spelled out in ``param``: a
    pattern that matches such a node maps to the member names that are still reported below it. A field that is
    missing inside a union is reported as ``<node>.<field>``. ``opaque`` nodes are all-or-nothing: anything wrong
    inside is ``invalid_type`` of the node. ``special`` maps a param to the code it gets instead of the general one.
    """

    def __init__(
        self,
        model: type[T],
        *,
        style: str = "api",
        unions: Mapping[str, tuple[str, ...]] | None = None,
        special: Mapping[str, str] | None = None,
        opaque: tuple[str, ...] = (),
    ) -> None:
        self._decode = msgspec.json.Decoder(model).decode
        self._style = style
        self._unions = [(re.compile(pattern), keep) for pattern, keep in (unions or {}).items()]
        self._special = dict(special or {})
        self._opaque = opaque

    def decode(self, body: bytes, headers: Mapping[str, str]) -> T:
        """The typed request. Raises ``ApiError`` and nothing else."""
        if not is_json_content_type(headers.get("content-type")):
            raise self._no_json()
        if nesting_exceeds(body, MAX_DEPTH):
            raise self._syntax("recursion limit exceeded", 1, 1)
        try:
            request = self._decode(body)
        except msgspec.ValidationError as error:
            raise self._shape(body, str(error)) from None
        except msgspec.DecodeError as error:
            message = str(error)
            raise self._syntax(_OFFSET.sub("", message), *_position(body, message)) from None
        except (RecursionError, ValueError):
            raise self._syntax("value out of range", 1, 1) from None
        if _names_two_models(body):
            raise self._shape_error("json_parse_error", "duplicate field `model`", None)
        return request

    def _no_json(self) -> ApiError:
        if self._style == "extractor":
            return ApiError(
                415, "json_parse_error", "Expected request with `Content-Type: application/json`", plain=True
            )
        return ApiError(400, "json_parse_error", "Missing Content-Type: application/json header")

    def _syntax(self, text: str, line: int, column: int) -> ApiError:
        where = f"Failed to parse the request body as JSON: {text} at line {line} column {column}"
        if self._style == "extractor":
            return ApiError(400, "invalid_json", where, plain=True)
        return ApiError(400, "invalid_json", f"JSON syntax error: {where}")

    def _shape_error(self, code: str, text: str, param: str | None) -> ApiError:
        detail = f"{param}: {text}" if param else text
        where = f"Failed to deserialize the JSON body into the target type: {detail}"
        if self._style == "extractor":
            return ApiError(422, code, where, plain=True)
        return ApiError(400, code, f"Invalid JSON data: {where}", param)

    def _shape(self, body: bytes, message: str) -> ApiError:
        found = _PATH.search(message)
        text = message[: found.start()] if found else message
        if text == "Number out of range":
            return self._syntax("number out of range", *_position(body, text))
        got = _GOT.match(text)
        try:
            path, value = _resolve(body, found[1], got[1] if got else "") if found else ("", None)
        except (ValueError, RecursionError):
            # Validation runs ahead of the end of the text: what follows the offending value may not be JSON at all.
            path, value = re.sub(r"^\$\.?", "", found[1]) if found else "", None
        code, member = _code(text, value)
        node = next((name for name in self._opaque if path.startswith((name, f"{name}."))), None)
        if node is not None:
            return self._shape_error("invalid_type", text, node)
        param = self._param(path, member)
        code = self._special.get(param or "", code)
        return self._shape_error(code, text, param)

    def _param(self, path: str, member: str) -> str | None:
        full = f"{path}.{member}" if path and member else path or member
        for pattern, keep in self._unions:
            node = pattern.match(full)
            if node and len(node[0]) < len(full):
                last = full.rpartition(".")[2]
                if member and last == member:
                    return f"{node[0]}.{member}"
                return f"{node[0]}.{last}" if full[node.end() + 1 :] in keep else node[0]
        return full or None


def _code(text: str, value: Any) -> tuple[str, str]:
    """The code for a decoder complaint, and the name of the member it is about when that is not part of the path."""
    missing = _MISSING.match(text)
    if missing:
        return "missing_required_parameter", missing[1]
    unknown = _UNKNOWN.match(text)
    if unknown:
        return "unknown_parameter", unknown[1]
    bound = _BOUND.match(text)
    if bound:
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return "invalid_type", ""  # no 64-bit integer: JSON readers commonly take it for a float
        return ("integer_below_min_value" if bound[1] == ">=" else "invalid_value"), ""
    if text.startswith(("Invalid enum value", "Invalid value")):
        return "invalid_value", ""
    return "invalid_type", ""
