"""Forced calls through a whole gateway: one engine that serves a model of every tool format, constrained in the
model's own format, and each answer read back by that format's parser."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway import Gateway, gateway
from sim_worker import worker

from smg.models.registry import TOOL_PARSERS

pytest.importorskip("xgrammar", reason="the embedded engine needs xgrammar to generate under a constraint")
validate = pytest.importorskip("jsonschema").validate

LIMIT = 100.0
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}


async def register(gw: Gateway, url: str) -> None:
    """One worker, one model per format; returns when all of them are served."""
    cards = [{"id": f"of-{parser}", "tool_parser": parser} for parser in TOOL_PARSERS]
    assert (await gw.http.post("/workers", json={"url": url, "models": cards})).status_code == 202
    await gw.wait_ready(workers=1)
    async with asyncio.timeout(LIMIT):
        while len((await gw.http.get("/v1/models")).json()["data"]) < len(cards):
            await asyncio.sleep(0.02)


async def streamed(gw: Gateway, body: dict[str, Any]) -> tuple[str, str, str]:
    """Name and arguments of the first call, and the finish reason."""
    name = arguments = finish = ""
    async with gw.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            [choice] = json.loads(line[6:])["choices"]
            for call in choice["delta"].get("tool_calls") or ():
                if call["index"] == 0:
                    name += call["function"].get("name") or ""
                    arguments += call["function"].get("arguments") or ""
            finish = choice["finish_reason"] or finish
    return name, arguments, finish


async def check(gw: Gateway, parser: str, choice: Any) -> None:
    body = {
        "model": f"of-{parser}", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS,
        "tool_choice": choice, "seed": 5, "max_tokens": 500,
    }  # fmt: skip
    answer = await gw.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [said] = answer.json()["choices"]
    call = said["message"]["tool_calls"][0]["function"]
    assert (call["name"], said["finish_reason"]) == ("get_weather", "tool_calls"), parser
    validate(json.loads(call["arguments"]), SCHEMA)
    name, arguments, finish = await streamed(gw, body)
    assert (name, json.loads(arguments), finish) == ("get_weather", json.loads(call["arguments"]), "tool_calls"), parser


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_every_format(kind: str) -> None:
    async def test() -> None:
        async with worker(kind) as (_engine, url), gateway(flags=("--tool-constraint", "native")) as gw:
            await register(gw, url)
            for number, parser in enumerate(TOOL_PARSERS):
                await check(gw, parser, ("required", NAMED, ALLOWED)[number % 3])

    asyncio.run(asyncio.wait_for(test(), LIMIT))
