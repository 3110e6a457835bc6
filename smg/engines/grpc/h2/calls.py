"""Calls: the messages in what comes back (gRPC's length-prefixed framing), the order in which they open, their ends."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from smg.engines.base import EngineError
from smg.engines.grpc.h2 import frames
from smg.engines.grpc.h2.frames import MAX_WINDOW, MESSAGE, PREFIX_BYTES, ProtocolError
from smg.engines.grpc.h2.headers import Head, without_status

if TYPE_CHECKING:
    from smg.engines.grpc.h2.sender import Sender

log = logging.getLogger("smg.engines.grpc")

MAX_ATTEMPTS = 5


@mypyc_attr(allow_interpreted_subclasses=True)
class Call:
    """A call of a machine. Subclasses say what becomes of its messages and of its end.

    The other members are the machine's."""

    __slots__ = (
        "attempts", "block", "buffer", "need", "open", "received", "request", "responded", "sent", "stream_id",
        "window",
    )  # fmt: skip

    def __init__(self, block: bytes, request: bytes) -> None:
        self.block = block
        self.request = request  # kept until it is sent and the peer answers
        self.sent = 0  # bytes of the request, with its prefix, that were sent
        self.stream_id = 0
        self.open = False
        self.attempts = 0
        self.window = 0  # bytes that may be sent
        self.received = 0  # bytes since the stream's window was last given back
        self.responded = False
        self.buffer = bytearray()  # an unfinished message with its prefix
        self.need = PREFIX_BYTES  # length of the buffer at which there is something to do

    def on_message(self, payload: bytes) -> None:
        """A whole message came."""
        raise NotImplementedError

    def ended(self) -> None:
        """The call ended with status OK."""
        raise NotImplementedError

    def failed(self, error: EngineError) -> None:
        """The call ended otherwise."""
        raise NotImplementedError

    def feed(self, payload: bytes, max_message: int) -> None:
        """Take in bytes that are not one whole message. Raises ``EngineError`` for framing that cannot be read, and
        what ``on_message`` raises."""
        buffer = self.buffer
        if buffer:
            buffer += payload
            if len(buffer) < self.need:
                return
            payload = bytes(buffer)
            buffer.clear()
        position, end, self.need = 0, len(payload), PREFIX_BYTES
        while end - position >= PREFIX_BYTES:
            compressed, length = MESSAGE.unpack_from(payload, position)
            if compressed:
                raise EngineError("INTERNAL", "compressed message, though no compression was agreed")
            if length > max_message:
                raise EngineError("RESOURCE_EXHAUSTED", f"message of {length} bytes, more than {max_message}")
            start = position + PREFIX_BYTES
            if end - start < length:
                self.need += length
                break
            position = start + length
            self.on_message(payload[start:position])
            if not self.open:
                return
        buffer += memoryview(payload)[position:]


