"""The path of each API, where only the API's name is at hand (errors are shaped by path)."""

from __future__ import annotations

_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "classify": "/v1/classify",
}


def path_of_api(api: str) -> str:
    """``"chat"`` -> ``"/v1/chat/completions"`` and so on; unknown names get the chat path's error shape."""
    return _PATHS.get(api, "/v1/chat/completions")
