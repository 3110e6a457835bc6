"""The gRPC client against the embedded engine, over real sockets."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from smg.engines.base import Delta, EngineError, EngineRequest, Sampling
from smg.engines.grpc.client import GrpcWorkerClient
from smg.engines.grpc.codecs import CODECS, codec_for
from smg.engines.grpc.pb import common_pb2, vllm_engine_pb2
from smg.engines.grpc.probe import WorkerAdmin, probe
from smg.simengine.core import SimEngine, SimOptions
from smg.simengine.grpc.front import GrpcFront
from smg.simengine.script import Failure, Output, Script
from smg.simengine.vocabulary import SHIPPED_MODEL, Vocabulary

KINDS = tuple(CODECS)
VOCABULARY = Vocabulary.load(SHIPPED_MODEL)
PROMPT = VOCABULARY.encode("<|turn|>user\nWhat do whales eat in winter?<|end|>\n<|turn|>assistant\n")
LIMIT = 20.0  # seconds; generous, for a busy machine


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT))


async def eventually(condition: Callable[[], bool]) -> float:
    """Wait until ``condition`` holds; seconds it took. Fails with the test's own time limit."""
    start = time.monotonic()
    while not condition():
        await asyncio.sleep(0.001)
    return time.monotonic() - start


class Collector:
    """A sink that keeps what it gets; ``first`` is set by the first delta, ``closed`` at the end."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.errors: list[EngineError] = []
        self.ends = 0
        self.first = asyncio.Event()
        self.closed = asyncio.Event()

    def on_delta(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.first.set()

    def on_end(self) -> None:
        self.ends += 1
        self.closed.set()

    def on_error(self, error: EngineError) -> None:
        self.errors.append(error)
        self.closed.set()

    def ids(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]


@asynccontextmanager
async def worker(
    kind: str, options: SimOptions | None = None, script: Script | None = None
) -> AsyncIterator[tuple[SimEngine, str]]:
    engine = SimEngine(VOCABULARY, options, script)
    front = GrpcFront(engine, kind, "sim")
    port = await front.start("127.0.0.1", 0)
    steps = asyncio.create_task(engine.run())
    try:
        yield engine, f"grpc://127.0.0.1:{port}"
    finally:
        await front.stop()
        steps.cancel()


@asynccontextmanager
async def client_of(kind: str, url: str) -> AsyncIterator[GrpcWorkerClient]:
    client = GrpcWorkerClient(url, kind)
    try:
        yield client
    finally:
        await client.close()


def start(
    client: GrpcWorkerClient, *, stream: bool, sampling: Sampling | None = None, name: str = "r-1", **options: Any
) -> tuple[Collector, Any]:
    sink = Collector()
    request = EngineRequest(name, "chat", "text", PROMPT, stream, sampling or Sampling())
    call = client.generate(name, client.codec.encode(request), sink, streaming=stream, **options)
    return sink, call


ENDLESS = Sampling(ignore_eos=True, max_tokens=4000)


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


def free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port: int = probe_socket.getsockname()[1]
        return port


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


# ---- what the router asks


@pytest.mark.parametrize("kind", KINDS)
def test_probe_finds_the_kind(kind: str) -> None:
    async def test() -> None:
        async with worker(kind, SimOptions(dp_size=2)) as (_, url):
            facts = await probe(url)
            assert facts == await probe(url, kind)
        assert (facts.kind, facts.model_id) == (kind, "sim")
        assert (facts.context_length, facts.vocab_size) == (VOCABULARY.context_length, VOCABULARY.size)
        if kind != "trtllm":
            assert facts.eos_token_ids == VOCABULARY.eos_ids
            assert facts.model_path == str(SHIPPED_MODEL)
        if kind in ("vllm", "sglang", "tokenspeed"):
            assert (facts.dp_size, facts.block_size) == (2, 16)
            assert '"top_k"' in facts.default_sampling_params

    run(test)


def test_probe_of_nothing_and_of_something_else() -> None:
    async def test() -> None:
        with pytest.raises(EngineError) as caught:
            await probe(f"grpc://127.0.0.1:{free_port()}")
        assert caught.value.code == "UNAVAILABLE"
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(EngineError) as caught:
            await probe(f"grpc://127.0.0.1:{port}")
        assert caught.value.code == "UNIMPLEMENTED"
        await server.stop(None)

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_and_flush(kind: str) -> None:
    async def test() -> None:
        async with worker(kind, SimOptions(step_ms=2)) as (engine, url), client_of(kind, url) as client:
            admin = WorkerAdmin(url)
            if not codec_for(kind).supports_loads:
                for call in (admin.loads(), admin.flush_cache()):
                    with pytest.raises(EngineError) as caught:
                        await call
                    assert caught.value.code == "UNIMPLEMENTED"
            else:
                sink, _ = start(client, stream=True, sampling=ENDLESS)
                await sink.first.wait()
                report = await admin.loads()
                (load,) = report.loads
                assert (load.num_running_reqs, load.num_waiting_reqs) == (1, 0)
                assert load.num_used_tokens > len(PROMPT)
                assert load.max_running_requests == 256
                assert len(engine.cache) > 0
                assert (await admin.flush_cache()).success
                assert len(engine.cache) == 0
            assert admin.kind == kind
            await admin.close()

    run(test)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm", "tokenspeed", "mlx"])
def test_profiler_that_is_not_there(kind: str) -> None:
    async def test() -> None:
        async with worker(kind) as (_, url):
            admin = WorkerAdmin(url, kind)
            for call in (admin.start_profile({"num_steps": 3}), admin.stop_profile()):
                with pytest.raises(EngineError) as caught:
                    await call
                assert caught.value.code == "UNIMPLEMENTED"
            await admin.close()

    run(test)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_comes_over_the_wire(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with worker(kind) as (_, url):
            admin = WorkerAdmin(url)
            assert await admin.fetch_tokenizer(tmp_path / "tok") == tmp_path / "tok"
            with pytest.raises(EngineError, match="exceeds 1000 bytes"):
                await admin.fetch_tokenizer(tmp_path / "small", max_bytes=1000)
            await admin.close()
        fetched = Vocabulary.load(tmp_path / "tok")
        assert fetched.encode("whales eat") == VOCABULARY.encode("whales eat")

    run(test)


@pytest.mark.parametrize("digest", ["", "00" * 32])
def test_tokenizer_with_the_wrong_hash_is_refused(digest: str, tmp_path: Path) -> None:
    async def tokenizer(payload: bytes, context: Any) -> AsyncIterator[bytes]:
        yield common_pb2.GetTokenizerChunk(data=VOCABULARY.bundle(), sha256=digest).SerializeToString()

    async def test() -> None:
        server = grpc.aio.server()
        handlers = {"GetTokenizer": grpc.unary_stream_rpc_method_handler(tokenizer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(vllm_engine_pb2.SERVICE, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        admin = WorkerAdmin(f"grpc://127.0.0.1:{port}", "vllm")
        with pytest.raises(EngineError) as caught:
            await admin.fetch_tokenizer(tmp_path / "tok")
        assert caught.value.code == "DATA_LOSS"
        assert not (tmp_path / "tok").exists()
        await admin.close()
        await server.stop(None)

    run(test)


# ---- the command


COMMAND = [sys.executable, "-c", "from smg.simengine.cli import sim_engine_command; sim_engine_command()"]


def launch(*options: str) -> tuple[subprocess.Popen[str], str]:
    """Start the command; the process and the URL its ready line names."""
    process = subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("sim-engine ready: "), line
    return process, line.rsplit("url=", 1)[1].strip()


def test_command_serves_and_ends_on_sigterm() -> None:
    process, url = launch("--kind", "vllm", "--model-name", "named", "--port", "0")
    try:
        facts = asyncio.run(probe(url))
        assert (facts.kind, facts.model_id) == ("vllm", "named")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT) == 0
        assert process.stdout is not None
        process.stdout.close()


def test_worker_that_vanishes_is_unavailable() -> None:
    process, url = launch("--kind", "sglang", "--vanish-at-token", "3", "--step-ms", "2")

    async def test() -> None:
        async with client_of("sglang", url) as client:
            sink, _ = start(client, stream=True, sampling=ENDLESS)
            await sink.closed.wait()
        assert [error.code for error in sink.errors] == ["UNAVAILABLE"]
        assert len(sink.ids()) <= 3

    try:
        run(test)
        assert process.wait(timeout=LIMIT) == 70
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
