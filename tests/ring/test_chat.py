"""Requests through a whole gateway: every endpoint, streaming and not, and what must not reach an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import self_signed
from gateway import Gateway, gateway
from sim_worker import worker

from smg.simengine.core import SimEngine, SimOptions
from smg.simengine.script import Output, Script

LIMIT = 100.0


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT))


def running(engine: SimEngine) -> int:
    """Requests that run or wait in the engine."""
    return sum(rank.running + rank.waiting for rank in engine.loads())


async def events(response: httpx.Response) -> list[Any]:
    """The data of a server-sent event stream; the end marker is checked and left out."""
    data = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


async def stream(gw: Gateway, path: str, body: dict[str, Any]) -> list[Any]:
    async with gw.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return await events(response)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_every_endpoint(kind: str) -> None:
    async def test() -> None:
        async with worker(kind) as (engine, url), gateway(url) as gw:
            chat = {"model": "sim", "messages": [{"role": "user", "content": "What do whales eat?"}], "max_tokens": 24}
            whole = (await gw.http.post("/v1/chat/completions", json=chat)).json()
            chunks = await stream(gw, "/v1/chat/completions", chat | {"stream_options": {"include_usage": True}})
            text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
            assert text == whole["choices"][0]["message"]["content"] != ""
            assert chunks[-1]["usage"] == whole["usage"]
            assert whole["usage"]["completion_tokens"] == 24

            completion = {"model": "sim", "prompt": ["One day", "Two"], "max_tokens": 9, "n": 2, "echo": True}
            whole = (await gw.http.post("/v1/completions", json=completion)).json()
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
            assert all(choice["text"].startswith("One day") for choice in whole["choices"][:2])
            chunks = await stream(gw, "/v1/completions", completion)
            for index in range(4):
                text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index)
                assert text == whole["choices"][index]["text"]

            by_ids = {"model": "sim", "prompt": [[70, 71], [72, 73, 74]], "max_tokens": 3, "return_token_ids": True}
            whole = (await gw.http.post("/v1/completions", json=by_ids)).json()
            assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[70, 71], [72, 73, 74]]
            assert [len(choice["token_ids"]) for choice in whole["choices"]] == [3, 3]

            generate = {"model": "sim", "text": "One day", "sampling_params": {"max_new_tokens": 7}}
            [whole] = (await gw.http.post("/generate", json=generate)).json()
            last = (await stream(gw, "/generate", generate))[-1]
            assert last["text"] == whole["text"]
            assert last["meta_info"]["finish_reason"] == "length"

            ids = (await gw.http.post("/v1/tokenize", json={"model": "sim", "prompt": "Grüße 🐋"})).json()["tokens"]
            back = await gw.http.post("/detokenize", json={"model": "sim", "tokens": ids})
            assert back.json() == {"text": "Grüße 🐋"}
            assert (await gw.http.get("/v1/models")).json()["data"][0]["id"] == "sim"
            assert running(engine) == 0

    run(test)


def test_streams_over_tls(tmp_path: Path) -> None:
    folder = self_signed(tmp_path, "IP:127.0.0.1")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    flags = ("--tls-cert-path", str(certificate), "--tls-key-path", str(key))

    async def test() -> None:
        options = SimOptions(step_ms=2)
        async with worker("vllm", options) as (_, url), gateway(url, flags=flags, authority=certificate) as gw:
            body = {"model": "sim", "messages": [{"role": "user", "content": "What do whales eat?"}], "max_tokens": 40}
            whole = (await gw.http.post("/v1/chat/completions", json=body)).json()
            answers = await asyncio.gather(*(stream(gw, "/v1/chat/completions", body) for _ in range(8)))
            for chunks in answers:
                text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
                assert text == whole["choices"][0]["message"]["content"] != ""

    run(test)


def test_stop_strings_cut_across_tokens_and_end_the_engine_request() -> None:
    async def test() -> None:
        script = Script([Output(text="alpha beta ##STOP## gamma delta epsilon zeta eta theta")])
        async with worker("sglang", SimOptions(step_ms=5), script) as (engine, url), gateway(url) as gw:
            body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "stop": ["##STOP##", "nope"]}
            chunks = await stream(gw, "/v1/chat/completions", body)
            text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
            assert text == "alpha beta "
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            assert chunks[-1]["choices"][0]["matched_stop"] == "##STOP##"
            async with asyncio.timeout(1.0):
                while running(engine):
                    await asyncio.sleep(0.005)
            kept = await gw.chat("x", stop="##STOP##", no_stop_trim=True)
            assert kept.json()["choices"][0]["message"]["content"] == "alpha beta ##STOP##"

    run(test)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_the_engine_within_a_tenth_of_a_second(streaming: bool) -> None:
    async def test() -> None:
        async with worker("vllm", SimOptions(step_ms=20)) as (engine, url), gateway(url) as gw:
            body = {
                "model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "ignore_eos": True,
                "stream": streaming,
            }  # fmt: skip
            request = asyncio.create_task(gw.http.post("/v1/chat/completions", json=body))
            while not running(engine):
                await asyncio.sleep(0.005)
            request.cancel()
            begun = asyncio.get_running_loop().time()
            while running(engine):
                await asyncio.sleep(0.002)
            assert asyncio.get_running_loop().time() - begun < 1.0  # 0.1 s on a quiet machine

    run(test)


BAD = [
    ({"messages": [{"role": "user", "content": "x"}], "temperature": 3}, 400, "decimal_above_max_value", "temperature"),
    ({"messages": []}, 400, "empty_array", "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}, 400, "invalid_type", "max_tokens"),
    ({"messages": [{"role": "user", "content": "word " * 200_000}]}, 400, "context_length_exceeded", None),
    ({"messages": [{"role": "user", "content": "x"}], "model": "unheard-of"}, 404, "model_not_found", None),
]


def test_bad_requests_never_reach_the_engine() -> None:
    async def test() -> None:
        flags = ("--max-payload-size", "4000000")
        async with worker("vllm") as (engine, url), gateway(url, flags=flags) as gw:
            for fields, status, code, param in BAD:
                answer = await gw.http.post("/v1/chat/completions", json={"model": "sim"} | fields)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (status, code)
                if param is not None:
                    assert error["param"] == param
            json_headers = {"content-type": "application/json"}
            broken = await gw.http.post("/v1/chat/completions", content=b'{"model": "sim"', headers=json_headers)
            assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
            large = await gw.http.post("/v1/chat/completions", content=b"x" * 5_000_000, headers=json_headers)
            assert (large.status_code, large.json()["error"]["code"]) == (413, "request_body_too_large")
            outside = {"model": "sim", "prompt": [5, 10_000_000]}
            assert (await gw.http.post("/v1/completions", json=outside)).status_code == 400
            assert (await gw.http.get("/v1/nothing")).status_code == 404
            assert (await gw.http.get("/v1/chat/completions")).status_code == 405
            assert engine.finished + engine.aborted + running(engine) == 0

    run(test)


def test_deadline_ends_a_request() -> None:
    async def test() -> None:
        flags = ("--request-timeout-secs", "1")
        async with worker("vllm", SimOptions(step_ms=100)) as (engine, url), gateway(url, flags=flags) as gw:
            answer = await gw.chat(max_tokens=4000, ignore_eos=True)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
            async with asyncio.timeout(2.0):
                while running(engine):
                    await asyncio.sleep(0.005)

    run(test)
