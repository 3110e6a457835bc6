"""One connection to one MCP server: made when it is needed, made again when it was lost, shared by all requests.

The SDK's context managers must be left by the task that entered them, so each session lives in a task of its own;
requests only use its session object, which any task may do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mcp_types
import orjson
from mcp import ClientSession, MCPError
from mcp.client.session import IncomingMessage
from pydantic import ValidationError

from smg import __version__
from smg.mcp.base import ToolError, ToolResult
from smg.mcp.endpoints import Endpoint
from smg.mcp.sieve import Sieve
from smg.mcp.transport import SESSION_GONE_CODE, UNREACHABLE_CODE

__all__ = ["Connection", "ConnectionFailedError"]

log = logging.getLogger("smg.mcp")

FIRST_BACKOFF_SECS = 0.5
MAX_BACKOFF_SECS = 60.0
MAX_PAGES = 64
MAX_INVENTORY_BYTES = 4 * 1024 * 1024
MAX_FAULT_CHARS = 500
BAD_GATEWAY = 502
CLOSE_SECS = 2.0
RETIRE_SECS = 5.0
# What the streamable transport says of an error status without a JSON-RPC error in its body.
_NO_MCP_ANSWER = "Server returned an error response"
_NOT_FOUND = "Not Found"
_BROKEN_ANSWERS = ("SSE stream ", "Failed to parse JSON response: ", "Connection closed")
_LIST_FAULTS = (MCPError, ValidationError, TimeoutError, orjson.JSONEncodeError)
_CLIENT = mcp_types.Implementation(name="smg", version=__version__)


class ConnectionFailedError(Exception):
    """The server cannot be reached, does not speak the protocol, or took too long; the text is fit for a client."""


class Connection:
    """A server's connection. ``name`` is for logs. ``endpoints`` are tried in turn as long as the server is there but
    does not understand. ``tool_ttl`` is the age in seconds at which the tool list is read again. ``on_change`` is
    called when the connection is made and when it is lost. ``last_used`` is a ``time.monotonic()``, ``users`` counts
    requests that hold the connection."""

    def __init__(
        self,
        name: str,
        endpoints: Sequence[Endpoint],
        tool_ttl: float,
        *,
        refresh_on_error: bool = True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.limits = endpoints[0].limits
        self.last_used = time.monotonic()
        self.users = 0
        self.closed = False
        self._endpoints = endpoints
        self._endpoint = endpoints[0]
        self._on_change = on_change
        self._tool_ttl = tool_ttl
        self._refresh_on_error = refresh_on_error
        self._session: ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._retired: dict[asyncio.Task[None], asyncio.Event] = {}
        self._stop = asyncio.Event()
        self._lock = asyncio.Lock()
        self._listing = asyncio.Lock()
        self._slots = asyncio.Semaphore(self.limits.max_concurrent_calls)
        self._tools: list[mcp_types.Tool] = []
        self._tools_until = 0.0
        self._tool_changes = 0
        self._fault = ""
        self._not_understood = False
        self._failures = 0
        self._failed_at = 0.0
        self._retry_at = 0.0

    @property
    def connected(self) -> bool:
        """Whether there is a session at the moment."""
        return self._session is not None

    @property
    def retry_in(self) -> float:
        """Seconds until the next attempt to connect is due after failed ones; 0 = now."""
        return max(0.0, self._retry_at - time.monotonic())

    # Life ----------------------------------------------------------------------------------------

    async def session(self, *, patient: bool = True) -> ClientSession:
        """The session, connecting first if there is none. Raises ``ConnectionFailedError``.

        ``patient`` False fails at once while the back-off after a failed attempt lasts.
        """
        begun = time.monotonic()
        async with self._lock:
            if self._session is not None:
                return self._session
            if self.closed:
                raise ConnectionFailedError("the connection was closed")
            if self._failed_at > begun or (not patient and self.retry_in > 0):
                raise ConnectionFailedError(self._fault)
            return await self._connect()

    async def _connect(self) -> ClientSession:
        for endpoint in self._endpoints:
            await self._end_task()
            self._endpoint, self._fault, self._not_understood = endpoint, "", False
            self._stop, ready = asyncio.Event(), asyncio.Event()
            self._task = asyncio.create_task(self._run(endpoint, ready, self._stop), name=f"mcp {self.name}")
            await ready.wait()
            if self._session is not None:
                self._failures, self._retry_at = 0, 0.0
                return self._session
            if not self._not_understood:
                break
        self._failures += 1
        delay = min(MAX_BACKOFF_SECS, FIRST_BACKOFF_SECS * 2 ** min(self._failures - 1, 10))
        self._failed_at = time.monotonic()
        self._retry_at = self._failed_at + delay
        self._fault = self._fault or "the server cannot be used"
        raise ConnectionFailedError(self._fault)

    async def _run(self, endpoint: Endpoint, ready: asyncio.Event, stop: asyncio.Event) -> None:
        """The life of one session, until ``stop`` is set: from outside, or from here when the connection is lost.
        ``ready`` tells that there is a session, or that there will be none."""

        def on_fault(text: str) -> None:
            if endpoint.faults_are_final:
                self._fault = text
                stop.set()

        try:
            async with asyncio.timeout(self.limits.connect_timeout_secs) as limit:
                async with (
                    endpoint.open(on_fault) as (read, write),
                    ClientSession(Sieve(read), write, message_handler=self._on_message, client_info=_CLIENT) as session,
                ):
                    await self._handshake(session, stop)
                    limit.reschedule(None)
                    self._session = session
                    ready.set()
                    self._on_change()
                    await stop.wait()
                    self._lose(stop)
        except asyncio.CancelledError:
            raise
        except BaseException as fault:  # task groups of the SDK raise groups of anything
            self._not_understood = any(_is_refusal(leaf) for leaf in _leaves(fault))
            self._fault = _fault_text(fault, self._fault)
            log.debug("mcp server %s: %s", self.name, self._fault)
        finally:
            self._lose(stop)
            ready.set()

    def _lose(self, stop: asyncio.Event) -> None:
        if self._stop is stop and self._session is not None:
            self._session = None
            self._tools_until = 0.0
            self._on_change()

    async def _handshake(self, session: ClientSession, stop: asyncio.Event) -> None:
        """Negotiate; a connection that is lost meanwhile ends the wait."""
        negotiation = asyncio.ensure_future(_negotiate(session))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([negotiation, stopped], return_when="FIRST_COMPLETED")
            if not negotiation.done():
                raise ConnectionFailedError(self._fault)
            negotiation.result()
        finally:
            for task in (negotiation, stopped):
                task.cancel()
            await asyncio.gather(negotiation, stopped, return_exceptions=True)

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._tool_changes += 1
            self._tools_until = 0.0

    def _drop(self) -> None:
        """Give the session up; the next use connects again. Where each call has its own connection, those that are
        still under way get a little time."""
        task, stop = self._task, self._stop
        self._lose(stop)
        if task is None or self._endpoint.faults_are_final:
            stop.set()
            return
        self._task = None
        self._retired[task] = stop
        task.add_done_callback(lambda done: self._retired.pop(done, None))
        asyncio.get_running_loop().call_later(RETIRE_SECS, stop.set)

    async def close(self) -> None:
        """End the connection for good."""
        self.closed = True
        self._lose(self._stop)
        for stop in self._retired.values():
            stop.set()
        await self._end_task(*self._retired)

    async def _end_task(self, *others: asyncio.Task[None]) -> None:
        tasks = [task for task in (self._task, *others) if task is not None]
        if not tasks:
            return
        self._stop.set()
        _, pending = await asyncio.wait(tasks, timeout=CLOSE_SECS)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        self._task = None

    # Use -----------------------------------------------------------------------------------------

    async def tools(self, *, patient: bool = True) -> list[mcp_types.Tool]:
        """The server's tools, from the cache while it is fresh. Raises ``ConnectionFailedError``."""
        self.last_used = time.monotonic()
        if self._session is not None and time.monotonic() < self._tools_until:
            return self._tools
        async with self._listing:
            if self._session is not None and time.monotonic() < self._tools_until:
                return self._tools
            for attempt in (1, 2):
                session = await self.session(patient=patient)
                changes = self._tool_changes
                try:
                    self._tools = await self._list(session)
                except _LIST_FAULTS as fault:
                    if not self._lost(session, fault, unreachable=True) or attempt == 2:
                        raise ConnectionFailedError(_fault_text(fault, self._fault)) from None
                else:
                    # A change that was announced meanwhile may not be in the list yet.
                    if changes == self._tool_changes and session is self._session:
                        self._tools_until = time.monotonic() + self._tool_ttl
                    break
        return self._tools

    async def _list(self, session: ClientSession) -> list[mcp_types.Tool]:
        tools: list[mcp_types.Tool] = []
        size, cursor = 0, None
        async with asyncio.timeout(self.limits.connect_timeout_secs):
            for _ in range(MAX_PAGES):
                page = await _page(session, cursor)
                tools += page.tools
                size += sum(_size(tool) for tool in page.tools)
                cursor = page.next_cursor
                if size > MAX_INVENTORY_BYTES:
                    raise ConnectionFailedError(f"the server's tool list is larger than {MAX_INVENTORY_BYTES} bytes")
                if not cursor or len(tools) >= self.limits.max_tools:
                    break
        return tools[: self.limits.max_tools]

    async def call(self, name: str, arguments: dict[str, Any], timeout: float) -> ToolResult:
        """Run a tool. Every failure is in the result. ``timeout`` seconds include the wait for one of the slots."""
        self.last_used = time.monotonic()
        timeout = min(timeout, self.limits.call_timeout_secs)
        try:
            async with asyncio.timeout(timeout):
                async with self._slots:
                    return await self._call(name, arguments)
        except TimeoutError:
            return _failed("timeout", f"the tool did not answer within {timeout:g} s")
        finally:
            self.last_used = time.monotonic()

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        params = mcp_types.CallToolRequestParams(name=name, arguments=arguments)
        for attempt in (1, 2):
            try:
                session = await self.session()
                # Not session.call_tool: it checks structured content against the server's own schema on this loop.
                result = await session.send_request(
                    mcp_types.CallToolRequest(params=params), mcp_types.CallToolResult, progress_callback=_ignore
                )
            except ConnectionFailedError as fault:
                return _failed("http", str(fault), BAD_GATEWAY)
            except ValidationError:
                return _failed("protocol", "the server's answer is no tool result")
            except MCPError as fault:
                if self._lost(session, fault) and attempt == 1 and fault.code == SESSION_GONE_CODE:
                    continue
                return self._refused(fault)
            return self._result(result)
        raise AssertionError("two attempts always end in a result")

    def _refused(self, fault: MCPError) -> ToolResult:
        if self._refresh_on_error:
            self._tools_until = 0.0
        lost = fault.code == mcp_types.CONNECTION_CLOSED and self._endpoint.faults_are_final
        if lost or fault.code in (UNREACHABLE_CODE, SESSION_GONE_CODE) or fault.message.startswith(_BROKEN_ANSWERS):
            self._tools_until = 0.0
            self._on_change()  # whoever keeps the connection finds out now whether the server is still there
            return _failed("http", _fault_text(fault, self._fault if lost else ""), BAD_GATEWAY)
        return _failed("protocol", fault.message[:MAX_FAULT_CHARS], fault.code)

    def _result(self, result: mcp_types.CallToolResult) -> ToolResult:
        content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content]
        if not result.is_error:
            return ToolResult(content=content)
        text = "\n".join(block.text for block in result.content if isinstance(block, mcp_types.TextContent))
        return ToolResult(content=content, error=ToolError(kind="tool", message=text))

    def _lost(self, session: ClientSession, fault: Exception, *, unreachable: bool = False) -> bool:
        """Whether the fault means that ``session`` is gone; if so it is given up, unless another took its place.
        ``unreachable``: a server that does not answer counts as gone; otherwise other calls of the session may still
        get their answers."""
        if not isinstance(fault, MCPError):
            return False
        closed = fault.code == mcp_types.CONNECTION_CLOSED and self._endpoint.faults_are_final
        silent = unreachable and fault.code == UNREACHABLE_CODE
        if not (closed or silent or fault.code == SESSION_GONE_CODE or fault.message == _NO_MCP_ANSWER):
            return False
        if session is self._session:
            self._drop()
        return True


