"""A worker's life: registration, replacement, removal. All of it runs in background tasks, off the request path."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import orjson

from smg.engines.base import EngineError
from smg.engines.clients import tls_options
from smg.engines.grpc.facts import WorkerFacts
from smg.engines.grpc.probe import WorkerAdmin
from smg.messages import TokenizerSource
from smg.router.health import HealthRules, Watch
from smg.router.registry import check_parsers
from smg.router.worker import DRAINING, PENDING, READY, ModelCard, Worker
from smg.router.zmq_admin import ZmqAdmin

if TYPE_CHECKING:
    from smg.router.process import RouterProcess

log = logging.getLogger("smg.router.lifecycle")

AnyAdmin: TypeAlias = WorkerAdmin | ZmqAdmin

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
REMOVAL_SECS = 5.0
FIRST_RETRY_SECS = 0.5
MAX_FAILED_JOBS = 256


class Lifecycle:
    """Runs the background work for all workers of a router."""

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self.settings = router.settings
        self.registry = router.registry
        self.tls = tls_options(router.settings)
        self.admins: dict[str, AnyAdmin] = {}
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._watches: dict[str, Watch] = {}
        self._slots = asyncio.Semaphore(max(1, router.settings.job_queue_concurrency))

    def admin(self, worker: Worker) -> AnyAdmin:
        """The management connection of a worker, opened on first use. Raises ``ValueError`` for a worker that cannot be
        served."""
        admin = self.admins.get(worker.url)
        if admin is None:
            admin = self.admins[worker.url] = self._open(worker)
        return admin

    def _open(self, worker: Worker) -> AnyAdmin:
        if worker.transport == "zmq":
            return self.router.zmq.admin(worker)
        return WorkerAdmin(worker.url, worker.kind, tls=self.tls)

    @property
    def running(self) -> int:
        """Registrations, replacements and removals that have not ended."""
        return len(self._jobs)

    async def settle(self, timeout: float) -> None:
        """Wait until the registrations that are running have ended, at most ``timeout`` seconds."""
        if self._jobs:
            await asyncio.wait(self._jobs.values(), timeout=timeout)

    async def close(self) -> None:
        for admin in self.admins.values():
            await admin.close()

    def _start(self, worker: Worker, job: asyncio.Task[None]) -> None:
        """Remember the worker's running job; an older one is given up."""
        older = self._jobs.get(worker.id)
        if older is not None:
            older.cancel()
        self._jobs[worker.id] = job

        def ended(done: asyncio.Task[None]) -> None:
            if self._jobs.get(worker.id) is done:
                del self._jobs[worker.id]

        job.add_done_callback(ended)

    # Registration ----------------------------------------------------------------------------------

    def register(self, worker: Worker) -> None:
        """Begin to register a pending worker."""
        self.registry.add(worker)
        self._start(worker, self.router.spawn(self._register(worker), f"register {worker.url}"))

    async def _register(self, worker: Worker) -> None:
        try:
            facts = await self._connect(worker, self.admin(worker))
            if facts is not None:
                async with self._slots:
                    await self._describe(worker, facts)
        except Exception as error:
            self._registration_failed(worker, str(error), error)
            return
        if facts is None or worker.status != PENDING:
            return
        for ranked in self._split_ranks(worker):
            self._activate(ranked)
        self._follow_links(worker)
        log.info("worker %s serves %s with %s", worker.url, ", ".join(c.id for c in worker.cards), worker.kind)
        self.registry.changed()
        self.watch(worker.url)

    async def _connect(self, worker: Worker, admin: AnyAdmin) -> WorkerFacts | None:
        """Probe until the worker answers; None when it was removed meanwhile. Raises ``EngineError`` when the start-up
        time is over."""
        settings = self.settings
        if settings.worker_startup_delay:
            await asyncio.sleep(settings.worker_startup_delay)
        limit = time.monotonic() + settings.worker_startup_timeout_secs
        timeout = HealthRules.of(settings, worker.spec).timeout
        pause = FIRST_RETRY_SECS
        while worker.status == PENDING:
            try:
                async with self._slots:
                    return await admin.probe(timeout)
            except EngineError as error:
                worker.error = error.message
                if time.monotonic() + pause > limit:
                    raise
                log.info("worker %s does not answer yet: %s", worker.url, error.message)
            # A worker that is just starting is usually there within seconds: probe faster at first.
            await (admin.wait(pause) if isinstance(admin, ZmqAdmin) else asyncio.sleep(pause))
            pause = min(float(settings.worker_startup_check_interval), pause * 2)
        return None

    def _registration_failed(self, worker: Worker, reason: str, error: Exception) -> None:
        expected = isinstance(error, ValueError | EngineError | OSError)
        log.error("registration of worker %s failed: %s", worker.url, reason, exc_info=None if expected else error)
        failed = self.router.failed_jobs
        failed[worker.id] = (worker.url, reason, time.time())
        while len(failed) > MAX_FAILED_JOBS:
            del failed[next(iter(failed))]
        self.registry.remove(worker)
        self.router.spawn(self._disconnect(worker.url), f"disconnect {worker.url}")

    async def _describe(self, worker: Worker, facts: WorkerFacts) -> None:
        """Fill the worker from what its engine says. Raises ``ValueError`` for a bad override."""
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
        check_parsers(worker.url, worker.cards, worker.labels)
        for card in worker.cards:
            card.context_length = card.context_length or facts.context_length
            card.architectures = card.architectures or facts.architectures
            card.hf_model_type = card.hf_model_type or facts.model_type
            await self._find_tokenizer(worker, card, facts)

    def _activate(self, worker: Worker) -> None:
        worker.status = READY
        worker.error = ""
        self.router.metrics.worker_registered(worker.name, http2=worker.transport == "grpc")
        self.router.metrics.workers.probed(worker.name, worker.worker_type, success=True, ready=True)

    def _follow_links(self, worker: Worker) -> None:
        """From now on the connections of a ZMQ worker's engines decide about its status."""
        admin = self.admins.get(worker.url)
        if isinstance(admin, ZmqAdmin):
            admin.update()

    def _split_ranks(self, worker: Worker) -> list[Worker]:
        """With ``--dp-aware`` one URL becomes a worker per data-parallel rank."""
        if not self.settings.dp_aware or worker.dp_size <= 1:
            return [worker]
        worker.dp_rank = 0
        ranks = [worker]
        for rank in range(1, worker.dp_size):
            other = self.registry.new_worker(worker.spec, self.router.breaker_changed, rank)
            other.describe_like(worker)
            self.registry.workers[other.id] = other
            ranks.append(other)
        return ranks

    # Replacement -----------------------------------------------------------------------------------

    def replace(self, old: Worker, renewed: Worker) -> None:
        """Register a worker again under the same id; the old entry serves until the new one is described, and stays if
        that fails."""
        renewed.id, renewed.dp_rank = old.id, old.dp_rank
        if old.status == PENDING:
            self.register(renewed)
            return
        self._start(old, self.router.spawn(self._replace(old, renewed), f"replace {old.name}"))

    async def _replace(self, old: Worker, renewed: Worker) -> None:
        # A connection of its own: the engine behind the URL may be of another kind now.
        admin = self._open(renewed)
        try:
            facts = await self._connect(renewed, admin)
            admin, self.admins[renewed.url] = self.admin(old), admin
            assert facts is not None
            async with self._slots:
                await self._describe(renewed, facts)
        except Exception as error:
            log.error("worker %s is not updated: %s", old.name, error)
            old.error, old.failed_at = str(error), time.time()
            return
        finally:
            if self.admins.get(renewed.url) is not admin:  # sockets of a ZMQ worker have one owner, it stays
                await admin.close()
        if self.registry.workers.get(old.id) is not old or old.status == DRAINING:
            return
        renewed.take_over(old)
        for policy in self.router.policies.values():
            policy.forget(old)
        self._activate(renewed)
        self.registry.add(renewed)
        self._follow_links(renewed)
        self.watch(renewed.url)

    # Tokenizers ------------------------------------------------------------------------------------

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
        registry.tokenizers.setdefault(card.id, TokenizerSource(card.id, path, template))

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

    # Watching and removal --------------------------------------------------------------------------

    def watch(self, url: str) -> None:
        """Watch the workers behind ``url``, by their present rules."""
        running = self._watches.pop(url, None)
        if running is not None:
            running.stop()
        self._watches[url] = Watch(self.router, url)

    def suspect(self, url: str) -> None:
        """Requests to the worker fail: see whether it is there."""
        if url in self._watches:
            self._watches[url].hurry()

    def drain(self, worker: Worker) -> None:
        """Stop routing to the worker; it disappears when its requests are done, at the earliest after a few seconds."""
        worker.status = DRAINING
        self.registry.changed()
        self._start(worker, self.router.spawn(self._remove(worker), f"remove {worker.name}"))

    async def _remove(self, worker: Worker) -> None:
        await asyncio.sleep(REMOVAL_SECS)
        while worker.inflight > 0:
            await asyncio.sleep(0.2)
        self.registry.remove(worker)
        self.router.forget(worker)
        await self._disconnect(worker.url)

    async def _disconnect(self, url: str) -> None:
        """Close the management connection of a URL that has no worker any more."""
        if self.registry.find_url(url):
            return
        watch = self._watches.pop(url, None)
        if watch is not None:
            watch.stop()
        admin = self.admins.pop(url, None)
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
