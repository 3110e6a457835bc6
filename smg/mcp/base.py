"""What a multi-turn session needs of MCP: a host that connects servers, and the tools they offer for one request.

The session owns the loop (which calls run, how often, what the client and the model see of them); the host owns
connections, credentials, tool names and policy. One ``ToolHost`` lives in each frontend process, on its event loop:
``smg.mcp.lazy.LazyHost``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

CallKind = Literal["mcp_call", "web_search_call", "code_interpreter_call", "file_search_call", "image_generation_call"]
ErrorKind = Literal["tool", "protocol", "http", "denied", "timeout"]


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One ``mcp`` tool of a request, as the client wrote it. Without ``url`` the ``label`` names a configured server.

    ``allowed_tools`` is None, a list of names or ``{"tool_names": [...], "read_only": bool}``. ``require_approval`` is
    None, "never", "always" or ``{"always": FILTER, "never": FILTER}`` with filters of that same form; None means
    "never"."""

    label: str
    url: str | None = None
    connector_id: str | None = None
    description: str | None = None
    authorization: str | None = None
    headers: dict[str, str] = {}
    allowed_tools: Any = None
    require_approval: Any = None


class ToolInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tool the model may call in this request.

    ``name`` is what the model and the client see (an alias, where one is configured). ``kind`` is the type of the
    output item its calls become. ``needs_approval``: a call must be approved by the client before it runs.
    ``internal``: calls leave no item in the client's output."""

    name: str
    server_label: str
    description: str = ""
    input_schema: dict[str, Any] = {}
    read_only: bool = False
    needs_approval: bool = False
    internal: bool = False
    kind: CallKind = "mcp_call"


class ServerTools(msgspec.Struct, frozen=True, kw_only=True):
    """What one server contributes to a request: its tools after ``allowed_tools``, in the server's order. ``error`` is
    set when a configured server could not be asked. ``listed``: the client sees an ``mcp_list_tools`` item (servers
    that answer a hosted tool, and internal ones, have none)."""

    label: str
    tools: list[ToolInfo] = []
    error: str | None = None
    listed: bool = True


class ToolError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a call failed: the tool's own error ("tool"), a JSON-RPC error ("protocol", ``code``), a transport failure
    ("http"), a denial by policy ("denied") or a call that took too long ("timeout")."""

    kind: ErrorKind
    message: str
    code: int = 0


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one call. ``content`` holds the MCP content blocks as plain JSON values
    (``{"type": "text", "text": ...}`` and so on), also those of a result that the tool flagged as an error."""

    content: list[dict[str, Any]] = []
    error: ToolError | None = None


class ToolSet(Protocol):
    """The tools of one request."""

    @property
    def servers(self) -> Sequence[ServerTools]:
        """In the order of the request's tools."""

    async def call(self, tool: ToolInfo, arguments: dict[str, Any], timeout: float) -> ToolResult:
        """Run one call; ``timeout`` in seconds. Every failure is in the result; only cancellation is raised (the
        server is told then). Calls of one set may run at the same time."""

    async def close(self) -> None:
        """The request is over; pooled connections stay open."""


class ToolHost(Protocol):
    """All MCP connections of one process."""

    async def start(self) -> None:
        """Connect what the configuration names; an unreachable server does not stop the start."""

    async def connect(self, servers: Sequence[ServerRequest], hosted: Sequence[str]) -> ToolSet:
        """The tools of a request: of its ``mcp`` servers and of the configured servers that answer the hosted tool
        types in ``hosted`` ("web_search_preview" ...; types that nobody answers are left out). Raises ``ApiError``
        (424 ``connect_mcp_server_failed`` when a server given by URL cannot be used)."""

    @property
    def hosted_types(self) -> frozenset[str]:
        """Hosted tool types that a configured server answers."""

    @property
    def waiting_for(self) -> list[str]:
        """Names of required servers that were never connected: the process is not ready yet."""

    async def close(self) -> None:
        """Close all connections."""
