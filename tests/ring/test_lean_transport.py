"""The lean HTTP/2 transport against grpcio's servers, over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from certificates import self_signed
from sim_worker import ENDLESS, LIMIT, Collector, eventually, free_port, start, worker

from smg.engines.base import EngineError
from smg.engines.grpc.channel import TlsOptions
from smg.engines.grpc.client import GrpcWorkerClient
from smg.engines.grpc.codecs import CODECS
from smg.engines.grpc.h2 import LeanTransport
from smg.engines.grpc.receiver import Receiver
from smg.simengine.core import SimOptions

Method = Callable[[bytes, Any], AsyncIterator[bytes]]
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    return lambda test: request.param(asyncio.wait_for(test(), LIMIT))


class Heard(Receiver):
    """What one call was told."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[bytes] = []
        self.ends = 0
        self.errors: list[EngineError] = []
        self.first = asyncio.Event()
        self.closed = asyncio.Event()

    def on_message(self, payload: bytes) -> None:
        self.messages.append(payload)
        self.first.set()

    def on_end(self) -> None:
        self.ends += 1
        self.closed.set()

    def on_error(self, error: EngineError) -> None:
        self.errors.append(error)
        self.closed.set()

    @property
    def codes(self) -> list[str]:
        return [error.code for error in self.errors]


def call(
    transport: LeanTransport, method: str, request: bytes = b"", timeout: float | None = None
) -> tuple[Heard, Any]:
    heard = Heard()
    path = f"/test.Worker/{method}"
    return heard, transport.start(path, request, heard, timeout=timeout)


async def answer(transport: LeanTransport, method: str, request: bytes = b"", timeout: float | None = None) -> Heard:
    heard, _ = call(transport, method, request, timeout)
    await heard.closed.wait()
    return heard


class Service:
    """A server whose methods say what they see."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.cancelled = 0
        self.peers: set[str] = set()
        self.deadlines: list[float | None] = []

    async def digest(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"%d %s" % (len(request), hashlib.sha256(request).hexdigest().encode())

    async def repeat(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """``count size`` in the request: that many messages of that many bytes."""
        count, size = map(int, request.split())
        for index in range(count):
            yield index.to_bytes(4, "big") * (size // 4)

    async def forever(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """One message, then silence for the seconds in the request, and one more."""
        self.running += 1
        self.most = max(self.most, self.running)
        self.peers.add(context.peer())
        self.deadlines.append(context.time_remaining())
        try:
            yield b"first"
            await asyncio.sleep(float(request or b"3600"))
            yield b"last"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def refuse(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            yield b"message"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full: 100% größer")


@asynccontextmanager
async def serving(
    service: Service,
    *,
    options: tuple[tuple[str, int], ...] = UNLIMITED,
    address: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[tuple[grpc.aio.Server, int]]:
    server = grpc.aio.server(options=options)
    methods = {name: getattr(service, name) for name in ("digest", "repeat", "forever", "refuse")}
    handlers = {name: grpc.unary_stream_rpc_method_handler(method) for name, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Worker", handlers),))
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(url: str, tls: TlsOptions | None = None, **options: Any) -> AsyncIterator[LeanTransport]:
    transport = LeanTransport(url, tls, **options)
    try:
        yield transport
    finally:
        await transport.close()


class Relay:
    """A TCP relay in front of a server: it can change the server, freeze, and cut its connections."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.frozen = False
        self.connections = 0
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers += [writer, far_writer]
        for pair in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._copy(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if not self.frozen:
                    writer.write(data)
        except ConnectionError:
            pass
        writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)


@asynccontextmanager
async def relayed(port: int) -> AsyncIterator[Relay]:
    relay = Relay(port)
    await relay.open()
    try:
        yield relay
    finally:
        await relay.close()


Run = Callable[[Callable[[], Awaitable[None]]], None]


# ---- streams


def test_streams_share_one_connection(run: Run) -> None:
    async def test() -> None:
        service = Service()
        async with serving(service) as (_, port), connected(f"grpc://127.0.0.1:{port}") as transport:
            calls = [call(transport, "forever", b"0.01")[0] for _ in range(200)]
            assert not any(heard.messages or heard.closed.is_set() for heard in calls)  # nothing from inside start
            for heard in calls:
                await heard.closed.wait()
            assert all((heard.messages, heard.ends, heard.errors) == ([b"first", b"last"], 1, []) for heard in calls)
            assert len(service.peers) == 1

    run(test)