async def _negotiate(session: ClientSession) -> None:
    """The handshake that all servers know; those that only speak the newest revision refuse it and are discovered."""
    try:
        await session.initialize()
    except MCPError as fault:
        if fault.code not in (mcp_types.METHOD_NOT_FOUND, mcp_types.UNSUPPORTED_PROTOCOL_VERSION):
            raise
        with contextlib.suppress(MCPError):
            await session.discover()
            return
        raise


async def _page(session: ClientSession, cursor: str | None) -> mcp_types.ListToolsResult:
    try:
        return await session.list_tools(params=mcp_types.PaginatedRequestParams(cursor=cursor))
    except MCPError as fault:
        if fault.code == mcp_types.METHOD_NOT_FOUND:  # a server without tools
            return mcp_types.ListToolsResult(tools=[])
        raise


async def _ignore(progress: float, total: float | None, message: str | None) -> None:
    """Progress is asked for, so that servers can tell that they live, and not shown."""


def _failed(kind: Any, message: str, code: int = 0) -> ToolResult:
    return ToolResult(error=ToolError(kind=kind, message=message, code=code))


def _size(tool: mcp_types.Tool) -> int:
    return len(orjson.dumps(tool.input_schema)) + len(tool.name) + len(tool.description or "")


def _leaves(fault: BaseException) -> Iterator[BaseException]:
    if isinstance(fault, BaseExceptionGroup):
        for each in fault.exceptions:
            yield from _leaves(each)
    else:
        yield fault


