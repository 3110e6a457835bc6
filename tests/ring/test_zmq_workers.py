"""ZMQ workers through a whole gateway: endpoints, ends, deaths and returns of engines and of gateway processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from gateway import Gateway, alive
from zmq_worker import ZmqWorker, sockets, zmq_gateway, zmq_worker

from smg.simengine.core import SimOptions, synthetic_logprobs
from smg.simengine.script import Failure, Output, Script

LIMIT = 100.0
CHAT = "/v1/chat/completions"
SCRIPT = [
    Output(match="be brief", text="Short and good."),
    Output(match="stop soon", text="alpha beta ##STOP## " + "gamma delta epsilon zeta " * 100),
    Output(match="break it", text="broken reply", error=Failure(at=1)),
]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT))


class Shared:
    """A worker and a gateway that several tests use one after the other; the worker stands still in between."""

    def __init__(self, kind: str, runner: asyncio.Runner, worker: ZmqWorker, gw: Gateway) -> None:
        self.kind = kind
        self.worker = worker
        self.gw = gw
        self._runner = runner

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        self._runner.run(asyncio.wait_for(test(), LIMIT))  # type: ignore[arg-type]
        assert self.worker.fatal == []


def started(kind: str) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def enter() -> Shared:
            worker = await stack.enter_async_context(zmq_worker(kind, SimOptions(step_ms=2), Script(SCRIPT)))
            return Shared(kind, runner, worker, await stack.enter_async_context(zmq_gateway(worker)))

        try:
            yield runner.run(enter())
        finally:
            runner.run(stack.aclose())


@pytest.fixture(scope="module", params=["vllm", "tokenspeed"])
def both(request: pytest.FixtureRequest) -> Iterator[Shared]:
    """Every engine wire in turn."""
    yield from started(request.param)


@pytest.fixture(scope="module")
def plain() -> Iterator[Shared]:
    """vLLM's wire."""
    yield from started("vllm")


async def until(condition: Callable[[], bool], limit: float = 20.0) -> float:
    """Wait until ``condition`` holds; seconds it took."""
    start = time.monotonic()
    async with asyncio.timeout(limit):
        while not condition():
            await asyncio.sleep(0.002)
    return time.monotonic() - start


async def events(response: httpx.Response) -> list[Any]:
    """The data of an event stream; the end marker is checked and left out."""
    data = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


async def stream(gw: Gateway, path: str, body: dict[str, Any]) -> list[Any]:
    async with gw.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        return await events(response)


def chat_body(text: str = "What do whales eat?", **fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 24} | fields


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [c["choices"][0] for c in chunks if c.get("choices")]
    return "".join(c["delta"].get("content") or "" for c in choices if c["index"] == index)


def test_every_endpoint(both: Shared) -> None:
    worker, gw = both.worker, both.gw

    async def test() -> None:
        whole = (await gw.http.post(CHAT, json=chat_body())).json()
        chunks = await stream(gw, CHAT, chat_body(stream_options={"include_usage": True}))
        assert text_of(chunks) == whole["choices"][0]["message"]["content"] != ""
        assert whole["usage"]["completion_tokens"] == 24
        usage = chunks[-1]["usage"]
        assert usage["completion_tokens"] == 24
        assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"] > 0

        completion = {"model": "sim", "prompt": ["One day", "Two"], "max_tokens": 9, "n": 2, "echo": True}
        whole = (await gw.http.post("/v1/completions", json=completion)).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        chunks = await stream(gw, "/v1/completions", completion)
        for index in range(4):
            text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index)
            assert text == whole["choices"][index]["text"]

        by_ids = {"model": "sim", "prompt": [[70, 71], [72, 73, 74]], "max_tokens": 3, "return_token_ids": True}
        whole = (await gw.http.post("/v1/completions", json=by_ids)).json()
        assert [len(choice["token_ids"]) for choice in whole["choices"]] == [3, 3]

        echo = {"model": "sim", "prompt": [70], "max_tokens": 2, "echo": True, "logprobs": 1}
        answer = await gw.http.post("/v1/completions", json=echo)
        if both.kind == "vllm":
            values = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
            assert len(values) == 3 and values[0] is None
        else:
            assert answer.status_code == 400

        generate = {"model": "sim", "text": "One day", "sampling_params": {"max_new_tokens": 7}}
        [whole] = (await gw.http.post("/generate", json=generate)).json()
        last = (await stream(gw, "/generate", generate))[-1]
        assert last["text"] == whole["text"]

        body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        answer = (await gw.http.post("/v1/messages", json=body)).json()
        assert answer["stop_reason"] == "max_tokens"
        refused = await gw.http.post("/v1/embeddings", json={"model": "sim", "input": "x"})
        assert refused.status_code == 501
        assert worker.running == 0

    both.run(test)