class Calls:
    """The calls of one connection: waiting, open, and how they end.

    ``flowing`` are the open ones whose next DATA frame begins with a message."""

    def __init__(self, sender: Sender) -> None:
        self.ready = False  # the peer's SETTINGS have come
        self.draining = False  # nothing may be submitted any more
        self.stalled = False  # after a refusal; ``resume`` is wanted, soon
        self.limit = MAX_WINDOW  # open calls
        self.open: dict[int, Call] = {}
        self.flowing: dict[int, Call] = {}
        self.waiting: OrderedDict[Call, None] = OrderedDict()
        self._sender = sender
        self._next_id = 1

    @property
    def idle(self) -> bool:
        """No call is open or waiting."""
        return not (self.open or self.waiting)

    def submit(self, call: Call) -> None:
        """Open ``call``, or let it wait."""
        if self.ready and not (self.waiting or self.stalled or self.draining) and len(self.open) < self.limit:
            self._admit(call)
        else:
            self.waiting[call] = None
            self.admit()

    def cancel(self, call: Call) -> None:
        """Reset ``call`` without a word to it; nothing happens when it is over."""
        if call.open:
            self._reset(call, frames.CANCEL)
            self.admit()
        else:
            self.waiting.pop(call, None)

    def resume(self) -> None:
        """Open calls again after a refusal."""
        self.stalled = False
        self.admit()

    def take_waiting(self) -> list[Call]:
        """The calls of which the peer knows nothing; they are no longer this connection's."""
        waiting = list(self.waiting)
        self.waiting.clear()
        return waiting

    def fail(self, status: str, message: str) -> None:
        """Fail every call: the connection is over."""
        self.draining = True
        while self.open:
            self.fail_one(next(iter(self.open.values())), status, message)
        while self.waiting:
            call, _ = self.waiting.popitem()
            self._tell(call, EngineError(status, message))

    def take_all(self) -> list[Call]:
        """The open and the waiting calls; they are told nothing more. For an owner who hangs up."""
        calls = [*self.open.values(), *self.take_waiting()]
        for call in list(self.open.values()):
            self._forget(call)
        return calls

    def get(self, stream_id: int) -> Call | None:
        """The open call of a stream, None when it is over. Raises ``ProtocolError`` when there never was one."""
        if not stream_id & 1 or stream_id >= self._next_id:
            raise ProtocolError(frames.PROTOCOL_ERROR, "frame on a stream that was never opened")
        return self.open.get(stream_id)

    def admit(self) -> None:
        while self.waiting and len(self.open) < self.limit:
            if self.draining or self.stalled or not self.ready:
                break
            self._admit(self.waiting.popitem(last=False)[0])

    def _admit(self, call: Call) -> None:
        stream_id = self._next_id
        call.stream_id, call.open = stream_id, True
        call.attempts += 1
        self.open[stream_id] = call
        self._next_id = stream_id + 2
        self.draining = stream_id + 2 > frames.MAX_STREAM_ID
        self._sender.open(call)

    def _forget(self, call: Call) -> None:
        call.open = False
        del self.open[call.stream_id]
        self.flowing.pop(call.stream_id, None)
        self._sender.blocked.pop(call.stream_id, None)

    def _reset(self, call: Call, code: int) -> None:
        self._sender.put_word(frames.RST_STREAM, call.stream_id, code)
        self._forget(call)

    def finish(self, call: Call, head: Head) -> None:
        """The peer ended the stream."""
        if call.stream_id in self._sender.blocked:
            self._reset(call, frames.NO_ERROR)
        else:
            self._forget(call)
        if head.status != "OK":
            self._tell(call, without_status(head) if not head.status else EngineError(head.status, head.message))
        elif call.buffer:
            self._tell(call, EngineError("INTERNAL", "the stream ended inside a message"))
        else:
            self._tell(call, None)

    def refuse(self, call: Call, error: EngineError, code: int = frames.CANCEL) -> None:
        """Give a call up for what the peer did, or its receiver."""
        if call.open:
            self._reset(call, code)
            self._tell(call, error)

    def fail_one(self, call: Call, status: str, message: str) -> None:
        self._forget(call)
        self._tell(call, EngineError(status, message))

    def put_back(self, call: Call, why: str) -> None:
        """The peer did nothing for ``call``: it may be tried again."""
        if call.responded or call.attempts >= MAX_ATTEMPTS:
            self.fail_one(call, "UNAVAILABLE", why)
        else:
            self._forget(call)
            call.sent = 0
            self.waiting[call] = None
            self.waiting.move_to_end(call, last=False)

    def broken(self, call: Call) -> None:
        """A message's receiver raised; the other calls must not notice."""
        log.exception("the receiver of a gRPC stream failed")
        self.refuse(call, EngineError("INTERNAL", "the gateway could not process the worker's message"))

    def _tell(self, call: Call, error: EngineError | None) -> None:
        try:
            if error is None:
                call.ended()
            else:
                call.failed(error)
        except Exception:
            log.exception("the receiver of a gRPC stream failed")
