"""The client side of one HTTP/2 connection that carries gRPC calls with one request and a stream of answers.

Rules:

- No I/O, no clock, no tasks. ``receive`` takes what the socket gave, cut anywhere; ``take_output`` gives what must be
  written. Requests and answers are serialized messages.
- A ``Call`` is told its messages in order, then exactly one of ``ended`` and ``failed``, or nothing more after
  ``cancel``. It is told from inside ``receive`` and ``fail`` only, and may submit and cancel calls from there.
- Calls wait until the peer's SETTINGS have come and while ``max_concurrent_streams`` are open; then they open in order.
- Calls that the peer did not look at (REFUSED_STREAM, above the last stream of a GOAWAY) wait again, a few times. After
  a refusal (``stalled``) nothing opens before ``resume``: the peer needs a moment to notice that streams have ended.
- A broken stream fails its call and is reset. A broken connection raises ``ProtocolError`` with the GOAWAY in the
  output, and the owner fails the calls. After a GOAWAY of the peer (``draining``) no call opens: the owner takes the
  waiting ones to a new connection.
- Of what a peer sends, nothing is kept beyond one unfinished frame, one header block, one unfinished message per call
  and a bounded number of answers to write. Windows are given back as soon as bytes arrive, since nobody downstream
  holds messages up.
"""

from __future__ import annotations

from collections.abc import Callable

from smg.engines.base import EngineError
from smg.engines.grpc.h2 import frames
from smg.engines.grpc.h2.calls import Call, Calls
from smg.engines.grpc.h2.frames import MAX_WINDOW, ProtocolError, fields_of, unpadded
from smg.engines.grpc.h2.headers import NOTHING, Head, HeadDecoder, without_status
from smg.engines.grpc.h2.sender import Sender

MAX_MESSAGE = 256 * 1024 * 1024
MAX_HEADER_BLOCK = 32 * 1024
# Both of the connection and of every stream. Streams are looked at only when half of the connection's is used up.
WINDOW = 16 * 1024 * 1024
PING_DATA = b"smgalive"

_WHOLE_HEAD = frames.END_HEADERS | frames.END_STREAM

_SETTINGS = (
    (frames.HEADER_TABLE_SIZE, 0),
    (frames.ENABLE_PUSH, 0),
    (frames.INITIAL_WINDOW_SIZE, WINDOW),
    (frames.MAX_HEADER_LIST_SIZE, MAX_HEADER_BLOCK),
)


