"""Cross-origin requests: off unless origins are configured."""

from __future__ import annotations

from typing import Any

from smg.frontend.http import Request

ALLOWED_METHODS = "GET,POST,PATCH,DELETE,OPTIONS"
ALLOWED_HEADERS = "content-type,authorization,anthropic-version,anthropic-beta,traceparent,tracestate"
EXPOSED_HEADERS = "x-request-id,traceparent,tracestate"


class Cors:
    """Answers preflights and marks responses for the configured origins; ``*`` stands for all."""

    def __init__(self, origins: list[str]) -> None:
        self._origins = frozenset(origins)
        self._any = "*" in self._origins
        self.enabled = bool(origins)

    def _allowed(self, request: Request) -> str | None:
        origin = request.headers.get("origin")
        if origin is None:
            return None
        if self._any:
            return "*"
        return origin if origin in self._origins else None

    async def preflight(self, request: Request) -> None:
        """Answer an OPTIONS request."""
        headers = [("vary", "origin")]
        allowed = self._allowed(request)
        if allowed is not None:
            headers += [
                ("access-control-allow-origin", allowed),
                ("access-control-allow-methods", "*" if self._any else ALLOWED_METHODS),
                ("access-control-allow-headers", "*" if self._any else ALLOWED_HEADERS),
                ("access-control-max-age", "3600"),
            ]
        await request.respond(200, headers, b"")

    def wrap(self, request: Request) -> None:
        """Add the headers of an allowed origin to whatever the handler sends."""
        allowed = self._allowed(request)
        if allowed is None or request.method == "OPTIONS":
            return
        extra = [
            (b"access-control-allow-origin", allowed.encode("latin-1")),
            (b"access-control-expose-headers", b"*" if self._any else EXPOSED_HEADERS.encode()),
            (b"vary", b"origin"),
        ]
        send = request.send

        async def with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        request.send = with_headers
