"""A transport that joins the writes of one loop iteration.

The server writes a response's head and its body separately; each write is a system call and, on the client's side, a
wake-up.
"""

from __future__ import annotations

import asyncio
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
    """Wraps a transport: ``write`` is delayed to the end of the loop iteration, ``flush``, ``write_now``,
    ``write_chunk`` and ``close`` send at once. Everything else goes to the wrapped transport. ``holding`` is what
    waits; ``paused``, kept by the protocol, is true while the transport has more to send than it should hold."""

    __slots__ = ("_loop", "holding", "inner", "paused")

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.inner = inner
        self._loop = loop
        self.holding: list[bytes] = []
        self.paused = False

    def write(self, data: bytes) -> None:
        if not self.holding:
            self._loop.call_soon(self.flush)
        self.holding.append(data)

    def flush(self) -> None:
        """Send what was written so far, unless the client has left meanwhile."""
        parts = self.holding
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if not self.inner.is_closing():
                self.inner.write(data)

    def write_now(self, data: bytes) -> None:
        """Write, behind what was written before, however much the client has left to read."""
        self.flush()
        if not self.inner.is_closing():
            self.inner.write(data)

    def write_chunk(self, body: bytes) -> bool:
        """Write one HTTP chunk of the running response now; False, and nothing written, when the client is too slow."""
        if self.paused:
            return False
        if self.holding:
            self.flush()
        self.inner.write(chunk(body))
        return True

    def close(self) -> None:
        self.flush()
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
