"""How the bytes of a server-streaming call reach the client of a worker.

``StreamTransport`` is all that ``GrpcWorkerClient`` knows of gRPC on the token path, so a leaner HTTP/2 reader can
stand in for ``grpc.aio``.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

import grpc.aio

from smg.engines.grpc.channel import Channel, engine_error
from smg.engines.grpc.receiver import Receiver


class StreamHandle(Protocol):
    """A running call."""

    def cancel(self) -> None:
        """Reset the stream; the receiver is told nothing after this. Idempotent."""


class StreamTransport(Protocol):
    """Runs server-streaming calls to one worker."""

    def start(self, path: str, request: bytes, receiver: Receiver, *, timeout: float | None = None) -> StreamHandle:
        """Start a call. The receiver is told on the event loop, never inside ``start``.

        ``timeout`` in seconds covers the whole call. Never raises for trouble with the worker.
        """

    async def close(self) -> None:
        """Cancel what still runs and give the connection up."""


class GrpcioTransport:
    """``StreamTransport`` on ``grpc.aio``: one task per stream."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._methods: dict[str, Any] = {}
        self._streams: set[_GrpcioStream] = set()

    def start(self, path: str, request: bytes, receiver: Receiver, *, timeout: float | None = None) -> StreamHandle:
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self._channel.unary_stream(path)
        stream = _GrpcioStream(method(request, timeout=timeout))
        self._streams.add(stream)
        stream.task = asyncio.get_running_loop().create_task(stream.run(receiver))
        stream.task.add_done_callback(lambda _: self._streams.discard(stream))
        return stream

    async def close(self) -> None:
        tasks = [stream.task for stream in self._streams if stream.task is not None]
        for stream in list(self._streams):
            stream.cancel()
        if tasks:
            await asyncio.wait(tasks)


class _GrpcioStream:
    __slots__ = ("_call", "_cancelled", "task")

    def __init__(self, call: Any) -> None:
        self._call = call
        self._cancelled = False
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()

    async def run(self, receiver: Receiver) -> None:
        read = self._call.read
        end = grpc.aio.EOF  # type: ignore[attr-defined]
        try:
            while (payload := await read()) is not end:
                if self._cancelled:
                    return
                receiver.on_message(payload)
        except grpc.aio.AioRpcError as error:
            if not self._cancelled:
                receiver.on_error(engine_error(error))
        except asyncio.CancelledError:
            # Raised by ``read`` after a local cancel, and by the loop when it shuts down.
            with contextlib.suppress(Exception):
                self._call.cancel()
            if not self._cancelled:
                raise
        else:
            if not self._cancelled:
                receiver.on_end()
