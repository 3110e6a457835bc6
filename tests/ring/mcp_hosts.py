"""A tool host under test, and short ways to ask it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp_process import SERVER

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


def by_url(url: str, label: str = "mine", **more: Any) -> ServerRequest:
    return ServerRequest(label=label, url=url, **more)


async def refusal(running: McpHost, *servers: ServerRequest) -> ApiError:
    with pytest.raises(ApiError) as fault:
        await running.connect(servers, [])
    return fault.value


def connected(running: McpHost) -> int:
    """Configured servers that are connected."""
    return sum(static.connection.connected for static in running._statics.values())
