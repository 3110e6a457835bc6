"""``StreamTransport`` on the HTTP/2 machine: one connection to one worker, dialled when a call needs it."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import tempfile
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from smg.engines.base import EngineError
from smg.engines.grpc.channel import DEFAULT_PORTS, TlsOptions, target_of
from smg.engines.grpc.h2.calls import Call
from smg.engines.grpc.h2.frames import ProtocolError
from smg.engines.grpc.h2.headers import request_block, timeout_field
from smg.engines.grpc.h2.machine import MAX_MESSAGE, Machine
from smg.engines.grpc.receiver import Receiver

CONNECT_TIMEOUT = 5.0
CLOSE_TIMEOUT = 1.0
# A connection with open calls on which nothing came for one period is pinged, and given up after one more.
KEEPALIVE = 30.0
# Servers allow one ping in five minutes, and begin anew whenever they send an answer's bytes.
PING_INTERVAL = 300.0
RESUME_DELAY = 0.02
LONG_TIMEOUT = 60.0
KNOWN_BLOCKS = 256
# Timers of the loop may fire this much early.
TIMER_GRAIN = 0.001
WRITE_BUFFER = 1024 * 1024

# The kernel watches connections on which HTTP/2 must keep silent.
_TCP_OPTIONS = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class LeanTransport:
    """Carries the calls of one worker over one HTTP/2 connection (``StreamTransport``).

    ``url`` is a ``grpc://`` or ``grpcs://`` URL. ``keepalive`` in seconds: a silent connection with open calls is found
    dead after two to three times that. ``max_message`` in bytes bounds one answer message: the call of a larger one
    fails with RESOURCE_EXHAUSTED. Raises ``ValueError`` for another URL. With unusable certificates every call fails.
    """

    def __init__(
        self,
        url: str,
        tls: TlsOptions | None = None,
        *,
        keepalive: float = KEEPALIVE,
        connect_timeout: float = CONNECT_TIMEOUT,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        self.target = target_of(url)
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
        self._tls = (tls or TlsOptions()) if parts.scheme == "grpcs" else None
        self._ssl: ssl.SSLContext | None = None
        self.keepalive = keepalive
        self.connect_timeout = connect_timeout
        self.max_message = max_message
        self._blocks: dict[tuple[str, float | None], bytes] = {}
        self._current: _Connection | None = None
        self._connections: set[_Connection] = set()
        self._deadlines: Deadlines | None = None
        self._closed = False

    def start(self, path: str, request: bytes, receiver: Receiver, *, timeout: float | None = None) -> _Stream:
        """See ``StreamTransport``."""
        stream = _Stream(self._block(path, timeout), request, receiver)
        if self._closed:
            error = EngineError("UNAVAILABLE", "the connection to the worker was given up")
            stream.failure = asyncio.get_running_loop().call_soon(stream.failed, error)
            return stream
        if timeout is not None:
            if self._deadlines is None:
                self._deadlines = Deadlines(asyncio.get_running_loop())
            self._deadlines.add(stream, timeout)
        self.place(stream)
        return stream

    def _block(self, path: str, timeout: float | None) -> bytes:
        """The header block of a call. The peer hears of a long timeout in whole seconds, so that blocks repeat."""
        told = math.ceil(timeout) if timeout is not None and timeout >= LONG_TIMEOUT else timeout
        block = self._blocks.get((path, told))
        if block is None:
            block = request_block("https" if self._tls else "http", self.target, path)
            if told is not None:
                block += timeout_field(told)
            if len(self._blocks) >= KNOWN_BLOCKS:
                self._blocks.clear()
            self._blocks[(path, told)] = block
        return block

    def encryption(self) -> ssl.SSLContext | None:
        """What connections are opened with. Raises ``ValueError`` for unusable certificates."""
        if self._tls is not None and self._ssl is None:
            self._ssl = ssl_context(self._tls)
        return self._ssl

    def place(self, stream: _Stream) -> None:
        """Give ``stream`` to a connection that takes calls."""
        connection = self._current
        if connection is None or not connection.usable:
            connection = self._current = _Connection(self)
            self._connections.add(connection)
            connection.dial()
        connection.submit(stream)

    def gone(self, connection: _Connection) -> None:
        """``connection`` has ended."""
        self._connections.discard(connection)
        if self._current is connection:
            self._current = None

    async def close(self) -> None:
        """Drop the running calls without a word to their callbacks and give the connections up."""
        self._closed = True
        endings = [connection.shut() for connection in list(self._connections)]
        if self._deadlines is not None:
            self._deadlines.close()
        if endings:
            await asyncio.wait(endings, timeout=CLOSE_TIMEOUT)


_NOBODY = Receiver()


class _Stream(Call):
    """A call and its ``StreamHandle``."""

    __slots__ = ("connection", "deadlines", "failure", "receiver")

    def __init__(self, block: bytes, request: bytes, receiver: Receiver) -> None:
        super().__init__(block, request)
        self.receiver = receiver
        self.connection: _Connection | None = None
        self.deadlines: Deadlines | None = None
        self.failure: asyncio.Handle | None = None

    def cancel(self) -> None:
        connection = self.connection
        self.release()
        if connection is not None:
            connection.cancel(self)

    def expire(self) -> None:
        """The deadline has passed."""
        receiver = self.receiver
        self.cancel()
        receiver.on_error(EngineError("DEADLINE_EXCEEDED", "Deadline Exceeded"))

    def on_message(self, payload: bytes) -> None:
        self.receiver.on_message(payload)

    def ended(self) -> None:
        receiver = self.receiver
        self.release()
        receiver.on_end()

    def failed(self, error: EngineError) -> None:
        if error.code == "CANCELLED" and self.deadlines is not None and self.deadlines.passed(self):
            # A server that was quicker to see it pass has reset the stream.
            error = EngineError("DEADLINE_EXCEEDED", "Deadline Exceeded")
        receiver = self.receiver
        self.release()
        receiver.on_error(error)

    def release(self) -> None:
        """The call is over: let go of everything, since the receiver holds this handle."""
        self.connection = None
        self.receiver = _NOBODY
        if self.deadlines is not None:
            self.deadlines.remove(self)
            self.deadlines = None
        if self.failure is not None:
            self.failure.cancel()
            self.failure = None


class Deadlines:
    """The deadlines of all streams of a transport, on one timer: nearly all of them end long before theirs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[_Stream, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0  # when the timer fires

    def add(self, stream: _Stream, timeout: float) -> None:
        """Have ``stream`` expire after ``timeout`` seconds."""
        due = self._due[stream] = self._loop.time() + timeout
        stream.deadlines = self
        if self._timer is None or due < self._at:
            self._arm(due)

    def remove(self, stream: _Stream) -> None:
        """The stream is over. The timer stays for the next one that needs it."""
        self._due.pop(stream, None)

    def passed(self, stream: _Stream) -> bool:
        return self._loop.time() >= self._due[stream]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        self.close()
        self._at = at
        self._timer = self._loop.call_later(max(at - self._loop.time(), 0.0), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._loop.time() + TIMER_GRAIN
        for stream in [stream for stream, due in self._due.items() if due <= now]:
            stream.expire()
        if self._due:
            self._arm(min(self._due.values()))


class _Connection(asyncio.Protocol):
    """One connection from its dialling to its end."""

    def __init__(self, owner: LeanTransport) -> None:
        self._owner = owner
        self._machine = Machine(owner.max_message)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._handshake: asyncio.TimerHandle | None = None
        self._keepalive: asyncio.TimerHandle | None = None
        self._resumption: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._over = False
        self._flushing = False
        self._paused = False
        self._heard = True
        self._pinged = float("-inf")

    @property
    def usable(self) -> bool:
        return not (self._over or self._machine.calls.draining)

    # Calls ----------------------------------------------------------------------------------------

    def submit(self, stream: _Stream) -> None:
        stream.connection = self
        self._machine.calls.submit(stream)
        self._flush_soon()
        if self._keepalive is None:
            self._heard = True
            self._keepalive = self._loop.call_later(self._owner.keepalive, self._watch)

    def cancel(self, stream: _Stream) -> None:
        self._machine.calls.cancel(stream)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Write after all of this turn of the loop have said what they want written."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._transport is None or self._over:
            return
        if self._machine.has_output and not self._paused:
            self._transport.write(self._machine.take_output())
        if self._machine.calls.draining:
            self._drain()
        elif self._machine.calls.stalled and self._resumption is None:
            self._resumption = self._loop.call_later(RESUME_DELAY, self._resume)

    def _resume(self) -> None:
        self._resumption = None
        self._machine.calls.resume()
        self._flush()

    def _drain(self) -> None:
        """Let open calls end here and take the others elsewhere."""
        for call in self._machine.calls.take_waiting():
            self._owner.place(cast(_Stream, call))
        if self._machine.calls.idle:
            self._give_up("the worker closed the connection")

    # Beginning and end ----------------------------------------------------------------------------

    def dial(self) -> None:
        self._handshake = self._loop.call_later(
            self._owner.connect_timeout, self._give_up, f"no connection to worker {self._owner.target} in time"
        )
        self._dialling = self._loop.create_task(self._dial())

    async def _dial(self) -> None:
        owner = self._owner
        try:
            tls = owner.encryption()
            name = owner.host if tls else None
            await self._loop.create_connection(lambda: self, owner.host, owner.port, ssl=tls, server_hostname=name)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._give_up(f"failed to connect to worker {owner.target}: {reason}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._over:
            self._transport.abort()
            return
        encryption = transport.get_extra_info("ssl_object")
        if encryption is not None and encryption.selected_alpn_protocol() != "h2":
            self._give_up(f"worker {self._owner.target} does not offer HTTP/2")
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        watched = transport.get_extra_info("socket")
        watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS:
            if hasattr(socket, name):
                watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        words = self._machine.goaway or (str(exc) if exc else "closed by the worker")
        self._give_up(f"connection to worker {self._owner.target} lost: {words}")
        if not self._end.done():
            self._end.set_result(None)

    def _give_up(self, message: str) -> None:
        """End the connection and fail what is on it."""
        if not self._over:
            self._close()
            self._machine.calls.fail("UNAVAILABLE", message)

    def _close(self) -> None:
        self._over = True
        self._owner.gone(self)
        for timer in (self._handshake, self._keepalive, self._resumption):
            if timer is not None:
                timer.cancel()
        if self._transport is None:
            if self._dialling is not None:
                self._dialling.cancel()
            if not self._end.done():
                self._end.set_result(None)
            return
        if self._paused or self._machine.ping_pending:
            # What is written might never leave.
            self._transport.abort()
            return
        if self._machine.has_output:
            self._transport.write(self._machine.take_output())
        self._transport.close()

    def shut(self) -> asyncio.Future[None]:
        """Drop every call unheard and close; done when the socket is closed."""
        if not self._over:
            for call in self._machine.calls.take_all():
                cast(_Stream, call).release()
            self._machine.close()
            self._close()
        return self._end

    # The socket -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._heard = True
        try:
            self._machine.receive(data)
        except ProtocolError as error:
            self._give_up(f"worker {self._owner.target} broke the protocol: {error}")
            return
        if self._handshake is not None and self._machine.calls.ready:
            self._handshake.cancel()
            self._handshake = None
        self._flush()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def _watch(self) -> None:
        """Once per keepalive period while there are calls."""
        machine = self._machine
        self._keepalive = None
        if machine.calls.idle:
            return
        if self._heard or self._transport is None:
            self._heard = False
        elif machine.ping_pending:
            self._give_up(f"worker {self._owner.target} does not answer")
            return
        elif machine.progressed or self._loop.time() - self._pinged >= PING_INTERVAL:
            machine.progressed = False
            self._pinged = self._loop.time()
            machine.ping()
            self._flush()
        self._keepalive = self._loop.call_later(self._owner.keepalive, self._watch)


def ssl_context(options: TlsOptions) -> ssl.SSLContext:
    """The client context of a worker's connection, for HTTP/2 only. Raises ``ValueError`` for unusable PEM data."""
    try:
        context = ssl.create_default_context(cadata=options.ca.decode("ascii") if options.ca else None)
        if options.certificate and options.key:
            # The library reads a client's certificate from files only.
            with tempfile.TemporaryDirectory() as folder:
                certificate, key = Path(folder, "certificate.pem"), Path(folder, "key.pem")
                certificate.write_bytes(options.certificate)
                key.write_bytes(options.key)
                context.load_cert_chain(certificate, key)
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise ValueError(f"unusable TLS certificates: {error}") from error
    context.set_alpn_protocols(["h2"])
    return context