def test_a_reply_ends_with_the_end_of_sequence_token(both: Shared) -> None:
    gw = both.gw

    async def test() -> None:
        answer = (await gw.http.post(CHAT, json=chat_body("be brief", max_tokens=None))).json()
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "Short and good."
        assert choice["finish_reason"] == "stop"
        assert choice.get("matched_stop") is None
        endless = (await gw.http.post(CHAT, json=chat_body(ignore_eos=True, max_tokens=50))).json()
        assert endless["choices"][0]["finish_reason"] in ("length", "stop")

    both.run(test)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_string_ends_the_engine_request_at_once(both: Shared, streaming: bool) -> None:
    worker, gw = both.worker, both.gw

    async def test() -> None:
        body = chat_body("stop soon", stop=["##STOP##", "nope"], max_tokens=400, stream=streaming)
        before = worker.engines[0].aborted
        if streaming:
            chunks = await stream(gw, CHAT, body)
            assert text_of(chunks) == "alpha beta "
            end = chunks[-1]["choices"][0]
        else:
            end = (await gw.http.post(CHAT, json=body)).json()["choices"][0]
            assert end["message"]["content"] == "alpha beta "
        assert (end["finish_reason"], end["matched_stop"]) == ("stop", "##STOP##")
        await until(lambda: worker.engines[0].aborted == before + 1, 1.0)
        assert worker.running == 0

    both.run(test)


def test_a_stop_string_of_one_choice_frees_its_engine_request_while_the_others_go_on() -> None:
    async def test() -> None:
        script = Script([Output(text="one ##STOP## " + "x " * 400), Output(text="two " * 400)])
        async with zmq_worker(options=SimOptions(step_ms=4), script=script) as worker, zmq_gateway(worker) as gw:
            body = chat_body(stop="##STOP##", max_tokens=300, n=2, stream=True)
            request = asyncio.create_task(stream(gw, CHAT, body))
            await until(lambda: worker.engines[0].aborted == 1)
            assert worker.running == 1
            chunks = await request
            assert text_of(chunks, 0) == "one "
            assert len(text_of(chunks, 1)) > 400

    run(test)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_the_engine(both: Shared, streaming: bool) -> None:
    worker, gw = both.worker, both.gw

    async def test() -> None:
        body = chat_body(stream=streaming, ignore_eos=True, max_tokens=3000)
        request = asyncio.create_task(gw.http.post(CHAT, json=body))
        await until(lambda: worker.running == 1)
        request.cancel()
        assert await until(lambda: worker.running == 0) < 1.0

    both.run(test)


def test_choices_get_consecutive_seeds(both: Shared) -> None:
    gw = both.gw

    async def test() -> None:

        async def texts(**fields: Any) -> list[str]:
            answer = (await gw.http.post(CHAT, json=chat_body(max_tokens=60, **fields))).json()
            return [choice["message"]["content"] for choice in answer["choices"]]

        three = await texts(n=3, seed=11)
        assert three == await texts(n=3, seed=11)
        assert [await texts(seed=seed) for seed in (11, 12, 13)] == [[text] for text in three]

    both.run(test)


def test_logprobs_are_those_of_the_engine(plain: Shared) -> None:
    gw = plain.gw

    async def test() -> None:
        body = chat_body(logprobs=True, top_logprobs=3, max_tokens=12)
        whole = (await gw.http.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
        chunks = await stream(gw, CHAT, body)
        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"]]
        assert [entry for part in parts if part for entry in part["content"]] == whole
        values, tops = synthetic_logprobs([0] * 12, 0, 3, 100)
        assert [entry["logprob"] for entry in whole] == values
        assert [[t["logprob"] for t in entry["top_logprobs"]] for entry in whole] == [
            [value for _, value in row] for row in tops
        ]

        prompt = {"model": "sim", "prompt": "What do whales eat in winter? " * 20, "max_tokens": 1}
        body = {"model": "sim", "text": prompt["prompt"], "return_logprob": True, "logprob_start_len": 0}
        answer = await gw.http.post("/generate", json=body | {"sampling_params": {"max_new_tokens": 2}})
        assert answer.status_code == 200

    plain.run(test)


FATAL: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat_body(temperature=-1)),
    (CHAT, chat_body(temperature=1e9)),
    (CHAT, chat_body(top_p=0)),
    (CHAT, chat_body(top_k=-7)),
    (CHAT, chat_body(min_p=1.5)),
    (CHAT, chat_body(presence_penalty=-3)),
    (CHAT, chat_body(repetition_penalty=0)),
    (CHAT, chat_body(min_tokens=9, max_tokens=3)),
    (CHAT, chat_body(logit_bias={"9999999": 1})),
    (CHAT, chat_body(min_tokens=2, stop_token_ids=[99999999])),
    ("/v1/completions", {"model": "sim", "prompt": "", "max_tokens": 3}),
    ("/v1/completions", {"model": "sim", "prompt": [], "max_tokens": 3}),
    ("/v1/completions", {"model": "sim", "prompt": [[1, 2, 99999999]], "max_tokens": 3}),
    ("/v1/completions", {"model": "sim", "prompt": [list(range(1, 60)) * 2300], "max_tokens": 3}),
]


