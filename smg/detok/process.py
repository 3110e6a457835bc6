"""The detok process: owns engine streams and turns token ids into the bytes that clients read."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec

from smg.api.errors import refused, render_error
from smg.api.paths import path_of_api
from smg.detok.embedding import EmbeddingRun
from smg.detok.host import AnyRun
from smg.detok.outlets import Outlets
from smg.detok.run import Run
from smg.detok.turn import TurnRun
from smg.detok.vocabularies import Vocabularies, VocabularyError
from smg.engines.base import EngineClient
from smg.engines.clients import connect
from smg.engines.zmq.client import ZmqWorkerClient
from smg.messages import (
    Abort,
    DetokLoad,
    Dispatch,
    EngineAttach,
    EngineCall,
    EngineDetach,
    GenerationPlan,
    ModelTable,
    Owner,
    Peer,
    Redispatch,
    Reply,
    RingMessage,
    WorkerRef,
    WorkerReport,
)  # fmt: skip
from smg.process import ChildProcess
from smg.telemetry.metrics import DetokMetrics

log = logging.getLogger("smg.detok")

SWEEP_SECS = 0.25

_decode_plan = msgspec.msgpack.Decoder(GenerationPlan).decode


class DetokProcess(ChildProcess):
    """One detok process. ``runs`` maps (frontend, seq) to the requests it owns."""

    role = "detok"
    talks_to = ("frontend", "router")

    async def start(self) -> str:
        self.runs: dict[tuple[int, int], AnyRun] = {}
        self.clients: dict[tuple[str, str], EngineClient] = {}
        self.metrics = DetokMetrics()
        self.vocabularies = Vocabularies(self.run_dir)
        self._engine_ids: set[str] = set()
        self._frontends, self._routers = self.links.of("frontend"), self.links.of("router")
        self._empty = asyncio.Event()
        self._empty.set()
        self.handlers |= {
            Dispatch: self._on_dispatch, Abort: self._on_abort, ModelTable: self._on_models,
            EngineAttach: self._on_attach, EngineDetach: self._on_detach, EngineCall: self._on_engine_call,
        }  # fmt: skip
        self.loop = asyncio.get_running_loop()
        self.out = Outlets(self.loop, self._frontends)
        self._sweep_timer = self.loop.call_later(SWEEP_SECS, self._sweep)
        return f"transport {self.settings.grpc_transport}"

    async def drain(self) -> None:
        await self._empty.wait()

    async def stop(self) -> None:
        self._sweep_timer.cancel()
        for run in list(self.runs.values()):
            run.abort()
        for client in self.clients.values():
            await client.close()

    # Ring -----------------------------------------------------------------------------------------

    def on_peers(self, appeared: list[Peer], vanished: list[Peer]) -> None:
        for peer in vanished:
            if peer.role == "frontend":
                for run in [run for run in self.runs.values() if run.frontend == peer.index]:
                    run.abort()
        if any(peer.role == "router" for peer in appeared):
            self.to_router(DetokLoad(self.index, self._inflight()))
            # It may have asked before it could be answered.
            for client in self.clients.values():
                if isinstance(client, ZmqWorkerClient):
                    client.report()

    def _inflight(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for run in self.runs.values():
            for worker in run.workers:
                counts[worker.name] = counts.get(worker.name, 0) + 1
        return counts

    def _on_models(self, message: ModelTable) -> None:
        self.vocabularies.update(message.tokenizers)

    def _on_attach(self, message: EngineAttach) -> None:
        client = self.client(WorkerRef(message.url, message.kind, "zmq"))
        if isinstance(client, ZmqWorkerClient):
            client.attach(message)

    def _on_detach(self, message: EngineDetach) -> None:
        client = self.clients.pop((message.url, message.kind), None)
        if isinstance(client, ZmqWorkerClient):
            client.detach()

    def _on_engine_call(self, message: EngineCall) -> None:
        client = self.client(WorkerRef(message.url, message.kind, "zmq"))
        if isinstance(client, ZmqWorkerClient):
            client.call(message)

    def _on_abort(self, message: Abort) -> None:
        run = self.runs.get((message.frontend, message.seq))
        if run is not None:
            run.abort()

    def _on_dispatch(self, message: Dispatch) -> None:
        plan = _decode_plan(message.route.plan)
        box = self._frontends.get(message.frontend)
        if box is not None:
            box.send_lazily(Owner(message.seq, self.index))
        for part in plan.parts:
            if part.engine_id in self._engine_ids:
                text = f"a request with id '{part.engine_id}' is running"
                self._refuse(message, plan, "duplicate_request_id", text, 400)
                return
        table = self.vocabularies.get(plan.tokenizer)
        if table is None:
            self.spawn(self._dispatch_when_loaded(message, plan), "load vocabulary")
            return
        self._start(message, plan, table)

    async def _dispatch_when_loaded(self, message: Dispatch, plan: GenerationPlan) -> None:
        try:
            table = await self.vocabularies.load(plan.tokenizer)
        except VocabularyError as error:
            self._refuse(message, plan, "tokenizer_load_failed", str(error), 503)
            return
        self._start(message, plan, table)

    def _start(self, message: Dispatch, plan: GenerationPlan, table: Any) -> None:
        run: AnyRun
        if plan.response.api in ("embeddings", "classify"):
            run = EmbeddingRun(self, message, plan)
        elif plan.response.api == "events":
            run = TurnRun(self, message, plan, table)
        else:
            run = Run(self, message, plan, table)
        self.runs[(message.frontend, message.seq)] = run
        for part in plan.parts:
            self._engine_ids.add(part.engine_id)
        self._empty.clear()
        run.start()

    def _refuse(self, message: Dispatch, plan: GenerationPlan, code: str, text: str, status: int) -> None:
        path = path_of_api(plan.response.api)
        error = refused(code, text, status=status)
        answer = render_error(error, path, plan.response.request_id)
        self.out.to_frontend(message.frontend, Reply(message.seq, *answer))
        key = message.route.routing_key
        for worker in message.workers:
            report = WorkerReport(worker.url, self.index, "neutral", dp_rank=worker.dp_rank, routing_key=key)
            self.to_router(report)

    # Host of the runs -----------------------------------------------------------------------------

    def client(self, worker: WorkerRef) -> EngineClient:
        """The connection to a worker, opened on first use."""
        key = (worker.url, worker.kind)
        client = self.clients.get(key)
        if client is None:
            client = self.clients[key] = connect(worker, self.settings, self)
        return client

    def to_router(self, message: RingMessage) -> None:
        if isinstance(message, Redispatch):
            self.links.deliver("router", 0, message)
        else:
            box = self._routers.get(0)
            if box is not None:  # a restarted router hears of the load as a whole
                box.send_lazily(message)

    def finished(self, run: AnyRun) -> None:
        self.runs.pop((run.frontend, run.seq), None)
        for part in run.plan.parts:
            self._engine_ids.discard(part.engine_id)
        if not self.runs:
            self._empty.set()

    def _sweep(self) -> None:
        now = time.time()
        for run in [run for run in self.runs.values() if run.deadline and now > run.deadline]:
            run.timed_out()
        self._sweep_timer = self.loop.call_later(SWEEP_SECS, self._sweep)
