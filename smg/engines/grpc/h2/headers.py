"""Header blocks (HPACK, RFC 7541) of gRPC requests and replies.

Requests are literals that never enter a table, so a block is bytes that can be joined. Replies are asked for without a
dynamic table; as long as the peer keeps to that, equal blocks have equal meaning and are decoded once.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import hpack

from smg.engines.base import EngineError
from smg.engines.grpc.h2.frames import COMPRESSION_ERROR, ProtocolError

USER_AGENT = b"grpc-smg"

CACHED_BLOCKS = 256
CACHED_BLOCK_BYTES = 512

STATUS_NAMES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip

# gRPC's http-grpc-status-mapping.md; every other HTTP status is UNKNOWN.
STATUS_OF_HTTP = {
    400: "INTERNAL", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "UNIMPLEMENTED", 429: "UNAVAILABLE",
    502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "UNAVAILABLE",
}  # fmt: skip

# A literal without indexing; the name is an index of the static table, or 0 and a literal itself.
_LITERAL_NAME = b"\x00"
_POST = b"\x83"
_SCHEME = {"http": b"\x86", "https": b"\x87"}
_AUTHORITY = b"\x01"
_PATH = b"\x04"
_CONTENT_TYPE = b"\x0f\x10"
_USER_AGENT = b"\x0f\x2b"

# The first block of a connection begins with this: the encoder's dynamic table is, and stays, empty.
EMPTY_TABLE = b"\x20"


class Head(NamedTuple):
    """What a client needs to know of a header block. ``http`` is 0 without a ``:status``; ``status`` is a gRPC status
    name, "" when the block has none; ``grpc`` tells whether the content type is gRPC's."""

    http: int
    status: str
    message: str
    grpc: bool


NOTHING = Head(0, "", "", False)


class HeadDecoder:
    """Decodes the reply blocks of one connection, which must all pass through it in order."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=64 * 1024)
        self._cache: dict[bytes, Head] = {}
        self._tableless = False  # the peer has given its dynamic table up; what a block means never changes then

    def decode(self, block: bytes) -> Head:
        """Raises ``ProtocolError``."""
        if self._tableless and (head := self._cache.get(block)) is not None:
            return head
        decoder = self._decoder
        try:
            fields = dict(decoder.decode(block, raw=True))
        except (hpack.HPACKError, IndexError, ValueError, OverflowError) as error:
            raise ProtocolError(
                COMPRESSION_ERROR, f"header block cannot be decoded ({type(error).__name__})"
            ) from error
        head = _head(fields)
        self._tableless = not decoder.header_table_size
        if self._tableless and len(block) <= CACHED_BLOCK_BYTES:
            if len(self._cache) >= CACHED_BLOCKS:
                self._cache.clear()
            self._cache[block] = head
        return head


def _head(fields: dict[bytes, bytes]) -> Head:
    status = ""
    if (code := fields.get(b"grpc-status")) is not None:
        number = int(code) if code.isdigit() and len(code) <= 2 else -1
        status = STATUS_NAMES[number] if 0 <= number < len(STATUS_NAMES) else "UNKNOWN"
    http = fields.get(b":status", b"")
    return Head(
        int(http) if http.isdigit() and len(http) == 3 else 0,
        status,
        unquote_to_bytes(fields.get(b"grpc-message", b"")).decode("utf-8", "replace"),
        fields.get(b"content-type", b"").startswith(b"application/grpc"),
    )


def without_status(head: Head) -> EngineError:
    """What a reply means that says no gRPC status where one is due."""
    if head.http and head.http != 200:
        status = STATUS_OF_HTTP.get(head.http, "UNKNOWN")
        return EngineError(head.status or status, head.message or f"the worker answered with HTTP status {head.http}")
    if head.http and not head.grpc:
        return EngineError("UNKNOWN", "the worker's answer is not gRPC")
    return EngineError("UNKNOWN", "the worker ended the stream without a status")


def request_block(scheme: str, authority: str, path: str) -> bytes:
    """The header block of calls to one method, without a deadline."""
    return b"".join(
        (
            _POST,
            _SCHEME[scheme],
            _PATH + _string(path.encode()),
            _AUTHORITY + _string(authority.encode()),
            _LITERAL_NAME + _string(b"te") + _string(b"trailers"),
            _CONTENT_TYPE + _string(b"application/grpc"),
            _USER_AGENT + _string(USER_AGENT),
        )
    )


def timeout_field(seconds: float) -> bytes:
    """What a deadline adds to a request's block: ``grpc-timeout``, at most eight digits and a unit, rounded up."""
    millis = math.ceil(seconds * 1000)
    value = f"{max(millis, 1)}m" if millis < 10**8 else f"{min(math.ceil(seconds), 10**8 - 1)}S"
    return _LITERAL_NAME + _string(b"grpc-timeout") + _string(value.encode())


def _string(value: bytes) -> bytes:
    """A string without Huffman coding: its length as an integer with a seven-bit prefix, then its bytes."""
    length = len(value)
    if length < 0x7F:
        return bytes((length,)) + value
    digits = bytearray(b"\x7f")
    length -= 0x7F
    while length >= 0x80:
        digits.append(length & 0x7F | 0x80)
        length >>= 7
    digits.append(length)
    return bytes(digits) + value
