"""The short way of a generation request: from the connection to the ring and back, without a task.

A POST to a generation route that needs nothing special is an exchange from its head on. The parser's callbacks fill in
the body and submit it, the ring's messages write the answer. What is not so simple (a wait for admission, a refused
key, CORS, a body without a length, ``expect``, pipelining behind an unfinished answer) is left to the application.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from smg.frontend.auth import SERVING
from smg.frontend.cork import chunk
from smg.frontend.exchange import DONE, STREAMING, WAITING, Exchange
from smg.frontend.http import choose_request_id, log_access, request_id_headers
from smg.messages import Reply, StreamStart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smg.frontend.app import App
    from smg.frontend.server import GatewayProtocol
    from smg.telemetry.cells import Cell, HistogramCell

KNOWN_HEADS = 256
LENGTH_DIGITS = 15

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class DirectRoute:
    """What requests to one path have in common."""

    __slots__ = ("duration", "id_head", "id_prefix", "path", "requests")

    def __init__(self, path: str, id_prefix: str, requests: Cell, duration: HistogramCell) -> None:
        self.path = path
        self.id_prefix = id_prefix
        # Header lines with a gap for the request id.
        self.id_head = b"".join(name + b": %(id)b\r\n" for name in request_id_headers(path))
        self.requests = requests
        self.duration = duration


class Direct:
    """Opens exchanges for the connections of one frontend."""

    def __init__(self, app: App, paths: Iterable[str], id_prefixes: dict[str, str]) -> None:
        self.process = app.process
        self.metrics = app.process.metrics
        self.admission = app.process.admission
        self._auth = app.auth
        self._limit = app.settings.max_payload_size
        self._timeout = app.settings.request_timeout_secs
        self._buffer_limit = app.settings.stream_buffer_bytes
        self._id_headers = app.id_headers
        self._ids = [(name.encode("latin-1"), name) for name in app.id_headers]
        self._forwarded = [(name.encode("latin-1"), name) for name in sorted(app.forwarded)]
        self._heads: dict[tuple[tuple[str, str], ...], tuple[bytes, bool, str]] = {}
        requests, duration = self.metrics.requests, self.metrics.duration
        self._routes = {
            path.encode(): DirectRoute(
                path, id_prefixes.get(path, "req-"), requests.child("POST", path), duration.child("POST", path)
            )
            for path in ([] if app.cors.enabled else paths)
        }

    def open(self, connection: GatewayProtocol) -> DirectExchange | None:
        """The exchange of the request whose head is complete; None when it is the application's."""
        route = self._routes.get(connection.url)
        if route is None or self.process.draining:
            return None
        fields = dict(reversed(connection.headers))  # the first of several counts
        length = fields.get(b"content-length", b"")
        if not length.isdigit() or len(length) > LENGTH_DIGITS or int(length) > self._limit:
            return None
        key = fields.get(b"authorization")
        if self._auth.check(SERVING, "POST", None if key is None else key.decode("latin-1")) is not None:
            return None
        admission = self.admission
        if not admission.try_enter():
            return None
        self.metrics.admission_allowed(admission.inflight, admission.waiting)
        route.requests.inc()
        given = {name: fields[raw].decode("latin-1") for raw, name in self._ids if raw in fields}
        request_id = choose_request_id(given, self._id_headers, route.id_prefix)
        headers = {name: fields[raw].decode("latin-1") for raw, name in self._forwarded if raw in fields}
        now = time.time()
        deadline = now + self._timeout if self._timeout else 0.0
        return DirectExchange(self, route, request_id, headers, connection, self._buffer_limit, now, deadline)

    def head(self, headers: list[tuple[str, str]]) -> tuple[bytes, bool, str]:
        """Header lines of an answer, whether they close the connection, and the error code among them."""
        key = tuple(headers)
        known = self._heads.get(key)
        if known is None:
            if len(self._heads) >= KNOWN_HEADS:
                self._heads.clear()
            lines = "".join(f"{name.lower()}: {_UNPRINTABLE.sub('', value)}\r\n" for name, value in headers)
            closes = any(name.lower() == "connection" and "close" in value.lower() for name, value in headers)
            known = self._heads[key] = (lines.encode("latin-1"), closes, dict(headers).get("x-smg-error-code", ""))
        return known

    def finished(self, exchange: DirectExchange) -> None:
        """Nothing more will be written."""
        self.process.forget(exchange)
        admission, metrics, path = self.admission, self.metrics, exchange.path
        admission.leave()
        metrics.admission_left(admission.inflight, admission.waiting)
        metrics.request_finished(path, exchange.status, exchange.error_code)
        log_access("POST", path, exchange.status, exchange.request_id, exchange.received)


