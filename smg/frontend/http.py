"""Small helpers around one ASGI request: headers, body with a limit, plain responses, the request id."""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from smg.frontend.server import GatewayProtocol

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[str, str]

access_log = logging.getLogger("smg.access")

_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)

DEFAULT_REQUEST_ID_HEADERS = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
_VISIBLE_ASCII = re.compile(r"[\x21-\x7e]{1,128}\Z")


class BodyTooLargeError(Exception):
    """The body exceeds ``--max-payload-size``."""


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


class Request:
    """One ASGI request. ``template`` is the route's pattern, used as metrics label."""

    __slots__ = (
        "error_code",
        "headers",
        "method",
        "on_head",
        "path",
        "receive",
        "request_id",
        "scope",
        "send",
        "status",
        "template",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
        self.request_id = ""
        self.template = "other"
        self.status = 0
        self.error_code = ""
        self.on_head: Callable[[Request], None] | None = None

    @property
    def connection(self) -> GatewayProtocol | None:
        connection: GatewayProtocol | None = self.scope.get("smg.connection")
        return connection

    async def read_body(self, limit: int) -> bytes:
        """The whole body. Raises ``BodyTooLargeError`` and ``ClientGoneError``."""
        length = self.headers.get("content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise BodyTooLargeError
        message = await self.receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            if len(body) > limit:
                raise BodyTooLargeError
            return body
        parts = [body]
        size = len(body)
        while message.get("more_body"):
            message = await self.receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise BodyTooLargeError
        return b"".join(parts)

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Send the response head. The request id is added here, for Messages also under that API's own name."""
        self.status = status
        if self.on_head is not None:
            self.on_head(self)
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        request_id = self.request_id.encode("latin-1")
        raw += [(name, request_id) for name in request_id_headers(self.path)]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def respond(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Send a complete response."""
        await self.start(status, [*headers, ("content-length", str(len(body)))])
        await self.send({"type": "http.response.body", "body": body})

    async def respond_text(self, status: int, text: str, headers: Iterable[Header] = ()) -> None:
        await self.respond(status, [("content-type", "text/plain; charset=utf-8"), *headers], text.encode())

    async def respond_json(self, status: int, value: Any, headers: Iterable[Header] = ()) -> None:
        await self.respond(status, [("content-type", "application/json"), *headers], orjson.dumps(value))


def request_id_headers(path: str) -> tuple[bytes, ...]:
    """Names under which an answer carries the request id: for Messages also that API's own."""
    return (b"x-request-id", b"request-id") if path.startswith("/v1/messages") else (b"x-request-id",)


def log_access(method: str, path: str, status: int, request_id: str, begun: float) -> None:
    """One line of the access log; ``begun`` is the wall-clock time of the request."""
    if access_log.isEnabledFor(logging.INFO):
        ms = round((time.time() - begun) * 1000, 1)
        access_log.info("%s %s %d", method, path, status, extra={"request_id": request_id, "ms": ms})


def choose_request_id(headers: dict[str, str], names: Iterable[str], prefix: str) -> str:
    """The client's request id where it is sound, else ``prefix`` and 24 alphanumerics."""
    for name in names:
        value = headers.get(name)
        if value is not None:
            if _VISIBLE_ASCII.match(value):
                return value
            break
    return f"{prefix}{_random.getrandbits(96):024x}"
