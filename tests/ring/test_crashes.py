"""What a crash costs: every kind of process is killed while streams run; afterwards everything is served again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from gateway import Gateway, gateway
from sim_worker import worker

from smg.simengine.core import SimEngine, SimOptions

LIMIT = 110.0
STREAMS = 64
TOKENS = 60


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT))


def running(engine: SimEngine) -> int:
    return sum(rank.running + rank.waiting for rank in engine.loads())


async def one_stream(gw: Gateway, number: int) -> str:
    """Run one stream to its end; "done", "error" (a clean error event) or "broken" (the connection just ended)."""
    body: dict[str, Any] = {
        "model": "sim", "messages": [{"role": "user", "content": f"story {number}"}], "max_tokens": TOKENS,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    outcome = "broken"
    try:
        async with gw.http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return f"status {response.status_code}"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return outcome if outcome == "error" else "done"
                if line.startswith("data: ") and "error" in json.loads(line[6:]):
                    outcome = "error"
    except httpx.HTTPError:
        return "broken"
    return outcome


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("tokenizer", {"done"}),
        ("router", {"done"}),
        ("detok", {"done", "error"}),
        ("telemetry", {"done"}),
        ("frontend", {"done", "broken"}),
    ],
)
def test_a_killed_process_is_replaced(role: str, allowed: set[str]) -> None:
    async def test() -> None:
        async with worker("vllm", SimOptions(step_ms=10)) as (engine, url), gateway(url) as gw:
            streams = [asyncio.create_task(one_stream(gw, number)) for number in range(STREAMS)]
            while running(engine) < STREAMS // 2:
                await asyncio.sleep(0.005)
            await gw.kill(role)
            outcomes = set(await asyncio.gather(*streams))
            assert outcomes <= allowed
            async with asyncio.timeout(20):
                while (await gw.chat()).status_code != 200:
                    await asyncio.sleep(0.05)
                while running(engine):
                    await asyncio.sleep(0.01)
            assert await gw.stop() == 0

    run(test)


def test_requests_that_wait_for_a_tokenizer_survive_its_death() -> None:
    async def test() -> None:
        async with worker("vllm") as (_engine, url), gateway(url) as gw:
            requests = [asyncio.create_task(gw.chat(f"text {n} " * 2000, max_tokens=4)) for n in range(40)]
            await asyncio.sleep(0)
            await gw.kill("tokenizer")
            answers = await asyncio.gather(*requests)
            assert {answer.status_code for answer in answers} == {200}

    run(test)


def test_drain_finishes_streams_and_refuses_new_requests() -> None:
    async def test() -> None:
        async with worker("vllm", SimOptions(step_ms=10)) as (engine, url), gateway(url) as gw:
            streams = [asyncio.create_task(one_stream(gw, number)) for number in range(8)]
            while running(engine) < 8:
                await asyncio.sleep(0.005)
            stopped = asyncio.create_task(gw.stop())
            assert set(await asyncio.gather(*streams)) == {"done"}
            assert await stopped == 0
            with pytest.raises(httpx.TransportError):
                await gw.http.get("/health")

    run(test)


def test_the_grace_period_and_a_second_signal_end_streams() -> None:
    async def test() -> None:
        flags = ("--shutdown-grace-period-secs", "1")
        async with worker("vllm", SimOptions(step_ms=1000)) as (engine, url):
            async with gateway(url, flags=flags) as gw:
                stream = asyncio.create_task(one_stream(gw, 1))
                while not running(engine):
                    await asyncio.sleep(0.005)
                assert await gw.stop() == 0
                assert await stream == "broken"
            async with gateway(url) as gw:
                stream = asyncio.create_task(one_stream(gw, 1))
                while not running(engine):
                    await asyncio.sleep(0.005)
                gw.process.terminate()
                with contextlib.suppress(httpx.TransportError):
                    while (await gw.http.get("/readiness")).status_code == 200:
                        await asyncio.sleep(0.01)
                assert await gw.stop() == 128 + 15
                assert await stream == "broken"

    run(test)
