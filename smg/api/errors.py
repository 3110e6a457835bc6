"""Refusals and their envelopes.

Every way of saying no to a client is an ``ApiError``. The envelope is chosen by the path, because each API family has
its own:
OpenAI (``{"error": {message, type, param, code}}``), Anthropic (``{"type": "error", "error": {type, message},
"request_id"}``),
the tokenizer routes (``{"error": {message, type}}``), the parser routes (``{"error": text, "success": false}``), the
worker routes
(``{"error": text, "code": "UPPER_SNAKE"}``), and plain text for JSON extractor failures and control-plane
authentication.
"""

from __future__ import annotations

from typing import Any

import msgspec

JSON_HEADERS = ("content-type", "application/json")
TEXT_HEADERS = ("content-type", "text/plain; charset=utf-8")

_OPENAI_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """A request that is refused.

    ``status`` is the HTTP status, ``code`` the machine-readable reason, ``param`` the dotted and indexed path of the
    request
    field at fault. ``type`` is derived from the status when it is None. ``gateway`` marks errors that the gateway
    found after
    the body was decoded and validated (routing, rendering, dispatch): only those carry the ``x-smg-error-code`` header.
    ``plain`` errors are answered as text whatever the path. ``headers`` are added to the answer.
    ``details`` is a part of the Anthropic envelope that its clients act upon.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        type: str | None = None,  # noqa: A002 - the envelope's own word
        *,
        gateway: bool = False,
        plain: bool = False,
        headers: tuple[tuple[str, str], ...] = (),
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.type = type
        self.gateway = gateway
        self.plain = plain
        self.headers = headers
        self.details = details

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


def invalid(code: str, message: str, param: str | None = None) -> ApiError:
    """A 400 that body validation found: a field (``param``) or, with no ``param``, a combination of fields."""
    return ApiError(400, code, f"{param or '__all__'}: {message}", param)


def refused(code: str, message: str, *, status: int = 400, param: str | None = None) -> ApiError:
    """A refusal found after validation (404 ``model_not_found``, 400 ``context_length_exceeded`` ...)."""
    return ApiError(status, code, message, param, gateway=True)


def openai_type(status: int) -> str:
    """The ``type`` of an OpenAI error object for this status."""
    return _OPENAI_TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")


def anthropic_type(status: int) -> str:
    """The ``type`` of an Anthropic error object for this status."""
    return _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")


def openai_body(error: ApiError) -> bytes:
    """The OpenAI envelope. Key order follows who found the fault, as clients of either have always seen it."""
    kind = error.type or openai_type(error.status)
    if error.gateway:
        inner = {"type": kind, "code": error.code, "message": error.message, "param": error.param}
    else:
        inner = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return _encode({"error": inner})


def anthropic_body(error: ApiError, request_id: str) -> bytes:
    """The Anthropic envelope; the code travels in a header only."""
    inner: dict[str, Any] = {"type": error.type or anthropic_type(error.status), "message": error.message}
    if error.details is not None:
        inner["details"] = error.details
    return _encode({"type": "error", "error": inner, "request_id": request_id})


def _body(error: ApiError, path: str, request_id: str) -> bytes:
    if path.startswith("/v1/messages"):
        return anthropic_body(error, request_id)
    simple: dict[str, Any]
    if path.startswith(("/v1/tokenize", "/v1/detokenize")):  # covers /v1/tokenizers too
        simple = {"error": {"message": error.message, "type": error.type or error.code}}
    elif path.startswith("/parse/"):
        simple = {"error": error.message, "success": False}
    elif path.startswith("/workers"):
        simple = {"error": error.message, "code": error.code}
    else:
        return openai_body(error)
    return _encode(simple)


def render_error(error: ApiError, path: str, request_id: str) -> tuple[int, list[tuple[str, str]], bytes]:
    """``(status, headers, body)`` of the answer to a request on ``path``."""
    if error.plain:
        return error.status, [TEXT_HEADERS, *error.headers], error.message.encode()
    headers = [JSON_HEADERS, *error.headers]
    if error.gateway:
        headers.append(("x-smg-error-code", error.code))
    return error.status, headers, _body(error, path, request_id)
