"""Configured MCP servers: real processes over every transport."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp_hosts import CALL, LOCAL, call, connected, host, named, run, stdio, text, tools_of
from mcp_process import SERVER, mcp_server, start_server

from smg.mcp.base import ServerRequest, ToolInfo


@asynccontextmanager
async def configured(kind: str, **more: Any) -> AsyncIterator[dict[str, Any]]:
    """A configured server of one kind; the program runs where it is not the host that starts it."""
    if kind == "stdio":
        yield stdio(**more)
        return
    protocol = "sse" if kind == "sse" else "streamable"
    async with mcp_server(protocol, *(["json"] if kind == "json" else [])) as server:
        yield {"name": "local", "protocol": protocol, "url": server.url, **more}


KINDS = pytest.mark.parametrize("kind", ["stdio", "sse", "streamable", "json"])


# Every transport -------------------------------------------------------------------------------------


@KINDS
def test_a_configured_server(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with configured(kind) as server, host(tmp_path, server) as running:
            tools = await tools_of(running, LOCAL)
            [listing] = tools.servers
            assert listing.label == "local" and listing.listed and listing.error is None
            assert [tool.name for tool in listing.tools][:3] == ["add", "echo", "boom"]
            add = listing.tools[0]
            assert (add.description, add.read_only, add.needs_approval) == ("Add two numbers.", True, False)
            assert set(add.input_schema["properties"]) == {"a", "b"}
            assert await text(tools, "add", a=1, b=2) == "3"
            picture = await call(tools, "picture")
            assert picture.content == [
                {"type": "text", "text": "look"}, {"type": "image", "data": "AAAA", "mimeType": "image/png"}
            ]  # fmt: skip
            broken = await call(tools, "boom")
            assert broken.error is not None and broken.error.kind == "tool"
            assert "the tool is broken" in broken.error.message and broken.content
            await tools.close()

    run(test())


@KINDS
def test_a_call_that_hangs_times_out_and_is_cancelled_at_the_server(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with configured(kind) as server, host(tmp_path, server) as running:
            tools = await tools_of(running, LOCAL)
            late = await call(tools, "hang", 0.2)
            assert late.error is not None and late.error.kind == "timeout"
            gone = asyncio.create_task(call(tools, "hang"))
            assert await text(tools, "echo", text="meanwhile") == "meanwhile"
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            while await text(tools, "cancellations") != "2":
                await asyncio.sleep(0.01)

    run(test())


@KINDS
def test_a_reply_that_is_too_large_is_an_error_and_the_server_stays_usable(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with configured(kind) as server, host(tmp_path, server) as running:
            tools = await tools_of(running, LOCAL)
            large = await call(tools, "big", size=10_000_000)
            assert large.content == [] and large.error is not None and large.error.kind == "http"
            assert large.error.message == "the server's reply is larger than 1048576 bytes"
            assert len(await text(tools, "big", size=500_000)) == 500_000

    run(test())


@KINDS
def test_a_server_that_dies_in_a_call(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with configured(kind) as server, host(tmp_path, server) as running:
            tools = await tools_of(running, LOCAL)
            before = await text(tools, "pid")
            dead = await call(tools, "die")
            assert dead.error is not None and dead.error.kind == "http" and "127.0.0.1" not in dead.error.message
            if kind == "stdio":  # the next use starts it again
                assert await text(tools, "pid") != before
            else:
                again = await call(tools, "echo", text="x")
                assert again.error is not None and again.error.kind == "http"

    run(test())


@KINDS
def test_a_changed_tool_list_is_read_again(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with configured(kind) as server, host(tmp_path, server) as running:
            tools = await tools_of(running, LOCAL)
            assert await text(tools, "grow") == "grown"
            while not any(tool.name == "grown" for tool in tools.servers[0].tools):
                tools = await tools_of(running, LOCAL)
            assert await text(tools, "grown") == "new"

    run(test())


@pytest.mark.parametrize("kind", ["sse", "streamable"])
def test_a_restarted_server_is_connected_again(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        first = await start_server(kind)
        async with host(tmp_path, {"name": "local", "protocol": kind, "url": first.url}) as running:
            tools = await tools_of(running, LOCAL)
            before = await text(tools, "pid")
            await first.kill()
            async with mcp_server(kind, port=first.port):
                while (result := await call(tools, "pid")).error is not None:
                    await asyncio.sleep(0.05)
                assert result.content[0]["text"] != before

    run(test())


# Configured servers ----------------------------------------------------------------------------------


def test_servers_are_connected_at_start_and_after_a_loss(tmp_path: Path) -> None:
    async def test() -> None:
        server = await start_server("streamable")
        await server.kill()
        entry = {"name": "local", "protocol": "streamable", "url": server.url, "required": True}
        async with host(tmp_path, entry) as running:
            tools = await tools_of(running, LOCAL)
            assert tools.servers[0].error == "no connection to the server" and tools.servers[0].tools == []
            assert running.waiting_for == ["local"]
            async with mcp_server("streamable", port=server.port):
                while running.waiting_for:
                    await asyncio.sleep(0.02)
                assert len((await tools_of(running, LOCAL)).servers[0].tools) > 5

    run(test())


def test_a_server_that_is_gone_is_noticed_by_a_call(tmp_path: Path) -> None:
    async def test() -> None:
        server = await start_server("streamable")
        async with host(tmp_path, {"name": "local", "protocol": "streamable", "url": server.url}) as running:
            tools = await tools_of(running, LOCAL)
            assert connected(running) == 1
            await server.kill()
            assert (await call(tools, "echo", text="x")).error is not None
            while connected(running):
                await asyncio.sleep(0.01)
            async with mcp_server("streamable", port=server.port):
                while not connected(running):  # nobody asks for it
                    await asyncio.sleep(0.02)
                assert await text(tools, "echo", text="x") == "x"

    run(test())


def test_environment_and_headers_of_configured_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_SECRET", "do not pass on")

    async def test() -> None:
        async with mcp_server("streamable") as server:
            remote = {
                "name": "remote",
                "protocol": "streamable",
                "url": server.url,
                "token": "t0p",
                "headers": {"X-A": "b"},
            }
            async with host(tmp_path, stdio(envs={"GIVEN": "yes"}), remote) as running:
                tools = await tools_of(running, LOCAL)
                assert await text(tools, "variable", name="GIVEN") == "yes"
                assert await text(tools, "variable", name="GATEWAY_SECRET") == ""
                tools = await tools_of(running, ServerRequest(label="remote"))
                assert await text(tools, "header", name="authorization") == "Bearer t0p"
                assert await text(tools, "header", name="x-a") == "b"

    run(test())


def test_a_stdio_server_ends_with_the_host(tmp_path: Path) -> None:
    async def test() -> None:
        async with host(tmp_path, stdio()) as running:
            pid = int(await text(await tools_of(running, LOCAL), "pid"))
        assert not Path(f"/proc/{pid}").exists()

    run(test())


def test_names_filters_approval_and_policy(tmp_path: Path) -> None:
    tools_config = {
        "echo": {"alias": "say", "arg_mapping": {"renames": {"words": "text"}}},
        "add": {"response_format": "web_search_call", "arg_mapping": {"overrides": {"b": 40}}},
    }
    policy = {"tools": {"local:pid": "deny"}, "servers": {"other": {"trust_level": "untrusted"}}}

    async def test() -> None:
        async with host(tmp_path, stdio(tools=tools_config), stdio("other"), policy=policy) as running:
            some = ServerRequest(
                label="local",
                allowed_tools=["say", "add", "pid", "nothing"],
                require_approval={"never": {"read_only": True}},
            )
            other = ServerRequest(label="other", allowed_tools=["echo", "add", "boom"], require_approval="always")
            tools = await tools_of(running, some, other, ServerRequest(label="unknown"))
            names = [[tool.name for tool in server.tools] for server in tools.servers]
            assert names == [["add", "say", "pid"], ["other__add", "echo", "boom"], []]
            assert [tool.needs_approval for tool in tools.servers[0].tools] == [False, True, True]
            assert all(tool.needs_approval for tool in tools.servers[1].tools)
            assert named(tools, "add").kind == "web_search_call" and named(tools, "other__add").kind == "mcp_call"
            assert await text(tools, "say", words="hi") == "hi"
            assert await text(tools, "add", a=2, b=2) == "42"
            assert await text(tools, "other__add", a=2, b=2) == "4"
            for name in ("pid", "boom"):
                denied = await call(tools, name)
                assert denied.error is not None and denied.error.kind == "denied"
                assert denied.error.message == f"Tool call failed: Tool execution denied: {name}"
            assert await text(tools, "echo", text="gentle") == "gentle"
            stranger = await tools.call(ToolInfo(name="variable", server_label="local"), {}, CALL)
            assert stranger.error is not None and stranger.error.kind == "denied"

    run(test())


def test_hosted_tools_and_internal_servers(tmp_path: Path) -> None:
    search = {"builtin_type": "web_search_preview", "builtin_tool_name": "echo"}

    async def test() -> None:
        async with host(tmp_path, stdio("finder", **search), stdio("hidden", internal=True)) as running:
            assert running.hosted_types == {"web_search_preview"}
            tools = await tools_of(running, ServerRequest(label="hidden"), hosted=["web_search_preview", "file_search"])
            hidden, finder = tools.servers
            assert not hidden.listed and hidden.tools[0].internal
            assert not finder.listed and [(tool.name, tool.kind) for tool in finder.tools] == [
                ("finder__echo", "web_search_call")
            ]
            assert await text(tools, "finder__echo", text="q") == "q"
            assert (await tools_of(running, hosted=[])).servers == []

    run(test())


def test_no_more_calls_at_once_than_allowed(tmp_path: Path) -> None:
    async def test() -> None:
        limits = {"max_concurrent_calls": 1}
        async with host(tmp_path, stdio(limits=limits)) as running:
            tools = await tools_of(running, LOCAL)
            busy = asyncio.create_task(call(tools, "hang"))
            await asyncio.sleep(0)
            waiting = await call(tools, "echo", 0.2, text="x")
            assert waiting.error is not None and waiting.error.kind == "timeout"
            busy.cancel()
            assert await text(tools, "echo", text="x") == "x"

    run(test())


def test_a_server_that_asks_and_asks_is_answered_a_few_times(tmp_path: Path) -> None:
    flood = {
        "name": "local",
        "protocol": "stdio",
        "command": sys.executable,
        "args": [SERVER.replace("tools_", "flood_")],
    }

    async def test() -> None:
        async with host(tmp_path, flood) as running:
            tools = await tools_of(running, LOCAL)
            assert 1 <= int(await text(tools, "answered")) <= 8

    run(test())
