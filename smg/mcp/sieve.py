"""What a server sends on its own account, kept within bounds.

A client that offers nothing is asked for nothing but a ping. Each question makes the SDK start a task that answers it,
so that a server which asks and asks, and never reads the answers, would fill the memory.
"""

from __future__ import annotations

import time
from typing import Any

import anyio
from mcp_types import JSONRPCRequest

__all__ = ["Sieve"]

MOST_REQUESTS = 8
WINDOW_SECS = 10.0


class Sieve:
    """A stream of a transport's messages without the requests of a server beyond ``MOST_REQUESTS`` in
    ``WINDOW_SECS``. Everything else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._requests = 0
        self._window_ends = 0.0

    @property
    def last_context(self) -> Any:
        """The context of the message before, where the transport keeps one."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        """The next message. Raises what the stream raises at its end."""
        while True:
            item = await self._stream.receive()
            if not isinstance(getattr(item, "message", None), JSONRPCRequest) or self._admit():
                return item

    def _admit(self) -> bool:
        now = time.monotonic()
        if now >= self._window_ends:
            self._requests, self._window_ends = 0, now + WINDOW_SECS
        self._requests += 1
        return self._requests <= MOST_REQUESTS

    def __aiter__(self) -> Sieve:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    async def __aenter__(self) -> Sieve:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
