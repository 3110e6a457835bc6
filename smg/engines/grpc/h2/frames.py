"""Frame formats and codes of HTTP/2 (RFC 9113), and how gRPC reads its error codes."""

from __future__ import annotations

from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FIELDS = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 1, 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6

NO_ERROR = 0x0
PROTOCOL_ERROR = 0x1
FLOW_CONTROL_ERROR = 0x3
FRAME_SIZE_ERROR = 0x6
REFUSED_STREAM = 0x7
CANCEL = 0x8
COMPRESSION_ERROR = 0x9
ENHANCE_YOUR_CALM = 0xB

# "HTTP2 Transport Mapping" of gRPC's PROTOCOL-HTTP2.md; every other code is INTERNAL.
STATUS_OF_RESET = {0x7: "UNAVAILABLE", 0x8: "CANCELLED", 0xB: "RESOURCE_EXHAUSTED", 0xC: "PERMISSION_DENIED"}

DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
MAX_STREAM_ID = 2**31 - 1
FRAME_SIZE = 16_384  # bytes of payload a peer takes, and sends, when nothing else was agreed

FRAME = Struct(">IBI")  # length << 8 | type, flags, stream id: nine bytes
MESSAGE = Struct(">BI")  # gRPC's message prefix: compressed flag, length
MESSAGE_FRAME = Struct(">IBIBI")  # a DATA frame that begins with a message
SETTING = Struct(">HI")
WORD = Struct(">I")
GOAWAY_FIELDS = Struct(">II")  # last stream id, error code

HEADER_BYTES = FRAME.size
PREFIX_BYTES = MESSAGE.size


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return FRAME.pack(len(payload) << 8 | kind, flags, stream_id) + payload


class ProtocolError(Exception):
    """The peer broke the protocol; the connection is beyond use. ``code`` is the HTTP/2 error code to send."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def unpadded(payload: bytes) -> bytes:
    """The payload of a PADDED frame without its padding. Raises ``ProtocolError``."""
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def fields_of(layout: Struct, payload: bytes) -> tuple[int, ...]:
    """The members of a payload of fixed length. Raises ``ProtocolError``."""
    if len(payload) != layout.size:
        raise ProtocolError(FRAME_SIZE_ERROR, "frame of a wrong length")
    return layout.unpack(payload)
