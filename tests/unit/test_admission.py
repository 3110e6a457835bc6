"""Admission: slots, queue, refusals, rate."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from smg.frontend.admission import Admission, RefusedError
from smg.settings import Settings


def make(**fields: Any) -> Admission:
    return Admission(Settings(frontend_procs=1, **fields))


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 10))


def test_waiting_requests_are_served_in_order() -> None:
    async def test() -> None:
        admission = make(max_concurrent_requests=1, queue_size=5)
        await admission.enter()
        order: list[int] = []

        async def wait(number: int) -> None:
            await admission.enter()
            order.append(number)
            admission.leave()

        tasks = [asyncio.create_task(wait(number)) for number in range(4)]
        while admission.waiting < 4:
            await asyncio.sleep(0)
        admission.leave()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3]
        assert (admission.inflight, admission.waiting) == (0, 0)

    run(test())


@pytest.mark.parametrize("queue_size", [0, 1])
def test_a_full_queue_refuses(queue_size: int) -> None:
    async def test() -> None:
        admission = make(max_concurrent_requests=1, queue_size=queue_size)
        await admission.enter()
        waiting = [asyncio.create_task(admission.enter()) for _ in range(queue_size)]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError) as refused:
            await admission.enter()
        assert (refused.value.status, refused.value.code) == (429, "admission_queue_full")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert admission.waiting == 0

    run(test())


def test_a_request_does_not_wait_forever() -> None:
    async def test() -> None:
        admission = make(max_concurrent_requests=1, queue_timeout_secs=0)
        await admission.enter()
        with pytest.raises(RefusedError) as refused:
            await admission.enter()
        assert (refused.value.status, refused.value.code) == (503, "admission_queue_timeout")
        admission.leave()
        await admission.enter()
        assert admission.inflight == 1

    run(test())


def test_zero_is_unlimited() -> None:
    async def test() -> None:
        admission = make(max_concurrent_requests=0)
        assert all(admission.try_enter() for _ in range(10_000))

    run(test())


def test_the_rate_limit_lets_a_burst_through_and_then_a_steady_flow() -> None:
    async def test() -> None:
        admission = make(max_concurrent_requests=3, rate_limit_tokens_per_second=50, queue_size=10)
        begun = asyncio.get_running_loop().time()
        for _ in range(6):
            await admission.enter()
            admission.leave()
        assert asyncio.get_running_loop().time() - begun >= 0.05

    run(test())
