"""The HTTP/1.1 server of a frontend: uvicorn's httptools protocol on uvloop, with what a data plane needs on top.

``GatewayProtocol`` adds to uvicorn's protocol:

* the client's disappearance is told to the running exchange at once (no task waits in ``receive`` for it);
* a direct way to write stream bytes from the inbox callback, without waking a task per token;
* a limit on the time a request head may take, and on its size;
* the short way of generation requests (``smg.frontend.direct``), which does without uvicorn's objects;
* timers that stay from one request to the next.

uvicorn keeps what it does well: parsing, keep-alive, pipelining, flow control, TLS.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from smg.frontend.cork import CorkedTransport
from smg.frontend.direct import Direct, DirectExchange
from smg.frontend.exchange import Exchange
from smg.settings import Settings
from smg.telemetry.metrics import FrontendMetrics

if TYPE_CHECKING:
    from smg.frontend.app import App

log = logging.getLogger("smg.frontend.server")

MAX_HEAD_BYTES = 64 * 1024
# Timers of the loop may fire this much early.
TIMER_GRAIN = 0.002


class GatewayProtocol(HttpToolsProtocol):
    """One client connection."""

    head_timeout: float = 30.0
    metrics: FrontendMetrics | None = None
    direct: Direct | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchange: Exchange | None = None
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None

    # Connection ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.corked = CorkedTransport(transport, self.loop)  # type: ignore[arg-type]
        super().connection_made(self.corked)  # type: ignore[arg-type]
        if self.metrics is not None:
            self.metrics.connections_active.inc()
        self._arm_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.corked.lost()
        if self.metrics is not None:
            self.metrics.connections_active.dec()
        self._disarm_head_timer()
        exchange, self.exchange = self.exchange, None
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        if exchange is not None:
            exchange.client_gone()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.corked.paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.corked.paused = False
        if self.exchange is not None:
            self.exchange.writable()

    # Request head --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")
            elif self._head_timer is None:
                self._arm_head_timer()

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._disarm_head_timer()
        exchange = self._open_directly()
        if exchange is not None:
            self.cycle = exchange  # type: ignore[assignment]
            self.exchange = exchange
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        self.scope["smg.connection"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def _open_directly(self) -> DirectExchange | None:
        parser, cycle = self.parser, self.cycle
        if self.direct is None or self.expect_100_continue or not (cycle is None or cycle.response_complete):
            return None
        if parser.get_method() != b"POST" or parser.get_http_version() != "1.1" or parser.should_upgrade():
            return None
        exchange = self.direct.open(self)
        if exchange is not None:
            exchange.keep_alive = parser.should_keep_alive()
        return exchange

    def on_body(self, body: bytes) -> None:
        cycle: object = self.cycle
        if isinstance(cycle, DirectExchange):
            cycle.parts.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        cycle: object = self.cycle
        if isinstance(cycle, DirectExchange):
            cycle.body_complete()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.exchange = None
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_idle(self.timeout_keep_alive)

    def _arm_head_timer(self) -> None:
        if self.head_timeout > 0:
            self._head_timer = self.loop.call_later(self.head_timeout, self._head_timed_out)

    def _disarm_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if self._in_head and not self.transport.is_closing():
            if self.metrics is not None:
                self.metrics.connection_timeout("header_read")
            self.transport.close()

    # One timer watches for idleness as long as the connection lives; requests only change what it finds.

    def _wait_idle(self, secs: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(secs, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None or self.transport.is_closing():
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > TIMER_GRAIN:
            self._wait_idle(left)
            return
        if self.metrics is not None:
            self.metrics.connection_timeout("idle")
        super().timeout_keep_alive_handler()

    def _refuse(self, status: bytes) -> None:
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()

    # Answers -------------------------------------------------------------------------------------

    def default_head(self) -> bytes:
        """Header lines of every answer."""
        return b"".join([b"%b: %b\r\n" % pair for pair in self.server_state.default_headers])


class HttpServer:
    """Serves one listening socket until ``close``."""

    def __init__(self, app: App, settings: Settings, metrics: FrontendMetrics) -> None:
        idle = settings.idle_connection_timeout_secs
        self._config = uvicorn.Config(
            app, http=GatewayProtocol, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,
            server_header=False,
            proxy_headers=False, timeout_keep_alive=idle if idle > 0 else 10**9,
            ssl_certfile=settings.tls_cert_path, ssl_keyfile=settings.tls_key_path,
        )  # fmt: skip
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._clock: asyncio.TimerHandle | None = None
        GatewayProtocol.head_timeout = float(settings.header_read_timeout_secs)
        GatewayProtocol.metrics = metrics
        GatewayProtocol.direct = app.direct

    async def start(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._tick()
        self._server = await loop.create_server(self._connection, sock=sock, ssl=self._config.ssl, backlog=2048)

    def _connection(self) -> GatewayProtocol:
        return GatewayProtocol(config=self._config, server_state=self._state, app_state={})

    def _tick(self) -> None:
        self._state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tick)

    def stop_listening(self) -> None:
        """Refuse new connections; idle ones are closed, busy ones end with their response."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._state.connections):
            connection.shutdown()

    def close(self) -> None:
        self.stop_listening()
        if self._clock is not None:
            self._clock.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()
