"""The detok process's connection to one gRPC worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from google.protobuf.message import DecodeError

from smg.engines.base import EngineError, Sink
from smg.engines.grpc.channel import TlsOptions, open_channel, unary
from smg.engines.grpc.codecs import Decoder, codec_for
from smg.engines.grpc.facts import Embedding
from smg.engines.grpc.receiver import Receiver
from smg.engines.grpc.transport import GrpcioTransport, StreamHandle, StreamTransport

log = logging.getLogger("smg.engines.grpc")

ABORT_REASON = "Stream dropped"
ABORT_TIMEOUT = 5.0
# The engine ends a stream by itself when it honours an abort; the stream is reset when it has not by then.
RESET_DELAY = 0.05


class GrpcWorkerClient:
    """``EngineClient`` over gRPC.

    ``kind`` is the engine kind, ``url`` a ``grpc://`` or ``grpcs://`` URL. Belongs to the event loop it is created on.
    ``transport`` carries the generate streams; None: ``grpc.aio`` on the client's own channel.
    """

    def __init__(
        self, url: str, kind: str, *, tls: TlsOptions | None = None, transport: StreamTransport | None = None
    ) -> None:
        self.url = url
        self.codec = codec_for(kind)
        self._channel = open_channel(url, tls)
        self._transport = transport or GrpcioTransport(self._channel)
        self._generate = self.codec.method("Generate")
        self._abort = self.codec.method("Abort")
        self._aborts: set[asyncio.Task[None]] = set()

    def generate(
        self,
        request_id: str,
        request: bytes,
        sink: Sink,
        *,
        streaming: bool,
        dp_rank: int = -1,
        timeout: float | None = None,
    ) -> GrpcCall:
        """Start a generation. Failures reach ``sink.on_error``; ``timeout`` (seconds) covers the whole generation.

        ``request`` comes from the codec's ``encode`` with the same ``streaming``. Without streaming the sink gets one
        delta per choice, with all its ids.
        """
        call = GrpcCall(self, request_id, sink, self.codec.decoder(streaming=streaming), streaming)
        if dp_rank >= 0:
            request = self.codec.pin_rank(request, dp_rank)
        call.handle = self._transport.start(self._generate, request, call, timeout=timeout)
        return call

    async def embed(self, request: bytes, timeout: float) -> Embedding:
        """One embedding. ``request`` comes from the codec's ``embed_request``. Raises ``EngineError``."""
        return self.codec.parse_embed(await unary(self._channel, self.codec.method("Embed"), request, timeout))

    def send_abort(self, request_id: str) -> asyncio.Task[None]:
        """Tell the engine to stop a generation; a failure to do so is nobody's concern."""
        task = asyncio.get_running_loop().create_task(self._send_abort(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task

    async def _send_abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineError):
            await unary(self._channel, self._abort, self.codec.abort_request(request_id, ABORT_REASON), ABORT_TIMEOUT)

    async def close(self) -> None:
        """Cancel running calls without a word to their sinks, let aborts go out, close the connection."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=1.0)
        await self._transport.close()
        await self._channel.close()


class GrpcCall(Receiver):
    """One running generation (``Call``), the receiver of its stream, whose handle is ``handle``."""

    __slots__ = ("_client", "_decoder", "_failed", "_open", "_request_id", "_sink", "_started", "_streaming", "handle")

    def __init__(
        self, client: GrpcWorkerClient, request_id: str, sink: Sink, decoder: Decoder, streaming: bool
    ) -> None:
        super().__init__()
        self._client = client
        self._request_id = request_id
        self._sink = sink
        self._decoder = decoder
        self._streaming = streaming
        self._open = True
        self._started = False
        self._failed = False
        self.handle: StreamHandle | None = None

    def abort(self) -> None:
        """Stop the generation in the engine at once; the sink is not called again. Idempotent.

        A stream that has begun, or a generation the engine calls failed, is stopped by the engine's Abort call and
        reset as soon as that is answered. Before the first message, and without streaming, the call is only reset."""
        if not self._open:
            return
        self._open = False
        handle = self.handle
        if handle is None:
            return
        if self._failed or (self._started and self._streaming):
            self._client.send_abort(self._request_id).add_done_callback(lambda _: handle.cancel())
            asyncio.get_running_loop().call_later(RESET_DELAY, handle.cancel)
        else:
            handle.cancel()

    def abort_choice(self, index: int) -> None:
        """Nothing: the engine runs all choices as one request."""

    def on_message(self, payload: bytes) -> None:
        """A message of the stream."""
        if not self._open:
            return
        self._started = True
        try:
            delta = self._decoder.decode(payload)
        except DecodeError:
            self._break(EngineError("INTERNAL", "the worker sent a message that cannot be decoded"))
            return
        if delta is None:
            return
        if delta.finish_reason == "error":
            self._failed = True
        try:
            self._sink.on_delta(delta)
        except Exception:
            log.exception("reading the stream of request %s failed", self._request_id)
            self._break(EngineError("INTERNAL", "the gateway could not process the engine's output"))

    def _break(self, error: EngineError) -> None:
        """Give the call up from this side and tell the sink why."""
        if self._open:
            self.abort()
            self._sink.on_error(error)

    def on_end(self) -> None:
        """The stream ended with status OK."""
        if not self._open:
            return
        self._open = False
        if self._failed:
            self._client.send_abort(self._request_id)
        self._sink.on_end()

    def on_error(self, error: EngineError) -> None:
        """The stream ended otherwise."""
        if not self._open:
            return
        self._open = False
        if self._started and self._streaming:
            self._client.send_abort(self._request_id)
        self._sink.on_error(error)
