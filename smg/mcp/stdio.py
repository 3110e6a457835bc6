"""The stdio transport: a server as a child process, one JSON-RPC message per line.

The SDK has one too, but it reads lines of any length. This one is bounded, cannot outlive the gateway, and keeps what
the server writes to its error stream out of the gateway's own output (it goes to the debug log).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from smg.mcp.config import StdioServer

__all__ = ["stdio_streams"]

log = logging.getLogger("smg.mcp.stdio")

CHUNK_BYTES = 64 * 1024
MAX_LOG_CHARS = 500
CLOSE_SECS = 1.0
TERMINATE_SECS = 1.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


@asynccontextmanager
async def stdio_streams(
    server: StdioServer, max_bytes: int, on_fault: Callable[[str], None]
) -> AsyncIterator[tuple[Incoming, Outgoing]]:
    """Run the server; yields the streams that a session reads from and writes to.

    ``max_bytes`` bounds a message of the server: a longer one ends the connection, since nobody can tell where in it
    an answer would begin. ``on_fault`` hears why the connection ended. Raises ``OSError`` if the command cannot run.
    """
    process = await _spawn(server)
    in_send, in_receive = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    out_send, out_receive = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_read(process, in_send, max_bytes, on_fault)),
        asyncio.create_task(_write(process, out_receive)),
        asyncio.create_task(_drain_errors(process, server.name)),
    ]
    try:
        yield in_receive, out_send
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (in_send, in_receive, out_send, out_receive):
            stream.close()


async def _spawn(server: StdioServer) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        server.command,
        *server.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=get_default_environment() | server.envs | server.env,
        cwd=server.cwd,
        start_new_session=True,
        preexec_fn=_in_child,
        limit=CHUNK_BYTES,
    )


def _in_child() -> None:
    """The gateway's processes ignore these signals; what they start must not. And it ends when they do."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _read(
    process: asyncio.subprocess.Process,
    into: MemoryObjectSendStream[SessionMessage | Exception],
    max_bytes: int,
    on_fault: Callable[[str], None],
) -> None:
    assert process.stdout is not None
    pending: list[bytes] = []
    size = 0
    reason = "the server ended"
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
        while chunk := await process.stdout.read(CHUNK_BYTES):
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                pending.append(line)
                await _deliver(b"".join(pending), into)
                pending.clear()
                size = 0
            pending.append(rest)
            size += len(rest)
            if size > max_bytes:
                reason = f"the server's reply is larger than {max_bytes} bytes"
                _signal(process, signal.SIGKILL)  # it would only wait for someone to read the rest
                break
    on_fault(reason)
    await into.aclose()


async def _deliver(line: bytes, into: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
    if not line.strip():
        return
    try:
        message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        log.debug("a line of %d bytes is no JSON-RPC message", len(line))
        return
    await into.send(SessionMessage(message))


async def _write(process: asyncio.subprocess.Process, source: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError, anyio.ClosedResourceError):
        async for message in source:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _drain_errors(process: asyncio.subprocess.Process, name: str) -> None:
    assert process.stderr is not None
    while chunk := await process.stderr.read(CHUNK_BYTES):
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s: %s", name, chunk[:MAX_LOG_CHARS].decode(errors="replace").rstrip())


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close its input, then SIGTERM, then SIGKILL to the whole process group."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        if await _exited(process, CLOSE_SECS):
            return
        _signal(process, signal.SIGTERM)
        await _exited(process, TERMINATE_SECS)
    finally:  # reached early when there is no time left for patience
        if process.returncode is None:
            _signal(process, signal.SIGKILL)
            await _exited(process, TERMINATE_SECS)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _exited(process: asyncio.subprocess.Process, patience: float) -> bool:
    # Not only process.wait(): it also waits for pipes, which a grandchild may hold open.
    try:
        await asyncio.wait_for(process.wait(), patience)
    except TimeoutError:
        return process.returncode is not None
    return True
