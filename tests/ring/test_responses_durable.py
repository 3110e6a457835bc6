"""Responses in a database file outlive the gateway, whatever becomes of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
from gateway import gateway
from sim_worker import worker

from smg.simengine.core import SimOptions
from smg.simengine.script import Output, Script

LIMIT = 110.0
WRITERS = 8


def test_what_was_acknowledged_survives_the_death_of_all_processes(tmp_path: Path) -> None:
    """Supervisor and children are killed at one moment while responses are written; a new gateway has every response
    that a client had seen complete."""
    flags = ("--history-backend", "sqlite", "--history-sqlite-path", str(tmp_path / "records.db"))
    known: list[dict[str, Any]] = []
    enough = asyncio.Event()

    async def write(http: httpx.AsyncClient, streaming: bool) -> None:
        body = {"model": "sim", "input": "hi", "stream": streaming}
        try:
            while True:
                answer = await http.post("/v1/responses", json=body)
                known.append({"id": _completed_id(answer.text)} if streaming else answer.json())
                if len(known) >= 100:
                    enough.set()
        except httpx.HTTPError:
            return

    async def test() -> None:
        async with worker("vllm", SimOptions(), Script([Output(content="alpha beta gamma")])) as (_, url):
            async with gateway(url, flags=flags) as gw:
                tasks = [asyncio.create_task(write(gw.http, number % 2 == 0)) for number in range(WRITERS)]
                await enough.wait()
                os.killpg(gw.process.pid, signal.SIGKILL)
                await gw.process.wait()
                await asyncio.gather(*tasks)
                shutil.rmtree(gw.run_dir)  # no process of the gateway is left that could
                gw.run_dir.mkdir()
            async with gateway(url, flags=flags) as gw:
                for shown in known:
                    found = (await gw.http.get(f"/v1/responses/{shown['id']}")).json()
                    assert found["status"] == "completed"
                    assert found | shown == found

    asyncio.run(asyncio.wait_for(test(), LIMIT))


def _completed_id(events: str) -> str:
    """Id of the response whose last event arrived."""
    last = events.rstrip().rpartition("\n\n")[2]
    assert last.startswith("event: response.completed")
    return last.partition('"id":"')[2].partition('"')[0]
