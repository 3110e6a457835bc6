"""A ZMQ worker to test against: the embedded engine behind real sockets, dialling a gateway."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway import Gateway, gateway
from sim_worker import VOCABULARY

from smg.engines.zmq.addresses import handshake_address, path_of
from smg.simengine.core import SimEngine, SimOptions
from smg.simengine.script import Script
from smg.simengine.vocabulary import SHIPPED_MODEL
from smg.simengine.zmq.front import ZmqFront


class ZmqWorker:
    """The engines (ranks) of one worker. ``options`` and ``script`` hold for the next start."""

    def __init__(
        self, url: str, kind: str, options: SimOptions | None, script: Script | None, ranks: int, lockstep: bool
    ) -> None:
        self.url = url
        self.kind = kind
        self.options = options or SimOptions()
        self.script = script
        self.count = ranks
        self.lockstep = lockstep
        self.engines: list[SimEngine] = []
        self.fronts: list[ZmqFront] = []
        self._steps: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Dial. A gateway need not be there yet."""
        address = handshake_address(path_of(self.url))
        self.engines = [SimEngine(VOCABULARY, self.options, self.script) for _ in range(self.count)]
        self.fronts = [
            ZmqFront(engine, self.kind, address, rank=rank, ranks=self.count, lockstep=self.lockstep)
            for rank, engine in enumerate(self.engines)
        ]
        self._steps = [asyncio.create_task(engine.run()) for engine in self.engines]

    def kill(self, *, sentinel: bool = False) -> None:
        """Drop all connections, as a killed process does."""
        for front in self.fronts:
            front.crash(sentinel=True) if sentinel else front.close()
        for task in self._steps:
            task.cancel()

    @property
    def running(self) -> int:
        """Requests that run or wait in the engines."""
        return sum(load.running + load.waiting for engine in self.engines for load in engine.loads())

    @property
    def fatal(self) -> list[str]:
        """Requests a real engine would not have survived."""
        return [text for front in self.fronts for text in front.fatal]


@asynccontextmanager
async def zmq_worker(
    kind: str = "vllm",
    options: SimOptions | None = None,
    script: Script | None = None,
    *,
    ranks: int = 1,
    lockstep: bool = False,
) -> AsyncIterator[ZmqWorker]:
    """A worker that has dialled; nothing it got may have been fatal."""
    directory = Path(tempfile.mkdtemp(prefix="smgz-"))
    worker = ZmqWorker(f"ipc://{directory}/e", kind, options, script, ranks, lockstep)
    worker.start()
    try:
        yield worker
        assert worker.fatal == []
    finally:
        worker.kill()
        shutil.rmtree(directory)


@asynccontextmanager
async def zmq_gateway(*workers: ZmqWorker, flags: tuple[str, ...] = ()) -> AsyncIterator[Gateway]:
    """A gateway in front of ZMQ workers of one kind; the model is called ``sim``."""
    first = workers[0]
    own = (
        "--backend", first.kind, "--model-path", str(SHIPPED_MODEL), "--model-alias", f"sim={SHIPPED_MODEL}",
        "--zmq-engine-count", str(first.count),
    )  # fmt: skip
    async with gateway(*(worker.url for worker in workers), flags=(*own, *flags)) as running:
        yield running


def sockets(worker: ZmqWorker) -> list[str]:
    """Socket files of a worker that exist now."""
    return sorted(path.name for path in Path(path_of(worker.url)).parent.glob("*.sock"))
