"""An MCP server to test against, over any transport: ``tools_server.py stdio|sse|streamable``.

Over HTTP it prints the port it listens on. Every tool shows one thing that a server can do to its clients.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent, ToolAnnotations

server = MCPServer("test tools", log_level="CRITICAL")
begun = 0
cancelled = 0


@server.tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool(annotations=ToolAnnotations(destructive_hint=False))
def echo(text: str) -> str:
    """Say it again."""
    return text


@server.tool()
def boom() -> str:
    """Fail."""
    raise ToolError("the tool is broken")


@server.tool()
async def hang() -> str:
    """Never answer."""
    global begun, cancelled
    begun += 1
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled += 1
        raise
    return "never"


@server.tool()
def beginnings() -> str:
    """How often hang was called."""
    return str(begun)


@server.tool()
def cancellations() -> str:
    """How often a call of hang was cancelled."""
    return str(cancelled)


@server.tool()
def die() -> str:
    """End the process without an answer."""
    os._exit(3)


@server.tool()
def big(size: int) -> str:
    """As many bytes."""
    return "x" * size


@server.tool()
def picture() -> list[TextContent | ImageContent]:
    """A text and an image."""
    return [TextContent(text="look"), ImageContent(data="AAAA", mime_type="image/png")]


@server.tool()
def header(name: str, ctx: Context) -> str:
    """A header of the call."""
    return (ctx.headers or {}).get(name, "")


@server.tool()
def variable(name: str) -> str:
    """A variable of the environment."""
    return os.environ.get(name, "")


@server.tool()
def pid() -> str:
    """The process that serves."""
    return str(os.getpid())


@server.tool()
async def grow(ctx: Context) -> str:
    """Offer one more tool."""
    server.add_tool(lambda: "new", name="grown", description="A new tool.")
    await ctx.session.send_tool_list_changed()
    return "grown"


def main() -> None:
    transport = sys.argv[1]
    if transport == "stdio":
        server.run("stdio")
        return
    app = server.sse_app() if transport == "sse" else server.streamable_http_app(json_response="json" in sys.argv)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", int(os.environ.get("PORT", "0"))))
        sock.listen()
        print(sock.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[sock])


if __name__ == "__main__":
    main()
