"""One ZMQ worker as the router sees it: it answers the handshake and keeps the state; detok processes hold the data
sockets and report what they see of the engines.

The engines of a worker are its ranks. A rank serves once it has registered with a detok process and said READY, or
when it did so towards an earlier process of the gateway and is found alive (its registration is kept in a file beside
the sockets). It stops the moment a detok process sees its connection end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import orjson
import zmq

from smg.engines.base import EngineError
from smg.engines.grpc.facts import Health, LoadReport, Outcome, WorkerFacts
from smg.engines.zmq.addresses import (
    MAX_RANKS,
    check_paths,
    handshake_address,
    input_path,
    output_path,
    path_of,
    prepare_directory,
)
from smg.engines.zmq.codecs import zmq_kind
from smg.engines.zmq.handshake import Addresses, HandshakeServer, Init, decode_ready
from smg.messages import EngineAttach, EngineDetach, EngineLink, EngineLoad
from smg.router.urls import ZMQ_BACKENDS
from smg.router.worker import NOT_READY, READY, Worker
from smg.router.zmq_state import Rank, SavedState, labels_of, rank_load, vocabulary_size
from smg.vocab.load import ModelFiles, TokenizerLoadError, load_model_dir

if TYPE_CHECKING:
    from smg.router.zmq_workers import ZmqWorkers

log = logging.getLogger("smg.router.zmq")

CALL_SECS = 5.0
# How long a restarted detok process may take to find an engine that was running.
ADOPTION_SECS = 3.0


class ZmqAdmin:
    """One ``ipc://`` worker: handshake, state, and the management calls of ``WorkerAdmin``."""

    def __init__(self, hub: ZmqWorkers, worker: Worker) -> None:
        """Raises ``ValueError`` for a worker that cannot be served."""
        settings = hub.router.settings
        self.url = worker.url
        self.path = path_of(worker.url)
        self.engine = worker.kind or settings.backend
        if self.engine not in ZMQ_BACKENDS:
            known = " or ".join(ZMQ_BACKENDS)
            raise ValueError(f"worker {worker.url} has unsupported runtime '{self.engine}' over ZMQ: choose {known}")
        self.model_path = worker.labels.get("model_path") or settings.model_path or ""
        if not (self.model_path or worker.cards or worker.labels.get("model_id")):
            raise ValueError(f"worker {worker.url} has no model identity: set --model-path or the label model_id")
        count = int(worker.spec.get("dp_size") or settings.zmq_engine_count or 1)
        if count > MAX_RANKS:
            raise ValueError(f"worker {worker.url}: more than {MAX_RANKS} engines")
        self.address = handshake_address(self.path, worker.spec.get("zmq_handshake_address"))
        self.ranks = [Rank() for _ in range(count)]
        self.registered = False
        self._hub = hub
        self._home = zlib.crc32(worker.url.encode()) % settings.detok_procs
        self._clients = settings.detok_procs
        self._orphans: list[int] = []
        self._files: ModelFiles | None = None
        self._model_read = False
        self._vocab_size = 0
        self._told: EngineAttach | None = None
        self._saved: SavedState | None = None
        self._server: HandshakeServer | None = None
        self._changed = asyncio.Event()
        self._adoption: asyncio.TimerHandle | None = None
        self._state_file = Path(f"{self.path}-state.json")
        check_paths(self.path, self._clients, count)

    @property
    def kind(self) -> str:
        """The engine's name."""
        return self.engine

    # Start ----------------------------------------------------------------------------------------

    async def probe(self, timeout: float = CALL_SECS) -> WorkerFacts:
        """Facts of the worker once all its engines have registered. Raises ``EngineError`` (UNAVAILABLE) when that has
        not happened after ``timeout`` seconds, and ``ValueError`` or ``OSError`` when the sockets cannot be had."""
        if self._server is None:
            self._start()
        if not self._model_read:
            await self._read_model()
        deadline = asyncio.get_running_loop().time() + timeout
        while not self._complete():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                missing = sum(not rank.usable or not rank.links for rank in self.ranks)
                text = f"waiting at {self.address} for {missing} of {len(self.ranks)} engine(s)"
                raise EngineError("UNAVAILABLE", text)
            await self.wait(left)
        self.registered = True
        self._tell()
        return self._facts()

    async def wait(self, timeout: float) -> None:
        """Until something changes, at most ``timeout`` seconds."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return

    def _complete(self) -> bool:
        return all(rank.usable and rank.links for rank in self.ranks)

    def _start(self) -> None:
        prepare_directory(self.path)
        try:
            self._server = HandshakeServer(
                self._hub.router.context, self.address, self._init, self._on_hello, self._on_ready
            )
        except zmq.ZMQError as error:
            owner = self._hub.owner_of(self.address, self)
            by = f", already claimed by worker {owner}" if owner else ""
            raise EngineError(
                "UNAVAILABLE", f"cannot bind handshake address {self.address}{by}: {error.strerror}"
            ) from error
        self._restore()
        for detok in self._hub.detoks():
            self.attach(detok)

    async def _read_model(self) -> None:
        """What the model's directory says and no engine does."""
        if self.model_path:
            try:
                self._files = await asyncio.to_thread(load_model_dir, self.model_path)
            except TokenizerLoadError as error:
                log.warning("worker %s: %s", self.url, error)
            else:
                self._vocab_size = vocabulary_size(self._files.config)
        self._model_read = True

    def _restore(self) -> None:
        """Registrations of engines that an earlier gateway may have left running."""
        try:
            saved = msgspec.json.decode(self._state_file.read_bytes(), type=SavedState)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s cannot be used: %s", self._state_file, error)
            return
        if saved.kind != self.engine or set(saved.ranks) != set(range(len(self.ranks))):
            return
        self._orphans = list(range(self._clients, saved.clients))
        self._clients = min(saved.clients, self._clients)
        for number, ready in saved.ranks.items():
            self.ranks[number].ready = ready

    def _save(self) -> None:
        ranks = {number: rank.ready for number, rank in enumerate(self.ranks) if rank.ready is not None}
        state = SavedState(self.engine, self._clients, ranks)
        if state == self._saved:
            return
        temporary = self._state_file.with_suffix(".tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(state))
            os.chmod(temporary, 0o600)
            temporary.replace(self._state_file)
            self._saved = state
        except OSError as error:
            log.warning("the state of worker %s cannot be kept: %s", self.url, error)

    # Handshake ------------------------------------------------------------------------------------

    def clients(self) -> list[int]:
        """The detok processes that are clients of the engines, in the order of the engines' address lists."""
        return list(range(self._clients)) if self.engine == "vllm" else [self._home]

    def _init(self, rank: int) -> Init | None:
        if not 0 <= rank < len(self.ranks):
            return None
        if self.engine == "vllm":
            self._clients = self._hub.router.settings.detok_procs
        numbers = range(len(self.clients()))
        return Init(
            Addresses(
                [f"ipc://{input_path(self.path, number, rank)}" for number in numbers],
                [f"ipc://{output_path(self.path, number)}" for number in numbers],
            )
        )

    def _on_hello(self, rank: int) -> None:
        log.info("worker %s: engine %d has dialled", self.url, rank)
        self.ranks[rank].reset()
        self.ranks[rank].awaiting = True
        self._saved = None
        self._state_file.unlink(missing_ok=True)
        for detok in self._hub.detoks():
            self.attach(detok)
        self.update()

    def _on_ready(self, rank: int) -> None:
        if 0 <= rank < len(self.ranks):
            self.ranks[rank].awaiting = False
            self.update()

    # Detok processes ------------------------------------------------------------------------------

    def attach(self, detok: int) -> None:
        """Have a detok process hold its data sockets."""
        clients = self.clients()
        if self._server is not None and detok in clients:
            self._hub.send(detok, self._attachment(clients.index(detok)))

    def _attachment(self, client: int) -> EngineAttach:
        known = [rank.ready for rank in self.ranks if rank.ready is not None]
        return EngineAttach(
            self.url,
            zmq_kind(self.engine),
            len(self.ranks),
            client,
            adopt=bool(known),
            lockstep=any(ready.lockstep for ready in known),
            context_length=min((ready.max_model_len for ready in known), default=0),
            vocab_size=self._vocab_size,
            orphans=[] if client else self._orphans,
        )

    def _tell(self) -> None:
        """Tell the detok processes what is new of the engines."""
        attachment = self._attachment(0)
        if attachment != self._told:
            self._told = attachment
            for detok in self._hub.detoks():
                self.attach(detok)

    def detok_appeared(self, detok: int) -> None:
        self.attach(detok)
        self._stop_adoption()
        self._adoption = self._hub.router.loop.call_later(ADOPTION_SECS, self._check_links)

    def detok_vanished(self, detok: int) -> None:
        # The time of its successor counts, from when that one appears.
        self._stop_adoption()
        for rank in self.ranks:
            rank.links.discard(detok)
        self.update()

    def _stop_adoption(self) -> None:
        if self._adoption is not None:
            self._adoption.cancel()
            self._adoption = None

    def _check_links(self) -> None:
        """Engines nobody has found again are gone."""
        lost = [rank for rank in self.ranks if rank.ready is not None and not rank.awaiting and not rank.links]
        if self.registered and lost:
            for rank in lost:
                rank.reset()
            self.update()

    def on_link(self, message: EngineLink) -> None:
        """A detok process gained or lost the connection to an engine."""
        if not 0 <= message.rank < len(self.ranks):
            return
        rank = self.ranks[message.rank]
        if message.up:
            rank.links.add(message.detok)
            if message.ready:
                rank.ready = decode_ready(message.ready, self.engine)
        else:
            rank.links.discard(message.detok)
            if message.reason:
                rank.reset()
        self.update()

    def on_load(self, message: EngineLoad) -> None:
        if not 0 <= message.rank < len(self.ranks):
            return
        self.ranks[message.rank].load = message
        if self.ranks[message.rank].ready is not None:
            report = self._report()
            for worker in self._hub.router.registry.find_url(self.url):
                worker.reported(report, time.monotonic())

    def update(self) -> None:
        """Bring the workers of this URL in line with the engines."""
        self._changed.set()
        if not self.registered:
            return
        if self._complete():
            self._tell()
            self._save()
        router = self._hub.router
        changed = False
        for worker in router.registry.find_url(self.url):
            ranks = self.ranks if worker.dp_rank < 0 else self.ranks[worker.dp_rank : worker.dp_rank + 1]
            worker.detoks = self._reachable_from(ranks)
            changed = self._settle(worker, ranks) or changed
        if changed:
            router.registry.changed()
        router.retry_waiting()

    def _reachable_from(self, ranks: list[Rank]) -> frozenset[int]:
        """The detok processes that can serve requests with these engines."""
        links = [frozenset(rank.links) if rank.usable else frozenset() for rank in ranks]
        if self._lockstep:
            return frozenset.intersection(*links)
        return frozenset.union(*links)

    @property
    def _lockstep(self) -> bool:
        return any(rank.ready is not None and rank.ready.lockstep for rank in self.ranks)

    def _settle(self, worker: Worker, ranks: list[Rank]) -> bool:
        """Move the worker between ready and not ready; whether it moved. While only a detok process is missing it stays
        ready: its requests wait for that process."""
        alive = [rank.usable for rank in ranks]
        serves = all(alive) if self._lockstep else any(alive)
        if worker.status == READY and not serves:
            worker.status = NOT_READY
        elif worker.status == NOT_READY and serves and worker.detoks:
            worker.status = READY
            worker.failures = 0
            if worker.breaker.readmit():
                self._hub.router.metrics.breakers.readmitted(worker.name)
        else:
            return False
        log.warning("worker %s is %s", worker.name, worker.status)
        return True

    # Facts and calls ------------------------------------------------------------------------------

    def _facts(self) -> WorkerFacts:
        known = [rank.ready for rank in self.ranks if rank.ready is not None]
        first = known[0]
        files = self._files
        config = files.config if files is not None else {}
        return WorkerFacts(
            kind=self.engine,
            model_id=self.model_path,
            labels=labels_of(first, self.model_path),
            model_path=self.model_path,
            tokenizer_path=self.model_path,
            context_length=min(ready.max_model_len for ready in known),
            vocab_size=self._vocab_size,
            default_sampling_params=orjson.dumps(files.generation_config).decode() if files is not None else "",
            dp_size=len(self.ranks),
            block_size=first.tokens_per_block,
            architectures=[str(name) for name in config.get("architectures") or ()],
            model_type=str(config.get("model_type") or ""),
        )

    async def health(self, timeout: float = CALL_SECS) -> Health:
        """Whether the engines are connected and, where they take calls, answer. Raises ``EngineError``."""
        serving = [number for number, rank in enumerate(self.ranks) if rank.usable and rank.links]
        if not serving or (self._lockstep and len(serving) < len(self.ranks)):
            raise EngineError("UNAVAILABLE", "the engine is not connected")
        if self.engine != "vllm":
            return Health(True)
        answers = await asyncio.gather(*(self._call(number, "is_sleeping", (), timeout) for number in serving))
        return Health(not any(answers), "the engine sleeps" if any(answers) else "")

    async def loads(self, timeout: float = CALL_SECS) -> LoadReport:
        """The loads that the engines reported last. Raises ``EngineError`` as long as there are none."""
        report = self._report()
        if not report.loads:
            raise EngineError("UNIMPLEMENTED", "the engine has reported no load yet")
        return report

    def _report(self) -> LoadReport:
        loads = [
            rank_load(number, rank.load, rank.ready)
            for number, rank in enumerate(self.ranks)
            if rank.load is not None and rank.ready is not None
        ]
        version = next((rank.ready.vllm_version for rank in self.ranks if rank.ready is not None), None)
        return LoadReport(datetime.now(UTC).isoformat(), version or "", len(loads), loads)

    async def flush_cache(self, timeout: float = 30.0) -> Outcome:
        """Empty the prefix caches. Raises ``EngineError``."""
        done = await self._call_all("reset_prefix_cache", (), timeout)
        return Outcome(all(value is not False for value in done), "" if all(done) else "the cache is in use")

    async def start_profile(self, options: dict[str, object] | None = None, timeout: float = 30.0) -> Outcome:
        """Start the engines' profilers. Raises ``EngineError``."""
        await self._call_all("profile", (True,), timeout)
        return Outcome(True)

    async def stop_profile(self, timeout: float = 120.0) -> Outcome:
        """Stop the engines' profilers. Raises ``EngineError``."""
        await self._call_all("profile", (False,), timeout)
        return Outcome(True)

    async def fetch_tokenizer(self, target: Path) -> NoReturn:
        """Headless engines send no files. Raises ``EngineError``."""
        raise EngineError("UNIMPLEMENTED", "workers over ZMQ send no tokenizer")

    async def _call_all(self, method: str, arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        if self.engine != "vllm":
            raise EngineError("UNIMPLEMENTED", f"{self.engine} workers over ZMQ take no calls")
        serving = [number for number, rank in enumerate(self.ranks) if rank.usable]
        if not serving:
            raise EngineError("UNAVAILABLE", "the engine is not connected")
        return await asyncio.gather(*(self._call(number, method, arguments, timeout) for number in serving))

    async def _call(self, rank: int, method: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        detok = min(self.ranks[rank].links, default=-1)
        return await self._hub.call(detok, self, rank, method, arguments, timeout)

    async def close(self) -> None:
        """Give the worker up. Its engines keep running, and can be taken over as long as the state file is there."""
        self._stop_adoption()
        if self._server is not None:
            self._server.close()
            self._server = None
        for detok in self._hub.detoks():
            self._hub.send(detok, EngineDetach(self.url, zmq_kind(self.engine)))
        self._hub.forget(self)