def test_statuses(run: Run) -> None:
    async def test() -> None:
        async with serving(Service()) as (_, port), connected(f"grpc://127.0.0.1:{port}") as transport:
            for count in (0, 3):
                heard = await answer(transport, "refuse", b"%d" % count)
                assert heard.messages == [b"message"] * count
                (error,) = heard.errors
                assert (error.code, error.message) == ("RESOURCE_EXHAUSTED", "queue is full: 100% größer")
            assert (await answer(transport, "nothing")).codes == ["UNIMPLEMENTED"]
            assert (await answer(transport, "repeat", b"no")).codes == ["UNKNOWN"]  # the handler raised
            assert (await answer(transport, "repeat", b"0 0")).ends == 1

    run(test)


def test_big_requests(run: Run) -> None:
    async def test() -> None:
        async with serving(Service()) as (_, port), connected(f"grpc://127.0.0.1:{port}") as transport:
            requests = [b"", b"x", *(bytes([index]) * (1 << 20) for index in range(8)), b"whale" * 4_000_000]
            calls = [call(transport, "digest", request)[0] for request in requests]
            for heard, request in zip(calls, requests, strict=True):
                await heard.closed.wait()
                assert heard.messages == [b"%d %s" % (len(request), hashlib.sha256(request).hexdigest().encode())]

    run(test)


