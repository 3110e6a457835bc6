"""One call: what is still to be sent, and the messages in what comes back (gRPC's length-prefixed framing)."""

from __future__ import annotations

from collections.abc import Callable

from smg.engines.base import EngineError
from smg.engines.grpc.h2.frames import MESSAGE, PREFIX_BYTES


class Call:
    """A call of a machine. Subclasses say what becomes of its end; ``on_message`` gets every message.

    The other members are the machine's."""

    __slots__ = (
        "attempts", "block", "body", "buffer", "need", "on_message", "open", "received", "request", "responded",
        "stream_id", "window",
    )  # fmt: skip

    def __init__(self, block: bytes, request: bytes, on_message: Callable[[bytes], None]) -> None:
        self.on_message = on_message
        self.block = block
        self.request = MESSAGE.pack(0, len(request)) + request  # kept until the peer answers
        self.body = memoryview(self.request)  # what is still to be sent
        self.stream_id = 0
        self.open = False
        self.attempts = 0
        self.window = 0  # bytes that may be sent
        self.received = 0  # bytes since the stream's window was last given back
        self.responded = False
        self.buffer = bytearray()  # an unfinished message with its prefix
        self.need = PREFIX_BYTES  # length of the buffer at which there is something to do

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
