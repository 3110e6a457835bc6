"""MCP connections with real server processes over every transport, and with servers that misbehave."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from mcp_process import SERVER, Head, mcp_server, raw_server, start_server

from smg.api.errors import ApiError
from smg.mcp.base import ServerRequest, ToolInfo, ToolResult
from smg.mcp.guard import Guard
from smg.mcp.host import McpHost
from smg.mcp.toolset import RequestTools
from smg.settings import Settings
from smg.telemetry.metrics import SessionMetrics

LIMIT = 60.0
CALL = 20.0
METRICS = SessionMetrics()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, LIMIT))


@asynccontextmanager
async def host(
    tmp_path: Path, *servers: dict[str, Any], guard: Guard | None = None, start: bool = True, **config: Any
) -> AsyncIterator[McpHost]:
    path = tmp_path / "mcp.yaml"
    path.write_text(yaml.safe_dump({"servers": list(servers), **config}))
    settings = Settings(mcp_config_path=str(path), mcp_allow_private_hosts=True)
    running = McpHost(settings, METRICS, guard=guard)
    if start:
        await running.start()
    try:
        yield running
    finally:
        await running.close()


def stdio(name: str = "local", **more: Any) -> dict[str, Any]:
    return {"name": name, "protocol": "stdio", "command": sys.executable, "args": [SERVER, "stdio"], **more}


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


async def tools_of(running: McpHost, *servers: ServerRequest, hosted: Sequence[str] = ()) -> RequestTools:
    return await running.connect(servers, hosted)


def named(tools: RequestTools, name: str) -> ToolInfo:
    return next(tool for server in tools.servers for tool in server.tools if tool.name == name)


async def call(tools: RequestTools, name: str, timeout: float = CALL, /, **arguments: Any) -> ToolResult:
    return await tools.call(named(tools, name), arguments, timeout)


async def text(tools: RequestTools, name: str, timeout: float = CALL, /, **arguments: Any) -> str:
    result = await call(tools, name, timeout, **arguments)
    assert result.error is None, result.error
    return str(result.content[0]["text"])


LOCAL = ServerRequest(label="local")


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


# Servers that requests name --------------------------------------------------------------------------


def by_url(url: str, label: str = "mine", **more: Any) -> ServerRequest:
    return ServerRequest(label=label, url=url, **more)


async def refusal(running: McpHost, *servers: ServerRequest) -> ApiError:
    with pytest.raises(ApiError) as fault:
        await running.connect(servers, [])
    return fault.value


@pytest.mark.parametrize("kind", ["sse", "streamable"])
def test_a_server_by_url(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with mcp_server(kind) as server, host(tmp_path) as running:
            request = by_url(server.url, authorization="s3cret", headers={"X-Team": "core"})
            tools = await tools_of(
                running, request, by_url(server.url, "twice", authorization="s3cret", headers={"X-Team": "core"})
            )
            assert [listing.label for listing in tools.servers] == ["mine"]
            assert await text(tools, "header", name="authorization") == "Bearer s3cret"
            assert await text(tools, "header", name="x-team") == "core"
            assert await text(tools, "header", name="accept-encoding") == "identity"
            await tools.close()

    run(test())


def test_credentials_never_share_a_connection(tmp_path: Path) -> None:
    async def test() -> None:
        async with mcp_server("streamable") as server, host(tmp_path) as running:
            sets = [await tools_of(running, by_url(server.url, authorization=token)) for token in ("a", "b", "a")]
            assert [await text(tools, "header", name="authorization") for tools in sets] == [
                "Bearer a", "Bearer b", "Bearer a"
            ]  # fmt: skip
            sessions = [await text(tools, "header", name="mcp-session-id") for tools in sets]
            assert sessions[0] == sessions[2] != sessions[1]
            for tools in sets:
                await tools.close()

    run(test())


def test_the_pool_is_bounded_and_forgets_what_is_idle(tmp_path: Path) -> None:
    async def test() -> None:
        pool = {"max_connections": 2, "idle_timeout": 0.2}
        async with mcp_server("streamable") as server, host(tmp_path, pool=pool) as running:
            first, second = [await tools_of(running, by_url(server.url, authorization=token)) for token in ("a", "b")]
            fault = await refusal(running, by_url(server.url, authorization="c"))
            assert (fault.status, fault.code) == (503, "mcp_connections_exhausted")
            await first.close()
            third = await tools_of(running, by_url(server.url, authorization="c"))
            assert len(running._pool) == 2
            await second.close()
            await third.close()
            while len(running._pool):
                await asyncio.sleep(0.02)

    run(test())


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1/mcp", "not a public address"),
        ("http://localhost:1/mcp", "not a public address"),
        ("http://[::ffff:7f00:1]:1/", "not a public address"),
        ("http://169.254.169.254/latest/meta-data", "not a public address"),
        ("file:///etc/passwd", "only http and https"),
        ("stdio:/bin/sh", "only http and https"),
        ("http://2130706433/", "a number"),
    ],
)
def test_urls_that_are_refused_by_default(url: str, reason: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with host(tmp_path, guard=Guard((), allow_private=False)) as running:
            fault = await refusal(running, by_url(url))
            assert (fault.status, fault.code) == (424, "connect_mcp_server_failed") and reason in fault.message
            assert len(running._pool) == 0

    run(test())


def test_headers_that_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with host(tmp_path) as running:
            for more in ({"headers": {"X": "a\r\nb: c"}}, {"headers": {"Host": "x"}}, {"authorization": "a\r\nb: c"}):
                fault = await refusal(running, by_url("http://127.0.0.1:1/", **more))
                assert (fault.status, fault.code, fault.param) == (400, "invalid_value", "tools")
            fault = await refusal(running, ServerRequest(label="gmail", connector_id="connector_gmail"))
            assert (fault.status, fault.code) == (400, "tool_not_supported")

    run(test())


def test_an_unreachable_server_is_424_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        server = await start_server("streamable")
        await server.kill()
        async with host(tmp_path) as running:
            fault = await refusal(running, by_url(server.url))
            assert (fault.status, fault.code) == (424, "connect_mcp_server_failed")
            assert fault.message == "Failed to connect to MCP server 'mine': no connection to the server"
            assert len(running._pool) == 0

    run(test())


# Servers that misbehave ------------------------------------------------------------------------------


def reply(status: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "content-length": str(len(body))}.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


Misbehaviour = Callable[[Head, bytes, asyncio.StreamWriter], Awaitable[None]]


async def outcome(tmp_path: Path, answer: Misbehaviour, guard: Guard | None = None, address: str = "127.0.0.1") -> str:
    async with (
        raw_server(answer, address) as port,
        host(tmp_path, guard=guard, limits={"connect_timeout_secs": 1}) as running,
    ):
        return (await refusal(running, by_url(f"http://{address}:{port}/mcp"))).message


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_a_redirect_to_another_host_is_not_followed(status: str, tmp_path: Path) -> None:
    reached: list[str] = []

    async def test() -> None:
        async def inner(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
            reached.append(head[1])
            writer.write(reply("200 OK", {"content-type": "application/json"}, b"{}"))

        async with raw_server(inner) as inner_port:

            async def redirect(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
                writer.write(reply(status, {"location": f"http://127.0.0.1:{inner_port}/secret"}))

            only = Guard(["127.0.0.2"], allow_private=False)
            message = await outcome(tmp_path, redirect, only, "127.0.0.2")
            assert "edirect" in message and reached == []
            message = await outcome(tmp_path, redirect)  # nor where the address would be allowed
            assert "edirect" in message and reached == []

    run(test())


def test_a_redirect_on_the_same_host_is_checked_and_followed(tmp_path: Path) -> None:
    asked: list[str] = []

    class Watching(Guard):
        async def addresses(self, target: Any) -> list[str]:
            asked.append(target.url.path)
            return await super().addresses(target)

    async def redirect(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head[1] == "/mcp":
            writer.write(reply("307 Temporary", {"location": "/mcp/"}))
        else:
            writer.write(reply("400 Bad Request", {"content-type": "text/plain"}, b"no"))

    async def test() -> None:
        message = await outcome(tmp_path, redirect, Watching((), allow_private=True))
        assert "error response" in message or "status 400" in message

    run(test())
    assert asked


def test_a_name_is_resolved_once_and_the_connection_goes_to_the_checked_address(tmp_path: Path) -> None:
    hosts: list[str] = []
    answers = [["127.0.0.1"]]

    async def rebinding(name: str, port: int) -> list[str]:
        return answers.pop()  # a second question would fail

    async def serve(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        hosts.append(head[2]["host"])
        message = orjson.loads(body) if body else {}
        if message.get("method") == "initialize":
            result = {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "r", "version": "1"},
            }
        elif message.get("method") == "tools/list":
            result = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
        else:
            writer.write(reply("202 Accepted", {}))
            return
        answer = orjson.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
        writer.write(reply("200 OK", {"content-type": "application/json"}, answer))

    async def test() -> None:
        guard = Guard((), allow_private=True, resolve=rebinding)
        async with raw_server(serve) as port, host(tmp_path, guard=guard) as running:
            tools = await tools_of(running, by_url(f"http://rebind.example:{port}/mcp"))
            assert [tool.name for tool in tools.servers[0].tools] == ["t"]
            assert set(hosts) == {f"rebind.example:{port}"} and len(hosts) >= 3

    run(test())


async def silent(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def compressed(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(reply("200 OK", {"content-type": "application/json", "content-encoding": "gzip"}, b"\x1f\x8b"))


async def endless_json(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
        await writer.drain()


async def endless_event(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + b"data: " + b"x" * 65529 + b"\n" + b"\r\n")
        await writer.drain()


async def garbage(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01garbage\r\n\r\n")
    writer.close()


async def no_mcp(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(reply("200 OK", {"content-type": "application/json"}, b'{"secret":"of another service"}'))


async def web_page(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(reply("200 OK", {"content-type": "text/html"}, b"<p>hello"))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (silent, "did not answer in time"), (compressed, "compressed"), (endless_json, "larger than 1048576 bytes"),
        (endless_event, "larger than 1048576 bytes"), (garbage, "no valid HTTP"), (no_mcp, "cannot be read"),
        (web_page, "text/html"),
    ],
)  # fmt: skip
def test_servers_that_are_no_servers(answer: Misbehaviour, reason: str, tmp_path: Path) -> None:
    async def test() -> None:
        message = await outcome(tmp_path, answer)
        assert reason in message and "secret" not in message and "127.0.0.1" not in message

    run(test())
