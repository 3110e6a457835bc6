"""One HTTP exchange of the data plane: the client's side of a stream on the ring.

The exchange is a small state machine fed by three parties: the ring (``reply``, ``start``, ``data``, ``end``), the
connection (``client_gone``, ``writable``) and the clock (``keepalive``). Stream bytes go from the inbox callback to the
transport without a task switch. Subclasses say what becomes of the head and of the end: ``AwaitedExchange`` tells a
coroutine that handles the request, ``smg.frontend.direct`` writes them itself.

States: WAITING (nothing sent) -> STARTING (head known, coroutine not run yet) -> STREAMING -> DONE.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from smg.ipc import Inbox
from smg.messages import Reply, StreamData, StreamStart

if TYPE_CHECKING:
    from smg.frontend.cork import CorkedTransport
    from smg.frontend.server import GatewayProtocol

WAITING, STARTING, STREAMING, DONE = range(4)


@mypyc_attr(allow_interpreted_subclasses=True)
class Exchange:
    """See the module's text. ``owner`` is the detok process that owns the stream (-1: none yet)."""

    __slots__ = (
        "attempts", "body", "buffer_limit", "connection", "corked", "deadline", "error_code", "gone", "headers",
        "last_write", "owner", "path", "pending", "pending_bytes", "received", "request_id", "seq", "state",
        "tokenizer",
    )  # fmt: skip

    def __init__(
        self, seq: int, path: str, request_id: str, headers: dict[str, str], body: bytes,
        connection: GatewayProtocol | None, buffer_limit: int, received: float, deadline: float,
    ) -> None:  # fmt: skip
        # First what every token needs, side by side.
        self.state = WAITING
        self.pending_bytes = 0
        self.last_write = received
        self.corked: CorkedTransport | None = None if connection is None else connection.corked
        self.pending: list[bytes] = []
        self.seq = seq
        self.path = path
        self.request_id = request_id
        self.headers = headers
        self.body = body
        self.connection = connection
        self.buffer_limit = buffer_limit
        self.received = received
        self.deadline = deadline
        self.tokenizer = (-1, -1)
        self.owner = -1
        self.attempts = 0
        self.gone = False
        self.error_code = ""

    # From the ring -------------------------------------------------------------------------------

    def reply(self, message: Reply) -> None:
        """The whole answer."""
        if self.state == WAITING:
            self.state = DONE
            self._headed(message)
            self._finish()

    def start(self, message: StreamStart) -> None:
        """Head and first bytes of a stream."""
        if self.state == WAITING:
            self.state = STARTING
            self._headed(message)

    def data(self, body: bytes, now: float, more: bool = False) -> None:
        """More bytes of the stream. ``more``: further ones are waiting in the inbox."""
        if self.state == STREAMING and not self.pending_bytes:
            self.last_write = now
            if self.corked is not None and self.corked.write_chunk(body, more):
                return
        if self.state in (STARTING, STREAMING):
            self.pending.append(body)
            self.pending_bytes += len(body)
            if self.pending_bytes > self.buffer_limit:
                self.error_code = "client_too_slow"
                self.client_gone()

    def end(self, body: bytes, error_code: str) -> None:
        """Last bytes of the stream."""
        if self.state in (STARTING, STREAMING):
            if body:
                self.pending.append(body)
            self.error_code = self.error_code or error_code
            self.state = DONE
            self._finish()

    # From the connection -------------------------------------------------------------------------

    def client_gone(self) -> None:
        """The client closed the connection, or reads too slowly to keep."""
        if self.state != DONE:
            self.gone = True
            self.state = DONE
            self._headed(None)
            self._finish()

    def writable(self) -> None:
        """The transport takes bytes again."""
        if self.state != STREAMING or not self.pending or self.corked is None:
            return
        if self.corked.write_chunk(b"".join(self.pending), True):
            self.pending.clear()
            self.pending_bytes = 0

    # From the coroutine and the clock ------------------------------------------------------------

    def streaming(self, now: float) -> None:
        """The head is on the wire: from here on bytes go directly to the transport."""
        if self.state == STARTING:
            self.state = STREAMING
            self.last_write = now
            self.writable()

    def take_pending(self) -> bytes:
        """What is left to write with the end of the response."""
        rest = b"".join(self.pending)
        self.pending.clear()
        return rest

    def keepalive(self, frame: bytes, now: float) -> None:
        """Write a keep-alive frame into a silent stream."""
        if self.state == STREAMING:
            self.data(frame, now)

    @property
    def started(self) -> bool:
        """Bytes of the answer may have reached the client."""
        return self.state in (STARTING, STREAMING)

    def _headed(self, message: Reply | StreamStart | None) -> None:
        """The answer begins; None: it will not, the client is gone (it may have begun before)."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Nothing more comes."""
        raise NotImplementedError


def data_handler(exchanges: dict[int, Exchange], inbox: Inbox) -> Callable[[StreamData], None]:
    """What the frontend does for every token: one function, from the message to the socket."""

    def on_data(message: StreamData) -> None:
        now, more = time.time(), inbox.more
        for seq, body in zip(message.seqs, message.bodies, strict=True):
            exchange = exchanges.get(seq)
            if exchange is not None:
                exchange.data(body, now, more)

    return on_data


@mypyc_attr(allow_interpreted_subclasses=True)
class AwaitedExchange(Exchange):
    """An exchange with a coroutine that awaits ``head`` and then ``done``, and writes the head and the end."""

    __slots__ = ("done", "head")

    def __init__(
        self, seq: int, path: str, request_id: str, headers: dict[str, str], body: bytes,
        connection: GatewayProtocol | None, buffer_limit: int, received: float, deadline: float,
    ) -> None:  # fmt: skip
        super().__init__(seq, path, request_id, headers, body, connection, buffer_limit, received, deadline)
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[Reply | StreamStart | None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()

    def _headed(self, message: Reply | StreamStart | None) -> None:
        if not self.head.done():
            self.head.set_result(message)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
