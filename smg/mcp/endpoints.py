"""How a session reaches its server: one endpoint per transport, each a maker of the SDK's pair of message streams."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from smg.mcp.config import Limits, Proxy, StdioServer
from smg.mcp.guard import Guard, Target
from smg.mcp.proxies import proxy_for
from smg.mcp.stdio import stdio_streams
from smg.mcp.transport import BoundedTransport

__all__ = ["Endpoint", "HttpEndpoint", "StdioEndpoint", "Streams"]

Streams = tuple[Any, Any]  # (from the server, to the server), as ``mcp.ClientSession`` takes them
OnFault = Callable[[str], None]

MAX_CONNECTIONS = 32


@functools.cache
def tls_context() -> ssl.SSLContext:
    """The trusted authorities (``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` replace the default ones). Slow to make."""
    return httpx2.create_ssl_context(trust_env=True)


class Endpoint(Protocol):
    """Where a server is. ``faults_are_final``: after a reported fault no message gets through any more."""

    @property
    def limits(self) -> Limits:
        """Bounds of time, size and number."""
        raise NotImplementedError

    @property
    def faults_are_final(self) -> bool:
        """See the class."""
        raise NotImplementedError

    def open(self, on_fault: OnFault) -> AbstractAsyncContextManager[Streams]:
        """Connect. ``on_fault`` hears, in words fit for a client, why the server cannot be reached or understood."""
        raise NotImplementedError


@dataclass(frozen=True)
class StdioEndpoint:
    """A child process."""

    server: StdioServer
    limits: Limits
    faults_are_final: bool = True

    def open(self, on_fault: OnFault) -> AbstractAsyncContextManager[Streams]:
        return stdio_streams(self.server, self.limits.max_result_bytes, on_fault)


@dataclass(frozen=True)
class HttpEndpoint:
    """A URL. ``guard`` and ``target`` are set for servers that a request names; ``headers`` go with every request."""

    url: str
    transport: Literal["sse", "streamable"]
    limits: Limits
    headers: Mapping[str, str] = field(default_factory=dict)
    proxy: Proxy | None = None
    guard: Guard | None = None
    target: Target | None = None

    @property
    def faults_are_final(self) -> bool:
        # Streamable HTTP answers each message on its own connection; the older transport has the one stream.
        return self.transport == "sse"

    @asynccontextmanager
    async def open(self, on_fault: OnFault) -> AsyncIterator[Streams]:
        verify = await asyncio.to_thread(tls_context)
        if self.transport == "streamable":
            client = self._client(verify, on_fault)
            async with (
                client,
                streamable_http_client(
                    self.url, http_client=client, max_sse_event_size=self.limits.max_result_bytes
                ) as streams,
            ):
                yield streams
            return

        def factory(
            headers: dict[str, str] | None = None,
            timeout: httpx2.Timeout | None = None,
            auth: httpx2.Auth | None = None,
        ) -> httpx2.AsyncClient:
            return self._client(verify, on_fault)

        async with sse_client(self.url, httpx_client_factory=factory) as streams:
            yield streams

    def _client(self, verify: ssl.SSLContext, on_fault: OnFault) -> httpx2.AsyncClient:
        proxy = proxy_for(self.proxy, httpx2.URL(self.url))
        pool = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=4)
        inner = httpx2.AsyncHTTPTransport(verify, trust_env=False, limits=pool, proxy=proxy)
        transport = BoundedTransport(
            inner, self.limits.max_result_bytes, self.limits.connect_timeout_secs, guard=self.guard, target=self.target,
            session_stream=self.faults_are_final, on_fault=on_fault,
        )  # fmt: skip
        # Reading has no limit of its own here: every request has one, and event streams are silent for long.
        timeout = httpx2.Timeout(self.limits.connect_timeout_secs, read=None)
        return httpx2.AsyncClient(
            transport=transport, headers=dict(self.headers), timeout=timeout, trust_env=False, follow_redirects=False
        )
