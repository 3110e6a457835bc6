"""A transport that joins the writes of one loop iteration.

The server writes a response's head and its body separately; each write is a system call and, on the client's side, a
wake-up.
"""

from __future__ import annotations

import asyncio
from os import write as write_to
from typing import Any

# The size lines of chunks as long as those of single tokens are.
_CHUNK_SIZES = 2048
_CHUNK_HEADS = [b"%x\r\n" % size for size in range(_CHUNK_SIZES)]


def chunk(body: bytes) -> bytes:
    """``body``, which is not empty, as one chunk of HTTP/1.1's chunked encoding."""
    size = len(body)
    head = _CHUNK_HEADS[size] if size < _CHUNK_SIZES else b"%x\r\n" % size
    return b"".join((head, body, b"\r\n"))


class CorkedTransport:
    """Wraps a transport: ``write`` is delayed to the end of the loop iteration, ``flush``, ``write_now`` and ``close``
    send at once. Everything else goes to the wrapped transport. ``paused``, kept by the protocol, is true while the
    transport has more to send than it should hold.

    ``write_chunk`` is for tokens. While nothing else waits, they go to the socket without the transport's buffers."""

    __slots__ = ("_fd", "_free", "_holding", "_loop", "inner", "paused")

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        encrypted = inner.get_extra_info("sslcontext") is not None
        socket = None if encrypted else inner.get_extra_info("socket")
        self._fd: int = -1 if socket is None else socket.fileno()
        self._free = False  # the descriptor may be written to: nothing is held here, nothing in the transport
        self.paused = False
        self.inner = inner
        self._holding: list[bytes] = []
        self._loop = loop

    def write(self, data: bytes) -> None:
        if not self._holding:
            self._free = False
            self._loop.call_soon(self.flush)
        self._holding.append(data)

    def flush(self) -> None:
        """Send what was written so far, unless the client has left meanwhile."""
        parts = self._holding
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            self._hand_over(data)

    def write_now(self, data: bytes) -> None:
        """Write, behind what was written before, however much the client has left to read."""
        self.flush()
        self._hand_over(data)

    def write_chunk(self, body: bytes, more: bool) -> bool:
        """Write one HTTP chunk of the running response now; False, and nothing written, when the client is too slow.
        ``more``: others are about to come, which should travel with it."""
        if more or not self._free:
            if self.paused:
                return False
            self.flush()
            if more or self._fd < 0 or self.inner.get_write_buffer_size():
                self._hand_over(chunk(body))
                return True
            self._free = True
        data = chunk(body)
        try:
            sent = write_to(self._fd, data)
        except OSError:  # full, or broken, which the transport is about to find out
            sent = 0
        if sent < len(data):
            self._hand_over(data[sent:])
        return True

    def _hand_over(self, data: bytes) -> None:
        self._free = False
        if not self.inner.is_closing():
            self.inner.write(data)

    def lost(self) -> None:
        """The connection is gone; its descriptor will be somebody else's."""
        self._fd = -1
        self._free = False

    def close(self) -> None:
        self.flush()
        self.lost()
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
