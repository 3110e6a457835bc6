"""Envelopes of refusals, per API family."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smg.api.errors import ApiError, anthropic_type, invalid, openai_type, refused, render_error

ERROR = ApiError(404, "some_code", "text", "field", gateway=True)


@pytest.mark.parametrize(
    ("path", "expect"),
    [
        (
            "/v1/chat/completions",
            {"error": {"type": "invalid_request_error", "code": "some_code", "message": "text", "param": "field"}},
        ),
        (
            "/v1/messages",
            {"type": "error", "error": {"type": "not_found_error", "message": "text"}, "request_id": "req"},
        ),
        (
            "/v1/messages/count_tokens",
            {"type": "error", "error": {"type": "not_found_error", "message": "text"}, "request_id": "req"},
        ),
        ("/v1/tokenize", {"error": {"message": "text", "type": "some_code"}}),
        ("/v1/tokenizers/x", {"error": {"message": "text", "type": "some_code"}}),
        ("/parse/reasoning", {"error": "text", "success": False}),
        ("/workers/x", {"error": "text", "code": "some_code"}),
        (
            "/generate",
            {"error": {"type": "invalid_request_error", "code": "some_code", "message": "text", "param": "field"}},
        ),
    ],
)
def test_envelope_goes_by_path(path: str, expect: dict[str, Any]) -> None:
    status, headers, body = render_error(ERROR, path, "req")
    assert status == 404
    assert json.loads(body) == expect
    assert ("content-type", "application/json") in headers


def test_validation_and_gateway_errors_differ_in_key_order_and_header() -> None:
    _, headers, body = render_error(invalid("c", "text", "f"), "/v1/completions", "req")
    assert list(json.loads(body)["error"]) == ["message", "type", "param", "code"]
    assert json.loads(body)["error"]["message"] == "f: text"
    assert "x-smg-error-code" not in dict(headers)
    _, headers, body = render_error(refused("c", "text"), "/v1/completions", "req")
    assert list(json.loads(body)["error"]) == ["type", "code", "message", "param"]
    assert dict(headers)["x-smg-error-code"] == "c"


def test_cross_field_errors_name_no_param() -> None:
    error = invalid("c", "text")
    assert (error.param, error.message) == (None, "__all__: text")


def test_plain_errors_are_text_on_every_path() -> None:
    status, headers, body = render_error(ApiError(422, "c", "wrong shape", plain=True), "/v1/embeddings", "req")
    assert (status, body) == (422, b"wrong shape")
    assert dict(headers)["content-type"].startswith("text/plain")


def test_extra_headers_are_kept() -> None:
    error = ApiError(429, "c", "later", headers=(("retry-after", "2"),), gateway=True)
    assert dict(render_error(error, "/v1/completions", "req")[1])["retry-after"] == "2"


OPENAI = {
    "invalid_request_error": (400, 401, 404, 405, 409, 413, 424),
    "permission_error": (403,),
    "rate_limit_error": (429,),
    "server_error": (500, 501, 502, 503, 504),
}
ANTHROPIC = {
    "invalid_request_error": (400, 405, 409),
    "authentication_error": (401,),
    "permission_error": (403,),
    "not_found_error": (404,),
    "request_too_large": (413,),
    "rate_limit_error": (429,),
    "api_error": (500, 501, 502),
    "overloaded_error": (503,),
    "timeout_error": (504,),
}


def test_types_by_status() -> None:
    assert {kind: {openai_type(status) for status in statuses} for kind, statuses in OPENAI.items()} == {
        kind: {kind} for kind in OPENAI
    }
    assert {kind: {anthropic_type(status) for status in statuses} for kind, statuses in ANTHROPIC.items()} == {
        kind: {kind} for kind in ANTHROPIC
    }
