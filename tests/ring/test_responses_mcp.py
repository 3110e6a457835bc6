"""The MCP loop of ``/v1/responses`` through a whole gateway: a scripted engine that calls tools, real MCP servers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from gateway import Gateway, alive, gateway
from mcp_hosts import by_url, host, text, tools_of
from mcp_process import SERVER, ServerProcess, mcp_server, start_server
from sim_worker import worker

from smg.simengine.script import Output, Script, ToolCall

LIMIT = 100.0
CALLS: dict[str, list[ToolCall]] = {
    "Sum please": [ToolCall("add", {"a": 20, "b": 22})],
    "Two sums": [ToolCall("add", {"a": 500, "b": 1}), ToolCall("add", {"a": 600, "b": 2})],
    "Break it": [ToolCall("boom", {})],
    "Too big": [ToolCall("big", {"size": 10_000_000})],
    "Forbidden": [ToolCall("pid", {})],
    "Die now": [ToolCall("die", {})],
    "Mixed": [ToolCall("add", {"a": 700, "b": 3}), ToolCall("mine", {"x": 1})],
    "Find whales": [ToolCall("seek", {"query": "whales"})],
    "Who am I": [ToolCall("header", {"name": "authorization"})],
    "Hang on": [ToolCall("hang", {})],
    "Again and again": [ToolCall("add", {"a": 1, "b": 1})],
}
# What the engine says when a tool's result is in the prompt; these come before the calls.
ANSWERS = {
    '"42"': "The sum is 42.", '"602"': "They are 501 and 602.", "the tool is broken": "It is broken.",
    "larger than 1048576": "It was too much.", "execution denied": "I may not.", "whales found": "Whales!",
    "Bearer s3cret": "You are s3cret.", "the connection to the server broke": "It died.", "no valid HTTP": "It died.",
    "the server ended": "It died.", "did not approve": "As you wish.",
}  # fmt: skip


def script() -> Script:
    answers = [Output(content=text, match=found) for found, text in ANSWERS.items()]
    calls = [
        Output(content="Let me see.", tool_calls=made, match=found) if found == "Sum please" else
        Output(tool_calls=made, match=found)
        for found, made in CALLS.items()
    ]  # fmt: skip
    return Script([*answers, *calls])


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT))


@asynccontextmanager
async def setting(tmp_path: Path, *flags: str, **config: Any) -> AsyncIterator[Gateway]:
    """A gateway with a stdio server ``local`` and an engine that follows the script."""
    local = {
        "name": "local", "protocol": "stdio", "command": sys.executable, "args": [SERVER, "stdio"],
        "tools": {"echo": {"alias": "seek", "response_format": "web_search_call", "arg_mapping": {
            "renames": {"query": "text"}, "overrides": {"text": "whales found"}}}},
    }  # fmt: skip
    config = {"servers": [local], "policy": {"tools": {"local:pid": "deny"}}, **config}
    path = tmp_path / "mcp.yaml"
    path.write_text(yaml.safe_dump(config))
    own = ("--mcp-config-path", str(path), "--tool-call-parser", "qwen", "--reasoning-parser", "qwen3")
    async with worker("sglang", script=script()) as (_, url), gateway(url, flags=(*own, *flags)) as running:
        yield running


LOCAL = {"type": "mcp", "server_label": "local", "require_approval": "never"}


def dynamic(server: ServerProcess, **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "mine", "server_url": server.url, **more}


async def post(gw: Gateway, text: Any, *tools: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"model": "sim", "input": text, "tools": list(tools), **fields}
    return await gw.http.post("/v1/responses", json=body)


async def answer(gw: Gateway, text: Any, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = await post(gw, text, *tools, **fields)
    assert response.status_code == 200, response.text
    shown: dict[str, Any] = response.json()
    return shown


async def events(gw: Gateway, text: Any, *tools: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "sim", "input": text, "tools": list(tools), "stream": True, **fields}
    async with gw.http.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200, await response.aread()
        found = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(shown: dict[str, Any]) -> list[str]:
    return [item["type"] for item in shown["output"]]


def last_text(shown: dict[str, Any]) -> str:
    assert shown["output"][-1]["type"] == "message", shown["output"]
    text: str = shown["output"][-1]["content"][0]["text"]
    return text


def of_type(shown: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [item for item in shown["output"] if item["type"] == kind]


async def metrics(gw: Gateway) -> dict[str, float]:
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://127.0.0.1:{gw.metrics_port}/metrics")).text
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("smg_mcp")]
    return {name: float(value) for name, _, value in lines}


def test_the_loop_streaming_and_not(tmp_path: Path) -> None:
    async def test() -> None:
        async with setting(tmp_path) as gw:
            shown = await answer(gw, "Sum please", LOCAL)
            assert shown["status"] == "completed" and last_text(shown) == "The sum is 42."
            [listing], [made] = of_type(shown, "mcp_list_tools"), of_type(shown, "mcp_call")
            assert shown["output"][0] is listing and listing["server_label"] == "local"
            assert {"add", "boom", "seek"} < {tool["name"] for tool in listing["tools"]}
            assert next(tool for tool in listing["tools"] if tool["name"] == "add")["annotations"] == {
                "read_only": True
            }
            assert (made["name"], made["server_label"], made["status"]) == ("add", "local", "completed")
            assert json.loads(made["arguments"]) == {"a": 20, "b": 22} and made["output"] == "42" and not made["error"]
            assert shown["usage"]["total_tokens"] == shown["usage"]["input_tokens"] + shown["usage"]["output_tokens"]

            stream = await events(gw, "Sum please", LOCAL)
            assert stream[-1]["type"] == "response.completed"
            final = stream[-1]["response"]
            assert kinds(final) == kinds(shown) and last_text(final) == last_text(shown)
            assert final["usage"]["total_tokens"] == shown["usage"]["total_tokens"]  # cached ones differ
            types = [event["type"] for event in stream]
            order = [
                "response.created", "response.in_progress", "response.mcp_list_tools.in_progress",
                "response.mcp_list_tools.completed", "response.mcp_call.in_progress",
                "response.mcp_call_arguments.done", "response.mcp_call.completed", "response.completed",
            ]  # fmt: skip
            assert [types.count(each) for each in order] == [1] * len(order)
            assert sorted(order, key=types.index) == order
            done = [event["item"]["type"] for event in stream if event["type"] == "response.output_item.done"]
            assert done == kinds(final)

            counts = await metrics(gw)
            assert counts['smg_mcp_tool_calls_total{model="sim",result="success",tool_name="add"}'] == 2
            assert counts['smg_mcp_tool_iterations_total{model="sim"}'] == 4
            assert counts["smg_mcp_servers_active"] == 1

    run(test)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_can_become_of_a_call(streaming: bool, tmp_path: Path) -> None:
    async def ask(gw: Gateway, text: str, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
        if not streaming:
            return await answer(gw, text, *tools, **fields)
        final: dict[str, Any] = (await events(gw, text, *tools, **fields))[-1]["response"]
        return final

    async def test() -> None:
        async with setting(tmp_path) as gw:
            both = await ask(gw, "Two sums", LOCAL)
            assert [item["output"] for item in of_type(both, "mcp_call")] == ["501", "602"]
            assert last_text(both) == "They are 501 and 602."

            for text, error, told in (
                ("Break it", "the tool is broken", "It is broken."),
                ("Too big", "larger than 1048576 bytes", "It was too much."),
                ("Forbidden", "Tool execution denied: pid", "I may not."),
                ("Die now", "the server ended", "It died."),
            ):
                shown = await ask(gw, text, LOCAL)
                [made] = of_type(shown, "mcp_call")
                assert made["status"] == "failed" and error in json.dumps(made["error"]) and not made["output"]
                assert shown["status"] == "completed" and last_text(shown) == told

            mine = {"type": "function", "name": "mine", "parameters": {"type": "object"}}
            mixed = await ask(gw, "Mixed", LOCAL, mine)
            assert kinds(mixed)[-2:] == ["mcp_call", "function_call"] and mixed["output"][-2]["output"] == "703"
            assert mixed["output"][-1]["name"] == "mine" and mixed["status"] == "completed"

            found = await ask(gw, "Find whales", LOCAL)
            [search] = of_type(found, "web_search_call")
            assert search["action"] == {"type": "search", "query": "whales"} and search["status"] == "completed"
            assert last_text(found) == "Whales!"

            filtered = await ask(gw, "Sum please", LOCAL | {"allowed_tools": ["boom"]})
            assert [tool["name"] for tool in filtered["output"][0]["tools"]] == ["boom"]
            assert filtered["output"][-1]["type"] == "function_call" and filtered["output"][-1]["name"] == "add"

            one = await ask(gw, "Two sums", LOCAL, max_tool_calls=1)
            assert [item["output"] for item in of_type(one, "mcp_call")] == ["501"] and one["status"] == "completed"

            endless = await ask(gw, "Again and again", LOCAL)
            assert len(of_type(endless, "mcp_call")) == 10 and endless["status"] == "failed"
            assert endless["error"] == {
                "code": "max_tool_calls_exceeded",
                "message": "Internal tool call safety limit (10) reached",
            }
            for most in (3, 12):
                bounded = await ask(gw, "Again and again", LOCAL, max_tool_calls=most)
                assert len(of_type(bounded, "mcp_call")) == most and bounded["status"] == "completed"
                assert all(item["output"] == "2" for item in of_type(bounded, "mcp_call"))

    run(test)


def test_approval(tmp_path: Path) -> None:
    async def test() -> None:
        async with setting(tmp_path) as gw:
            always = LOCAL | {"require_approval": "always"}
            for first in (
                await answer(gw, "Sum please", always),
                (await events(gw, "Sum please", always))[-1]["response"],
            ):
                request = first["output"][-1]
                assert request["type"] == "mcp_approval_request" and not of_type(first, "mcp_call")
                assert (request["name"], request["server_label"]) == ("add", "local") and first["status"] == "completed"

                yes = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
                then = await answer(gw, [yes], always, previous_response_id=first["id"])
                [made] = of_type(then, "mcp_call")
                assert made["output"] == "42" and made["approval_request_id"] == request["id"]
                assert last_text(then) == "The sum is 42."

                no = yes | {"approve": False}
                denied = await answer(gw, [no], always, previous_response_id=first["id"])
                assert not of_type(denied, "mcp_call") and last_text(denied) == "As you wish."

            rule = LOCAL | {"require_approval": {"never": {"tool_names": ["add"]}}}
            assert last_text(await answer(gw, "Sum please", rule)) == "The sum is 42."
            assert (await answer(gw, "Break it", rule))["output"][-1]["type"] == "mcp_approval_request"
            unknown = {"type": "mcp_approval_response", "approval_request_id": "mcpr_none", "approve": True}
            assert (await post(gw, [unknown], always)).status_code == 400

    run(test)


@pytest.mark.parametrize("transport", ["streamable", "sse"])
def test_servers_that_requests_name(transport: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with mcp_server(transport) as server, setting(tmp_path, "--mcp-allow-private-hosts") as gw:
            shown = await answer(gw, "Who am I", dynamic(server, authorization="s3cret"))
            assert last_text(shown) == "You are s3cret." and of_type(shown, "mcp_call")[0]["server_label"] == "mine"
            assert "s3cret" not in json.dumps(shown["tools"])
            stream = await events(gw, "Sum please", dynamic(server))
            assert last_text(stream[-1]["response"]) == "The sum is 42."
            previous = stream[-1]["response"]["id"]
            going_on = await answer(gw, "And again: Sum please", dynamic(server), previous_response_id=previous)
            assert last_text(going_on) == "The sum is 42."

            await server.kill()
            for stream_it in (False, True):
                refused = await post(gw, "Sum please", dynamic(server, authorization="new"), stream=stream_it)
                assert refused.status_code == 424, refused.text
                assert refused.json()["error"]["code"] == "connect_mcp_server_failed"

    run(test)


def test_what_is_refused_by_default(tmp_path: Path) -> None:
    async def test() -> None:
        server = await start_server("streamable")
        async with setting(tmp_path) as gw:
            for url in (server.url, "http://169.254.169.254/latest", "http://[::1]:1/", "file:///etc/passwd"):
                for stream in (False, True):
                    entry = {"type": "mcp", "server_label": "mine", "server_url": url}
                    refused = await post(gw, "Sum please", entry, stream=stream)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (424, "connect_mcp_server_failed")
            entry = {"type": "mcp", "server_label": "mine", "server_url": "http://a.example/", "headers": {"Host": "b"}}
            assert (await post(gw, "Sum please", entry)).json()["error"]["code"] == "invalid_value"
            entry = LOCAL | {"require_approval": "sometimes"}
            assert (await post(gw, "Sum please", entry)).json()["error"]["code"] == "invalid_type"
            unknown = await answer(gw, "Sum please", {"type": "mcp", "server_label": "nobody"})
            assert unknown["output"][0] == unknown["output"][0] | {"server_label": "nobody", "tools": []}
        await server.kill()

    run(test)


def test_a_client_that_leaves_cancels_the_call(tmp_path: Path) -> None:
    async def test() -> None:
        async with mcp_server("streamable") as server, setting(tmp_path, "--mcp-allow-private-hosts") as gw:
            body = {"model": "sim", "input": "Hang on", "tools": [dynamic(server)], "stream": True}
            async with host(tmp_path) as own:
                tools = await tools_of(own, by_url(server.url))
                async with gw.http.stream("POST", "/v1/responses", json=body):
                    while await text(tools, "beginnings") != "1":
                        await asyncio.sleep(0.02)
                while await text(tools, "cancellations") != "1":
                    await asyncio.sleep(0.02)

    run(test)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_stdio_servers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    started: list[int] = []

    async def test() -> None:
        async with setting(tmp_path) as gw:
            assert last_text(await answer(gw, "Sum please", LOCAL)) == "The sum is 42."
            started.extend(children(gw.pids["frontend", 0]))
            assert len(started) == 1
            await gw.http.aclose()
            await gw.kill("frontend")
            async with asyncio.timeout(LIMIT):
                while alive(started[0]):
                    await asyncio.sleep(0.01)
            gw.http = httpx.AsyncClient(base_url=gw.url, timeout=30.0)
            await gw.wait_ready()
            assert last_text(await answer(gw, "Sum please", LOCAL)) == "The sum is 42."
            started.extend(children(gw.pids["frontend", 0]))
            assert len(started) == 2
        assert not alive(started[1])

    run(test)


def test_a_required_server_holds_readiness_back(tmp_path: Path) -> None:
    async def test() -> None:
        server = await start_server("streamable")
        await server.kill()
        entry = {"name": "needed", "protocol": "streamable", "url": server.url, "required": True}
        path = tmp_path / "mcp.yaml"
        path.write_text(yaml.safe_dump({"servers": [entry]}))
        async with worker("sglang") as (_, url), gateway(flags=("--mcp-config-path", str(path))) as gw:
            await gw.http.post("/workers", json={"url": url})
            while (ready := await gw.http.get("/readiness")).json().get("reason") != "required MCP servers: needed":
                assert ready.status_code == 503
                await asyncio.sleep(0.02)
            assert (await gw.http.get("/health")).status_code == 200
            async with mcp_server("streamable", port=server.port):
                await gw.wait_ready()

    run(test)
