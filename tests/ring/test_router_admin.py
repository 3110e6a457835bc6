"""The workers API, draining, dead workers, breakers and retries, through a whole gateway."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httpx
import pytest
from gateway import Gateway, free_port, gateway
from router_calls import add, code_of, engine_process, metric, run, served_by, until, workers
from sim_worker import worker

from smg.simengine.core import SimOptions
from smg.simengine.script import Failure, Output, Script
from smg.simengine.vocabulary import SHIPPED_MODEL


def test_workers_api() -> None:
    async def test() -> None:
        async with worker("vllm") as (_engine, url), gateway() as gw:
            assert (await gw.http.get("/workers")).json() == {
                "workers": [], "total": 0, "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": 0},
            }  # fmt: skip
            await refused_registrations(gw)
            created = await gw.http.post("/workers", json={"url": url, "labels": {"zone": "a"}, "api_key": "secret"})
            body = created.json()
            assert (created.status_code, body["status"], body["url"]) == (202, "accepted", url)
            assert created.headers["location"] == body["location"] == f"/workers/{body['worker_id']}"
            again = await gw.http.post("/workers", json={"url": url})
            assert again.status_code == 409
            assert again.json()["code"] in ("WORKER_CREATE_IN_PROGRESS", "WORKER_ALREADY_EXISTS")
            path = body["location"]

            async def ready() -> bool:
                return bool((await gw.http.get(path)).json()["status"] == "ready")

            await until(ready)
            again = await gw.http.post("/workers", json={"url": url})
            assert (again.status_code, again.json()["code"]) == (409, "WORKER_ALREADY_EXISTS")
            shown = (await gw.http.get(path)).json()
            assert shown["model_id"] == "sim" and shown["is_healthy"] is True and shown["runtime_type"] == "vllm"
            assert shown["labels"]["zone"] == "a" and "secret" not in str(shown)
            assert (await gw.http.get("/workers?model=sim")).json()["stats"]["regular_count"] == 1
            assert (await gw.http.get("/workers?model=other")).json()["total"] == 0
            assert (await gw.chat()).headers["x-smg-routed-worker-id"] == url
            await updates(gw, path, url)
            await removal(gw, path, url)

    run(test)


async def refused_registrations(gw: Gateway) -> None:
    urls = ("http://h:1", "grpc://", "grpc://h:0", "grpc://h:99999", "grpc://h:1/v1", "ipc://", "ipc://relative")
    bodies = [b"{", b"[]", b'{"url": 1}', b'{"url": "grpc://h:1", "labels": [1]}', b'{"url": "grpc://h:1", "cost": -5}']
    for body in (*bodies, *(b'{"url": "%s"}' % url.encode() for url in urls)):
        answer = await gw.http.post("/workers", content=body)
        assert (answer.status_code, answer.json()["code"]) == (400, "BAD_REQUEST"), body
    answer = await gw.http.get("/workers/not-a-uuid")
    assert (answer.status_code, answer.json()["code"]) == (400, "BAD_REQUEST")
    for method in ("GET", "PATCH", "PUT", "DELETE"):
        answer = await gw.http.request(method, f"/workers/{uuid.uuid4()}", content=b"{}")
        assert (answer.status_code, answer.json()["code"]) == (404, "WORKER_NOT_FOUND"), method


async def updates(gw: Gateway, path: str, url: str) -> None:
    patched = await gw.http.patch(path, json={"priority": 0, "cost": 2.0, "labels": {"rack": "7"}})
    assert patched.status_code == 202
    shown = (await gw.http.get(path)).json()
    assert (shown["priority"], shown["cost"], shown["labels"]["zone"], shown["labels"]["rack"]) == (0, 2.0, "a", "7")
    assert (await gw.http.post("/workers", json={"url": f"{url}/"})).status_code == 409
    assert (await gw.http.patch(path, json={"priority": "high"})).status_code == 400
    fixed: tuple[dict[str, Any], ...] = (
        {"url": "grpc://elsewhere:1"}, {"models": [{"id": "other"}]}, {"status": "ready", "priority": 3},
        {"model_id": "other"}, {"labels": {"model_id": "other"}},
    )  # fmt: skip
    for body in fixed:
        assert (await gw.http.patch(path, json=body)).status_code == 400
    for kind in ("tool_parser", "reasoning_parser"):
        bad = await gw.http.patch(path, json={"priority": 9, "labels": {kind: "nope"}})
        assert bad.status_code == 202 and f"not updated: worker {url} declares unknown {kind}" in bad.json()["message"]
        after = (await gw.http.get(path)).json()
        job = after.pop("job_status")
        assert after == shown, "a bad parser leaves the worker unchanged"
        assert (job["job_type"], job["status"]) == ("UpdateWorker", "failed") and f"{kind} 'nope'" in job["message"]
    assert (await gw.http.patch(path, json={"labels": {"tool_parser": "qwen"}})).status_code == 202
    after = (await gw.http.get(path)).json()
    assert "job_status" not in after and after["models"][0]["tool_parser"] == "qwen"

    specs: tuple[dict[str, Any], ...] = (
        {"url": "grpc://elsewhere:1"}, {"priority": 1}, {"url": url, "labels": {"tool_parser": "nope"}},
    )  # fmt: skip
    for spec in specs:
        assert (await gw.http.put(path, json=spec)).status_code == 400
    put = await gw.http.put(path, json={"url": url, "labels": {"rack": "8"}})
    assert put.status_code == 202

    async def replaced() -> bool:
        shown = (await gw.http.get(path)).json()
        assert (await gw.chat(max_tokens=1)).status_code == 200, "the old entry serves meanwhile"
        return bool(shown["labels"].get("rack") == "8" and shown["status"] == "ready")

    await until(replaced)
    shown = (await gw.http.get(path)).json()
    assert (shown["priority"], shown["labels"]["zone"], shown["model_id"]) == (50, "a", "sim")


async def removal(gw: Gateway, path: str, url: str) -> None:
    removed = await gw.http.delete(path)
    assert removed.status_code == 202
    assert (await gw.http.get(path)).json()["status"] == "draining"
    assert (await gw.http.post("/workers", json={"url": url})).status_code == 409
    assert (await gw.http.patch(path, json={"priority": 1})).status_code == 409
    assert (await gw.http.delete(path)).status_code == 202
    answer = await gw.chat()
    assert answer.status_code in (404, 503)

    async def gone() -> bool:
        return (await gw.http.get(path)).status_code == 404

    await until(gone)
    await add(gw, url)
    assert (await gw.chat()).status_code == 200


def test_a_model_may_be_that_of_a_worker_that_has_not_told_it_yet() -> None:
    async def test() -> None:
        async with gateway() as gw:
            assert code_of(await gw.chat()) == "model_not_found"
            await gw.http.post("/workers", json={"url": f"grpc://127.0.0.1:{free_port()}"})

            async def known() -> bool:
                return code_of(await gw.chat()) != "model_not_found"

            await until(known)
            early = await gw.chat()
            assert (early.status_code, code_of(early)) == (503, "no_available_workers")
            assert early.headers["retry-after"] == "1"

    run(test)


def test_registrations_that_cannot_succeed() -> None:
    async def test() -> None:
        flags = ("--worker-startup-timeout-secs", "1", "--job-queue-capacity", "2")
        async with worker("vllm") as (_engine, url), gateway(flags=flags) as gw:
            nobody = f"grpc://127.0.0.1:{free_port()}"
            created = (await gw.http.post("/workers", json={"url": nobody})).json()
            shown = (await gw.http.get(created["location"])).json()
            assert shown["status"] == "pending" and shown["is_healthy"] is False
            assert shown["job_status"].keys() == {"job_type", "worker_url", "status", "message", "timestamp"}
            answer = await gw.http.post("/workers", json={"url": nobody})
            assert (answer.status_code, answer.json()["code"]) == (409, "WORKER_CREATE_IN_PROGRESS")
            other = (await gw.http.post("/workers", json={"url": f"grpc://127.0.0.1:{free_port()}"})).json()
            answer = await gw.http.post("/workers", json={"url": url})
            assert (answer.status_code, answer.json()["code"]) == (503, "JOB_QUEUE_FULL")

            async def none_left() -> bool:
                return not await workers(gw)

            await until(none_left)
            labels = {"tool_parser": "nope"}
            bad = (await gw.http.post("/workers", json={"url": url, "labels": labels})).json()
            await until(none_left)
            jobs = (
                (created, "failed to connect"),
                (other, "failed to connect"),
                (bad, "tool_parser"),
            )
            for job, reason in jobs:
                shown = (await gw.http.get(job["location"])).json()
                assert shown["status"] == "failed" and reason in shown["job_status"]["message"]
            await add(gw, url)
            path = f"/workers/{(await workers(gw))[url]['id']}"
            assert (await gw.http.put(path, json={"url": url, "runtime_type": "sglang"})).status_code == 202

            async def not_replaced() -> bool:
                shown = (await gw.http.get(path)).json()
                assert (shown["status"], shown["runtime_type"]) == ("ready", "vllm"), "the old entry stays"
                return bool(shown.get("job_status", {}).get("status") == "failed")

            await until(not_replaced)

    run(test)


def test_workers_come_and_go_under_load() -> None:
    async def test() -> None:
        slow = SimOptions(step_ms=5)
        async with worker("vllm", slow) as (_, first), worker("sglang", slow) as (_, second), gateway(first) as gw:
            answers: list[httpx.Response] = []
            stop = asyncio.Event()

            async def client(number: int) -> None:
                while not stop.is_set():
                    answers.append(await gw.chat(f"question {number} {len(answers)}", max_tokens=8))

            load = [asyncio.create_task(client(number)) for number in range(12)]
            await add(gw, second)
            first_id = (await workers(gw))[first]["id"]
            mark = len(answers)

            async def both_serve() -> bool:
                return len({a.headers.get("x-smg-routed-worker-id") for a in answers[mark:]}) == 2

            await until(both_serve)
            await gw.http.patch(f"/workers/{first_id}", json={"labels": {"zone": "b"}})
            assert (await gw.http.delete(f"/workers/{first_id}")).status_code == 202
            drained = len(answers)

            async def gone() -> bool:
                return first not in await workers(gw)

            await until(gone)
            stop.set()
            await asyncio.gather(*load)
            assert {answer.status_code for answer in answers} == {200}
            late = answers[drained + 12 :]
            assert late and {a.headers["x-smg-routed-worker-id"] for a in late} == {second}

    run(test)


def test_a_drained_worker_finishes_its_streams() -> None:
    async def test() -> None:
        async with worker("vllm", SimOptions(step_ms=60)) as (_engine, url), gateway(url) as gw:
            body = {
                "model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "stream": True,
                "ignore_eos": True,
            }  # fmt: skip
            async with gw.http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                shown = (await workers(gw))[url]
                assert shown["load"] == 1
                await gw.http.delete(f"/workers/{shown['id']}")
                rest = [line async for line in lines if line.startswith("data:")]
            assert rest[-1] == "data: [DONE]" and len(rest) >= 100
            assert not any('"error"' in line for line in rest)

            async def gone() -> bool:
                return not await workers(gw)

            await until(gone)

    run(test)


def test_a_worker_that_dies_loses_no_request() -> None:
    async def test() -> None:
        async with (
            engine_process("--step-ms", "10") as (doomed, first),
            engine_process("--step-ms", "10") as (_, second),
            gateway(first, second, flags=("--policy", "round_robin")) as gw,
        ):
            requests = [asyncio.create_task(gw.chat(f"q {n}", max_tokens=40, ignore_eos=True)) for n in range(40)]

            async def both_busy() -> bool:
                return all(entry["load"] >= 10 for entry in (await workers(gw)).values())

            await until(both_busy)
            doomed.kill()
            answers = await asyncio.gather(*requests)
            assert {answer.status_code for answer in answers} == {200}
            assert {answer.headers["x-smg-routed-worker-id"] for answer in answers} == {first, second} or (
                {answer.headers["x-smg-routed-worker-id"] for answer in answers} == {second}
            )
            assert await served_by(gw, 10) == {second: 10}
            retries = await metric(gw, "smg_worker_retries_total")
            assert sum(retries.values()) >= 10
            assert sum((await metric(gw, "smg_router_requests_total")).values()) == 50, "requests, not attempts"

    run(test)


def test_health_probes_and_the_last_worker() -> None:
    flags = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--retry-max-retries", "1")

    async def test() -> None:
        async with engine_process() as (process, url), gateway(url, flags=flags) as gw:
            process.kill()

            async def not_ready() -> bool:
                return bool((await workers(gw))[url]["status"] == "not_ready")

            answer = await gw.chat()
            assert answer.status_code == 503
            await until(not_ready)
            answer = await gw.chat()
            assert (answer.status_code, code_of(answer)) == (503, "no_available_workers")
            assert (await gw.http.get("/readiness")).status_code == 503
            async with engine_process("--port", url.rpartition(":")[2]):
                await gw.wait_ready()
                assert (await gw.chat()).status_code == 200

    run(test)


async def probes(gw: Gateway, result: str) -> float:
    """How many health probes ended so."""
    checks = await metric(gw, "smg_worker_health_checks_total")
    return sum(count for labels, count in checks.items() if result in labels)


def test_a_worker_that_is_back_is_used_before_its_breaker_would_close() -> None:
    flags = ("--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "600", "--retry-max-retries", "1")

    async def test() -> None:
        async with engine_process() as (process, url), gateway(url, flags=flags) as gw:
            process.kill()
            await process.wait()
            for _ in range(2):
                assert (await gw.chat()).status_code == 503
            assert code_of(await gw.chat()) == "no_available_workers", "the breaker is open"

            async def found_away() -> bool:
                return await probes(gw, "failure") >= 1

            await until(found_away)
            async with engine_process("--port", url.rpartition(":")[2]):

                async def answers() -> bool:
                    return (await gw.chat()).status_code == 200

                await until(answers)

    run(test)


def failing(code: str, times: int) -> Script:
    """Fails the first ``times`` requests, then answers."""
    outputs = [Output(error=Failure(code, "scripted"))] * times
    return Script([*outputs, *[Output(text="fine")] * 200])


def test_breaker_counts_requests_and_opens() -> None:
    flags = ("--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "1", "--cb-success-threshold", "1",
             "--retry-initial-backoff-ms", "1")  # fmt: skip

    async def test() -> None:
        script = failing("UNAVAILABLE", 10)
        async with worker("vllm", script=script) as (_, url), gateway(url, flags=flags) as gw:
            answer = await gw.chat()
            assert (answer.status_code, code_of(answer)) == (503, "start_generation_failed")
            label = f'{{outcome="failure",worker="{url}"}}'
            assert await metric(gw, "smg_worker_cb_outcomes_total") == {label: 1.0}, "five attempts, one outcome"
            assert (await gw.chat()).status_code == 503
            answer = await gw.chat()
            assert (answer.status_code, code_of(answer)) == (503, "no_available_workers")
            assert (await gw.http.get("/readiness")).status_code == 200

            async def closed() -> bool:
                return (await gw.chat()).status_code == 200

            await until(closed)
            assert await metric(gw, "smg_worker_cb_state") == {f'{{worker="{url}"}}': 0.0}
            changes = await metric(gw, "smg_worker_cb_transitions_total")
            assert sorted(changes.values()) == [1.0, 1.0, 1.0]
            exhausted = await metric(gw, "smg_worker_retries_exhausted_total")
            assert sum(exhausted.values()) == 2.0

    run(test)


def test_a_worker_that_fails_requests_and_says_it_is_well_stays_out() -> None:
    flags = ("--cb-failure-threshold", "1", "--cb-timeout-duration-secs", "600", "--retry-max-retries", "1")

    async def test() -> None:
        async with worker("vllm", script=failing("UNAVAILABLE", 1)) as (_, url), gateway(url, flags=flags) as gw:
            assert (await gw.chat()).status_code == 503

            async def looked_at() -> bool:
                return await probes(gw, "success") >= 2

            await until(looked_at)
            assert code_of(await gw.chat()) == "no_available_workers"

    run(test)


@pytest.mark.parametrize(
    ("code", "times", "status"),
    [
        ("RESOURCE_EXHAUSTED", 4, 200),
        ("RESOURCE_EXHAUSTED", 5, 429),
        ("INVALID_ARGUMENT", 1, 400),
        ("INTERNAL", 1, 500),
    ],
)
def test_what_is_tried_again(code: str, times: int, status: int) -> None:
    async def test() -> None:
        flags = ("--retry-initial-backoff-ms", "1")
        async with worker("vllm", script=failing(code, times)) as (_, url), gateway(url, flags=flags) as gw:
            answer = await gw.chat()
            assert answer.status_code == status, answer.text
            if status != 200:
                assert code_of(answer) == "start_generation_failed"
                assert ("retry-after" in answer.headers) == (status == 503)
            assert (await gw.chat()).status_code == 200
            outcomes = await metric(gw, "smg_worker_cb_outcomes_total")
            failures = sum(value for labels, value in outcomes.items() if "failure" in labels)
            assert failures == (1.0 if code == "INTERNAL" else 0.0)

    run(test)


def test_data_parallel_ranks_are_workers() -> None:
    async def test() -> None:
        flags = ("--dp-aware", "--policy", "round_robin")
        async with worker("vllm", SimOptions(dp_size=2)) as (_, url), gateway(flags=flags) as gw:
            await gw.http.post("/workers", json={"url": url})
            await gw.wait_ready(workers=2)
            found = await workers(gw)
            assert set(found) == {f"{url}@0", f"{url}@1"}
            assert [(w["dp_rank"], w["dp_size"]) for w in found.values()] == [(0, 2), (1, 2)]
            assert {answer.status_code for answer in await asyncio.gather(*(gw.chat() for _ in range(10)))} == {200}

            async def idle() -> bool:  # ends are reported with the next frame that goes there anyway
                return [entry["load"] for entry in (await workers(gw)).values()] == [0, 0]

            await until(idle)
            sent = await metric(gw, "smg_worker_requests_total")
            assert {labels.split('worker="')[1].rstrip('"}'): value for labels, value in sent.items()} == {
                f"{url}@0": 5.0, f"{url}@1": 5.0,
            }  # fmt: skip
            assert (await gw.http.get("/loads")).json()["dp_rank_count"] == 2
            await gw.http.delete(f"/workers/{found[f'{url}@0']['id']}")

            async def one_left() -> bool:
                return set(await workers(gw)) == {f"{url}@1"}

            await until(one_left)
            assert await served_by(gw, 3) == {url: 3}

    run(test)


def test_a_restarted_router_knows_its_workers() -> None:
    async def test() -> None:
        async with worker("vllm") as (_one, first), worker("sglang") as (_two, second), gateway(first) as gw:
            await add(gw, second, labels={"zone": "b"})
            before = await workers(gw)
            await gw.kill("router")
            assert (await gw.chat()).status_code == 200, "no request is refused for the restart"
            after = await workers(gw)
            assert {url: entry["id"] for url, entry in after.items()} == {
                url: entry["id"] for url, entry in before.items()
            }
            assert after[second]["labels"]["zone"] == "b"
            assert {entry["status"] for entry in after.values()} == {"ready"}

    run(test)


def test_loads_flush_and_profile() -> None:
    async def test() -> None:
        async with worker("vllm") as (_one, first), worker("mlx") as (_two, second), gateway(first, second) as gw:
            loads = (await gw.http.get("/get_loads")).json()
            assert [load["worker"] for load in loads["loads"]] == [first], "MLX reports no load"
            assert loads["aggregate"].keys() == {
                "total_running_reqs", "total_waiting_reqs", "total_reqs", "avg_token_usage", "avg_throughput",
                "avg_utilization",
            }  # fmt: skip
            flushed = await gw.http.post("/flush_cache")
            body = flushed.json()
            assert (flushed.status_code, body["status"], body["successful"]) == (206, "partial_success", [first])
            assert body["workers_flushed"] == 1 and [failure["worker"] for failure in body["failed"]] == [second]
            profiled = await gw.http.post("/start_profile")
            assert (profiled.status_code, profiled.json()["workers_profiled"]) == (206, 0)

    run(test)


def test_the_status_of_a_tokenizer_follows_its_load() -> None:
    async def status(gw: Gateway, identity: str) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        async def ended() -> bool:
            seen.update((await gw.http.get(f"/v1/tokenizers/{identity}/status")).json())
            return seen["status"] not in ("pending", "processing")

        await until(ended)
        return seen

    async def test() -> None:
        async with gateway() as gw:
            for name, source in (("good", str(SHIPPED_MODEL)), ("bad", "/nowhere")):
                added = await gw.http.post("/v1/tokenizers", json={"name": name, "source": source})
                assert (added.status_code, added.json()["status"]) == (202, "pending")
            entries = {entry["name"]: entry for entry in (await gw.http.get("/v1/tokenizers")).json()["tokenizers"]}
            for kill in (False, True):  # a restarted router is told again
                if kill:
                    await gw.kill("router")
                good = await status(gw, entries["good"]["id"])
                assert good["status"] == "completed" and good["vocab_size"] > 0
                bad = await status(gw, entries["bad"]["id"])
                assert bad["status"] == "failed" and "/nowhere" in bad["message"]
            shown = (await gw.http.get("/v1/tokenizers/good")).json()
            assert shown["vocab_size"] == good["vocab_size"]
            refusal = await gw.http.post("/v1/tokenize", json={"model": "bad", "prompt": "hello"})
            assert refusal.status_code == 503 and "/nowhere" in refusal.text

    run(test)
