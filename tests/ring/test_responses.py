"""``/v1/responses`` and ``/v1/conversations`` through a whole gateway with a scripted engine."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway import Gateway, gateway
from sim_worker import worker

from smg.simengine.core import SimEngine, SimOptions
from smg.simengine.script import Failure, Output, Script, ToolCall

LIMIT = 110.0
PARSERS = ("--tool-call-parser", "qwen", "--reasoning-parser", "qwen3")
LOOKUP = {"type": "function", "name": "lookup", "parameters": {"type": "object"}}
NOTE = {"type": "custom", "name": "note"}
SCRIPT = [
    Output(match="4 degrees", content="It is cold."),
    Output(match="What is my name", content="You are Ada."),
    Output(match="Nobody is here", content="I do not know."),
    Output(match="Weather?", reasoning="Look it up.", tool_calls=[ToolCall("lookup", {"town": "Oslo"})]),
    Output(match="Write it down", tool_calls=[ToolCall("note", {"input": "a\nb"})]),
    Output(match="Refuse", content="x", error=Failure("UNAVAILABLE", "no", 0)),
    Output(match="Break", content="one two three four", error=Failure("INTERNAL", "boom", 2)),
    Output(match="Think", reasoning="Hm.", content="Yes."),
    Output(content="alpha beta gamma delta epsilon zeta"),
]
SLOW = {"model": "sim", "input": "tell a story", "max_output_tokens": 4000, "stop": ["never comes"]}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT))


@asynccontextmanager
async def scripted(*flags: str, step_ms: float = 0.0) -> AsyncIterator[tuple[SimEngine, Gateway]]:
    async with (
        worker("vllm", SimOptions(step_ms=step_ms), Script(SCRIPT)) as (engine, url),
        gateway(url, flags=(*PARSERS, *flags)) as gw,
    ):
        yield engine, gw


@asynccontextmanager
async def talkative(*flags: str) -> AsyncIterator[tuple[SimEngine, Gateway]]:
    """An engine whose answers take long: it makes up text until the token limit, and rarely ends before."""
    async with worker("vllm", SimOptions(step_ms=20), ENDLESS) as (engine, url), gateway(url, flags=flags) as gw:
        yield engine, gw


ENDLESS = Script([Output(content="whale " * 3000, finish_reason="length")])


def running(engine: SimEngine) -> int:
    return sum(rank.running + rank.waiting for rank in engine.loads())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def create(gw: Gateway, text: Any, **fields: Any) -> dict[str, Any]:
    response = await gw.http.post("/v1/responses", json={"model": "sim", "input": text, **fields})
    assert response.status_code == 200, response.text
    shown: dict[str, Any] = response.json()
    return shown


async def read(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, await response.aread()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line async for line in response.aiter_lines() if line]
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line for line in lines if line.startswith("event: ")] == [f"event: {event['type']}" for event in data]
    return data


async def stream(gw: Gateway, text: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "sim", "input": text, "stream": True, **fields}
    async with gw.http.stream("POST", "/v1/responses", json=body) as response:
        events = await read(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def refused(gw: Gateway, method: str, path: str, body: Any = None) -> tuple[int, str]:
    answer = await gw.http.request(method, path, json=body)
    return answer.status_code, answer.json()["error"]["code"]


def text_of(shown: dict[str, Any]) -> str:
    return "".join(part["text"] for item in shown["output"] if item["type"] == "message" for part in item["content"])


def essence(shown: dict[str, Any]) -> dict[str, Any]:
    """A response without what is its own: ids and times."""
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in shown["output"]]
    kept = {key: value for key, value in shown.items() if key not in ("id", "created_at", "completed_at", "output")}
    return copy.deepcopy(kept | {"output": items})


def test_whole_and_streamed_answers_are_the_same() -> None:
    async def test() -> None:
        async with scripted() as (_, gw):
            for text, tools in (("hi", []), ("Think", []), ("Weather?", [LOOKUP]), ("Write it down", [NOTE])):
                fields = {"tools": tools} if tools else {}
                whole = await create(gw, text, **fields)
                events = await stream(gw, text, **fields)
                assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
                assert events[-1]["type"] == "response.completed"
                last = events[-1]["response"]
                shown, streamed = essence(whole), essence(last)
                for usage in (shown["usage"], streamed["usage"]):
                    usage.pop("input_tokens_details")  # the second finds its prompt in the engine's cache
                assert streamed == shown
                assert events[0]["response"].keys() == last.keys() == whole.keys()
                assert (await gw.http.get(f"/v1/responses/{last['id']}")).json() == last
                assert (await gw.http.get(f"/v1/responses/{whole['id']}")).json() == whole
            thought, said = (await create(gw, "Think"))["output"]
            assert thought["content"] == [{"type": "reasoning_text", "text": "\nHm.\n"}]
            assert said["content"][0]["text"].strip() == "Yes."
            [note] = (await create(gw, "Write it down", tools=[NOTE]))["output"]
            assert (note["type"], note["name"], note["input"]) == ("custom_tool_call", "note", "a\nb")

    run(test)


def test_records_of_responses() -> None:
    async def test() -> None:
        async with scripted() as (_, gw):
            first = await create(gw, [{"role": "user", "content": "I am Ada."}, {"role": "user", "content": "Hello."}])
            path = f"/v1/responses/{first['id']}"
            listed = (await gw.http.get(f"{path}/input_items?order=asc")).json()
            assert [item["content"][0]["text"] for item in listed["data"]] == ["I am Ada.", "Hello."]
            page = (await gw.http.get(f"{path}/input_items?limit=1")).json()
            assert (page["data"], page["has_more"]) == (listed["data"][1:], True)
            page = (await gw.http.get(f"{path}/input_items?after={page['last_id']}")).json()
            assert (page["data"], page["has_more"]) == (listed["data"][:1], False)

            second = await create(gw, "What is my name?", previous_response_id=first["id"])
            assert text_of(second) == "You are Ada."
            assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
            again = await create(gw, [{"type": "item_reference", "id": listed["first_id"]}])
            assert again["usage"]["input_tokens"] < first["usage"]["input_tokens"]

            deleted = await gw.http.delete(path)
            assert deleted.json() == {"id": first["id"], "object": "response.deleted", "deleted": True}
            for method, where in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
                assert await refused(gw, method, where) == (404, "not_found")
            hidden = await create(gw, "hi", store=False)
            assert await refused(gw, "GET", f"/v1/responses/{hidden['id']}") == (404, "not_found")
            assert await refused(gw, "POST", f"/v1/responses/{second['id']}/cancel") == (
                400, "response_already_completed",
            )  # fmt: skip
            for fields, expected in (
                ({"previous_response_id": first["id"]}, (400, "previous_response_not_found")),
                ({"conversation": "conv_0"}, (404, "conversation_not_found")),
                ({"input": [{"type": "item_reference", "id": "msg_0"}]}, (404, "item_not_found")),
                ({"model": "nobody"}, (404, "model_not_found")),
                ({"prompt": {"id": "p"}}, (400, "unsupported_parameter")),
            ):
                body = {"model": "sim", "input": "x", **fields}
                assert await refused(gw, "POST", "/v1/responses", body) == expected

    run(test)


def test_the_function_loop() -> None:
    async def test() -> None:
        async with scripted() as (_, gw):
            first = await create(gw, "Weather?", tools=[LOOKUP])
            thought, call = first["output"]
            assert (thought["type"], call["type"]) == ("reasoning", "function_call")
            assert json.loads(call["arguments"]) == {"town": "Oslo"}
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4 degrees"}
            chained = await create(gw, [result], tools=[LOOKUP], previous_response_id=first["id"])
            replayed = await create(gw, [{"role": "user", "content": "Weather?"}, *first["output"], result],
                                    tools=[LOOKUP])  # fmt: skip
            assert text_of(chained) == text_of(replayed) == "It is cold."
            assert chained["usage"]["input_tokens"] == replayed["usage"]["input_tokens"]

    run(test)


def test_conversations() -> None:
    async def test() -> None:
        async with scripted() as (_, gw):
            made = (await gw.http.post("/v1/conversations", json={"metadata": {"a": "1", "b": "2"}})).json()
            path = f"/v1/conversations/{made['id']}"
            changed = await gw.http.post(path, json={"metadata": {"a": None, "c": "3"}})
            assert changed.json()["metadata"] == {"b": "2", "c": "3"}
            assert (await gw.http.get(path)).json() == changed.json()
            added = (
                await gw.http.post(f"{path}/items", json={"items": [{"role": "user", "content": "I am Ada."}]})
            ).json()
            assert added["data"][0]["content"] == [{"type": "input_text", "text": "I am Ada."}]

            said = await create(gw, "What is my name?", conversation=made["id"])
            assert said["conversation"] == {"id": made["id"]}
            assert text_of(said) == "You are Ada."
            listed = (await gw.http.get(f"{path}/items?order=asc")).json()
            assert [item["role"] for item in listed["data"]] == ["user", "user", "assistant"]
            assert listed["data"][2] == said["output"][0]
            newest = (await gw.http.get(f"{path}/items?limit=1")).json()
            assert (newest["data"], newest["has_more"]) == (listed["data"][2:], True)
            older = (await gw.http.get(f"{path}/items?after={newest['last_id']}&limit=1")).json()
            assert older["data"] == listed["data"][1:2]

            item = f"{path}/items/{listed['first_id']}"
            assert (await gw.http.get(item)).json() == listed["data"][0]
            assert (await gw.http.delete(item)).json() == changed.json()
            assert (await gw.http.delete(item)).status_code == 200
            assert await refused(gw, "GET", item) == (404, "not_found")

            many = {"items": [{"role": "user", "content": "x"}] * 21}
            assert await refused(gw, "POST", f"{path}/items", many) == (400, "invalid_request")
            assert (await gw.http.post(f"{path}/items", json={})).status_code == 422
            keys = {"metadata": {str(number): "x" for number in range(17)}}
            assert await refused(gw, "POST", "/v1/conversations", keys) == (400, "invalid_request")
            assert (await gw.http.delete(path)).json()["object"] == "conversation.deleted"
            assert await refused(gw, "GET", path) == (404, "not_found")
            assert (await gw.http.get(f"/v1/responses/{said['id']}")).status_code == 200

    run(test)


def test_logprobs() -> None:
    async def test() -> None:
        async with scripted() as (_, gw):
            wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
            chat = (await gw.chat("hi", logprobs=True, top_logprobs=2, max_tokens=None)).json()
            expected = chat["choices"][0]["logprobs"]["content"]
            for text in ("hi", "Think"):
                whole = await create(gw, text, **wanted)
                events = await stream(gw, text, **wanted)
                parts = [shown["output"][-1]["content"][0] for shown in (whole, events[-1]["response"])]
                assert parts[0] == parts[1]
                deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
                assert [entry for entries in deltas for entry in entries] == parts[0]["logprobs"]
                if text == "hi":
                    assert parts[0]["logprobs"] == expected
                    assert len(expected[0]["top_logprobs"]) == 2
                assert "".join(entry["token"] for entry in parts[0]["logprobs"]).startswith(parts[0]["text"])

    run(test)


def test_limits_and_failures() -> None:
    async def test() -> None:
        async with scripted("--disable-retries", "--disable-circuit-breaker") as (engine, gw):
            cut = await create(gw, "hi", max_output_tokens=2)
            assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            assert cut["usage"]["output_tokens"] == 2
            events = await stream(gw, "hi", max_output_tokens=2)
            assert events[-1]["type"] == "response.incomplete"
            assert essence(events[-1]["response"])["output"] == essence(cut)["output"]

            body = {"model": "sim", "input": "Refuse"}
            for streamed in (False, True):  # nothing was sent yet, so both are plain HTTP errors
                assert await refused(gw, "POST", "/v1/responses", body | {"stream": streamed}) == (
                    503, "start_generation_failed",
                )  # fmt: skip
            events = await stream(gw, "Break")
            assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.failed"]
            failed = events[-1]["response"]
            assert (failed["status"], failed["error"]["code"]) == ("failed", "stream_error")
            assert "boom" in failed["error"]["message"]
            assert failed["output"][0]["status"] == "incomplete"
            assert (await gw.http.get(f"/v1/responses/{failed['id']}")).json() == failed
            broken = {"model": "sim", "input": "Break"}
            assert await refused(gw, "POST", "/v1/responses", broken) == (500, "start_generation_failed")
            assert running(engine) == 0

    run(test)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_ends_the_generation(streaming: bool) -> None:
    async def test() -> None:
        async with talkative() as (engine, gw):
            request = asyncio.create_task(gw.http.post("/v1/responses", json=SLOW | {"stream": streaming}))
            await until(lambda: running(engine) == 1)
            request.cancel()
            async with asyncio.timeout(3.0):
                await until(lambda: running(engine) == 0)

    run(test)


def test_background() -> None:
    async def test() -> None:
        async with talkative("--max-background-responses", "2") as (engine, gw):
            queued = await create(gw, **SLOW_FIELDS, background=True)
            assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
            path = f"/v1/responses/{queued['id']}"
            await until(lambda: running(engine) == 1)
            assert (await gw.http.get(path)).json()["status"] == "in_progress"
            body = SLOW | {"previous_response_id": queued["id"]}
            assert await refused(gw, "POST", "/v1/responses", body) == (400, "previous_response_not_finished")

            other = await create(gw, **SLOW_FIELDS, background=True, store=False)
            await until(lambda: running(engine) == 2)
            assert await refused(gw, "POST", "/v1/responses", SLOW | {"background": True}) == (
                429, "background_responses_limit_reached",
            )  # fmt: skip
            for name in (queued["id"], other["id"]):
                cancelled = await gw.http.post(f"/v1/responses/{name}/cancel")
                assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
            async with asyncio.timeout(3.0):
                await until(lambda: running(engine) == 0)
            assert (await gw.http.get(path)).json() == (await gw.http.post(f"{path}/cancel")).json()
            assert (await gw.http.get(f"/v1/responses/{other['id']}")).status_code == 404
            assert await refused(gw, "POST", "/v1/responses/resp_0/cancel") == (404, "response_not_found")

            done = await create(gw, "hi", background=True, max_output_tokens=3)
            while (shown := (await gw.http.get(f"/v1/responses/{done['id']}")).json())["status"] != "incomplete":
                await asyncio.sleep(0.01)
            assert shown["usage"]["output_tokens"] == 3

    run(test)


SLOW_FIELDS = {"text": SLOW["input"], "max_output_tokens": 4000, "stop": ["never comes"]}


def test_background_streams_can_be_resumed() -> None:
    async def test() -> None:
        async with talkative() as (_, gw):
            body = {"model": "sim", "input": "hi", "background": True, "stream": True, "max_output_tokens": 40}
            seen: list[dict[str, Any]] = []
            async with gw.http.stream("POST", "/v1/responses", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        seen.append(json.loads(line[6:]))
                    if len(seen) == 12:
                        break  # the client leaves, the generation goes on
            kinds = [event["type"].removeprefix("response.") for event in seen[:4]]
            assert kinds == ["created", "queued", "in_progress", "output_item.added"]
            path = f"/v1/responses/{seen[0]['response']['id']}"
            async with gw.http.stream("GET", f"{path}?stream=true&starting_after=11") as response:
                rest = await read(response)
            assert [event["sequence_number"] for event in (*seen, *rest)] == list(range(12 + len(rest)))
            assert rest[-1]["type"] == "response.incomplete"
            text = "".join(event.get("delta", "") for event in (*seen, *rest))
            assert text == text_of(rest[-1]["response"]) != ""
            async with gw.http.stream("GET", f"{path}?stream=true") as response:
                assert await read(response) == [*seen, *rest]
            assert await refused(gw, "GET", f"{path}?stream=true&starting_after=x") == (400, "invalid_value")
            whole = await create(gw, "hi", max_output_tokens=2)
            assert await refused(gw, "GET", f"/v1/responses/{whole['id']}?stream=true") == (400, "stream_not_available")

    run(test)


def test_no_background_slots_means_foreground() -> None:
    async def test() -> None:
        async with scripted("--max-background-responses", "0") as (_, gw):
            shown = await create(gw, "hi", background=True)
            assert (shown["status"], shown["background"]) == ("completed", False)

    run(test)


@pytest.mark.parametrize("role", ["tokenizer", "router", "detok"])
def test_what_a_crash_costs(role: str) -> None:
    async def test() -> None:
        async with talkative() as (engine, gw):
            short = {"model": "sim", "input": "hi", "max_output_tokens": 30}
            whole = [asyncio.create_task(gw.http.post("/v1/responses", json=short)) for _ in range(4)]
            await until(lambda: running(engine) == 4)
            streams = [asyncio.create_task(stream(gw, "hi", max_output_tokens=30)) for _ in range(4)]
            await until(lambda: running(engine) == 8)
            await gw.kill(role)
            for answer in await asyncio.gather(*whole):
                assert answer.json()["status"] == "incomplete", answer.text
            ends = {events[-1]["type"] for events in await asyncio.gather(*streams)}
            assert ends <= {"response.incomplete", *(["response.failed"] if role == "detok" else [])}

    run(test)


def test_a_stream_that_has_begun_fails_with_its_detok_process() -> None:
    """Its client has seen text, so the turn cannot be repeated: stream and generation end, in order."""

    async def test() -> None:
        async with talkative() as (engine, gw):
            events: list[dict[str, Any]] = []
            killed = False
            async with gw.http.stream("POST", "/v1/responses", json=SLOW | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        events.append(json.loads(line[6:]))
                    if not killed and events and events[-1]["type"] == "response.output_text.delta":
                        killed = True
                        await gw.kill("detok")
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert [event["type"] for event in events if "response" in event][2:] == ["response.failed"]
            failed = events[-1]["response"]
            assert failed["status"] == "failed" and failed["error"]["code"]
            assert text_of(failed) == "".join(event.get("delta", "") for event in events) != ""
            assert (await gw.http.get(f"/v1/responses/{failed['id']}")).json() == failed
            async with asyncio.timeout(5.0):
                await until(lambda: running(engine) == 0)

    run(test)


def test_tenants_see_their_own_records() -> None:
    async def test() -> None:
        flags = ("--tenant-api-key", "red:r-key", "--tenant-api-key", "blue:b-key")
        async with scripted(*flags) as (_, gw):
            red, blue = ({"authorization": f"Bearer {key}"} for key in ("r-key", "b-key"))
            body = {"model": "sim", "input": "hi"}
            made = (await gw.http.post("/v1/responses", json=body, headers=red)).json()
            path = f"/v1/responses/{made['id']}"
            assert (await gw.http.get(path, headers=red)).status_code == 200
            assert (await gw.http.get(path, headers=blue)).status_code == 404
            chained = body | {"previous_response_id": made["id"]}
            assert (await gw.http.post("/v1/responses", json=chained, headers=blue)).status_code == 400
            assert (await gw.http.delete(path, headers=blue)).status_code == 404
            assert (await gw.http.delete(path, headers=red)).status_code == 200

    run(test)


def test_several_http_processes_share_records_in_memory() -> None:
    async def test() -> None:
        async with talkative("--frontend-procs", "2") as (engine, gw):
            queued = await create(gw, **SLOW_FIELDS, background=True)
            made = await create(gw, "hi", max_output_tokens=2)
            await until(lambda: running(engine) == 1)
            statuses = set()
            for _ in range(16):  # a new connection each time: the kernel chooses the process
                async with httpx.AsyncClient(base_url=gw.url, timeout=30.0) as client:
                    assert (await client.get(f"/v1/responses/{made['id']}")).json() == made
                    statuses.add((await client.get(f"/v1/responses/{queued['id']}")).json()["status"])
            assert statuses == {"in_progress"}
            for _ in range(8):
                async with httpx.AsyncClient(base_url=gw.url, timeout=30.0) as client:
                    answer = await client.post(f"/v1/responses/{queued['id']}/cancel")
                    assert answer.json()["status"] == "cancelled"
            async with asyncio.timeout(10.0):
                await until(lambda: running(engine) == 0)

    run(test)


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    """The HTTP process is killed again and again while it writes; no acknowledged response is missing afterwards."""

    async def test() -> None:
        flags = ("--history-backend", "sqlite", "--history-sqlite-path", str(tmp_path / "records.db"))
        async with scripted(*flags) as (_, gw):
            known: list[dict[str, Any]] = []
            stop = asyncio.Event()

            async def write() -> None:
                while not stop.is_set():
                    try:
                        known.append(await create(gw, "hi"))
                    except httpx.HTTPError:
                        await asyncio.sleep(0.05)

            writers = [asyncio.create_task(write()) for _ in range(8)]
            for count in (10, 20, 30):
                await until(lambda: len(known) >= count)  # noqa: B023
                await gw.kill("frontend")
            await until(lambda: len(known) >= 60)
            stop.set()
            await asyncio.gather(*writers)
            for shown in known:
                assert (await gw.http.get(f"/v1/responses/{shown['id']}")).json() == shown
            last = known[-1]
        async with scripted(*flags) as (_, gw):  # the records outlive the gateway, too
            assert (await gw.http.get(f"/v1/responses/{last['id']}")).json() == last

    run(test)


def test_a_background_response_whose_process_died_has_failed(tmp_path: Path) -> None:
    async def test() -> None:
        flags = ("--history-backend", "sqlite", "--history-sqlite-path", str(tmp_path / "records.db"))
        async with talkative(*flags) as (engine, gw):
            queued = await create(gw, **SLOW_FIELDS, background=True)
            await until(lambda: running(engine) == 1)
            await gw.kill("frontend")
            path = f"/v1/responses/{queued['id']}"
            while (shown := (await gw.http.get(path)).json())["status"] == "in_progress":
                await asyncio.sleep(0.05)
            assert (shown["status"], shown["error"]["code"]) == ("failed", "server_error")
            async with asyncio.timeout(5.0):
                await until(lambda: running(engine) == 0)

    run(test)


def test_no_history() -> None:
    async def test() -> None:
        async with scripted("--history-backend", "none") as (_, gw):
            shown = await create(gw, "hi")
            assert shown["store"] is True
            assert (await gw.http.get(f"/v1/responses/{shown['id']}")).status_code == 404
            assert (await gw.http.post("/v1/conversations", json={})).status_code == 200

    run(test)