def test_no_request_kills_an_engine(plain: Shared) -> None:
    worker, gw = plain.worker, plain.gw

    async def test() -> None:
        for path, body in FATAL:
            answer = await gw.http.post(path, json=body)
            assert 400 <= answer.status_code < 500, (body, answer.status_code, answer.text)
        harmless = [
            chat_body(seed=-1), chat_body(seed=2**63 - 1, n=2), chat_body(stop_token_ids=[99999999]),
            chat_body(max_tokens=10**9, min_tokens=0), chat_body(top_k=-1), chat_body(temperature=0),
        ]  # fmt: skip
        for body in harmless:
            answer = await gw.http.post(CHAT, json=body)
            assert answer.status_code == 200, (body, answer.text)
        assert worker.fatal == []

    plain.run(test)


def test_equal_request_ids_are_different_requests_for_the_engine(both: Shared) -> None:
    worker, gw = both.worker, both.gw

    async def test() -> None:
        body = chat_body(rid="the-same", ignore_eos=True, max_tokens=60)
        answers = await asyncio.gather(*(gw.http.post(CHAT, json=body) for _ in range(4)))
        assert {answer.status_code for answer in answers} <= {200, 400}
        again = await gw.http.post(CHAT, json=body)
        assert again.status_code == 200
        assert worker.fatal == []

    both.run(test)


async def outcome(gw: Gateway, number: int, tokens: int = 60) -> str:
    """Run one stream: "done", "error" (a clean error event), "broken", or the status of a refusal."""
    body = chat_body(f"story {number}", max_tokens=tokens, ignore_eos=True, stream=True)
    result = "broken"
    try:
        async with gw.http.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                return f"status {response.status_code}"
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return result if result == "error" else "done"
                if line.startswith("data: ") and "error" in json.loads(line[6:]):
                    result = "error"
    except httpx.HTTPError:
        return "broken"
    return result


async def ready(gw: Gateway, *, wanted: bool) -> float:
    """Wait until the gateway is ready, or not; seconds it took."""
    start = time.monotonic()
    while ((await gw.http.get("/readiness")).status_code == 200) != wanted:
        await asyncio.sleep(0.005)
    return time.monotonic() - start


def test_a_dead_engine_is_noticed_and_taken_back() -> None:
    async def test() -> None:
        async with zmq_worker(options=SimOptions(step_ms=5)) as worker, zmq_gateway(worker) as gw:
            for sentinel in (False, True, False):
                streams = [asyncio.create_task(outcome(gw, number, 400)) for number in range(32)]
                await until(lambda: worker.running == 32)
                await asyncio.sleep(0.1)
                worker.kill(sentinel=sentinel)
                start = time.monotonic()
                outcomes = await asyncio.gather(*streams)
                assert time.monotonic() - start < 3.0
                assert set(outcomes) <= {"error", "status 503"}
                await ready(gw, wanted=False)
                assert (await gw.chat()).status_code == 503
                worker.start()
                assert await ready(gw, wanted=True) < 1.0
                assert (await gw.chat()).status_code == 200

    run(test)


def test_requests_without_an_answer_move_to_another_worker() -> None:
    async def test() -> None:
        slow = SimOptions(prefill_ms=400, step_ms=1)
        flags = ("--policy", "round_robin")
        async with (
            zmq_worker(options=slow) as one,
            zmq_worker(options=slow) as two,
            zmq_gateway(one, two, flags=flags) as gw,
        ):
            streams = [asyncio.create_task(outcome(gw, number, 5)) for number in range(16)]
            await until(lambda: one.running + two.running == 16)
            assert one.running > 0
            one.kill()
            assert set(await asyncio.gather(*streams)) == {"done"}

    run(test)


