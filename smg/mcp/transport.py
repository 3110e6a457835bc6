"""HTTP towards MCP servers: bounded, pinned to checked addresses, and with faults that stay with their request.

The SDK's transports speak the protocol; this sits below them, where bytes arrive. Three things are decided here:

* *Where to*: with a guard, every request (a redirected one too) goes to an address that was checked, and the name is
  only used for TLS and the ``Host`` header.
* *How much*: an answer, or one event of an event stream, that grows beyond the bound ends in an error while it is
  still being received. Compressed answers are refused, because their size says nothing about what they become.
* *What a fault costs*: a failed connection is turned into an answer that says so, because the SDK ends the whole
  session, with all its calls, when a request raises.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx2
import orjson

from smg.mcp.guard import Guard, RefusedTargetError, Target

__all__ = ["SESSION_GONE_CODE", "UNREACHABLE_CODE", "AnswerError", "BoundedTransport", "connection_fault"]

MAX_TRIED_ADDRESSES = 4
# In the range JSON-RPC leaves to implementations; servers rarely use its end.
UNREACHABLE_CODE = -32098
# A request of a session that the server forgot (it was restarted); nothing was executed.
SESSION_GONE_CODE = -32097


class AnswerError(httpx2.StreamError, httpx2.SSEError):
    """The answer cannot be read to its end. Both bases, because the SDK handles one in each kind of body."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class BoundedTransport(httpx2.AsyncBaseTransport):
    """A transport for one MCP session. ``max_bytes`` bounds an answer and an event of a stream,
    ``patience`` the seconds until a message that is no call is taken.

    ``guard`` None trusts the URL: it is the operator's. ``on_fault`` hears of every failure to reach the server or to
    read its answer, with a text that is fit for the client. ``session_stream``: the session depends on the event stream
    of its GET request and on every POST being accepted, so the end of the one and an error status are faults as well.
    """

    def __init__(
        self,
        inner: httpx2.AsyncBaseTransport,
        max_bytes: int,
        patience: float,
        *,
        guard: Guard | None = None,
        target: Target | None = None,
        session_stream: bool = False,
        on_fault: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._inner = inner
        self._max_bytes = max_bytes
        self._patience = patience
        self._guard = guard
        self._home = target
        self._pinned: list[str] = []
        self._session_stream = session_stream
        self._on_fault = on_fault

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        await request.aread()  # a message of the SDK; a redirected one has not been read yet
        try:
            async with asyncio.timeout(None if self._may_take_long(request) else self._patience):
                response = await self._send(request)
        except RefusedTargetError as fault:
            return self._unreachable(request, str(fault), 403)
        except (httpx2.TransportError, OSError) as fault:  # TimeoutError is an OSError
            return self._unreachable(request, connection_fault(fault), 502)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            return self._unreachable(request, "the server compressed its answer without being asked to", 502)
        if response.status_code == 404 and "mcp-session-id" in request.headers and request.method == "POST":
            await response.aclose()
            return self._error(request, 404, SESSION_GONE_CODE, "the server does not know the session any more")
        if self._session_stream and response.status_code >= 400:
            self._on_fault(f"the server answered with status {response.status_code}")
        return self._bounded(request, response)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _may_take_long(self, request: httpx2.Request) -> bool:
        """Event streams, and calls: their answers have limits elsewhere. For all other messages the SDK waits with its
        only writer, so that a server that does not answer one would stop the whole session."""
        if request.method == "GET":
            return True
        return request.method == "POST" and not self._session_stream and _is_call(request.content)

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        if self._guard is None:
            return await self._inner.handle_async_request(request)
        target, addresses = await self._checked(self._guard, request.url)
        if target.scheme == "https":
            request.extensions = {**request.extensions, "sni_hostname": target.host}
        url, last = request.url, len(addresses) - 1
        for index, address in enumerate(addresses):
            request.url = url.copy_with(host=address)
            try:
                return await self._inner.handle_async_request(request)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if index == last:
                    self._pinned = []  # it may have moved: ask, and check, again next time
                    raise
            finally:
                request.url = url
        raise AssertionError("a checked target has an address")

    async def _checked(self, guard: Guard, url: httpx2.URL) -> tuple[Target, list[str]]:
        """The session's own host keeps the addresses it had when it was first resolved."""
        target = guard.check(str(url))
        home = self._home
        if home is None or (target.scheme, target.host, target.port) != (home.scheme, home.host, home.port):
            return target, (await guard.addresses(target))[:MAX_TRIED_ADDRESSES]
        if not self._pinned:
            self._pinned = (await guard.addresses(target))[:MAX_TRIED_ADDRESSES]
        return target, self._pinned

    def _bounded(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        endless = self._session_stream and request.method == "GET"
        response.stream = _BoundedStream(stream, self._max_bytes, self._on_fault, events=events, endless=endless)
        return response

    def _unreachable(self, request: httpx2.Request, text: str, status: int) -> httpx2.Response:
        self._on_fault(text)
        return self._error(request, status, UNREACHABLE_CODE, text)

    def _error(self, request: httpx2.Request, status: int, code: int, text: str) -> httpx2.Response:
        """An answer that the SDK hands to the request's caller as an error of the protocol."""
        error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": text}}
        headers = {"content-type": "application/json"}
        return httpx2.Response(status, headers=headers, content=orjson.dumps(error), request=request)


class _BoundedStream(httpx2.AsyncByteStream):
    """The body of an answer. Of an event stream, the bytes since the last blank line count. The end of an ``endless``
    one is a fault."""

    def __init__(
        self,
        stream: httpx2.AsyncByteStream,
        max_bytes: int,
        on_fault: Callable[[str], None],
        *,
        events: bool,
        endless: bool,
    ) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._on_fault = on_fault
        self._events = events
        self._endless = endless

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, tail = 0, b""
        try:
            async for chunk in self._stream:
                if self._events:
                    since = _after_last_blank_line(tail + chunk)
                    size = size + len(chunk) if since is None else since
                    tail = (tail + chunk[-3:])[-3:]
                else:
                    size += len(chunk)
                if size > self._max_bytes:
                    raise self._fault(f"the server's reply is larger than {self._max_bytes} bytes")
                yield chunk
        except (httpx2.TransportError, OSError) as fault:
            if isinstance(fault, AnswerError):
                raise
            raise self._fault(connection_fault(fault)) from None
        if self._endless:
            self._on_fault("the server closed the connection")

    async def aclose(self) -> None:
        # A connection that is broken already has nothing left to close.
        with contextlib.suppress(httpx2.TransportError, OSError):
            await self._stream.aclose()

    def _fault(self, text: str) -> AnswerError:
        self._on_fault(text)
        return AnswerError(text)


def _is_call(body: bytes) -> bool:
    try:
        message = orjson.loads(body)
    except ValueError:
        return False
    return isinstance(message, dict) and "id" in message and "method" in message


def _after_last_blank_line(data: bytes) -> int | None:
    """Bytes behind the last end of an event, None if there is none in ``data``."""
    ends = [data.rfind(mark) + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r") if mark in data]
    return len(data) - max(ends) if ends else None


def connection_fault(fault: Exception) -> str:
    """A failure of the network in words that tell a client nothing about addresses."""
    kinds: list[tuple[type[Exception], str]] = [
        (httpx2.ConnectTimeout, "the server did not accept a connection in time"),
        (httpx2.ConnectError, "no connection to the server"),
        (TimeoutError, "the server did not answer in time"),
        (httpx2.TimeoutException, "the server did not answer in time"),
        (httpx2.ProxyError, "the proxy refused the connection"),
        (httpx2.RemoteProtocolError, "the server closed the connection or sent no valid HTTP"),
        (httpx2.NetworkError, "the connection to the server broke"),
    ]
    return next((text for kind, text in kinds if isinstance(fault, kind)), "the server cannot be reached")