class _NoEvent:
    """Stands where a request of the application has an event: nobody waits here."""

    def set(self) -> None:
        pass


class DirectExchange(Exchange):
    """An exchange that writes its answer itself.

    For uvicorn's protocol it is the request in progress (its ``cycle``): ``disconnected``, ``keep_alive``,
    ``message_event`` and ``response_complete`` belong to that role."""

    __slots__ = ("direct", "disconnected", "keep_alive", "parts", "response_complete", "route", "status")

    message_event: ClassVar[_NoEvent] = _NoEvent()

    def __init__(
        self, direct: Direct, route: DirectRoute, request_id: str, headers: dict[str, str],
        connection: GatewayProtocol, buffer_limit: int, received: float, deadline: float,
    ) -> None:  # fmt: skip
        super().__init__(0, route.path, request_id, headers, b"", connection, buffer_limit, received, deadline)
        self.direct = direct
        self.route = route
        self.parts: list[bytes] = []
        self.status = 0
        self.keep_alive = True
        self.disconnected = False
        self.response_complete = False

    def body_complete(self) -> None:
        """The request is complete: send it around the ring."""
        if self.state == WAITING:
            parts, self.parts = self.parts, []
            self.body = parts[0] if len(parts) == 1 else b"".join(parts)
            self.direct.process.submit(self)

    def start(self, message: StreamStart) -> None:
        if self.state == WAITING:
            self.state = STREAMING
            self.body = b""
            self.last_write = time.time()
            first = chunk(message.body) if message.body else b""
            self._write(self._head_of(200, message.headers, None) + first)

    def end(self, body: bytes, error_code: str) -> None:
        if self.state == STREAMING:
            self.state = DONE
            if self.pending:
                body = self.take_pending() + body
            self.error_code = self.error_code or error_code
            self._write((chunk(body) if body else b"") + b"0\r\n\r\n")
            self._finish()

    def _headed(self, message: Reply | StreamStart | None) -> None:
        if isinstance(message, Reply):
            body = message.body
            self._write(self._head_of(message.status, message.headers, len(body)) + body)

    def _head_of(self, status: int, headers: list[tuple[str, str]], length: int | None) -> bytes:
        """The head of the answer; a stream has no length."""
        self.status = status
        self.route.duration.observe(time.time() - self.received)
        lines, closes, self.error_code = self.direct.head(headers)
        keep_alive = self.keep_alive
        if closes:
            self.keep_alive = False
        connection = self.connection
        return b"%b%b%b%b%b%b%b\r\n" % (
            STATUS_LINE[status],
            connection.default_head() if connection is not None else b"",
            lines,
            b"" if length is None else b"content-length: %d\r\n" % length,
            self.route.id_head % {b"id": self.request_id.encode("latin-1")},
            b"" if keep_alive or closes else b"connection: close\r\n",
            b"transfer-encoding: chunked\r\n" if length is None else b"",
        )

    def _write(self, data: bytes) -> None:
        if self.corked is not None:
            self.corked.write_now(data)

    def _finish(self) -> None:
        connection = self.connection
        if self.gone:
            if self.status and connection is not None:
                connection.transport.abort()  # a stream that is cut off must not look complete
            self.status, self.error_code = 499, "client_closed_request"
        self.response_complete = True
        self.direct.finished(self)
        if connection is not None and not self.gone:
            if not self.keep_alive:
                connection.transport.close()
            connection.on_response_complete()
        self.connection = self.corked = None  # which refers to the last exchange until the next one comes
        self.body = b""
