"""A transport that joins the writes of one loop iteration.

The server writes a response's head and its body separately; each write is a system call and, on the client's side, a
wake-up.
"""

from __future__ import annotations

import asyncio
from typing import Any


class CorkedTransport:
    """Wraps a transport: ``write`` is delayed to the end of the loop iteration, ``flush`` and ``close`` send at once.
    Everything else goes to the wrapped transport. ``holding`` is what waits."""

    __slots__ = ("_loop", "holding", "inner")

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.inner = inner
        self._loop = loop
        self.holding: list[bytes] = []

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

    def close(self) -> None:
        self.flush()
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
