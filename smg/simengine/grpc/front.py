"""The gRPC server of the embedded engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from smg.engines.grpc.pb import common_pb2 as common
from smg.simengine.core import Choice, Generation, RefusalError, SimEngine
from smg.simengine.grpc.adapter import Adapter
from smg.simengine.grpc.mlx import MlxAdapter
from smg.simengine.grpc.sglang import SglangAdapter
from smg.simengine.grpc.tokenspeed import TokenspeedAdapter
from smg.simengine.grpc.trtllm import TrtllmAdapter
from smg.simengine.grpc.vllm import VllmAdapter

ADAPTERS: dict[str, type[Adapter]] = {
    adapter.kind: adapter for adapter in (SglangAdapter, VllmAdapter, TrtllmAdapter, TokenspeedAdapter, MlxAdapter)
}
BUNDLE_CHUNK = 64 * 1024
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


class _Stream:
    """Messages of one generation on their way to its handler."""

    __slots__ = ("_adapter", "_generation", "aborted", "finished", "messages", "wake")

    def __init__(self, adapter: Adapter, generation: Generation) -> None:
        self._adapter = adapter
        self._generation = generation
        self.messages: deque[bytes] = deque()
        self.wake = asyncio.Event()
        self.finished = False
        self.aborted = False
        generation.deliver = self.on_step
        generation.failed = self.on_failure

    def on_step(self, generation: Generation, choice: Choice, ids: list[int]) -> None:
        if generation.request.stream:
            chunk = self._adapter.chunk(generation, choice, ids)
            if chunk is not None:
                self.messages.append(chunk)
        if choice.done:
            self.messages.append(self._adapter.complete(generation, choice, ids))
            self.finished = all(other.done for other in generation.choices)
        if self.messages:
            self.wake.set()

    def on_failure(self, generation: Generation) -> None:
        self.finished = True
        self.wake.set()

    def abort(self) -> None:
        self.aborted = True
        self.wake.set()


class GrpcFront:
    """Serves one engine under one worker protocol. ``start`` binds and returns the port."""

    def __init__(self, engine: SimEngine, kind: str, model_name: str) -> None:
        self.engine = engine
        self.adapter = ADAPTERS[kind](engine, model_name)
        self._streams: dict[str, _Stream] = {}
        self._bundle: tuple[bytes, str] | None = None
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(self.adapter.pb.SERVICE, self._handlers()),)
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; ``port`` 0 takes a free one. Raises ``OSError`` when the address is taken."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
        await self._server.start()
        return bound

    async def stop(self, grace: float | None = None) -> None:
        """Stop serving; running calls are cancelled after ``grace`` seconds."""
        await self._server.stop(grace)

    def _handlers(self) -> dict[str, Any]:
        pb, adapter = self.adapter.pb, self.adapter
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(self._generate),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(self._tokenizer),
            "Abort": _unary(pb.AbortRequest, self._abort),
            "HealthCheck": _unary(pb.HealthCheckRequest, lambda _: adapter.health()),
            "GetModelInfo": _unary(pb.GetModelInfoRequest, lambda _: adapter.model_info()),
            "GetServerInfo": _unary(pb.GetServerInfoRequest, lambda _: adapter.server_info()),
        }
        if adapter.has_loads:
            handlers["GetLoads"] = _unary(pb.GetLoadsRequest, adapter.loads)
            handlers["FlushCache"] = _unary(common.FlushCacheRequest, self._flush)
        if adapter.has_embed:
            handlers["Embed"] = _unary(pb.EmbedRequest, lambda m: adapter.embedding(list(m.tokenized.input_ids)))
        return handlers

    async def _generate(self, payload: bytes, context: Any) -> None:
        try:
            message = self.adapter.pb.GenerateRequest.FromString(payload)
            generation = await self.engine.prepare(self.adapter.request(message))
            stream = _Stream(self.adapter, generation)
            self.engine.submit(generation)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be decoded")
            return
        except RefusalError as refusal:
            await _refuse(context, refusal)
            return
        request_id = generation.request.request_id
        self._streams[request_id] = stream
        try:
            await self._send(stream, context)
        finally:
            del self._streams[request_id]
            if not stream.finished and not stream.aborted:
                self.engine.abort(request_id)
        if generation.refusal is not None:
            await _refuse(context, generation.refusal)

    @staticmethod
    async def _send(stream: _Stream, context: Any) -> None:
        messages, wake = stream.messages, stream.wake
        while not stream.aborted:
            while messages:
                await context.write(messages.popleft())
            if stream.finished:
                return
            wake.clear()
            await wake.wait()

    def _abort(self, message: Any) -> Any:
        found = False
        for request_id in self.adapter.aborted_ids(message):
            found = self.engine.abort(request_id) or found
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.abort()
        return self.adapter.abort_answer(found)

    def _flush(self, message: Any) -> Any:
        self.engine.cache.clear()
        return common.FlushCacheResponse(success=True, message="flushed")

    async def _tokenizer(self, payload: bytes, context: Any) -> AsyncIterator[bytes]:
        if self._bundle is None:
            data = await asyncio.to_thread(self.engine.vocabulary.bundle)
            self._bundle = data, hashlib.sha256(data).hexdigest()
        data, digest = self._bundle
        for start in range(0, len(data), BUNDLE_CHUNK):
            last = start + BUNDLE_CHUNK >= len(data)
            chunk = common.GetTokenizerChunk(data=data[start : start + BUNDLE_CHUNK], sha256=digest if last else "")
            yield chunk.SerializeToString()


async def _refuse(context: Any, refusal: RefusalError) -> None:
    await context.abort(grpc.StatusCode[refusal.code], refusal.message)


def _unary(request_class: Any, answer: Callable[[Any], Any]) -> Any:
    """A handler from request bytes to answer bytes around a plain function of messages."""

    async def handle(payload: bytes, context: Any) -> bytes:
        try:
            data: bytes = answer(request_class.FromString(payload)).SerializeToString()
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be decoded")
            raise
        except RefusalError as refusal:
            await _refuse(context, refusal)
            raise
        return data

    return grpc.unary_unary_rpc_method_handler(handle)
