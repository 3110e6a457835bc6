"""Calls and engines that the router's tests share."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from gateway import ROOT, Gateway
from sim_worker import VOCABULARY

from smg.simengine.core import SimEngine
from smg.simengine.grpc.front import GrpcFront

LIMIT = 100.0


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT))


@asynccontextmanager
async def engine_process(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A sim engine in a process of its own, so that it can die."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "smg", "sim-engine", "--kind", "vllm", "--model-name", "sim", *options,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
    try:
        yield process, line.split("url=")[1].strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until(condition: Callable[[], Awaitable[bool]], limit: float = 30.0) -> None:
    async with asyncio.timeout(limit):
        while not await condition():
            await asyncio.sleep(0.02)


async def workers(gw: Gateway) -> dict[str, Any]:
    """Worker objects by URL."""
    return {entry["url"]: entry for entry in (await gw.http.get("/workers")).json()["workers"]}


async def add(gw: Gateway, url: str, **fields: Any) -> str:
    """Register a worker and wait until it is ready; its id."""
    answer = await gw.http.post("/workers", json={"url": url} | fields)
    assert answer.status_code == 202, answer.text
    location = answer.headers["location"]

    async def ready() -> bool:
        return bool((await gw.http.get(location)).json()["status"] == "ready")

    await until(ready)
    return str(answer.json()["worker_id"])


async def served_by(gw: Gateway, count: int, **fields: Any) -> Counter[str]:
    """Answers per worker, ``(status, error code)`` for others; requests one after the other."""
    seen: Counter[Any] = Counter()
    for _ in range(count):
        answer = await gw.chat(max_tokens=1, **fields)
        seen[answer.headers.get("x-smg-routed-worker-id") or (answer.status_code, code_of(answer))] += 1
    return seen


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


async def metric(gw: Gateway, name: str) -> dict[str, float]:
    """Values of one series by its label part."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{gw.metrics_port}/metrics")).text
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(name))
    return {head[len(name) :]: float(value) for head, _, value in lines if head[len(name)] in "{ "}


@asynccontextmanager
async def named_worker(model: str) -> AsyncIterator[str]:
    engine = SimEngine(VOCABULARY)
    front = GrpcFront(engine, "vllm", model)
    port = await front.start("127.0.0.1", 0)
    steps = asyncio.create_task(engine.run())
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        await front.stop()
        steps.cancel()
