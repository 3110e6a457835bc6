"""Answers of the Messages API that need no engine: a request for zero tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from smg.api.plan import Answer, Draft

_encode = msgspec.json.Encoder().encode
SSE_HEADERS = [
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("connection", "keep-alive"),
]


def _message(draft: Draft, stop_reason: str | None) -> dict[str, Any]:
    usage = {
        "input_tokens": draft.options["input_tokens"],
        "output_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "service_tier": "standard",
        "inference_geo": "not_available",
    }
    return {
        "id": draft.body_id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": draft.info.id,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "stop_details": None,
        "usage": usage,
        "container": None,
    }


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **data}) + b"\n\n"


def empty_answer(draft: Draft) -> Answer:
    """No content, stopped by the token limit; as a stream when the request asked for one."""
    if not draft.stream:
        return Answer(_encode(_message(draft, "max_tokens")))
    delta = {"stop_reason": "max_tokens", "stop_sequence": None, "stop_details": None, "container": None}
    usage = {
        "output_tokens": 0,
        "input_tokens": draft.options["input_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    body = _event("message_start", {"message": _message(draft, None)})
    body += _event("message_delta", {"delta": delta, "usage": usage})
    return Answer(body + _event("message_stop", {}), headers=list(SSE_HEADERS))
