"""The router process: one for the whole gateway, it alone knows the workers.

It picks a worker and a detok process for every plan and forwards the plan as opaque bytes; decides about retries;
keeps registry, health and breakers; tells everyone which models there are. It holds no request: until a plan is
dispatched its owner is the frontend's copy of the body, afterwards the detok process.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from typing import Any

import msgspec

from smg.api.errors import ApiError, render_error
from smg.api.grpc_status import breaker_outcome, http_status, is_retryable
from smg.api.paths import path_of_api
from smg.ipc import Handlers
from smg.messages import (
    AdminCall,
    DetokLoad,
    Dispatch,
    EngineAnswer,
    EngineLink,
    EngineLoad,
    ModelTable,
    Peer,
    Redispatch,
    Reply,
    RingMessage,
    Route,
    TokenizerReport,
    TokenizerSource,
    WorkerReport,
)  # fmt: skip
from smg.process import ChildProcess
from smg.readiness import unserved
from smg.router.admin import Admin
from smg.router.breaker import NAMES, OPEN
from smg.router.lifecycle import Lifecycle
from smg.router.policies import Policy, RouteFacts, make_policy
from smg.router.registry import Registry
from smg.router.retry import RetryRules, counted
from smg.router.spec import RegistrationError
from smg.router.urls import worker_url
from smg.router.worker import READY, Worker
from smg.router.zmq_workers import ZmqWorkers
from smg.settings import POLICIES
from smg.telemetry.router_metrics import RouterMetrics

log = logging.getLogger("smg.router")

AVOID_LIMIT = 8
# How long a restarted router waits for its workers before it takes requests.
RESTART_SECS = 2.0
TICK_CONTINUES_SECS = 0.02
ERROR_TYPES = {"DEADLINE_EXCEEDED": "timeout", "RESOURCE_EXHAUSTED": "rate_limit_error", "INTERNAL": "engine_error"}


class RouterProcess(ChildProcess):
    """See the module's text. ``detok_load`` counts dispatched requests per detok process."""

    role = "router"
    talks_to = ("frontend", "tokenizer", "detok", "telemetry")

    async def start(self) -> str:
        settings = self.settings
        self.metrics = RouterMetrics()
        self._broadcast_due = False
        self.loop = asyncio.get_running_loop()
        self.registry = Registry(settings, self.run_dir, self._changed)
        self.policies: dict[str, Policy] = {}
        self.failed_jobs: dict[str, tuple[str, str, float]] = {}
        self.detok_load: dict[int, int] = {}
        self._detoks: list[int] = []
        self._waiting_for_detok: list[Route] = []
        self.retries = RetryRules.from_settings(settings)
        self.zmq = ZmqWorkers(self)
        self.lifecycle = Lifecycle(self)
        self.admin = Admin(self)
        self.handlers |= {
            Route: self._on_route, Redispatch: self._on_redispatch, WorkerReport: self._on_report,
            DetokLoad: self._on_detok_load, AdminCall: self.admin.on_call, EngineLink: self.zmq.on_link,
            EngineLoad: self.zmq.on_load, EngineAnswer: self.zmq.on_answer, TokenizerReport: self.admin.on_tokenizer,
        }  # fmt: skip
        self._pool_labels: set[tuple[str, str, str]] = set()
        # Only sticky sessions look at the requests in flight per routing key.
        self._counts_keys = settings.routing_key_override
        self._held: list[RingMessage] | None = None
        if self._restore():
            self._hold()
        self._tick_timer = self.loop.call_later(float(settings.eviction_interval_secs), self._tick)
        return f"policy {settings.policy}, {len(self.registry.workers)} workers"

    def _restore(self) -> bool:
        """Workers and tokenizers: those of the router that ran before (True), or the flags at first start."""
        saved = self.registry.saved()
        if saved is None:
            source = self.settings.tokenizer_source
            if source is not None and not self.settings.disable_tokenizer_autoload:
                self.registry.tokenizers[source] = TokenizerSource(source, source, self.settings.chat_template or "")
            urls = dict.fromkeys(map(worker_url, self.settings.worker_urls))
            specs: list[dict[str, Any]] = [{"url": url} for url in urls]
        else:
            specs, sources, removed = saved
            self.registry.tokenizers.update({source.name: source for source in sources})
            self.registry.removed_tokenizers.update(removed)
        for spec in specs:
            try:
                self.lifecycle.register(self.registry.new_worker(spec, self.breaker_changed))
            except RegistrationError as error:
                log.error("worker %s is not registered: %s", spec.get("url"), error)
        return saved is not None

    def _hold(self) -> None:
        """Let requests and calls wait, and the other processes keep the table they have, until the workers that the
        router before had are found again. That takes messages of the detok processes, so this router is already one
        of their peers."""
        held: list[RingMessage] = []
        self._held = held
        served: Handlers = {kind: self.handlers[kind] for kind in (Route, Redispatch, AdminCall)}
        self.handlers.update(dict.fromkeys(served, held.append))

        async def settle() -> None:
            await self.lifecycle.settle(RESTART_SECS)
            self.handlers.update(served)
            self._held = None
            self._changed()
            for message in held:
                served[type(message)](message)

        self.spawn(settle(), "settle")

    async def stop(self) -> None:
        self._tick_timer.cancel()
        await self.lifecycle.close()

    def _tick(self) -> None:
        """Upkeep of the policies, in small steps."""
        now = time.monotonic()
        unfinished = [policy for policy in list(self.policies.values()) if policy.tick(now)]
        pause = TICK_CONTINUES_SECS if unfinished else float(self.settings.eviction_interval_secs)
        self._tick_timer = self.loop.call_later(pause, self._tick)

    def forget(self, worker: Worker) -> None:
        """The worker has left: nothing refers to it any more."""
        now = time.monotonic()
        for model, policy in list(self.policies.items()):
            policy.forget(worker)
            if model not in self.registry.by_model:
                policy.tick(now)  # its gauges go to zero
                del self.policies[model]
        self.metrics.worker_removed(worker.name)

    # Ring -----------------------------------------------------------------------------------------

    def on_peers(self, appeared: list[Peer], vanished: list[Peer]) -> None:
        self._detoks = sorted(self.links.of("detok"))
        for peer in vanished:
            if peer.role == "detok":
                self.detok_load.pop(peer.index, None)
                for worker in self.registry.workers.values():
                    worker.forget_detok(peer.index)
        self.zmq.on_peers(appeared, vanished)
        if any(peer.role == "detok" for peer in appeared):
            self.retry_waiting()
        if self._held is None:
            table = self.registry.table()
            for peer in appeared:
                self.links.send(peer.role, peer.index, table)

    def retry_waiting(self) -> None:
        """Try the plans that wait for a detok process again."""
        waiting, self._waiting_for_detok = self._waiting_for_detok, []
        for route in waiting:
            self._on_route(route)

    def _changed(self) -> None:
        """Broadcast once per loop iteration, however many changes there were."""
        if not self._broadcast_due:
            self._broadcast_due = True
            self.loop.call_soon(self._broadcast)

    def _broadcast(self) -> None:
        self._broadcast_due = False
        if self._held is not None:
            return
        table: ModelTable = self.registry.table()
        for role in self.talks_to:
            for box in self.links.of(role).values():
                box.send(table)
        self._measure_pool()

    def _measure_pool(self) -> None:
        sizes = Counter(
            (worker.worker_type, worker.transport, card.id)
            for worker in self.registry.workers.values()
            for card in worker.cards
        )
        for labels in self._pool_labels - sizes.keys():
            self.metrics.workers.pool_size.forget(*labels)
        for labels, size in sizes.items():
            self.metrics.workers.pool_size.set(size, *labels)
        self._pool_labels = set(sizes)

    # Dispatch -------------------------------------------------------------------------------------

    def _on_route(self, route: Route, suspect: str = "") -> None:
        """Choose and forward. ``suspect`` is the worker whose failure was the reason for another attempt."""
        now = time.monotonic()
        key = route.routing_key if self._counts_keys else ""
        workers: list[Worker] = []
        detok = -1
        for part in route.parts:
            worker = self._choose(route, part.prompt_tokens, part.block_hashes, now)
            if worker is not None and not workers:
                detok = self._choose_detok(worker)
            if worker is None or detok < 0:
                for sent in workers:
                    sent.released(detok, key)
                self._blame(route, suspect)
                self._no_worker(route, detoks=worker is None)
                return
            # Counted at once, so that the next prompt of a batch sees it.
            worker.sent(detok, part.prompt_tokens, key)
            workers.append(worker)
        if suspect and all(worker.name != suspect for worker in workers):
            self._blame(route, suspect)
        for worker in workers:
            self.metrics.workers.sent(worker.name, route.model, worker.inflight)
        self.detok_load[detok] = self.detok_load.get(detok, 0) + len(workers)
        if route.attempts == 0:
            first = workers[0]
            self.metrics.routed("regular", first.transport, route.model, route.endpoint, streaming=route.streaming)
        refs = [worker.ref() for worker in workers]
        self.links.send("detok", detok, Dispatch(route.seq, route.frontend, refs, route))

    def _choose(self, route: Route, prompt_tokens: int, hashes: bytes, now: float) -> Worker | None:
        served = self.registry.by_model.get(route.model)
        if not served:
            return None
        policy = self.policies.get(route.model) or self._new_policy(route.model)
        # ``Worker.selectable``, without two calls per worker.
        candidates = [w for w in served if w.status == READY and (w.breaker.state != OPEN or w.breaker.allows(now))]
        if len(candidates) > 1 and route.avoid:
            candidates = spared(candidates, route.avoid)
        if not candidates:
            policy.no_candidates()
            return None
        facts = RouteFacts(
            route.model, prompt_tokens, hashes, route.routing_key, route.target_worker, now, served, route.key_source
        )
        worker = policy.select(candidates, facts)
        if worker is not None:
            self.metrics.workers.selections.inc(worker.worker_type, worker.transport, route.model, policy.name)
        return worker

    def _new_policy(self, model: str) -> Policy:
        """The first worker of a model decides by its label ``policy``, else the flag does."""
        label = self.registry.by_model[model][0].labels.get("policy", "")
        if label and label not in POLICIES:
            log.warning("model %s: a worker names the unknown policy '%s'", model, label)
            label = ""
        policy = self.policies[model] = make_policy(self.settings, self.metrics, model, label)
        return policy

    def _choose_detok(self, worker: Worker) -> int:
        """Streams of one worker share a detok process, so that one engine step is one read and one frame; a process
        that is clearly busier than the others passes its streams on. -1 when none is running."""
        live = self._detoks
        if worker.detoks is not None:
            live = [index for index in live if index in worker.detoks]
        if not live:
            return -1
        if len(live) == 1:
            return live[0]
        load = [self.detok_load.get(index, 0) for index in live]
        home = zlib.crc32(worker.url.encode()) % len(live)
        if load[home] <= 1.5 * sum(load) / len(live) + 16:
            return live[home]
        return live[load.index(min(load))]

    def _no_worker(self, route: Route, *, detoks: bool) -> None:
        """Refuse the request: no worker takes it, or (``detoks`` False) there is no process to run it in."""
        if not detoks:
            self._fail(route, "internal_error")
            self._waiting_for_detok.append(route)
            return
        self._fail(route, "no_workers")
        if route.model not in self.registry.by_model:
            error = unserved(self.registry.table(), route.model)
        else:
            message = "No available workers (all circuits open or unhealthy)"
            error = ApiError(503, "no_available_workers", message, gateway=True)
        self._refuse(route, error)

    def _fail(self, route: Route, error_type: str) -> None:
        """Count a request that failed for good. Models nobody serves are not told apart."""
        served = self.registry.by_model.get(route.model)
        transport = served[0].transport if served else "grpc"
        self.metrics.failed("regular", transport, route.model if served else "other", route.endpoint, error_type)

    def _refuse(self, route: Route, error: ApiError) -> None:
        status, headers, body = render_error(error, path_of_api(route.endpoint), route.request_id)
        self.links.send("frontend", route.frontend, Reply(route.seq, status, headers, body))

    # Outcomes -------------------------------------------------------------------------------------

    def _on_redispatch(self, message: Redispatch) -> None:
        """A worker failed before its first message."""
        route = message.route
        attempts = route.attempts + 1
        suspect = message.worker if breaker_outcome(message.code) == "failure" else ""
        error_type = ERROR_TYPES.get(message.code, "backend_error")
        worker = self.registry.by_name.get(message.worker)
        if worker is not None:
            self.metrics.workers.errors.inc(worker.worker_type, worker.transport, error_type)
        if not is_retryable(message.code) or attempts >= self.retries.attempts:
            if attempts > 1:
                self.metrics.workers.exhausted.inc("regular", route.endpoint)
            self._blame(route, suspect)
            self._fail(route, error_type)
            self._refuse(route, start_failed(route.endpoint, message.code, message.message))
            return
        delay = self.retries.delay(attempts)
        self.metrics.workers.retried("regular", route.endpoint, attempts, delay)
        avoid = [*route.avoid, message.worker][-AVOID_LIMIT:]
        again = msgspec.structs.replace(route, attempts=attempts, avoid=avoid)
        self.loop.call_later(delay, self._on_route, again, suspect)

    def _blame(self, route: Route, suspect: str) -> None:
        """The request is done with this worker, or failed for good: its failures there are one outcome."""
        worker = self.registry.by_name.get(suspect)
        if worker is not None and not counted(route.avoid, suspect):
            self._feed_breaker(worker, "failure")

    def _on_report(self, message: WorkerReport) -> None:
        load = self.detok_load.get(message.detok, 0)
        if load:
            self.detok_load[message.detok] = load - 1
        worker = self.registry.at(message.url, message.dp_rank)
        if worker is not None:
            worker.released(message.detok, message.routing_key if self._counts_keys else "")
            self._feed_breaker(worker, message.outcome)
            if message.outcome == "failure":
                self.metrics.workers.errors.inc(worker.worker_type, worker.transport, "engine_error")
            self.metrics.workers.left(worker.name, worker.inflight)

    def _feed_breaker(self, worker: Worker, outcome: str) -> None:
        breaker = worker.breaker
        if outcome == "success":
            if not breaker.failures and not breaker.state:
                breaker.successes += 1
                self.metrics.breakers.succeeded(worker.name, breaker.successes)
                return
            breaker.success()
        elif outcome == "failure":
            breaker.failure(time.monotonic())
        else:
            return
        self.metrics.breakers.outcome(worker.name, success=outcome == "success")
        self.metrics.breakers.update(worker.name, NAMES[breaker.state], breaker.failures, breaker.successes)

    def breaker_changed(self, worker: Worker, old: str, new: str) -> None:
        """A breaker went from one state to another."""
        log.warning("circuit breaker of worker %s: %s -> %s", worker.name, old, new)
        breaker = worker.breaker
        self.metrics.breakers.transition(worker.name, old, new)
        self.metrics.breakers.update(worker.name, new, breaker.failures, breaker.successes)
        if breaker.state == OPEN:
            self.lifecycle.suspect(worker.url)

    def _on_detok_load(self, message: DetokLoad) -> None:
        """A detok process tells a restarted router what it runs."""
        self.detok_load[message.detok] = sum(message.inflight.values())
        for worker in self.registry.workers.values():
            count = message.inflight.get(worker.name)
            if count is not None:
                worker.forget_detok(message.detok)
                worker.detok_inflight[message.detok] = count
                worker.inflight += count


def spared(candidates: list[Worker], failed: list[str]) -> list[Worker]:
    """The candidates on servers where the request did not fail yet, else on ranks where it did not, else all."""
    urls = {name.rpartition("@")[0] if name.rpartition("@")[2].isdigit() else name for name in failed}
    elsewhere = [worker for worker in candidates if worker.url not in urls]
    return elsewhere or [worker for worker in candidates if worker.name not in failed] or candidates


def start_failed(endpoint: str, code: str, reason: str) -> ApiError:
    """The answer when the last attempt failed with this gRPC status."""
    what = "embedding" if endpoint in ("embeddings", "classify") else "generation"
    status = http_status(code)
    headers = (("retry-after", "1"),) if status == 503 else ()
    return ApiError(status, f"start_{what}_failed", f"Failed to start {what}: {reason}", gateway=True, headers=headers)
