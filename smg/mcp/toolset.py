"""The tools of one request: which server each belongs to, under which name the model sees it, how its calls run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mcp_types

from smg.mcp.base import CallKind, ServerTools, ToolError, ToolInfo, ToolResult
from smg.mcp.config import Policy, ToolConfig
from smg.mcp.connection import Connection
from smg.mcp.policy import denial, is_allowed, is_read_only, needs_approval

__all__ = ["Binding", "RequestTools", "Source", "ToolSetBuilder"]

log = logging.getLogger("smg.mcp")

MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}\Z")


@dataclass(frozen=True, slots=True)
class Source:
    """A server's part in a request. ``connection`` None: nobody configured the label. ``policy_name`` is its name in
    the policy; servers that a request names have none, whatever label the client chose. ``only`` restricts it to one
    tool."""

    label: str
    connection: Connection | None
    policy_name: str = ""
    tools: dict[str, ToolConfig] | None = None
    internal: bool = False
    listed: bool = True
    only: str | None = None
    kind: CallKind = "mcp_call"
    allowed_tools: Any = None
    require_approval: Any = None


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a tool's calls go."""

    connection: Connection
    tool: mcp_types.Tool
    config: ToolConfig
    denied: str | None


class ToolSetBuilder:
    """Collects the servers of a request. Tool names are unique in it: a later server's tool whose name is taken is
    shown as ``<label>__<name>``, with a number behind it if that is taken as well."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.servers: list[ServerTools] = []
        self.bindings: dict[str, Binding] = {}
        self._offered: set[tuple[int, str]] = set()

    def add(self, source: Source, tools: Sequence[mcp_types.Tool]) -> None:
        """Offer a server's tools."""
        offered: list[ToolInfo] = []
        if source.connection is not None:
            found = (self._offer(source, source.connection, tool) for tool in tools)
            offered = [info for info in found if info is not None]
        shown = source.listed and not source.internal
        self.servers.append(ServerTools(label=source.label, tools=offered, listed=shown))

    def add_empty(self, source: Source, error: str) -> None:
        """A configured server that could not be asked."""
        shown = source.listed and not source.internal
        self.servers.append(ServerTools(label=source.label, error=error, listed=shown))

    def _offer(self, source: Source, connection: Connection, tool: mcp_types.Tool) -> ToolInfo | None:
        config = (source.tools or {}).get(tool.name, ToolConfig())
        shown = config.alias or tool.name
        key = (id(connection), tool.name)
        if (source.only is not None and tool.name != source.only) or key in self._offered:
            return None
        if not _NAME.match(shown):
            log.debug("a tool of mcp server %s has a name that cannot be offered", source.label)
            return None
        names, read_only = (tool.name, shown), is_read_only(tool)
        if not is_allowed(source.allowed_tools, names, read_only):
            return None
        self._offered.add(key)
        denied = denial(self._policy, source.policy_name, tool)
        name = self._unique(shown, source.label)
        self.bindings[name] = Binding(connection, tool, config, denied)
        return ToolInfo(
            name=name,
            server_label=source.label,
            description=tool.description or "",
            input_schema=tool.input_schema,
            read_only=read_only,
            needs_approval=needs_approval(source.require_approval, names, read_only),
            internal=source.internal,
            kind=source.kind if config.response_format == "passthrough" else config.response_format,
        )

    def _unique(self, name: str, label: str) -> str:
        if name not in self.bindings:
            return name
        longer = f"{label}__{name}"[:MAX_NAME_CHARS]
        candidate, number = longer, 2
        while candidate in self.bindings:
            tail = f"_{number}"
            candidate, number = longer[: MAX_NAME_CHARS - len(tail)] + tail, number + 1
        return candidate


class RequestTools:
    """``ToolSet`` of one request. ``release`` is called with every connection it holds when the request is over."""

    def __init__(
        self, builder: ToolSetBuilder, held: Sequence[Connection], release: Callable[[Connection], None]
    ) -> None:
        self._servers = builder.servers
        self._bindings = builder.bindings
        self._held = list(held)
        self._release = release

    @property
    def servers(self) -> Sequence[ServerTools]:
        return self._servers

    async def call(self, tool: ToolInfo, arguments: dict[str, Any], timeout: float) -> ToolResult:
        binding = self._bindings.get(tool.name)
        if binding is None:
            return ToolResult(error=ToolError(kind="denied", message=f"Tool not offered: {tool.name}"))
        if binding.denied is not None:
            log.info("mcp tool %s of %s denied: %s", tool.name, tool.server_label, binding.denied)
            return ToolResult(
                error=ToolError(kind="denied", message=f"Tool call failed: Tool execution denied: {tool.name}")
            )
        mapped = binding.config.arg_mapping.apply(arguments)
        return await binding.connection.call(binding.tool.name, mapped, timeout)

    async def close(self) -> None:
        held, self._held = self._held, []
        for connection in held:
            self._release(connection)
