"""What the runs need of the process that hosts them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from smg.detok.outlets import Outlets
from smg.engines.base import EngineClient
from smg.messages import GenerationPlan, RingMessage, WorkerRef
from smg.telemetry.metrics import DetokMetrics


class AnyRun(Protocol):
    """A request that a detok process owns."""

    seq: int
    frontend: int
    deadline: float
    plan: GenerationPlan
    workers: list[WorkerRef]

    def start(self) -> None: ...

    def abort(self) -> None: ...

    def timed_out(self) -> None: ...


class Host(Protocol):
    """The detok process, as a run sees it."""

    index: int
    metrics: DetokMetrics
    out: Outlets

    def client(self, worker: WorkerRef) -> EngineClient: ...

    def to_router(self, message: RingMessage) -> None: ...

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str = "") -> asyncio.Task[None]: ...

    def finished(self, run: AnyRun) -> None: ...