def test_big_answers(run: Run) -> None:
    async def test() -> None:
        async with (
            serving(Service()) as (_, port),
            connected(f"grpc://127.0.0.1:{port}", max_message=24_000_000) as transport,
        ):
            for count, size in ((1, 24_000_000), (1200, 40_000), (5000, 16)):
                heard = await answer(transport, "repeat", b"%d %d" % (count, size))
                assert (heard.ends, heard.errors) == (1, [])
                assert heard.messages == [index.to_bytes(4, "big") * (size // 4) for index in range(count)]
            assert (await answer(transport, "repeat", b"1 24000004")).codes == ["RESOURCE_EXHAUSTED"]
            assert (await answer(transport, "repeat", b"1 4")).ends == 1

    run(test)


def test_more_calls_than_the_worker_takes_at_once(run: Run) -> None:
    async def test() -> None:
        service = Service()
        options = (*UNLIMITED, ("grpc.max_concurrent_streams", 5))
        async with (
            serving(service, options=options) as (_, port),
            connected(f"grpc://127.0.0.1:{port}") as transport,
        ):
            calls = [call(transport, "forever", b"0.02")[0] for _ in range(40)]
            for heard in calls:
                await heard.closed.wait()
            assert all((heard.ends, heard.errors) == (1, []) for heard in calls)
            assert service.most <= 5
            assert len(service.peers) == 1
            held = [call(transport, "forever")[1] for _ in range(5)]
            waiting, handle = call(transport, "forever")
            assert (await answer(transport, "forever", timeout=0.1)).codes == ["DEADLINE_EXCEEDED"]
            handle.cancel()
            last, _ = call(transport, "forever", b"0")
            held[0].cancel()
            await last.closed.wait()
            assert (last.ends, waiting.messages) == (1, [])

    run(test)


def test_cancel_reaches_the_worker(run: Run) -> None:
    async def test() -> None:
        service = Service()
        async with serving(service) as (_, port), connected(f"grpc://127.0.0.1:{port}") as transport:
            heard, handle = call(transport, "forever")
            other, _ = call(transport, "forever", b"0.3")
            unsent, early = call(transport, "forever")
            early.cancel()
            await heard.first.wait()
            handle.cancel()
            handle.cancel()
            await eventually(lambda: service.cancelled == 1)
            await other.closed.wait()
            assert (other.ends, heard.messages, heard.ends, heard.errors) == (1, [b"first"], 0, [])
            assert (unsent.messages, unsent.ends, unsent.errors) == ([], 0, [])

    run(test)


def test_deadline(run: Run) -> None:
    async def test() -> None:
        service = Service()
        async with serving(service) as (_, port), connected(f"grpc://127.0.0.1:{port}") as transport:
            began = time.monotonic()
            heard = await answer(transport, "forever", timeout=0.3)
            assert (heard.codes, heard.messages) == (["DEADLINE_EXCEEDED"], [b"first"])
            assert 0.29 <= time.monotonic() - began < 2
            assert 0 < (service.deadlines[0] or 0) <= 0.3
            await eventually(lambda: service.cancelled == 1)
            assert (await answer(transport, "forever", timeout=0)).codes == ["DEADLINE_EXCEEDED"]
            assert (await answer(transport, "forever", b"0", timeout=1800)).ends == 1
            assert 1790 < (service.deadlines[-1] or 0) <= 1800

    run(test)


# ---- trouble with connections


def test_nobody_listens_and_then_somebody(run: Run) -> None:
    async def test() -> None:
        port = free_port()
        async with connected(f"grpc://127.0.0.1:{port}") as transport:
            for _ in range(2):
                began = time.monotonic()
                calls = [call(transport, "forever", b"0")[0] for _ in range(3)]
                for heard in calls:
                    await heard.closed.wait()
                    assert heard.codes == ["UNAVAILABLE"]
                    assert f"127.0.0.1:{port}" in heard.errors[0].message
                assert time.monotonic() - began < 1
            async with serving(Service(), address=f"127.0.0.1:{port}"):
                assert (await answer(transport, "forever", b"0")).ends == 1
        assert (await answer(LeanTransport("grpc://host.invalid:1"), "forever")).codes == ["UNAVAILABLE"]

    run(test)


def test_lost_connections(run: Run) -> None:
    async def test() -> None:
        async with (
            serving(Service()) as (_, port),
            relayed(port) as relay,
            connected(f"grpc://127.0.0.1:{relay.port}") as transport,
        ):
            calls = [call(transport, "forever")[0] for _ in range(3)]
            for heard in calls:
                await heard.first.wait()
            relay.cut()
            for heard in calls:
                await heard.closed.wait()
                assert (heard.codes, heard.messages) == (["UNAVAILABLE"], [b"first"])
            assert (await answer(transport, "forever", b"0")).ends == 1
            assert relay.connections == 2

    run(test)


def test_a_stopping_worker_ends_its_streams_and_gets_no_new_ones(run: Run) -> None:
    async def test() -> None:
        old, new = Service(), Service()
        async with (
            serving(old) as (server, port),
            serving(new) as (_, new_port),
            relayed(port) as relay,
            connected(f"grpc://127.0.0.1:{relay.port}") as transport,
        ):
            running, _ = call(transport, "forever", b"0.5")
            cut_short, _ = call(transport, "forever")
            await running.first.wait()
            await cut_short.first.wait()
            relay.target = new_port
            stopping = asyncio.create_task(server.stop(1.0))
            while not new.peers:  # until the worker's goodbye has been read
                heard = await answer(transport, "forever", b"0")
                assert heard.ends or heard.codes[0] in ("UNAVAILABLE", "CANCELLED")
            await running.closed.wait()
            assert (running.messages, running.ends) == ([b"first", b"last"], 1)
            await cut_short.closed.wait()
            assert len(cut_short.codes) == 1
            assert cut_short.codes[0] in ("UNAVAILABLE", "CANCELLED")
            await stopping
            assert relay.connections == 2

    run(test)


def test_workers_that_retire_connections(run: Run) -> None:
    async def test() -> None:
        service = Service()
        options = (("grpc.max_connection_age_ms", 150), ("grpc.max_connection_age_grace_ms", 10_000))
        async with (
            serving(service, options=options) as (_, port),
            connected(f"grpc://127.0.0.1:{port}") as transport,
        ):
            while len(service.peers) < 3:
                calls = [call(transport, "forever", b"0.03")[0] for _ in range(20)]
                for heard in calls:
                    await heard.closed.wait()
                    assert (heard.ends, heard.errors) == (1, [])

    run(test)


@pytest.mark.parametrize("hello", [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"\xff" * 100, b""])
def test_servers_that_are_no_http2(run: Run, hello: bytes) -> None:
    async def test() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(3)
            writer.write(hello)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with connected(f"grpc://127.0.0.1:{port}", connect_timeout=0.3) as transport:
            assert (await answer(transport, "forever")).codes == ["UNAVAILABLE"]
            assert (await answer(transport, "forever", timeout=0.05)).codes == [
                "DEADLINE_EXCEEDED" if not hello else "UNAVAILABLE"
            ]
        server.close()

    run(test)


def test_close_ends_calls_silently(run: Run) -> None:
    async def test() -> None:
        service = Service()
        async with serving(service) as (_, port):
            transport = LeanTransport(f"grpc://127.0.0.1:{port}")
            heard, handle = call(transport, "forever", timeout=60)
            await heard.first.wait()
            await transport.close()
            await eventually(lambda: service.cancelled == 1)
            handle.cancel()
            assert (heard.ends, heard.errors) == (0, [])
            late, late_handle = call(transport, "forever")
            late_handle.cancel()
            assert (await answer(transport, "forever")).codes == ["UNAVAILABLE"]
            assert late.errors == []
            dialling = LeanTransport(f"grpc://127.0.0.1:{port}")
            unheard, _ = call(dialling, "forever")
            await dialling.close()
            assert (unheard.messages, unheard.errors) == ([], [])

    run(test)


# ---- keepalive


def test_silence_is_no_death(run: Run) -> None:
    """A server with grpcio's defaults closes the connection of a client that pings too often."""

    async def test() -> None:
        service = Service()
        async with (
            serving(service) as (_, port),
            connected(f"grpc://127.0.0.1:{port}", keepalive=0.05) as transport,
        ):
            for _ in range(6):  # answers between the silences allow a ping each
                heard = await answer(transport, "forever", b"0.3")
                assert (heard.messages, heard.errors) == ([b"first", b"last"], [])
            heard = await answer(transport, "forever", b"1.2")
            assert (heard.messages, heard.errors) == ([b"first", b"last"], [])
            assert len(service.peers) == 1

    run(test)


def test_a_dead_worker_is_found(run: Run) -> None:
    async def test() -> None:
        async with (
            serving(Service()) as (_, port),
            relayed(port) as relay,
            connected(f"grpc://127.0.0.1:{relay.port}", keepalive=0.1) as transport,
        ):
            heard, _ = call(transport, "forever")
            await heard.first.wait()
            relay.frozen = True
            began = time.monotonic()
            await heard.closed.wait()
            assert heard.codes == ["UNAVAILABLE"]
            assert "does not answer" in heard.errors[0].message
            assert time.monotonic() - began < 2
            relay.frozen = False
            assert (await answer(transport, "forever", b"0")).ends == 1

    run(test)


# ---- addresses and TLS


def test_ipv6(run: Run) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")

    async def test() -> None:
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 loopback here")
        async with (
            serving(Service(), address="[::1]:0") as (_, port),
            connected(f"grpc://[::1]:{port}") as transport,
        ):
            assert (await answer(transport, "forever", b"0")).ends == 1

    run(test)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, Path]:
    """Key and certificate for localhost, and the folder with key.pem and cert.pem."""
    folder = self_signed(tmp_path_factory.mktemp("tls"))
    return (folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes(), folder


def test_tls(run: Run, signed: tuple[bytes, bytes, Path]) -> None:
    key, certificate, _ = signed
    credentials = grpc.ssl_server_credentials([(key, certificate)], certificate, require_client_auth=True)

    async def test() -> None:
        async with serving(Service(), address="localhost:0", credentials=credentials) as (_, port):
            url = f"grpcs://localhost:{port}"
            async with connected(url, TlsOptions(certificate, certificate, key)) as transport:
                assert (await answer(transport, "digest", b"x" * 300_000)).ends == 1
                assert (await answer(transport, "repeat", b"100 10000")).ends == 1
            for bad in (None, TlsOptions(certificate)):  # an unknown authority; no certificate of the client
                async with connected(url, bad) as transport:
                    assert (await answer(transport, "digest")).codes == ["UNAVAILABLE"]
            async with connected(f"grpcs://127.0.0.1:{port}", TlsOptions(certificate, certificate, key)) as transport:
                assert (await answer(transport, "digest")).codes == ["UNAVAILABLE"]  # not the name in the certificate
            async with connected(f"grpc://localhost:{port}") as transport:
                assert (await answer(transport, "digest")).codes == ["UNAVAILABLE"]

    run(test)


def test_tls_without_http2(run: Run, signed: tuple[bytes, bytes, Path]) -> None:
    _, certificate, folder = signed

    async def test() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        server = await asyncio.start_server(lambda _, writer: None, "localhost", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        async with connected(f"grpcs://localhost:{port}", TlsOptions(certificate)) as transport:
            (error,) = (await answer(transport, "digest")).errors
            assert (error.code, "does not offer HTTP/2" in error.message) == ("UNAVAILABLE", True)
        server.close()

    run(test)


def test_unusable_certificates(run: Run) -> None:
    async def test() -> None:
        for tls in (TlsOptions(ca=b"no pem"), TlsOptions(ca=b"\xff"), TlsOptions(certificate=b"no", key=b"pem")):
            async with connected("grpcs://localhost:1", tls) as transport:
                (error,) = (await answer(transport, "digest")).errors
                assert (error.code, "unusable TLS certificates" in error.message) == ("UNAVAILABLE", True)

    run(test)


# ---- as the transport of a worker's client


@pytest.mark.parametrize("kind", tuple(CODECS))
def test_engines_of_every_kind(run: Run, kind: str) -> None:
    async def test() -> None:
        async with worker(kind, SimOptions(step_ms=1)) as (engine, url):
            client = GrpcWorkerClient(url, kind, transport=LeanTransport(url))
            streamed, _ = start(client, stream=True)
            whole, _ = start(client, stream=False, name="r-2")
            endless, stopped = start(client, stream=True, sampling=ENDLESS, name="r-3")
            for sink in (streamed, whole):
                await sink.closed.wait()
            assert streamed.ids() == whole.ids() != []
            assert (streamed.ends, len(whole.deltas)) == (1, 1)
            await endless.first.wait()
            stopped.abort()
            await eventually(lambda: not engine.loads()[0].running)
            assert isinstance(endless, Collector)
            assert (endless.ends, endless.errors) == (0, [])
            await client.close()

    run(test)
