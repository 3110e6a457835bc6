"""The short way of generation requests: the protocol's bytes, and who gets which request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from smg.frontend.admission import Admission
from smg.frontend.app import App
from smg.frontend.direct import DirectExchange
from smg.frontend.server import GatewayProtocol, HttpServer
from smg.messages import Reply, StreamStart
from smg.settings import Settings
from smg.telemetry.metrics import FrontendMetrics

BODY = b'{"model":"m"}'
JSON = [("content-type", "application/json"), ("x-smg-routed-worker-id", "grpc://w:1")]


class Process:
    """What the application and its exchanges need of the frontend process."""

    draining = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = FrontendMetrics()
        self.admission = Admission(settings)
        self.submitted: list[DirectExchange] = []
        self.forgotten: list[DirectExchange] = []
        self.submit = self.submitted.append
        self.forget = self.forgotten.append


class Wire:
    """The transport of a connection."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def take(self) -> tuple[list[str], bytes]:
        """The lines of the head but its date, and the body."""
        head, _, body = self.written.partition(b"\r\n\r\n")
        self.written = b""
        return [line for line in head.decode().split("\r\n") if not line.startswith("date: ")], body


def request(path: str = "/v1/chat/completions", *lines: str, body: bytes = BODY) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", "X-Request-Id: mine", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def served(test: Callable[[GatewayProtocol, Wire, list[DirectExchange], Process], None], **flags: Any) -> None:
    """Run ``test`` with a connection, its wire, the exchanges that were submitted, and the process."""

    async def run() -> None:
        process = Process(Settings(**flags))
        server = HttpServer(App(process), process.settings, process.metrics)  # type: ignore[arg-type]
        server._tick()
        connection, wire = server._connection(), Wire()
        connection.connection_made(wire)  # type: ignore[arg-type]
        test(connection, wire, process.submitted, process)
        server.close()

    asyncio.run(run())


def test_a_complete_answer() -> None:
    def test(connection: GatewayProtocol, wire: Wire, submitted: list[DirectExchange], process: Process) -> None:
        data = request("/v1/messages", "Content-Type: application/json", "Authorization: Bearer x")
        for cut in (data[:9], data[9:-4], data[-4:]):
            connection.data_received(cut)
        [exchange] = submitted
        assert (exchange.path, exchange.body, exchange.request_id) == ("/v1/messages", BODY, "mine")
        assert exchange.headers == {"content-type": "application/json"}
        assert process.admission.inflight == 1
        exchange.reply(Reply(1, 404, JSON, b"{}"))
        lines, body = wire.take()
        assert body == b"{}"
        assert lines == [
            "HTTP/1.1 404 Not Found", "content-type: application/json", "x-smg-routed-worker-id: grpc://w:1",
            "content-length: 2", "x-request-id: mine", "request-id: mine",
        ]  # fmt: skip
        assert (process.admission.inflight, process.forgotten, exchange.body) == (0, [exchange], b"")
        connection.data_received(request())
        assert len(submitted) == 2
        assert not wire.closed

    served(test)


def test_a_stream() -> None:
    def test(connection: GatewayProtocol, wire: Wire, submitted: list[DirectExchange], process: Process) -> None:
        connection.data_received(request("/generate", "Connection: close"))
        [exchange] = submitted
        exchange.start(StreamStart(1, [("content-type", "text/event-stream")], b"one"))
        lines, body = wire.take()
        assert lines[1:] == [
            "content-type: text/event-stream", "x-request-id: mine", "connection: close", "transfer-encoding: chunked",
        ]  # fmt: skip
        assert body == b"3\r\none\r\n"
        exchange.data(b"two", 0.0)
        connection.pause_writing()
        exchange.data(b"three", 0.0)
        assert wire.written == b"3\r\ntwo\r\n"
        connection.resume_writing()
        exchange.end(b"", "")
        assert wire.written == b"3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"
        assert wire.closed
        assert process.admission.inflight == 0

    served(test)


def test_a_client_that_leaves() -> None:
    def test(connection: GatewayProtocol, wire: Wire, submitted: list[DirectExchange], process: Process) -> None:
        connection.data_received(request()[:-2])
        assert (submitted, process.admission.inflight) == ([], 1)
        connection.connection_lost(None)
        assert (submitted, process.admission.inflight) == ([], 0)
        assert [exchange.gone for exchange in process.forgotten] == [True]

    served(test)


def test_a_client_that_does_not_read() -> None:
    def test(connection: GatewayProtocol, wire: Wire, submitted: list[DirectExchange], process: Process) -> None:
        connection.data_received(request())
        [exchange] = submitted
        exchange.start(StreamStart(1, [], b"one"))
        connection.pause_writing()
        exchange.data(b"x" * 2000, 0.0)
        assert wire.aborted
        assert (exchange.status, exchange.error_code, exchange.gone) == (499, "client_closed_request", True)
        exchange.end(b"late", "")
        connection.connection_lost(None)
        assert process.admission.inflight == 0

    served(test, stream_buffer_bytes=1000)


def test_what_is_not_simple_is_the_applications() -> None:
    def test(connection: GatewayProtocol, wire: Wire, submitted: list[DirectExchange], process: Process) -> None:
        seen: list[str] = []
        connection._start_asgi_task = lambda cycle, app: seen.append(cycle.scope["path"])  # type: ignore[method-assign]
        simple = request()
        for data in (
            request("/v1/chat/completions?x=1"),
            request("/v1/tokenize"),
            request("/v1/chat/completions", "Expect: 100-continue"),
            request(body=b"x" * 101),
            simple.replace(b"POST", b"PUT"),
            simple.replace(b"HTTP/1.1", b"HTTP/1.0"),
            simple.replace(b"Content-Length: 13", b"Transfer-Encoding: chunked"),
        ):
            seen.clear()
            fresh, fresh_wire = another(connection), Wire()
            fresh.connection_made(fresh_wire)  # type: ignore[arg-type]
            fresh._start_asgi_task = lambda cycle, app: seen.append(cycle.scope["path"])  # type: ignore[method-assign]
            fresh.data_received(data)
            assert (len(seen), submitted) == (1, []), data
        connection.data_received(simple + request("/generate"))
        assert len(submitted) == 1
        assert len(connection.pipeline) == 1
        submitted[0].reply(Reply(1, 200, JSON, b"{}"))
        assert seen[-1] == "/generate"

    served(test, max_payload_size=100)


def another(connection: GatewayProtocol) -> GatewayProtocol:
    """Another connection of the same server."""
    return GatewayProtocol(config=connection.config, server_state=connection.server_state, app_state={})
