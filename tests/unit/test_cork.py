"""Joined writes of one loop iteration."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from smg.frontend.cork import CorkedTransport


def run(test: Callable[[CorkedTransport, socket.socket], Awaitable[None]]) -> list[dict[str, Any]]:
    """Run ``test`` with a corked transport and the socket at its other end; what the loop had to complain about."""
    complaints: list[dict[str, Any]] = []

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: complaints.append(context))
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            await test(CorkedTransport(transport, loop), theirs)
            transport.abort()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    uvloop.run(asyncio.wait_for(body(), 10))
    return complaints


def test_writes_of_one_iteration_travel_together() -> None:
    async def test(corked: CorkedTransport, theirs: socket.socket) -> None:
        corked.write(b"head ")
        corked.write(b"body")
        assert await asyncio.get_running_loop().sock_recv(theirs, 100) == b"head body"

    assert run(test) == []


def test_close_sends_what_waits() -> None:
    async def test(corked: CorkedTransport, theirs: socket.socket) -> None:
        corked.write(b"last words")
        corked.close()
        assert await asyncio.get_running_loop().sock_recv(theirs, 100) == b"last words"

    assert run(test) == []


def test_a_client_that_left_meanwhile_is_no_error() -> None:
    async def test(corked: CorkedTransport, theirs: socket.socket) -> None:
        # The transport is closed for good before the delayed write comes to its turn.
        corked.abort()
        for _ in range(3):
            await asyncio.sleep(0)
        corked.write(b"too late")
        await asyncio.sleep(0)

    assert run(test) == []
