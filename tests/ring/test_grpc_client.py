"""The gRPC client against the embedded engine, over real sockets."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from sim_worker import ENDLESS, PROMPT, VOCABULARY, Collector, client_of, eventually, free_port, run, start, worker

from smg.engines.base import Delta, EngineError, EngineRequest, Sampling
from smg.engines.grpc.channel import TlsOptions, target_of
from smg.engines.grpc.client import GrpcWorkerClient
from smg.engines.grpc.codecs import CODECS
from smg.engines.grpc.pb import vllm_engine_pb2
from smg.simengine.core import SimEngine, SimOptions
from smg.simengine.grpc.front import GrpcFront
from smg.simengine.script import Failure, Output, Script

KINDS = tuple(CODECS)


def test_worker_addresses() -> None:
    assert target_of("grpc://host:50051") == "host:50051"
    assert target_of("grpcs://host") == "host:443"
    assert target_of("grpc://[::1]:7") == "[::1]:7"
    for url in ("http://host:1", "grpc://", "host:1", "ipc:///x"):
        with pytest.raises(ValueError, match="not a gRPC worker URL"):
            target_of(url)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_adds_up_to_the_whole_answer(kind: str) -> None:
    async def test() -> None:
        async with worker(kind) as (_, url), client_of(kind, url) as client:
            streamed, _ = start(client, stream=True)
            await streamed.closed.wait()
            whole, _ = start(client, stream=False)
            await whole.closed.wait()
        assert len(streamed.deltas) > 10
        assert len(whole.deltas) == 1
        assert streamed.ids() == whole.ids() != []
        assert "whales" in VOCABULARY.decode(whole.ids()) or "winter" in VOCABULARY.decode(whole.ids())
        for sink in (streamed, whole):
            assert (sink.ends, sink.errors) == (1, [])
            last = sink.deltas[-1]
            assert (last.finish_reason, last.prompt_tokens) == ("stop", len(PROMPT))
            assert last.completion_tokens == len(whole.ids())

    run(test)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mlx"])
def test_several_choices(kind: str) -> None:
    async def test() -> None:
        async with worker(kind) as (_, url), client_of(kind, url) as client:
            streamed, _ = start(client, stream=True, sampling=Sampling(n=3, max_tokens=6))
            await streamed.closed.wait()
            whole, _ = start(client, stream=False, sampling=Sampling(n=3, max_tokens=6))
            await whole.closed.wait()
        for index in range(3):
            assert streamed.ids(index) == whole.ids(index)
            assert len(whole.ids(index)) == 6
        assert [d.finish_reason for d in whole.deltas] == ["length"] * 3

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_abort_stops_the_engine_at_once(kind: str) -> None:
    async def test() -> None:
        async with worker(kind, SimOptions(step_ms=2)) as (engine, url), client_of(kind, url) as client:
            sink, call = start(client, stream=True, sampling=ENDLESS)
            await sink.first.wait()
            call.abort()
            call.abort()
            seen = len(sink.deltas)
            assert await eventually(lambda: engine.aborted == 1 and not engine.loads()[0].running) < 1.0
            # The connection still serves, and nothing more comes to the aborted sink.
            other, _ = start(client, stream=False, sampling=Sampling(max_tokens=3), name="r-2")
            await other.closed.wait()
        assert (len(sink.deltas), sink.ends, sink.errors) == (seen, 0, [])
        assert engine.aborted == 1

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_abort_before_the_first_message_resets_the_call(stream: bool) -> None:
    async def test() -> None:
        options = SimOptions(prefill_ms=60_000)
        async with worker("vllm", options) as (engine, url), client_of("vllm", url) as client:
            sink, call = start(client, stream=stream, sampling=ENDLESS)
            await eventually(lambda: engine.loads()[0].running == 1)
            call.abort()
            assert await eventually(lambda: not engine.loads()[0].running) < 1.0
        assert (sink.deltas, sink.ends, sink.errors) == ([], 0, [])

    run(test)


def test_abort_right_after_the_start() -> None:
    async def test() -> None:
        async with worker("sglang", SimOptions(step_ms=2)) as (engine, url), client_of("sglang", url) as client:
            sink, call = start(client, stream=True, sampling=ENDLESS)
            call.abort()
            other, _ = start(client, stream=False, sampling=Sampling(max_tokens=3), name="r-2")
            await other.closed.wait()
            await eventually(lambda: not engine.loads()[0].running)
        assert (sink.deltas, sink.ends, sink.errors) == ([], 0, [])

    run(test)


@pytest.mark.parametrize(
    "code",
    ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "CANCELLED", "UNKNOWN"],
)
@pytest.mark.parametrize("at", [0, 2])
def test_engine_errors_keep_their_code(code: str, at: int) -> None:
    async def test() -> None:
        script = Script([Output(text="one two three four", error=Failure(code, "scripted", at))])
        async with worker("vllm", script=script) as (_, url), client_of("vllm", url) as client:
            sink, _ = start(client, stream=True)
            await sink.closed.wait()
        (error,) = sink.errors
        assert (error.code, error.message) == (code, "scripted")
        assert len(sink.deltas) == at
        assert sink.ends == 0

    run(test)


def test_refused_requests() -> None:
    async def test() -> None:
        async with worker("sglang") as (_, url), client_of("sglang", url) as client:
            sink = Collector()
            request = EngineRequest("r-1", "chat", "", [VOCABULARY.size], True, Sampling())
            client.generate("r-1", client.codec.encode(request), sink, streaming=True)
            await sink.closed.wait()
        assert [error.code for error in sink.errors] == ["INVALID_ARGUMENT"]

    run(test)


def test_no_worker_is_unavailable_quickly_and_found_again() -> None:
    async def test() -> None:
        port = free_port()
        async with client_of("vllm", f"grpc://127.0.0.1:{port}") as client:
            began = time.monotonic()
            sink, _ = start(client, stream=True)
            await sink.closed.wait()
            assert [error.code for error in sink.errors] == ["UNAVAILABLE"]
            assert time.monotonic() - began < 2.0
            engine = SimEngine(VOCABULARY)
            front = GrpcFront(engine, "vllm", "sim")
            await front.start("127.0.0.1", port)
            steps = asyncio.create_task(engine.run())
            while not sink.ends:  # dialled again within the reconnect limit
                sink, _ = start(client, stream=False, sampling=Sampling(max_tokens=2))
                await sink.closed.wait()
                await asyncio.sleep(0.02)
            await front.stop()
            steps.cancel()

    run(test)


def test_timeout_covers_the_generation() -> None:
    async def test() -> None:
        async with worker("vllm", SimOptions(step_ms=5)) as (engine, url), client_of("vllm", url) as client:
            sink, _ = start(client, stream=True, sampling=ENDLESS, timeout=0.2)
            await sink.closed.wait()
            assert [error.code for error in sink.errors] == ["DEADLINE_EXCEEDED"]
            await eventually(lambda: not engine.loads()[0].running)

    run(test)


def test_big_prompts_pass() -> None:
    async def test() -> None:
        ids = [index % 5000 for index in range(120_000)]
        async with worker("vllm") as (_, url), client_of("vllm", url) as client:
            sink = Collector()
            request = EngineRequest("r", "chat", "x" * 6_000_000, ids, False, Sampling(max_tokens=2))
            client.generate("r", client.codec.encode(request), sink, streaming=False)
            await sink.closed.wait()
        assert sink.errors == []
        assert sink.deltas[0].prompt_tokens == 120_000

    run(test)


def test_rank_and_prefix_cache_show() -> None:
    async def test() -> None:
        options = SimOptions(dp_size=3, step_ms=2)
        async with worker("sglang", options) as (engine, url), client_of("sglang", url) as client:
            sink, call = start(client, stream=True, sampling=ENDLESS, dp_rank=2)
            await sink.first.wait()
            assert [rank.running for rank in engine.loads()] == [0, 0, 1]
            assert sink.deltas[0].cached_tokens == 0
            call.abort()
            again, _ = start(client, stream=False, sampling=Sampling(max_tokens=1), name="r-2", dp_rank=0)
            await again.closed.wait()
            assert again.deltas[0].cached_tokens == len(PROMPT) // 16 * 16 > 0
            bad, _ = start(client, stream=False, name="r-3", dp_rank=3)
            await bad.closed.wait()
            assert [error.code for error in bad.errors] == ["INVALID_ARGUMENT"]

    run(test)


def test_broken_sink_ends_its_own_call_only() -> None:
    class Broken(Collector):
        def on_delta(self, delta: Delta) -> None:
            raise RuntimeError("cannot")

    async def test() -> None:
        async with worker("vllm", SimOptions(step_ms=2)) as (engine, url), client_of("vllm", url) as client:
            sink = Broken()
            request = EngineRequest("r", "chat", "", PROMPT, True, ENDLESS)
            client.generate("r", client.codec.encode(request), sink, streaming=True)
            await sink.closed.wait()
            assert [error.code for error in sink.errors] == ["INTERNAL"]
            await eventually(lambda: not engine.loads()[0].running)

    run(test)


def test_closing_the_client_frees_the_engine() -> None:
    async def test() -> None:
        async with worker("vllm", SimOptions(step_ms=2)) as (engine, url):
            async with client_of("vllm", url) as client:
                sink, _ = start(client, stream=True, sampling=ENDLESS)
                await sink.first.wait()
            await eventually(lambda: not engine.loads()[0].running)
        assert (sink.ends, sink.errors) == (0, [])

    run(test)


def test_embeddings() -> None:
    async def test() -> None:
        for kind in ("vllm", "sglang"):
            async with worker(kind) as (_, url), client_of(kind, url) as client:
                first = await client.embed(client.codec.embed_request("e-1", "text", [1, 2, 3]), 5.0)
                again = await client.embed(client.codec.embed_request("e-2", "text", [1, 2, 3]), 5.0)
                with pytest.raises(EngineError, match="INVALID_ARGUMENT"):
                    await client.embed(client.codec.embed_request("e-3", "", []), 5.0)
            assert (len(first.vector), first.prompt_tokens) == (64, 3)
            assert first == again

    run(test)


# ---- what the engine is told about calls that end badly


@asynccontextmanager
async def scripted_worker(
    messages: list[bytes], failure: grpc.StatusCode | None = None, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[tuple[list[str], int]]:
    """A vLLM service that answers every Generate with ``messages`` and then ``failure``; yields the ids it is told to
    abort, and its port."""
    aborted: list[str] = []

    async def generate(payload: bytes, context: Any) -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        if failure is not None:
            await context.abort(failure, "broken")

    async def abort(payload: bytes, context: Any) -> bytes:
        aborted.extend(vllm_engine_pb2.AbortRequest.FromString(payload).request_ids)
        return b""

    server = grpc.aio.server()
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "Abort": grpc.unary_unary_rpc_method_handler(abort),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(vllm_engine_pb2.SERVICE, handlers),))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    try:
        yield aborted, port
    finally:
        await server.stop(None)


def vllm_chunk(*ids: int) -> bytes:
    chunk = vllm_engine_pb2.GenerateStreamChunk(token_ids=ids)
    return vllm_engine_pb2.GenerateResponse(chunk=chunk).SerializeToString()


def vllm_complete(reason: str) -> bytes:
    complete = vllm_engine_pb2.GenerateComplete(output_ids=[1], finish_reason=reason)
    return vllm_engine_pb2.GenerateResponse(complete=complete).SerializeToString()


class AbortingOnFailure(Collector):
    """A sink that aborts its call as soon as the engine calls it failed."""

    call: Any = None

    def on_delta(self, delta: Delta) -> None:
        super().on_delta(delta)
        if delta.finish_reason == "error":
            self.call.abort()
            self.closed.set()


@pytest.mark.parametrize("sink_class", [Collector, AbortingOnFailure])
@pytest.mark.parametrize(
    ("messages", "failure", "stream", "told"),
    [
        ([vllm_chunk(1), vllm_complete("stop")], None, True, False),
        ([vllm_complete("stop")], None, False, False),
        ([vllm_chunk(1), vllm_complete("error")], None, True, True),
        ([vllm_complete("error")], None, False, True),
        ([vllm_chunk(1)], grpc.StatusCode.INTERNAL, True, True),
        ([], grpc.StatusCode.INTERNAL, True, False),
        ([], grpc.StatusCode.INTERNAL, False, False),
        ([vllm_chunk(1), b"\xff\xff"], None, True, True),
    ],
)
def test_engine_is_told_of_failed_generations(
    messages: list[bytes], failure: grpc.StatusCode | None, stream: bool, told: bool, sink_class: type[Collector]
) -> None:
    async def test() -> None:
        async with scripted_worker(messages, failure) as (aborted, port):
            client = GrpcWorkerClient(f"grpc://127.0.0.1:{port}", "vllm")
            sink = sink_class()
            request = client.codec.encode(EngineRequest("r-1", "chat", "", PROMPT, stream, Sampling()))
            call = client.generate("r-1", request, sink, streaming=stream)
            if isinstance(sink, AbortingOnFailure):
                sink.call = call
            await sink.closed.wait()
            await client.close()  # lets what it has to say go out
            assert aborted == (["r-1"] if told else [])
            assert sink.ends + len(sink.errors) <= 1

    run(test)


# ---- TLS


def self_signed(folder: Path) -> tuple[bytes, bytes]:
    """Key and certificate for localhost."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:localhost", *files], check=True, capture_output=True)
    return (folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes()


def test_tls_verifies_the_worker_and_shows_the_gateways_certificate(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)

    async def answer(port: int, tls: TlsOptions | None) -> Collector:
        client = GrpcWorkerClient(f"grpcs://localhost:{port}", "vllm", tls=tls)
        sink, _ = start(client, stream=True)
        await sink.closed.wait()
        await client.close()
        return sink

    async def test() -> None:
        credentials = grpc.ssl_server_credentials([(key, certificate)], certificate, require_client_auth=True)
        async with scripted_worker([vllm_complete("stop")], credentials=credentials) as (_, port):
            good = await answer(port, TlsOptions(ca=certificate, certificate=certificate, key=key))
            assert (good.ends, good.errors) == (1, [])
            for bad in (None, TlsOptions(ca=certificate)):
                assert [error.code for error in (await answer(port, bad)).errors] == ["UNAVAILABLE"]

    run(test)
