"""Joined writes of one loop iteration."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
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


async def read(theirs: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += await asyncio.get_running_loop().sock_recv(theirs, size)
    return data


def test_writes_of_one_iteration_travel_together() -> None:
    async def test(corked: CorkedTransport, theirs: socket.socket) -> None:
        corked.write(b"head ")
        corked.write(b"body")
        assert await asyncio.get_running_loop().sock_recv(theirs, 100) == b"head body"

    assert run(test) == []


def test_chunks_keep_their_place() -> None:
    """A chunk that could go to the socket at once stays behind what was written before it."""

    async def test(corked: CorkedTransport, theirs: socket.socket) -> None:
        corked.write(b"head ")
        assert corked.write_chunk(b"a", False)
        assert corked.write_chunk(b"b", True)
        assert corked.write_chunk(b"c", False)
        await asyncio.sleep(0)
        assert corked.write_chunk(b"d", False)
        corked.write_now(b"end ")
        corked.write(b"next")
        expected = b"head 1\r\na\r\n1\r\nb\r\n1\r\nc\r\n1\r\nd\r\nend next"
        assert await read(theirs, len(expected)) == expected

    assert run(test) == []


def test_a_chunk_alone_needs_no_turn_of_the_loop() -> None:
    async def test(corked: CorkedTransport, theirs: socket.socket) -> None:
        assert corked.write_chunk(b"token", False)
        assert theirs.recv(100) == b"5\r\ntoken\r\n"

    assert run(test) == []


def test_a_full_socket_takes_the_rest_later() -> None:
    async def test(corked: CorkedTransport, theirs: socket.socket) -> None:
        body = bytes(range(256)) * 64
        count = 0
        while not corked.get_write_buffer_size():  # until the socket takes no more, probably amid a chunk
            assert corked.write_chunk(body, False)
            count += 1
        assert corked.write_chunk(b"last", False)
        expected = (b"%x\r\n" % len(body) + body + b"\r\n") * count + b"4\r\nlast\r\n"
        assert await read(theirs, len(expected)) == expected

    assert run(test) == []


def test_nothing_is_written_to_a_descriptor_that_is_closed() -> None:
    """After the connection's end its descriptor belongs to whoever opens the next one."""

    async def test(corked: CorkedTransport, theirs: socket.socket) -> None:
        reader, writer = os.pipe()
        fd = corked.get_extra_info("socket").fileno()
        assert corked.write_chunk(b"1", False)
        corked.abort()
        corked.lost()  # what the protocol says when it hears of the loss
        for _ in range(3):
            await asyncio.sleep(0)
        os.dup2(writer, fd)
        try:
            assert corked.write_chunk(b"2", False)
            await asyncio.sleep(0)
            os.set_blocking(reader, False)
            with pytest.raises(BlockingIOError):
                os.read(reader, 1)
        finally:
            for opened in (reader, writer, fd):
                os.close(opened)

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
