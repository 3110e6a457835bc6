"""All MCP connections of one process: configured servers, kept connected, and the pool of those that requests name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal

import mcp_types
from msgspec import UNSET

from smg.api.errors import ApiError, invalid, refused
from smg.mcp.base import CallKind, ServerRequest
from smg.mcp.config import McpConfig, Proxy, Server, SseServer, StdioServer, load_config
from smg.mcp.connection import Connection, ConnectionFailedError
from smg.mcp.endpoints import Endpoint, HttpEndpoint, StdioEndpoint
from smg.mcp.guard import Guard, RefusedTargetError, Target, check_headers
from smg.mcp.policy import check_rules
from smg.mcp.pool import ConnectionPool, PoolFullError, pool_key
from smg.mcp.toolset import RequestTools, Source, ToolSetBuilder
from smg.settings import Settings
from smg.telemetry.metrics import SessionMetrics

__all__ = ["McpHost"]

log = logging.getLogger("smg.mcp")

MAX_SERVERS_PER_REQUEST = 32
# The SDK logs failures with the messages at hand, which hold what clients and tools said.
_CHATTY_AREAS = ("mcp", "client", "httpx2", "httpcore2")


class StaticServer:
    """A configured server: its connection, and the task that keeps it connected."""

    def __init__(self, config: Server, connection: Connection) -> None:
        self.config = config
        self.connection = connection
        self.changed = asyncio.Event()
        self.seen = False
        self._reported = ""

    async def keep(self, interval: float, *, list_tools: bool) -> None:
        """Connect, connect again after a loss, and read the tool list again when it is old, until cancelled."""
        while True:
            self.changed.clear()
            try:
                if list_tools:
                    await self.connection.tools()
                else:
                    await self.connection.session()
                self._report("")
                delay = interval
            except ConnectionFailedError as fault:
                self._report(str(fault))
                delay = self.connection.retry_in or interval
            try:
                async with asyncio.timeout(delay):
                    await self.changed.wait()
            except TimeoutError:
                continue

    def _report(self, fault: str) -> None:
        """One line per change, not one per attempt."""
        if fault and fault != self._reported:
            log.warning("mcp server %s: %s; trying again", self.config.name, fault)
        elif not fault and (self._reported or not self.seen):
            log.info("mcp server %s is connected", self.config.name)
        self.seen = self.seen or not fault
        self._reported = fault


class McpHost:
    """``ToolHost`` of a frontend process. Reads the configuration once; raises ``McpConfigError`` for a bad one."""

    def __init__(self, settings: Settings, metrics: SessionMetrics, *, guard: Guard | None = None) -> None:
        path = settings.mcp_config_path
        self.config = load_config(path) if path is not None else McpConfig(servers=[])
        self._metrics = metrics
        self._proxy = self.config.proxy or Proxy.from_environment()
        self._guard = guard or Guard(settings.mcp_allowed_hosts or (), allow_private=settings.mcp_allow_private_hosts)
        self._pool = ConnectionPool(self.config.pool.max_connections, self.config.pool.idle_timeout)
        self._statics = {server.name: self._static(server) for server in self.config.servers}
        self._tasks: list[asyncio.Task[None]] = []

    # Life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        for area in _CHATTY_AREAS:
            logging.getLogger(area).setLevel(logging.CRITICAL)
        self._metrics.servers_active.set(0)
        inventory = self.config.inventory
        for static in self._statics.values():
            keeping = static.keep(inventory.refresh_interval, list_tools=inventory.enable_refresh)
            self._tasks.append(asyncio.create_task(keeping, name=f"mcp keep {static.config.name}"))
        for entry in self.config.warmup:
            self._tasks.append(asyncio.create_task(self._warm_up(entry.url, entry.token), name="mcp warmup"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        closing = [static.connection.close() for static in self._statics.values()]
        await asyncio.gather(*self._tasks, *closing, self._pool.close(), return_exceptions=True)

    @property
    def hosted_types(self) -> frozenset[str]:
        return frozenset(
            server.builtin_type for server in self.config.servers if server.builtin_type and server.builtin_tool_name
        )

    @property
    def waiting_for(self) -> list[str]:
        """Names of ``required`` servers that were never connected: the process is not ready yet."""
        return [name for name, static in self._statics.items() if static.config.required and not static.seen]

    def _static(self, server: Server) -> StaticServer:
        def on_change() -> None:
            static.changed.set()
            self._metrics.servers_active.set(sum(each.connection.connected for each in self._statics.values()))

        inventory = self.config.inventory
        connection = Connection(
            server.name, [self._static_endpoint(server)], inventory.tool_ttl,
            refresh_on_error=inventory.refresh_on_error, on_change=on_change,
        )  # fmt: skip
        static = StaticServer(server, connection)
        return static

    def _static_endpoint(self, server: Server) -> Endpoint:
        limits = server.limits or self.config.limits
        if isinstance(server, StdioServer):
            return StdioEndpoint(server, limits)
        proxy = self._proxy if server.proxy is UNSET else server.proxy
        kind: Literal["sse", "streamable"] = "sse" if isinstance(server, SseServer) else "streamable"
        return HttpEndpoint(server.url, kind, limits, server.all_headers(), proxy)

    async def _warm_up(self, url: str, token: str | None) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            connection = self._pooled(self._guard.check(url), headers)
        except (RefusedTargetError, PoolFullError) as fault:
            log.warning("mcp warm-up of a server refused: %s", fault)
            return
        try:
            await connection.tools()
        except ConnectionFailedError as fault:
            log.warning("mcp warm-up of a server failed: %s", fault)
        finally:
            self._pool.release(connection)

    # Requests ------------------------------------------------------------------------------------

    async def connect(self, servers: Sequence[ServerRequest], hosted: Sequence[str]) -> RequestTools:
        if len(servers) > MAX_SERVERS_PER_REQUEST:
            raise invalid("array_above_max_length", f"at most {MAX_SERVERS_PER_REQUEST} mcp tools", "tools")
        for server in servers:
            check_rules(server.allowed_tools, server.require_approval)
        held: list[Connection] = []
        try:
            sources = self._sources(servers, held)
            sources += [_hosted(static) for static in self._statics.values() if _answers(static, hosted)]
            listings = await asyncio.gather(*(_listing(source) for source in sources))
            builder = ToolSetBuilder(self.config.policy)
            for source, listing in zip(sources, listings, strict=True):
                if not isinstance(listing, str):
                    builder.add(source, listing)
                elif source.connection in held:
                    raise _unusable(source.label, listing)
                else:
                    builder.add_empty(source, listing)
        except BaseException:
            self._release(held)
            raise
        return RequestTools(builder, held, self._pool.release)

    def _release(self, held: list[Connection]) -> None:
        for connection in held:
            self._pool.release(connection)
            self._pool.discard(connection)

    def _sources(self, servers: Sequence[ServerRequest], held: list[Connection]) -> list[Source]:
        """Sources in the order of the request. Connections of the pool are added to ``held``."""
        sources: list[Source] = []
        for server in servers:
            if server.url is None:
                sources.append(self._configured(server))
                continue
            connection = self._dynamic(server)
            if connection in held:  # the same URL with the same credentials under a second label
                self._pool.release(connection)
                continue
            held.append(connection)
            rules = {"allowed_tools": server.allowed_tools, "require_approval": server.require_approval}
            sources.append(Source(server.label, connection, **rules))
        return sources

    def _configured(self, server: ServerRequest) -> Source:
        static = self._statics.get(server.label)
        if static is None:
            if server.connector_id is not None:
                text = f"Invalid 'tools': no connector is configured as MCP server '{server.label}'"
                raise invalid("tool_not_supported", text, "tools")
            return Source(server.label, None)
        config = static.config
        return Source(
            server.label, static.connection, config.name, tools=config.tools, internal=config.internal,
            allowed_tools=server.allowed_tools, require_approval=server.require_approval,
        )  # fmt: skip

    def _dynamic(self, server: ServerRequest) -> Connection:
        """The pooled connection to a server that the client named. Raises ``ApiError``."""
        assert server.url is not None
        try:
            target = self._guard.check(server.url)
        except RefusedTargetError as fault:
            raise _unusable(server.label, str(fault)) from None
        try:
            headers = check_headers(server.headers)
            if server.authorization:
                token = server.authorization.strip().removeprefix("Bearer ")
                headers |= check_headers({"authorization": f"Bearer {token}"})
        except RefusedTargetError as fault:
            text = f"Invalid headers of MCP server '{server.label}': {fault}"
            raise invalid("invalid_value", text, "tools") from None
        try:
            return self._pooled(target, headers)
        except PoolFullError as fault:
            raise refused("mcp_connections_exhausted", str(fault), status=503) from None

    def _pooled(self, target: Target, headers: dict[str, str]) -> Connection:
        url = str(target.url)

        def make() -> Connection:
            endpoints = [
                HttpEndpoint(url, kind, self.config.limits, headers, self._proxy, self._guard, target)
                for kind in _transports(target)
            ]
            inventory = self.config.inventory
            return Connection(
                target.host, endpoints, inventory.tool_ttl, refresh_on_error=inventory.refresh_on_error
            )  # fmt: skip

        return self._pool.acquire(pool_key(url, headers), make)


def _transports(target: Target) -> tuple[Literal["sse", "streamable"], ...]:
    """A client does not say which transport its server speaks: the newer first, unless the address says otherwise."""
    return ("sse", "streamable") if target.url.path.rstrip("/").endswith("/sse") else ("streamable", "sse")


def _hosted(static: StaticServer) -> Source:
    config = static.config
    kinds: dict[str | None, CallKind] = {
        "web_search_preview": "web_search_call", "code_interpreter": "code_interpreter_call",
        "file_search": "file_search_call", "image_generation": "image_generation_call",
    }  # fmt: skip
    return Source(
        config.name, static.connection, config.name, tools=config.tools, internal=config.internal, listed=False,
        only=config.builtin_tool_name, kind=kinds[config.builtin_type],
    )  # fmt: skip


def _answers(static: StaticServer, hosted: Sequence[str]) -> bool:
    return static.config.builtin_type in hosted and static.config.builtin_tool_name is not None


async def _listing(source: Source) -> list[mcp_types.Tool] | str:
    """The tools of a source, or why there are none."""
    if source.connection is None:
        return []
    try:
        return await source.connection.tools(patient=source.policy_name == "")
    except ConnectionFailedError as fault:
        return str(fault)


def _unusable(label: str, fault: str) -> ApiError:
    text = f"Failed to connect to MCP server '{label}': {fault}"
    return refused("connect_mcp_server_failed", text, status=424, param="tools")
