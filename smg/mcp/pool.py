"""Connections to servers that requests name: shared, bounded, closed when nobody used them for a while."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping

from smg.mcp.connection import Connection

__all__ = ["ConnectionPool", "PoolFullError", "pool_key"]

SWEEP_SECS = 10.0


class PoolFullError(Exception):
    """Every connection of the pool is in use."""


def pool_key(url: str, headers: Mapping[str, str]) -> str:
    """One connection per URL and credentials: a session of one must never answer for another. The key holds no
    secret."""
    parts = [url, *(f"{name}:{value}" for name, value in sorted(headers.items()))]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


class ConnectionPool:
    """At most ``size`` connections. A new one pushes out the one that was unused for longest."""

    def __init__(self, size: int, idle_timeout: float) -> None:
        self._size = size
        self._idle_timeout = idle_timeout
        self._connections: dict[str, Connection] = {}  # the least recently used first
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def acquire(self, key: str, make: Callable[[], Connection]) -> Connection:
        """The connection of ``key``, made if there is none; ``release`` it after the request. Raises
        ``PoolFullError``."""
        found = self._connections.pop(key, None)
        if found is None:
            self._make_room()
            found = make()
        self._connections[key] = found
        found.users += 1
        found.last_used = time.monotonic()
        if self._sweeper is None:
            self._sweeper = asyncio.ensure_future(self._sweep())
        return found

    def release(self, connection: Connection) -> None:
        """The request does not need it any more."""
        connection.users -= 1
        connection.last_used = time.monotonic()

    def discard(self, connection: Connection) -> None:
        """Forget a connection that turned out to lead nowhere, unless others wait for it."""
        if connection.users == 0 and not connection.connected:
            for key in [key for key, each in self._connections.items() if each is connection]:
                self._drop(key)

    async def close(self) -> None:
        """Close all."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for key in list(self._connections):
            self._drop(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _make_room(self) -> None:
        if len(self._connections) < self._size:
            return
        for key, connection in self._connections.items():
            if connection.users == 0:
                self._drop(key)
                return
        raise PoolFullError(f"all {self._size} connections to MCP servers are in use")

    def _drop(self, key: str) -> None:
        task = asyncio.ensure_future(self._connections.pop(key).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECS, self._idle_timeout / 4))
            oldest = time.monotonic() - self._idle_timeout
            for key, connection in list(self._connections.items()):
                if connection.users == 0 and connection.last_used < oldest:
                    self._drop(key)
