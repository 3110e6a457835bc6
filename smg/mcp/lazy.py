"""The tool host of a process that may never need one: the SDK costs half a second and 40 MB, paid on first use."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from smg.mcp.base import ServerRequest, ToolSet
from smg.settings import Settings
from smg.telemetry.metrics import SessionMetrics

if TYPE_CHECKING:
    from smg.mcp.host import McpHost

__all__ = ["LazyHost"]


class LazyHost:
    """``ToolHost`` that becomes a ``smg.mcp.host.McpHost`` at start if servers are configured, else with the first
    request that names one."""

    def __init__(self, settings: Settings, metrics: SessionMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._host: McpHost | None = None
        self._opening = asyncio.Lock()

    async def start(self) -> None:
        """Raises ``McpConfigError`` if the configuration cannot be read (start-up has checked it before)."""
        if self._settings.mcp_config_path is not None:
            await self._open()

    async def connect(self, servers: Sequence[ServerRequest], hosted: Sequence[str]) -> ToolSet:
        host = await self._open()
        return await host.connect(servers, hosted)

    @property
    def hosted_types(self) -> frozenset[str]:
        return self._host.hosted_types if self._host is not None else frozenset()

    @property
    def waiting_for(self) -> list[str]:
        """Names of required servers that were not connected yet."""
        return self._host.waiting_for if self._host is not None else []

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close()

    async def _open(self) -> McpHost:
        async with self._opening:
            if self._host is None:
                # In a thread, so that running streams get their turns meanwhile.
                module = await asyncio.to_thread(importlib.import_module, "smg.mcp.host")
                host: McpHost = module.McpHost(self._settings, self._metrics)
                await host.start()
                self._host = host
            return self._host
