"""What the router asks of a gRPC worker: who it is, how it is, what it carries, and its tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from smg.engines.base import EngineError
from smg.engines.grpc.bundle import MAX_ARCHIVE_BYTES, BundleError, unpack
from smg.engines.grpc.channel import TlsOptions, engine_error, open_channel, unary
from smg.engines.grpc.codecs import CODECS, GrpcCodec
from smg.engines.grpc.facts import Health, LoadReport, Outcome, WorkerFacts
from smg.engines.grpc.pb import common_pb2 as common

DEFAULT_TIMEOUT = 5.0
BUNDLE_TIMEOUT = 120.0
LOAD_SECTIONS = ("core", "disagg", "queues", "memory")
# An engine that does not have a method, and a server that does not have the service, both answer this.
UNIMPLEMENTED = "UNIMPLEMENTED"
UNDECODABLE = "the worker sent a message that cannot be decoded"

T = TypeVar("T")


def parsed(parse: Callable[[bytes], T], payload: bytes) -> T:
    """``parse(payload)``; raises ``EngineError`` (INTERNAL) for bytes that are no message."""
    try:
        return parse(payload)
    except DecodeError as error:
        raise EngineError("INTERNAL", UNDECODABLE) from error


class WorkerAdmin:
    """The management calls of one worker, over one channel.

    ``kind`` is the engine kind when it is known; "" finds it out with the first call (the service that answers a health
    check). Every method raises ``EngineError``: UNIMPLEMENTED when the engine kind has no such call.
    """

    def __init__(self, url: str, kind: str = "", *, tls: TlsOptions | None = None) -> None:
        self.url = url
        self._channel = open_channel(url, tls)
        self._codec: GrpcCodec | None = CODECS[kind] if kind else None

    @property
    def kind(self) -> str:
        """The engine kind, "" as long as it is unknown."""
        return self._codec.kind if self._codec is not None else ""

    async def close(self) -> None:
        await self._channel.close()

    async def health(self, timeout: float = DEFAULT_TIMEOUT) -> Health:
        """One health check."""
        if self._codec is not None:
            answer = await self._call(self._codec, "HealthCheck", b"", timeout)
            return parsed(self._codec.parse_health, answer)
        for codec in CODECS.values():
            try:
                answer = await self._call(codec, "HealthCheck", b"", timeout)
            except EngineError as error:
                if error.code != UNIMPLEMENTED:
                    raise
                continue
            self._codec = codec
            return parsed(codec.parse_health, answer)
        raise EngineError(UNIMPLEMENTED, f"{self.url} speaks none of the known worker protocols")

    async def probe(self, timeout: float = DEFAULT_TIMEOUT) -> WorkerFacts:
        """Facts of a healthy worker; UNAVAILABLE when it says it is not healthy.

        A worker that does not answer for its model or server information is described by what is known."""
        health = await self.health(timeout)
        if not health.healthy:
            raise EngineError("UNAVAILABLE", f"worker is not healthy: {health.message}")
        codec = await self._known(timeout)
        model, server = await asyncio.gather(
            self._optional(codec, "GetModelInfo", timeout), self._optional(codec, "GetServerInfo", timeout)
        )
        try:
            return codec.facts(model, server)
        except DecodeError as error:
            raise EngineError("INTERNAL", UNDECODABLE) from error

    async def loads(self, include: Sequence[str] = LOAD_SECTIONS, timeout: float = DEFAULT_TIMEOUT) -> LoadReport:
        """The worker's load, one entry per data-parallel rank."""
        codec = await self._known(timeout)
        if not codec.supports_loads:
            raise EngineError(UNIMPLEMENTED, f"{codec.kind} workers report no load")
        answer = await self._call(codec, "GetLoads", codec.loads_request(include), timeout)
        return parsed(codec.parse_loads, answer)

    async def flush_cache(self, timeout: float = 30.0) -> Outcome:
        """Empty the worker's prefix cache."""
        codec = await self._known(timeout)
        if not codec.supports_flush:
            raise EngineError(UNIMPLEMENTED, f"{codec.kind} workers have no cache flush")
        answer = await self._call(codec, "FlushCache", common.FlushCacheRequest().SerializeToString(), timeout)
        message = parsed(common.FlushCacheResponse.FromString, answer)
        return Outcome(message.success, message.message)

    async def start_profile(self, options: dict[str, object] | None = None, timeout: float = 30.0) -> Outcome:
        """Start the worker's profiler; ``options`` are fields of ``StartProfileRequest``."""
        try:
            request = common.StartProfileRequest(**(options or {})).SerializeToString()
        except (ValueError, TypeError) as error:
            raise EngineError("INVALID_ARGUMENT", str(error)) from error
        return await self._profile("StartProfile", request, timeout)

    async def stop_profile(self, timeout: float = 120.0) -> Outcome:
        """Stop the worker's profiler and let it write its traces."""
        return await self._profile("StopProfile", b"", timeout)

    async def fetch_tokenizer(
        self, target: Path, *, timeout: float = BUNDLE_TIMEOUT, max_bytes: int = MAX_ARCHIVE_BYTES
    ) -> Path:
        """Fetch the worker's tokenizer files into the directory ``target`` and return it.

        The archive is held in a temporary file, its SHA-256 must be the one the worker names, and its content is
        bounded (``smg.engines.grpc.bundle``). Raises ``EngineError``: DATA_LOSS for an archive that fails those checks.
        """
        codec = await self._known(DEFAULT_TIMEOUT)
        with tempfile.TemporaryFile() as archive:
            digest = hashlib.sha256()
            expected, size = "", 0
            stream = self._channel.unary_stream(codec.method("GetTokenizer"))(b"", timeout=timeout)
            try:
                async for payload in stream:
                    chunk = parsed(common.GetTokenizerChunk.FromString, payload)
                    size += len(chunk.data)
                    if size > max_bytes:
                        raise EngineError("DATA_LOSS", f"the tokenizer archive exceeds {max_bytes} bytes")
                    digest.update(chunk.data)
                    archive.write(chunk.data)
                    expected = chunk.sha256 or expected
            except grpc.aio.AioRpcError as error:
                raise engine_error(error) from error
            finally:
                stream.cancel()
            if digest.hexdigest() != expected.lower():
                raise EngineError("DATA_LOSS", "the tokenizer archive does not have the hash the worker names")
            try:
                await asyncio.to_thread(unpack, archive, target)
            except BundleError as error:
                raise EngineError("DATA_LOSS", str(error)) from error
        return target

    async def _profile(self, method: str, request: bytes, timeout: float) -> Outcome:
        codec = await self._known(DEFAULT_TIMEOUT)
        if not codec.supports_profile:
            raise EngineError(UNIMPLEMENTED, f"{codec.kind} workers have no profiler")
        message = parsed(common.ProfileResponse.FromString, await self._call(codec, method, request, timeout))
        return Outcome(message.success, message.message)

    async def _known(self, timeout: float) -> GrpcCodec:
        if self._codec is None:
            await self.health(timeout)
        if self._codec is None:
            raise EngineError(UNIMPLEMENTED, f"{self.url} speaks none of the known worker protocols")
        return self._codec

    async def _call(self, codec: GrpcCodec, method: str, request: bytes, timeout: float) -> bytes:
        return await unary(self._channel, codec.method(method), request, timeout)

    async def _optional(self, codec: GrpcCodec, method: str, timeout: float) -> bytes:
        with contextlib.suppress(EngineError):
            return await self._call(codec, method, b"", timeout)
        return b""


async def probe(url: str, kind_hint: str = "", *, tls: TlsOptions | None = None, timeout: float = 5.0) -> WorkerFacts:
    """Facts of the worker at ``url`` over a connection of its own. Raises ``EngineError``."""
    admin = WorkerAdmin(url, kind_hint, tls=tls)
    try:
        return await admin.probe(timeout)
    finally:
        await admin.close()
