"""A worker's life: registration, health probes, load reports, removal. One task per worker, all of it off the request
path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from smg.engines.base import EngineError
from smg.engines.clients import tls_options
from smg.engines.grpc.facts import WorkerFacts
from smg.engines.grpc.probe import WorkerAdmin
from smg.messages import TokenizerSource
from smg.models.registry import ParserNames, check_override
from smg.router.worker import DRAINING, NOT_READY, PENDING, READY, ModelCard, Worker

if TYPE_CHECKING:
    from smg.router.process import RouterProcess

log = logging.getLogger("smg.router.lifecycle")

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
REMOVAL_SECS = 5.0
FIRST_RETRY_SECS = 0.5


class Lifecycle:
    """Runs the background work for all workers of a router."""

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self.settings = router.settings
        self.registry = router.registry
        self.tls = tls_options(router.settings)
        self.admins: dict[str, WorkerAdmin] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._jobs = asyncio.Semaphore(max(1, router.settings.job_queue_concurrency))

    def admin(self, worker: Worker) -> WorkerAdmin:
        """The management connection of a worker, opened on first use."""
        admin = self.admins.get(worker.url)
        if admin is None:
            admin = self.admins[worker.url] = WorkerAdmin(worker.url, worker.kind, tls=self.tls)
        return admin

    async def close(self) -> None:
        for admin in self.admins.values():
            await admin.close()

    # Registration ----------------------------------------------------------------------------------

    def register(self, worker: Worker) -> None:
        """Begin to register a pending worker."""
        self.registry.add(worker)
        self._tasks[worker.id] = self.router.spawn(self._life(worker), f"worker {worker.url}")

    async def _life(self, worker: Worker) -> None:
        async with self._jobs:
            facts = await self._connect(worker)
            if facts is None:
                return
            try:
                await self._describe(worker, facts)
            except (ValueError, EngineError, OSError) as error:
                self._registration_failed(worker, str(error))
                return
        await self._watch(worker)

    async def _connect(self, worker: Worker) -> WorkerFacts | None:
        """Probe until the worker answers or the start-up time is over."""
        settings = self.settings
        if settings.worker_startup_delay:
            await asyncio.sleep(settings.worker_startup_delay)
        limit = time.monotonic() + settings.worker_startup_timeout_secs
        pause = FIRST_RETRY_SECS
        while worker.status == PENDING:
            try:
                return await self.admin(worker).probe(float(settings.health_check_timeout_secs))
            except EngineError as error:
                worker.error = error.message
                if time.monotonic() + pause > limit:
                    self._registration_failed(worker, error.message)
                    return None
                log.info("worker %s does not answer yet: %s", worker.url, error.message)
            # A worker that is just starting is usually there within seconds: probe faster at first.
            await asyncio.sleep(pause)
            pause = min(float(settings.worker_startup_check_interval), pause * 2)
        return None

    def _registration_failed(self, worker: Worker, reason: str) -> None:
        log.error("registration of worker %s failed: %s", worker.url, reason)
        worker.error = reason
        self.router.failed_jobs[worker.id] = (worker.url, reason, time.time())
        self._tasks.pop(worker.id, None)
        self.registry.remove(worker)

    async def _describe(self, worker: Worker, facts: WorkerFacts) -> None:
        """Fill the worker from what its engine says and make it ready. Raises ``ValueError`` for a bad override."""
        worker.kind = facts.kind
        worker.labels = {**facts.labels, **worker.labels}
        worker.context_length = facts.context_length
        worker.vocab_size = facts.vocab_size
        worker.supports_embedding = facts.supports_embedding
        worker.dp_size = facts.dp_size
        worker.default_sampling = sampling_defaults(facts.default_sampling_params)
        name = worker.labels.get("model_id") or facts.model_id
        if not worker.cards:
            if not name:
                raise ValueError("the worker names no model; register it with a model card or a model_id label")
            worker.cards = [ModelCard(name)]
        self.check_labels(worker, worker.labels)
        for card in worker.cards:
            card.context_length = card.context_length or facts.context_length
            card.architectures = card.architectures or facts.architectures
            card.hf_model_type = card.hf_model_type or facts.model_type
            await self._find_tokenizer(worker, card, facts)
        self.router.metrics.worker_registered(worker.url, http2=worker.transport == "grpc")
        for ranked in self._split_ranks(worker):
            ranked.status = READY
            self.router.metrics.workers.probed(ranked.name, ranked.worker_type, success=True, ready=True)
        log.info("worker %s serves %s with %s", worker.url, ", ".join(c.id for c in worker.cards), worker.kind)
        self.registry.changed()

    def check_labels(self, worker: Worker, labels: dict[str, str]) -> None:
        """Raises ``ValueError`` if the parsers named by the worker's cards or ``labels`` are not registered."""
        for card in worker.cards:
            names = ParserNames(
                tool=card.tool_parser or labels.get("tool_parser", ""),
                reasoning=card.reasoning_parser or labels.get("reasoning_parser", ""),
            )
            check_override(worker.url, card.id, names)

    def replace(self, old: Worker, renewed: Worker) -> None:
        """Register a worker again under the same id; the old entry serves until the new one is described."""
        task = self._tasks.pop(old.id, None)
        if task is not None:
            task.cancel()
        renewed.inflight, renewed.detok_inflight = old.inflight, old.detok_inflight
        self.register(renewed)

    def _split_ranks(self, worker: Worker) -> list[Worker]:
        """With ``--dp-aware`` one URL becomes a worker per data-parallel rank."""
        if not self.settings.dp_aware or worker.dp_size <= 1:
            return [worker]
        worker.dp_rank = 0
        ranks = [worker]
        for rank in range(1, worker.dp_size):
            other = self.registry.new_worker(worker.spec, self.router.breaker_changed)
            for name in ("kind", "cards", "labels", "context_length", "vocab_size", "default_sampling", "dp_size"):
                setattr(other, name, getattr(worker, name))
            other.dp_rank = rank
            self.registry.workers[other.id] = other
            ranks.append(other)
            self._tasks[other.id] = self.router.spawn(self._watch(other), f"worker {other.name}")
        return ranks

    async def _find_tokenizer(self, worker: Worker, card: ModelCard, facts: WorkerFacts) -> None:
        """Where the model's tokenizer comes from; the first worker of a model decides."""
        registry, settings = self.registry, self.settings
        if (
            card.id in registry.tokenizers
            or card.id in registry.removed_tokenizers
            or settings.disable_tokenizer_autoload
        ):
            return
        template = card.chat_template or settings.chat_template or ""
        if settings.tokenizer_source is not None and not settings.enable_igw:
            if card.chat_template:
                registry.tokenizers[card.id] = TokenizerSource(card.id, settings.tokenizer_source, template)
            return
        labels = worker.labels
        for path in (labels.get("tokenizer_path"), card.tokenizer_path, facts.tokenizer_path, facts.model_path):
            if path and Path(path).exists():
                registry.tokenizers[card.id] = TokenizerSource(card.id, path, template)
                return
        fetched = await self._fetch_tokenizer(worker, card)
        path = fetched or facts.tokenizer_path or facts.model_path or card.id
        registry.tokenizers[card.id] = TokenizerSource(card.id, path, template)

    async def _fetch_tokenizer(self, worker: Worker, card: ModelCard) -> str | None:
        """The tokenizer files of the worker itself, unpacked into the run directory; None if it has none to give."""
        target = self.router.run_dir / "tokenizers" / f"{len(self.registry.tokenizers)}-{worker.id}"
        target.mkdir(parents=True, exist_ok=True)
        try:
            await self.admin(worker).fetch_tokenizer(target)
        except EngineError as error:
            log.info("worker %s sends no tokenizer for %s: %s", worker.url, card.id, error.message)
            return None
        return str(target)

    # Health and load -------------------------------------------------------------------------------

    async def _watch(self, worker: Worker) -> None:
        """Probe health and load until the worker is removed."""
        settings = self.settings
        health_every = 0.0 if settings.disable_health_check else float(settings.health_check_interval_secs)
        load_every = 0.0 if settings.disable_load_monitoring else float(settings.load_monitor_interval)
        next_health = time.monotonic() + health_every
        next_load = time.monotonic()
        while worker.id in self.registry.workers and worker.status != DRAINING:
            now = time.monotonic()
            if load_every and now >= next_load:
                next_load = now + load_every
                await self._poll_load(worker)
            if health_every and now >= next_health:
                next_health = now + health_every
                await self._probe(worker)
            times = [t for t, on in ((next_health, health_every), (next_load, load_every)) if on]
            await asyncio.sleep(max(0.05, min(times) - time.monotonic()) if times else 3600.0)

    async def _probe(self, worker: Worker) -> None:
        healthy = False
        with contextlib.suppress(EngineError):
            healthy = (await self.admin(worker).health(float(self.settings.health_check_timeout_secs))).healthy
        before = worker.status
        if healthy:
            worker.successes, worker.failures = worker.successes + 1, 0
            if before == NOT_READY and worker.successes >= self.settings.health_success_threshold:
                worker.status = READY
                worker.breaker.readmit()
        else:
            worker.failures, worker.successes = worker.failures + 1, 0
            if before == READY and worker.failures >= self.settings.health_failure_threshold:
                worker.status = NOT_READY
        ready = worker.status == READY
        self.router.metrics.workers.probed(worker.name, worker.worker_type, success=healthy, ready=ready)
        if worker.status != before:
            log.warning("worker %s is %s", worker.name, worker.status)
            self.registry.changed()

    async def _poll_load(self, worker: Worker) -> None:
        mode = "poll"
        try:
            report = await self.admin(worker).loads()
        except EngineError:
            mode = "fallback"
        else:
            worker.reported(report, time.monotonic())
            model = worker.cards[0].id
            for rank in report.loads:
                values = {
                    "running_requests": float(rank.num_running_reqs),
                    "waiting_requests": float(rank.num_waiting_reqs),
                    "token_usage": rank.token_usage,
                    "gen_throughput": rank.gen_throughput,
                    "cache_hit_rate": rank.cache_hit_rate,
                }
                self.router.metrics.engines.reported(worker.url, model, str(rank.dp_rank), values)
        self.router.metrics.engines.polls.inc(worker.url, mode)

    # Removal ---------------------------------------------------------------------------------------

    def drain(self, worker: Worker) -> None:
        """Stop routing to the worker; it disappears when its requests are done, at the earliest after a few seconds."""
        worker.status = DRAINING
        self.registry.changed()
        self.router.spawn(self._remove(worker), f"remove {worker.url}")

    async def _remove(self, worker: Worker) -> None:
        await asyncio.sleep(REMOVAL_SECS)
        while worker.inflight > 0:
            await asyncio.sleep(0.2)
        task = self._tasks.pop(worker.id, None)
        if task is not None:
            task.cancel()
        for policy in self.router.policies.values():
            policy.forget(worker)
        self.registry.remove(worker)
        self.router.metrics.worker_removed(worker.url)
        if not self.registry.find_url(worker.url):
            admin = self.admins.pop(worker.url, None)
            if admin is not None:
                await admin.close()


def sampling_defaults(text: str) -> dict[str, float]:
    """The part of a worker's generation config that fills unset sampling fields."""
    if not text:
        return {}
    try:
        config = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(config, dict):
        return {}
    return {
        key: config[key]
        for key in SAMPLING_KEYS
        if isinstance(config.get(key), int | float) and not isinstance(config[key], bool)
    }
