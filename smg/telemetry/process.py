"""The telemetry process: the Prometheus listener and the probe port, away from every loop that carries tokens."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from smg.listeners import inherited
from smg.messages import ModelTable
from smg.process import ChildProcess
from smg.readiness import readiness
from smg.telemetry.exposition import serve_metrics, serve_probes


class TelemetryProcess(ChildProcess):
    """Serves ``/metrics`` and, on ``--health-check-port``, the health probes."""

    role = "telemetry"
    talks_to = ()

    async def start(self) -> str:
        self.models = ModelTable(0, [], [])
        self.handlers[ModelTable] = self._on_models
        listeners = inherited()
        self._servers = []
        if listeners.metrics is not None:
            self._servers.append(serve_metrics(listeners.metrics, os.environ["PROMETHEUS_MULTIPROC_DIR"]))
        if listeners.probes is not None:
            self._servers.append(serve_probes(listeners.probes, self._readiness))
        return f"metrics port {self.settings.prometheus_port}"

    def _on_models(self, message: ModelTable) -> None:
        self.models = message

    def _readiness(self) -> tuple[int, dict[str, Any]]:
        return readiness(self.models, draining=self.draining)

    async def stop(self) -> None:
        for server in self._servers:
            await asyncio.to_thread(server.close)
