"""What the router asks of a gRPC worker, and the command that runs the embedded engine."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from sim_worker import ENDLESS, LIMIT, PROMPT, VOCABULARY, client_of, free_port, run, start, worker

from smg.engines.base import EngineError
from smg.engines.grpc.codecs import CODECS, codec_for
from smg.engines.grpc.pb import common_pb2, vllm_engine_pb2
from smg.engines.grpc.probe import WorkerAdmin, probe
from smg.simengine.core import SimOptions
from smg.simengine.vocabulary import SHIPPED_MODEL, Vocabulary

KINDS = tuple(CODECS)


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
