"""How a stream that has already begun says that it failed, per API."""

from __future__ import annotations

import orjson

DONE = b"data: [DONE]\n\n"


def stream_error_frames(path: str, message: str) -> bytes:
    """The last frames of a broken stream on ``path``: the error, and the end marker where the API has one."""
    text = f"Stream error: {message}"
    if path.startswith("/v1/messages"):
        event = {"type": "error", "error": {"type": "api_error", "message": text}}
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"
    return b"data: " + orjson.dumps({"error": {"message": text, "type": "stream_error"}}) + b"\n\n" + DONE
