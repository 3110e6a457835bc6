"""MCP servers under test: the server program as a process, and raw HTTP servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

SERVER = str(Path(__file__).parent / "mcp_servers" / "tools_server.py")
START_LIMIT = 30.0
Head = tuple[str, str, dict[str, str]]  # method, path, headers
Answer = Callable[[Head, bytes, asyncio.StreamWriter], Awaitable[None]]


class ServerProcess:
    """A running server; ``url`` is its endpoint."""

    def __init__(self, process: asyncio.subprocess.Process, transport: str, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}/{'sse' if transport == 'sse' else 'mcp'}"

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def start_server(transport: str, *words: str, port: int = 0) -> ServerProcess:
    """Start the server program over ``sse`` or ``streamable``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, SERVER, transport, *words, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PORT": str(port)}
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), START_LIMIT)
    return ServerProcess(process, transport, int(line))


@asynccontextmanager
async def mcp_server(transport: str, *words: str, port: int = 0) -> AsyncIterator[ServerProcess]:
    """The server program over ``sse`` or ``streamable``, ended at the end."""
    running = await start_server(transport, *words, port=port)
    try:
        yield running
    finally:
        await running.kill()


@asynccontextmanager
async def raw_server(answer: Answer, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A TCP server that reads HTTP requests and lets ``answer`` write whatever it likes; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines[1:-2])}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                await answer((method, path, headers), body, writer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
