"""MCP servers that requests name: the pool, the guard, and servers that misbehave."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from mcp_hosts import LIMIT, LOCAL, by_url, call, host, refusal, run, stdio, text, tools_of
from mcp_process import Head, mcp_server, raw_server, start_server

from smg.mcp import endpoints
from smg.mcp.base import ServerRequest
from smg.mcp.guard import Guard

# Servers that requests name --------------------------------------------------------------------------


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


async def speak_mcp(body: bytes, writer: asyncio.StreamWriter, headers: dict[str, str] | None = None) -> None:
    """Answer as a server with one tool, ``t``, would."""
    message = orjson.loads(body) if body else {}
    if message.get("method") == "initialize":
        info = {"name": "r", "version": "1"}
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
    elif message.get("method") == "tools/list":
        result = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    else:
        writer.write(reply("202 Accepted", {}))
        return
    answer = orjson.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
    writer.write(reply("200 OK", {"content-type": "application/json", **(headers or {})}, answer))


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
        await speak_mcp(body, writer)

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


def test_a_label_that_a_client_chose_has_no_share_in_a_configured_servers_policy(tmp_path: Path) -> None:
    policy = {"default": "deny", "servers": {"local": {"default": "allow"}}, "tools": {"local:echo": "allow"}}

    async def test() -> None:
        async with mcp_server("streamable") as server, host(tmp_path, stdio(), policy=policy) as running:
            assert await text(await tools_of(running, LOCAL), "echo", text="x") == "x"
            denied = await call(await tools_of(running, by_url(server.url, "local")), "echo", text="x")
            assert denied.error is not None and denied.error.kind == "denied"

    run(test())


def test_requests_that_come_while_the_list_is_being_read_wait_for_it(tmp_path: Path) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slow(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        if b"tools/list" in body:
            asked.set()
            await go_on.wait()
        await speak_mcp(body, writer)

    async def test() -> None:
        async with raw_server(slow) as port, host(tmp_path) as running:
            server = by_url(f"http://127.0.0.1:{port}/mcp")
            first = asyncio.create_task(tools_of(running, server))
            await asked.wait()
            second = asyncio.create_task(tools_of(running, server))
            await asyncio.sleep(0)
            go_on.set()
            for tools in (await first, await second):
                assert [tool.name for tool in tools.servers[0].tools] == ["t"]

    run(test())


def test_calls_of_a_forgotten_session_are_made_again_in_one_new_session(tmp_path: Path) -> None:
    sessions: list[str] = []
    waiting, again = asyncio.Barrier(4), asyncio.Barrier(4)

    async def forgetful(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        message = orjson.loads(body) if body else {}
        session = head[2].get("mcp-session-id", "")
        if message.get("method") == "initialize":
            sessions.append(f"s{len(sessions)}")
            await speak_mcp(body, writer, {"mcp-session-id": sessions[-1]})
        elif message.get("method") == "tools/call" and session == "s0":
            await waiting.wait()
            writer.write(reply("404 Not Found", {}))
        elif message.get("method") == "tools/call":
            await again.wait()
            result = {"content": [{"type": "text", "text": session}]}
            answer = orjson.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
            writer.write(reply("200 OK", {"content-type": "application/json"}, answer))
        elif head[0] == "GET":
            writer.write(reply("405 Method Not Allowed", {}))
        else:
            await speak_mcp(body, writer)

    async def test() -> None:
        async with raw_server(forgetful) as port, host(tmp_path) as running:
            tools = await tools_of(running, by_url(f"http://127.0.0.1:{port}/mcp"))
            assert await asyncio.gather(*(text(tools, "t") for _ in range(4))) == ["s1"] * 4
            assert sessions == ["s0", "s1"]

    run(test())


# Ways out --------------------------------------------------------------------------------------------


def test_a_proxy_is_told_the_checked_address(tmp_path: Path) -> None:
    seen: list[tuple[str, str | None]] = []

    async def proxy(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append((head[1], head[2].get("proxy-authorization")))
        await speak_mcp(body, writer)

    async def resolve(name: str, port: int) -> list[str]:
        return ["93.184.216.34"]

    async def test() -> None:
        async with raw_server(proxy) as port:
            way = {"http": f"http://127.0.0.1:{port}", "username": "u", "password": "p", "no_proxy": "direct.example"}
            entry = {"name": "local", "protocol": "streamable", "url": "http://named.example/mcp"}
            guard = Guard((), allow_private=False, resolve=resolve)
            async with host(tmp_path, entry, guard=guard, proxy=way) as running:
                assert (await tools_of(running, LOCAL)).servers[0].tools[0].name == "t"
                assert {path for path, _ in seen} == {"http://named.example/mcp"}
                seen.clear()
                tools = await tools_of(running, by_url("http://named.example/mcp"))
                assert tools.servers[0].tools[0].name == "t"
                assert {path for path, _ in seen} == {"http://93.184.216.34/mcp"}
                assert {auth for _, auth in seen} == {"Basic dTpw"}

    run(test())


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    files = ["-keyout", str(key), "-out", str(certificate), "-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize(("name", "works"), [("mcp.example", True), ("other.example", False)])
def test_the_certificate_is_checked_against_the_name(
    name: str, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path, "mcp.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    endpoints.tls_context.cache_clear()

    async def resolve(name: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def serve(head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        await speak_mcp(body, writer)

    async def test() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        guard = Guard((), allow_private=True, resolve=resolve)
        async with raw_server(serve, tls=context) as port, host(tmp_path, guard=guard) as running:
            server = by_url(f"https://{name}:{port}/mcp")
            if works:
                assert (await tools_of(running, server)).servers[0].tools[0].name == "t"
            else:
                assert (await refusal(running, server)).code == "connect_mcp_server_failed"

    try:
        run(test())
    finally:
        endpoints.tls_context.cache_clear()


def test_the_sdk_is_loaded_by_the_first_request_that_needs_it(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from smg.mcp.base import ServerRequest
from smg.mcp.lazy import LazyHost
from smg.settings import Settings
from smg.telemetry.metrics import SessionMetrics

async def main():
    host = LazyHost(Settings(), SessionMetrics())
    await host.start()
    assert "mcp" not in sys.modules and host.hosted_types == frozenset() and host.waiting_for == []
    tools = await host.connect([ServerRequest(label="unknown")], [])
    assert [(server.label, server.tools) for server in tools.servers] == [("unknown", [])] and "mcp" in sys.modules
    await host.close()

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