class Machine:
    """One connection. ``max_message`` in bytes bounds a single answer message. ``calls`` takes calls."""

    def __init__(self, max_message: int = MAX_MESSAGE) -> None:
        self.goaway = ""  # why, in the peer's words
        self.ping_pending = False
        self.progressed = False  # an answer's bytes came; for the owner to clear
        self._max_message = max_message
        self._small_message = min(max_message, frames.FRAME_SIZE - frames.PREFIX_BYTES)
        self._sender = Sender()
        self.calls = Calls(self._sender)
        self._sender.put(frames.SETTINGS, 0, 0, b"".join(frames.SETTING.pack(*setting) for setting in _SETTINGS))
        self._sender.put_word(frames.WINDOW_UPDATE, 0, WINDOW - frames.DEFAULT_WINDOW)
        self._rest = bytearray()  # an unfinished frame
        self._need = frames.HEADER_BYTES
        self._heads = HeadDecoder()
        self._block = bytearray()
        self._block_id = 0  # stream whose header block is unfinished
        self._block_flags = 0
        self._received = 0  # bytes since the connection's window was last given back
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            frames.DATA: self._on_data,
            frames.HEADERS: self._on_headers,
            frames.RST_STREAM: self._on_reset,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._on_push,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
            frames.WINDOW_UPDATE: self._on_window,
            frames.CONTINUATION: self._on_continuation,
        }

    # The owner's side -----------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        return bool(self._sender)

    def take_output(self) -> bytes:
        """The bytes to write now. To be left where they are while the peer does not read."""
        return self._sender.take()

    def ping(self) -> None:
        self.ping_pending = True
        self._sender.put(frames.PING, 0, 0, PING_DATA)

    def close(self, code: int = frames.NO_ERROR) -> None:
        """Say goodbye: GOAWAY with an HTTP/2 error code."""
        self.calls.draining = True
        self._sender.put(frames.GOAWAY, 0, 0, frames.GOAWAY_FIELDS.pack(0, code))

    # Receiving ------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take bytes of the connection in. Raises ``ProtocolError``, after which nothing may be received."""
        rest = self._rest
        if rest:
            rest += data
            if len(rest) < self._need:
                return
            data = bytes(rest)
            rest.clear()
        try:
            position = self._walk(data)
            self._settle()
        except ProtocolError as error:
            self.close(error.code)
            raise
        if position < len(data):
            rest += memoryview(data)[position:]
            self._need = frames.HEADER_BYTES
            if len(rest) >= self._need:
                self._need += frames.WORD.unpack_from(rest)[0] >> 8

    def _walk(self, data: bytes) -> int:
        """Handle the whole frames in ``data``; gives where the unfinished one begins."""
        position, end, received = 0, len(data), 0
        last, last_message = end - frames.HEADER_BYTES, end - frames.MESSAGE_FRAME.size
        flowing, unpack = self.calls.flowing, frames.MESSAGE_FRAME.unpack_from
        plain, small = not self._block_id, self._small_message
        while position <= last:
            if plain and position <= last_message:
                # Nearly every frame is a DATA frame of exactly one small message: no slice but the message itself.
                head, flags, stream_id, compressed, length = unpack(data, position)
                stop = position + 14 + length
                if (
                    head == (length + 5) << 8
                    and stop <= end
                    and not (flags or compressed)
                    and length <= small
                    and (call := flowing.get(stream_id)) is not None
                ):
                    payload = data[position + 14 : stop]
                    position = stop
                    length += 5
                    received += length
                    call.received += length
                    try:
                        call.on_message(payload)
                    except Exception:
                        self.calls.broken(call)
                    continue
            head, flags, stream_id = frames.FRAME.unpack_from(data, position)
            start = position + frames.HEADER_BYTES
            stop = start + (head >> 8)
            if head >> 8 > frames.FRAME_SIZE:
                raise ProtocolError(frames.FRAME_SIZE_ERROR, "frame too large, or no HTTP/2 at all")
            if stop > end:
                break
            position = stop
            kind = head & 0xFF
            if kind == frames.HEADERS and plain and flags | frames.END_STREAM == _WHOLE_HEAD and self.calls.ready:
                self._on_head(self.calls.get(stream_id & MAX_WINDOW), self._heads.decode(data[start:stop]), flags)
                continue
            self._on_frame(kind, flags, stream_id & MAX_WINDOW, data[start:stop])
            plain = not self._block_id
        if received:
            self._received += received
            self.progressed = True
        return position

    def _settle(self) -> None:
        """What a pass over received bytes leaves to do."""
        if self._received >= WINDOW // 2:
            if self._received > WINDOW:
                raise ProtocolError(frames.FLOW_CONTROL_ERROR, "window exceeded")
            self._sender.put_word(frames.WINDOW_UPDATE, 0, self._received)
            self._received = 0
            for call in self.calls.open.values():
                if call.received >= WINDOW // 4:
                    self._sender.put_word(frames.WINDOW_UPDATE, call.stream_id, call.received)
                    call.received = 0
        self._sender.pump()
        if self.calls.waiting:
            self.calls.admit()

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block_id and kind != frames.CONTINUATION:
            raise ProtocolError(frames.PROTOCOL_ERROR, "header block interrupted")
        if not self.calls.ready and kind != frames.SETTINGS:
            raise ProtocolError(frames.PROTOCOL_ERROR, "connection does not begin with SETTINGS")
        if (handler := self._handlers.get(kind)) is not None:
            handler(flags, stream_id, payload)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        call, size = self.calls.get(stream_id), len(payload)
        self._received += size
        self.progressed = True
        if flags & frames.PADDED:
            payload = unpadded(payload)
        if call is None:
            return
        call.received += size
        if not call.responded:
            self.calls.refuse(
                call, EngineError("INTERNAL", "data before the response's headers"), frames.PROTOCOL_ERROR
            )
            return
        if payload:
            try:
                call.feed(payload, self._max_message)
            except EngineError as unreadable:
                self.calls.refuse(call, unreadable)
            except Exception:
                self.calls.broken(call)
        if call.open:
            if flags & frames.END_STREAM:
                self.calls.finish(call, NOTHING)
            elif call.buffer:
                self.calls.flowing.pop(stream_id, None)
            else:
                self.calls.flowing[stream_id] = call

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        call = self.calls.get(stream_id)
        if flags & frames.PADDED:
            payload = unpadded(payload)
        if flags & frames.PRIORITY_FIELDS:
            if len(payload) < 5:
                raise ProtocolError(frames.FRAME_SIZE_ERROR, "HEADERS without its priority fields")
            payload = payload[5:]
        if flags & frames.END_HEADERS:
            self._on_head(call, self._heads.decode(payload), flags)
        else:
            self._block_id, self._block_flags = stream_id, flags
            self._block += payload

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id or stream_id != self._block_id:
            raise ProtocolError(frames.PROTOCOL_ERROR, "CONTINUATION of no header block")
        self._block += payload
        if len(self._block) > MAX_HEADER_BLOCK or not (payload or flags & frames.END_HEADERS):
            raise ProtocolError(frames.ENHANCE_YOUR_CALM, "header block without an end")
        if flags & frames.END_HEADERS:
            block = bytes(self._block)
            self._block.clear()
            self._block_id = 0
            self._on_head(self.calls.open.get(stream_id), self._heads.decode(block), self._block_flags)

    def _on_head(self, call: Call | None, head: Head, flags: int) -> None:
        self.progressed = True
        if call is None:
            return
        if flags & frames.END_STREAM:
            self.calls.finish(call, head)
        elif call.responded:
            error = EngineError("INTERNAL", "trailers that do not end the stream")
            self.calls.refuse(call, error, frames.PROTOCOL_ERROR)
        elif head.http == 200 and head.grpc:
            call.responded = True
            if call.stream_id not in self._sender.blocked:
                call.request = b""
            self.calls.flowing[call.stream_id] = call
        elif not 100 <= head.http < 200:
            self.calls.refuse(call, without_status(head))

    def _on_reset(self, _flags: int, stream_id: int, payload: bytes) -> None:
        call = self.calls.get(stream_id)
        (code,) = fields_of(frames.WORD, payload)
        if call is None:
            return
        if code == frames.REFUSED_STREAM and not call.responded:
            self.calls.stalled = True
            self.calls.put_back(call, "the worker takes no more streams")
            return
        status = frames.STATUS_OF_RESET.get(code, "INTERNAL")
        self.calls.fail_one(call, status, f"the worker reset the stream (HTTP/2 error {code})")

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or (flags & frames.ACK and not self.calls.ready):
            raise ProtocolError(frames.PROTOCOL_ERROR, "misplaced SETTINGS")
        if len(payload) % frames.SETTING.size or (flags & frames.ACK and payload):
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
        if flags & frames.ACK:
            return
        for name, value in frames.SETTING.iter_unpack(payload):
            if name == frames.MAX_CONCURRENT_STREAMS:
                self.calls.limit = value
            elif name == frames.INITIAL_WINDOW_SIZE:
                self._sender.resize(value)
            elif name == frames.MAX_FRAME_SIZE:
                if not frames.FRAME_SIZE <= value < 1 << 24:
                    raise ProtocolError(frames.PROTOCOL_ERROR, "impossible frame size")
                self._sender.frame_size = value
        self.calls.ready = True
        self._sender.answer(frames.SETTINGS)
        self.calls.admit()

    def _on_push(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise ProtocolError(frames.PROTOCOL_ERROR, "a push, which was not enabled")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ProtocolError(frames.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, "PING of a wrong length")
        if not flags & frames.ACK:
            self._sender.answer(frames.PING, payload)
        elif payload == PING_DATA:
            self.ping_pending = False

    def _on_goaway(self, _flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ProtocolError(frames.PROTOCOL_ERROR, "GOAWAY on a stream")
        last, code = fields_of(frames.GOAWAY_FIELDS, payload[:8])
        self.calls.draining = True
        words = payload[8:200].decode("ascii", "replace")
        self.goaway = f"HTTP/2 error {code}{': ' if words else ''}{words}"
        for call in [call for call in reversed(self.calls.open.values()) if call.stream_id > last & MAX_WINDOW]:
            if call.open:
                self.calls.put_back(call, f"the worker is closing the connection ({self.goaway})")

    def _on_window(self, _flags: int, stream_id: int, payload: bytes) -> None:
        increment = fields_of(frames.WORD, payload)[0] & MAX_WINDOW
        if not stream_id:
            self._sender.widen(increment)
            return
        call = self.calls.get(stream_id)
        if call is not None and not self._sender.widen_stream(call, increment):
            self.calls.refuse(call, EngineError("INTERNAL", "impossible window"), frames.FLOW_CONTROL_ERROR)
