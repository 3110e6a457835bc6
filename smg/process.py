"""What every child process of the gateway has in common: its control channel, its inbox, its links, its end.

A child is forked by the supervisor with one end of a ``SOCK_SEQPACKET`` socket pair. It binds its inbox, says
``Ready``, follows the table of live peers, and ends when it is told to drain or when the control socket reaches its
end (the supervisor is gone). Children ignore SIGTERM and SIGINT: a service manager signals the whole group, but only
the supervisor decides the order.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import setproctitle
import uvloop
import zmq

from smg import listeners
from smg.ipc import Handlers, Inbox, Links, peer_address
from smg.messages import ControlMessage, Drain, Idle, Peer, PeerTable, Ready
from smg.settings import Settings
from smg.telemetry.logs import setup_logging
from smg.telemetry.metrics import ProcessMetrics

log = logging.getLogger("smg.process")

MAX_CONTROL_BYTES = 256 * 1024
# Requests make many short-lived containers and next to no cycles: the defaults look for those far too often.
GC_THRESHOLDS = (20_000, 20, 100)

# glibc's mallopt: memory that is freed stays with the process up to this much, and only larger blocks are mapped on
# their own. With the defaults every frame of more than 128 KiB is mapped, faulted in page by page and unmapped again.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 * 1024 * 1024

_encode_control = msgspec.msgpack.Encoder().encode
_decode_control = msgspec.msgpack.Decoder(ControlMessage).decode


class ControlChannel:
    """One end of the control socket pair; messages keep their boundaries."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: ControlMessage) -> bool:
        """Send; False if the other end is gone or not reading."""
        try:
            self._sock.send(_encode_control(message))
        except OSError:
            return False
        return True

    def receive(self) -> ControlMessage | None:
        """The next message; None at the end of the channel. Raises ``BlockingIOError`` when there is none yet."""
        try:
            data = self._sock.recv(MAX_CONTROL_BYTES)
        except ConnectionError:
            return None
        return _decode_control(data) if data else None

    def close(self) -> None:
        self._sock.close()


class ChildProcess:
    """Base of the processes of the ring. Subclasses set ``role`` and ``talks_to``, override the hooks, and put their
    ``handlers`` of ring messages into the table before they are ready."""

    role = "child"
    talks_to: tuple[str, ...] = ()

    def __init__(self, index: int, generation: int, settings: Settings, run_dir: Path, control: ControlChannel) -> None:
        self.index = index
        self.generation = generation
        self.settings = settings
        self.run_dir = run_dir
        self.control = control
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.handlers: Handlers = {}
        self.draining = False
        self.drain_deadline = 0.0
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # Hooks ---------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Load what the process needs before it is ready; returns a word for the start-up line."""
        return ""

    def on_peers(self, appeared: list[Peer], vanished: list[Peer]) -> None:
        """The table of live peers changed."""

    async def drain(self) -> None:
        """Finish running work; return when there is none left."""

    async def stop(self) -> None:
        """Release resources; the last hook that runs."""

    # Life ----------------------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str = "") -> asyncio.Task[None]:
        """Run a background task that is kept alive and whose failure is logged."""
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)
        if name:
            task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task %s failed", task.get_name(), exc_info=task.exception())

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        address = peer_address(self.run_dir, self.role, self.index, self.generation)
        self.links = Links(self.context, self.talks_to)
        self.inbox = Inbox(self.context, address, self.handlers)
        loop.add_reader(self.control.fileno(), self._read_control)
        detail = await self.start()
        self.spawn(ProcessMetrics(self.role).watch_loop(), "loop delay")
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self.control.send(Ready(self.role, self.index, self.generation, detail))
        await self._stopped.wait()
        loop.remove_reader(self.control.fileno())
        await self.stop()
        for task in list(self._tasks):
            task.cancel()
        self.links.close()
        self.inbox.close()
        self.context.term()

    def _read_control(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                message = self.control.receive()
                if message is None:
                    self._stopped.set()
                    asyncio.get_running_loop().remove_reader(self.control.fileno())
                    return
                if isinstance(message, PeerTable):
                    self.on_peers(*self.links.update(message.peers))
                elif isinstance(message, Drain) and not self.draining:
                    self.draining = True
                    self.drain_deadline = message.deadline
                    self.spawn(self._drain(), "drain")

    async def _drain(self) -> None:
        await self.drain()
        self.control.send(Idle(self.role, self.index))


def keep_freed_memory() -> None:
    """Have the allocator keep freed buffers for the next ones. Does nothing where there is no ``mallopt``."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def run_in_batches() -> None:
    """Tell the scheduler not to interrupt whoever runs whenever a message for this process arrives. The processes of
    the ring wake each other all the time: run to its end, a loop iteration handles more messages at once and finds its
    caches warm (a tenth less CPU where there are more processes than cores). On an idle core nothing changes."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_child(
    cls: type[ChildProcess], index: int, generation: int, settings: Settings, run_dir: Path, control: ControlChannel
) -> int:
    """Body of a forked child: never returns to the supervisor's code. The exit status is 0 after an orderly end."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    setproctitle.setproctitle(f"smg: {cls.role} {index}")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    keep_freed_memory()
    run_in_batches()
    listeners.keep_for(cls.role, index)
    setup_logging(settings, f"{cls.role}{index}")

    async def body() -> None:
        await cls(index, generation, settings, run_dir, control).main()

    try:
        uvloop.run(body())
    except Exception:
        log.exception("%s %d ended with an error", cls.role, index)
        return 1
    return 0
