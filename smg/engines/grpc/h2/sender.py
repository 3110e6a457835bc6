"""What a connection writes: frames in order, and request bodies as the peer's windows let them through."""

from __future__ import annotations

from smg.engines.grpc.h2 import frames
from smg.engines.grpc.h2.calls import Call
from smg.engines.grpc.h2.frames import MAX_WINDOW, PREFIX_BYTES, ProtocolError, frame
from smg.engines.grpc.h2.headers import EMPTY_TABLE

MAX_ANSWERS = 1000


class Sender:
    """``blocked`` holds the calls with an unsent rest of their body, by stream id, oldest first."""

    def __init__(self) -> None:
        self.blocked: dict[int, Call] = {}
        self.frame_size = frames.FRAME_SIZE
        self._out: list[bytes | memoryview] = [frames.PREFACE]
        self._answers = 0
        self._window = self._stream_window = frames.DEFAULT_WINDOW
        self._widened = False
        self._table_note = EMPTY_TABLE

    def __bool__(self) -> bool:
        """There is something to write."""
        return bool(self._out)

    def take(self) -> bytes:
        output = b"".join(self._out)
        self._out.clear()
        self._answers = 0
        return output

    def put(self, kind: int, flags: int, stream_id: int, payload: bytes = b"") -> None:
        self._out.append(frame(kind, flags, stream_id, payload))

    def put_word(self, kind: int, stream_id: int, word: int) -> None:
        """A WINDOW_UPDATE or RST_STREAM."""
        self._out.append(frame(kind, 0, stream_id, frames.WORD.pack(word)))

    def answer(self, kind: int, payload: bytes = b"") -> None:
        """Acknowledge a frame. Raises ``ProtocolError`` when the peer wants more of that than it reads."""
        self._answers += 1
        if self._answers > MAX_ANSWERS:
            raise ProtocolError(frames.ENHANCE_YOUR_CALM, "too many frames that want an answer")
        self.put(kind, frames.ACK, 0, payload)

    def open(self, call: Call) -> None:
        """Send the head of ``call``, and of its request what can be sent."""
        out, stream_id, block = self._out, call.stream_id, call.block
        if self._table_note:
            block = self._table_note + block
            self._table_note = b""
        out.append(frames.FRAME.pack(len(block) << 8 | frames.HEADERS, frames.END_HEADERS, stream_id))
        out.append(block)
        request = call.request
        size = len(request) + PREFIX_BYTES
        call.window = self._stream_window
        if size <= self.frame_size and size <= self._window and size <= call.window:
            out.append(frames.MESSAGE_FRAME.pack(size << 8, frames.END_STREAM, stream_id, 0, len(request)))
            out.append(request)
            self._window -= size
            call.window -= size
            call.sent = size
        else:
            self.blocked[stream_id] = call
            self._send(call)

    def pump(self) -> None:
        """Use what windows have grown. The oldest call goes first: a request is of use only when it is whole."""
        if self._widened:
            self._widened = False
            for call in list(self.blocked.values()):
                if self._window <= 0:
                    break
                self._send(call)

    def _send(self, call: Call) -> None:
        """Send of the request, behind its prefix, what the windows let through."""
        out, request, sent = self._out, memoryview(call.request), call.sent
        end = len(request) + PREFIX_BYTES
        while (size := min(self.frame_size, self._window, call.window, end - sent)) > 0:
            flags = frames.END_STREAM if sent + size == end else 0
            out.append(frames.FRAME.pack(size << 8 | frames.DATA, flags, call.stream_id))
            if sent < PREFIX_BYTES:
                out.append(frames.MESSAGE.pack(0, len(request))[sent : sent + size])
            out.append(request[max(sent - PREFIX_BYTES, 0) : max(sent + size - PREFIX_BYTES, 0)])
            sent += size
            self._window -= size
            call.window -= size
        call.sent = sent
        if sent == end:
            del self.blocked[call.stream_id]
            if call.responded:
                call.request = b""

    def resize(self, initial_window: int) -> None:
        """The peer's SETTINGS_INITIAL_WINDOW_SIZE. Raises ``ProtocolError``."""
        grown = initial_window - self._stream_window
        self._stream_window = initial_window
        self._widened = True
        for call in self.blocked.values():
            call.window += grown
        if max(initial_window, *(call.window for call in self.blocked.values()), 0) > MAX_WINDOW:
            raise ProtocolError(frames.FLOW_CONTROL_ERROR, "impossible window")

    def widen(self, increment: int) -> None:
        """The peer's WINDOW_UPDATE of the connection. Raises ``ProtocolError``."""
        self._window += increment
        self._widened = True
        if not increment or self._window > MAX_WINDOW:
            raise ProtocolError(frames.FLOW_CONTROL_ERROR, "impossible window")

    def widen_stream(self, call: Call, increment: int) -> bool:
        """The peer's WINDOW_UPDATE of one stream; False when it is impossible."""
        call.window += increment
        self._widened = True
        return increment > 0 and call.window <= MAX_WINDOW