def test_a_failed_request_is_an_error_and_the_engine_goes_on(plain: Shared) -> None:
    gw = plain.gw

    async def test() -> None:
        answer = await gw.http.post(CHAT, json=chat_body("break it"))
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "worker_stream_failed"
        assert (await gw.chat()).status_code == 200

    plain.run(test)


@pytest.mark.parametrize("kind", ["vllm", "tokenspeed"])
def test_a_killed_detok_process_finds_the_engine_again(kind: str) -> None:
    async def test() -> None:
        async with zmq_worker(kind, SimOptions(step_ms=5)) as worker, zmq_gateway(worker) as gw:
            streams = [asyncio.create_task(outcome(gw, number, 2000)) for number in range(8)]
            await until(lambda: worker.running == 8)
            await asyncio.sleep(0.1)
            await gw.kill("detok")
            later = await gw.chat()
            assert later.status_code == 200
            assert set(await asyncio.gather(*streams)) <= {"error", "done"}
            await until(lambda: worker.running == 0, 5.0)  # the requests of the dead process are aborted
            assert worker.fatal == []

    run(test)


def test_a_killed_router_keeps_the_engine() -> None:
    async def test() -> None:
        async with zmq_worker(options=SimOptions(step_ms=5)) as worker, zmq_gateway(worker) as gw:
            streams = [asyncio.create_task(outcome(gw, number, 150)) for number in range(8)]
            await until(lambda: worker.running == 8)
            await gw.kill("router")
            assert (await gw.chat()).status_code == 200
            assert set(await asyncio.gather(*streams)) == {"done"}
            worker.kill()
            await ready(gw, wanted=False)
            worker.start()
            await ready(gw, wanted=True)
            assert (await gw.chat()).status_code == 200

    run(test)


@pytest.mark.parametrize("kind", ["vllm", "tokenspeed"])
@pytest.mark.parametrize("second", ["tokenizer", "detok", "frontend", "telemetry"])
def test_no_request_is_lost_with_a_router_and_no_second_death_loses_the_engine(kind: str, second: str) -> None:
    async def test() -> None:
        async with zmq_worker(kind) as worker, zmq_gateway(worker) as gw:
            chats = [asyncio.create_task(gw.chat(f"question {number}")) for number in range(24)]
            os.kill(gw.pids[("router", 0)], signal.SIGKILL)
            assert {answer.status_code for answer in await asyncio.gather(*chats)} == {200}
            os.kill(gw.pids[("router", 0)], signal.SIGKILL)
            await gw.kill(second)
            async with asyncio.timeout(10):
                while await outcome(gw, 0) != "done":
                    await asyncio.sleep(0.02)

    run(test)


@pytest.mark.parametrize("kind", ["vllm", "tokenspeed"])
def test_a_new_gateway_adopts_a_living_engine(kind: str) -> None:
    async def test() -> None:
        async with zmq_worker(kind, SimOptions(step_ms=5)) as worker:
            flags = ("--detok-procs", "2", "--shutdown-grace-period-secs", "0")
            async with zmq_gateway(worker, flags=flags) as gw:
                assert (await gw.chat()).status_code == 200
                running = asyncio.create_task(outcome(gw, 1, 4000))
                await until(lambda: worker.running == 1)
                assert len(sockets(worker)) == (4 if kind == "vllm" else 2)
                await gw.stop()
                await running
            assert sockets(worker) == []
            async with zmq_gateway(worker) as gw:
                assert (await gw.chat()).status_code == 200
                await until(lambda: worker.running == 0, 5.0)
                worker.kill()
                await ready(gw, wanted=False)

    run(test)


def test_requests_of_a_gateway_that_was_killed_are_stopped() -> None:
    """It had more clients than the next one has."""

    async def test() -> None:
        async with zmq_worker(options=SimOptions(step_ms=5)) as worker:
            async with zmq_gateway(worker, flags=("--detok-procs", "3")) as gw:
                streams = [asyncio.create_task(outcome(gw, number, 4000)) for number in range(40)]
                await until(lambda: worker.running == 40)
                gw.process.kill()
                await asyncio.gather(*streams)
                await until(lambda: not any(alive(pid) for pid in gw.all_pids))
                for directory in gw.run_dir.iterdir():
                    shutil.rmtree(directory)
            async with zmq_gateway(worker) as gw:
                assert (await gw.chat()).status_code == 200
                await until(lambda: worker.running == 0, 5.0)

    run(test)