def _own_words(message: str) -> str:
    """What the transport said, without what the SDK writes before it; nothing of an answer that could not be read."""
    _, colon, cause = message.partition(": ")
    if not colon or not message.startswith(_BROKEN_ANSWERS):
        return message[:MAX_FAULT_CHARS]
    return cause[:MAX_FAULT_CHARS] if cause.startswith(("the ", "no ")) else "the server's answer cannot be read"


def _is_refusal(fault: BaseException) -> bool:
    """Whether a server is there that may speak another transport."""
    return isinstance(fault, MCPError) and fault.message in (_NOT_FOUND, _NO_MCP_ANSWER)


def _fault_text(fault: BaseException, known: str) -> str:
    """What a client may read about a failure; ``known`` is what the transport said about it."""
    for leaf in _leaves(fault):
        if isinstance(leaf, ConnectionFailedError) and str(leaf):
            return str(leaf)
        if isinstance(leaf, TimeoutError):
            return known or "the server did not answer in time"
        if isinstance(leaf, MCPError):
            return known or _own_words(leaf.message)
        if isinstance(leaf, ValidationError):
            return known or "the server's answer does not follow the protocol"
        if isinstance(leaf, FileNotFoundError | PermissionError):
            return known or "the server's command cannot be run"
    return known or "the server cannot be reached or does not speak MCP"
