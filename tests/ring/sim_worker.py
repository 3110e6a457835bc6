"""A worker to test against: the embedded engine behind a real socket, and a sink that keeps what it gets."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from smg.engines.base import Delta, EngineError, EngineRequest, Sampling, Sink
from smg.engines.grpc.client import GrpcWorkerClient
from smg.simengine.core import SimEngine, SimOptions
from smg.simengine.grpc.front import GrpcFront
from smg.simengine.script import Script
from smg.simengine.vocabulary import SHIPPED_MODEL, Vocabulary

VOCABULARY = Vocabulary.load(SHIPPED_MODEL)
PROMPT = VOCABULARY.encode("<|turn|>user\nWhat do whales eat in winter?<|end|>\n<|turn|>assistant\n")
LIMIT = 20.0  # seconds; generous, for a busy machine
ENDLESS = Sampling(ignore_eos=True, max_tokens=4000)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT))


async def eventually(condition: Callable[[], bool]) -> float:
    """Wait until ``condition`` holds; seconds it took. Fails with the test's own time limit."""
    start = time.monotonic()
    while not condition():
        await asyncio.sleep(0.001)
    return time.monotonic() - start


COUNTS = ("finish_reason", "matched_stop", "logprobs", "prompt_logprobs", "prompt_tokens", "completion_tokens",
          "cached_tokens", "reasoning_tokens", "spec_accepted", "spec_draft", "hidden_states")  # fmt: skip


def snapshot(delta: Delta) -> Delta:
    """What ``delta`` says now: the next message may come in the same object."""
    kept = Delta(delta.index, delta.token_ids)
    for name in COUNTS:
        setattr(kept, name, getattr(delta, name))
    return kept


class Collector(Sink):
    """A sink that keeps what it gets; ``first`` is set by the first delta, ``closed`` at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas: list[Delta] = []
        self.errors: list[EngineError] = []
        self.ends = 0
        self.first = asyncio.Event()
        self.closed = asyncio.Event()

    def on_delta(self, delta: Delta) -> None:
        self.deltas.append(snapshot(delta))
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


def free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port: int = probe_socket.getsockname()[1]
        return port