def test_an_engine_that_does_not_answer_is_not_ready() -> None:
    async def test() -> None:
        flags = (
            "--health-check-interval-secs",
            "1",
            "--health-check-timeout-secs",
            "1",
            "--health-failure-threshold",
            "1",
        )
        async with zmq_worker() as worker, zmq_gateway(worker, flags=flags) as gw:
            worker.fronts[0].freeze()
            await ready(gw, wanted=False)
            worker.fronts[0].thaw()
            await ready(gw, wanted=True)

    run(test)


def test_requests_spread_over_ranks() -> None:
    async def test() -> None:
        async with zmq_worker(options=SimOptions(step_ms=4), ranks=2) as worker, zmq_gateway(worker) as gw:
            streams = [asyncio.create_task(outcome(gw, number)) for number in range(10)]
            assert set(await asyncio.gather(*streams)) == {"done"}
            assert all(front.adds >= 4 for front in worker.fronts)
            loads = []
            async with asyncio.timeout(5):
                while len(loads) < 2:
                    loads = (await gw.http.get("/get_loads")).json()["loads"]
                    await asyncio.sleep(0.05)
            assert [load["dp_rank"] for load in loads] == [0, 1]
            worker.fronts[0].close()  # one of two independent engines: the other goes on
            await asyncio.sleep(0.05)
            assert {(await gw.chat()).status_code for _ in range(6)} == {200}

    run(test)


def test_ranks_can_be_workers_of_their_own() -> None:
    async def test() -> None:
        async with zmq_worker(options=SimOptions(step_ms=4), ranks=2) as worker:
            flags = ("--dp-aware", "--policy", "round_robin")
            async with zmq_gateway(worker, flags=flags) as gw:
                async with asyncio.timeout(10):
                    while (await gw.http.get("/readiness")).json()["healthy_workers"] < 2:
                        await asyncio.sleep(0.01)
                assert {await outcome(gw, number, 5) for number in range(6)} == {"done"}
                assert [front.adds for front in worker.fronts] == [3, 3]
                worker.fronts[1].close()
                async with asyncio.timeout(10):
                    while (await gw.http.get("/readiness")).json()["healthy_workers"] > 1:
                        await asyncio.sleep(0.01)
                assert {await outcome(gw, number, 5) for number in range(4)} == {"done"}

    run(test)


def test_ranks_that_step_together_are_woken() -> None:
    async def test() -> None:
        flags = ("--detok-procs", "2")
        async with zmq_worker(ranks=2, lockstep=True) as worker, zmq_gateway(worker, flags=flags) as gw:
            for number in range(6):
                assert await outcome(gw, number, 10) == "done"
            worker.fronts[1].close()
            await ready(gw, wanted=False)

    run(test)


def test_management_calls_reach_the_engine(plain: Shared) -> None:
    gw = plain.gw

    async def test() -> None:
        prompt = chat_body("a prompt of some length, " * 12, max_tokens=2)
        first = (await gw.http.post(CHAT, json=prompt)).json()["usage"]["prompt_tokens_details"]
        again = (await gw.http.post(CHAT, json=prompt)).json()["usage"]["prompt_tokens_details"]
        assert first["cached_tokens"] == 0 < again["cached_tokens"]
        assert (await gw.http.post("/flush_cache")).json()["workers_flushed"] == 1
        flushed = (await gw.http.post(CHAT, json=prompt)).json()["usage"]["prompt_tokens_details"]
        assert flushed["cached_tokens"] == 0
        assert (await gw.http.post("/start_profile")).status_code == 206
        entry = (await gw.http.get("/workers")).json()["workers"][0]
        assert (entry["connection_mode"], entry["runtime_type"]) == ("zmq", "vllm")

    plain.run(test)


def test_workers_that_cannot_be_served_are_refused(plain: Shared) -> None:
    worker, gw = plain.worker, plain.gw

    async def test() -> None:

        async def failure(**spec: Any) -> str:
            accepted = await gw.http.post("/workers", json=spec)
            assert accepted.status_code == 202
            async with asyncio.timeout(10):
                while True:
                    shown = (await gw.http.get(f"/workers/{accepted.json()['worker_id']}")).json()
                    if shown["status"] == "failed":
                        return str(shown["job_status"]["message"])
                    await asyncio.sleep(0.01)

        assert "unsupported runtime" in await failure(url=worker.url + "2", runtime_type="trtllm")
        specs = ({"url": worker.url + "3", "zmq_handshake_address": "udp://x"}, {"url": "ipc:///tmp/" + "x" * 120})
        for spec, reason in zip(specs, ("tcp://", "107 bytes"), strict=True):
            refused = await gw.http.post("/workers", json=spec)
            assert refused.status_code == 400 and reason in refused.json()["error"]

    plain.run(test)
