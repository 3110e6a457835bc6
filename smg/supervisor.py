"""The ``smg launch`` process: binds the listeners, forks the ring, watches it, drains it, leaves nothing behind.

It runs one plain ``selectors`` loop, holds no ZMQ context, no event loop and no threads, so that forking is safe at
any time: a restarted child is a fork of the same clean parent, with all modules loaded and their pages shared.

Order of things:

* Listening sockets are bound here, before anything is forked: a taken port stops start-up with one line, and a
  restarted frontend serves the same socket, so connections in its accept queue survive.
* Children announce ``Ready``; the table of live peers goes to everyone whenever it changes.
* A child that ends is restarted with back-off. Its generation is part of its address.
* The first SIGTERM or SIGINT drains, the second ends at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from smg.ipc import peer_address
from smg.listeners import bind_listeners, inherited, publish
from smg.messages import ControlMessage, Drain, Idle, Peer, PeerTable, Ready
from smg.process import MAX_CONTROL_BYTES, ChildProcess, ControlChannel, run_child
from smg.run_dir import run_dir
from smg.settings import Settings
from smg.telemetry.exposition import mark_process_dead
from smg.telemetry.metrics import SupervisorMetrics
from smg.telemetry.series import configure

log = logging.getLogger("smg.supervisor")

BACKOFF_FIRST_SECS = 0.1
BACKOFF_LIMIT_SECS = 5.0
STABLE_AFTER_SECS = 30.0
STOP_SECS = 3.0
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Child:
    """One slot of the ring: the process that fills it changes, role and index stay."""

    role: str
    index: int
    cls: type[ChildProcess]
    pid: int = 0
    generation: int = 0
    control: ControlChannel | None = None
    ready: bool = False
    idle: bool = False
    started: float = 0.0
    failures: int = 0
    restart_at: float = 0.0


class Supervisor:
    """Runs the ring until it is told to stop. One instance per ``smg launch``."""

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        self.settings = settings
        self.run_dir = run_dir
        self.children = [Child(role, index, cls) for role, count, cls in _ring(settings) for index in range(count)]
        self.metrics = SupervisorMetrics(sorted({child.role for child in self.children}))
        self.selector = selectors.DefaultSelector()
        self.signals = 0
        self.exit_status = 0
        self.drain_deadline = 0.0
        self.announced = False
        self._wake_read, self._wake_write = os.pipe()

    # Life ----------------------------------------------------------------------------------------

    def run(self) -> int:
        """Fork, watch, drain, clean up; returns the exit status."""
        self._install_signals()
        gc.collect()
        gc.freeze()
        try:
            for child in self.children:
                self._fork(child)
            while not self._finished():
                self._wait_once()
        finally:
            self._end_children()
        return self.exit_status

    def _install_signals(self) -> None:
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)
        self.selector.register(self._wake_read, selectors.EVENT_READ, None)

    def _wait_once(self) -> None:
        for key, _ in self.selector.select(self._next_timeout()):
            if key.data is None:
                self._on_signals(os.read(self._wake_read, 4096))
            else:
                self._on_control(key.data)
        self._reap()
        now = time.monotonic()
        for child in self.children:
            if child.pid == 0 and child.restart_at and now >= child.restart_at and not self.signals:
                self._fork(child)

    def _next_timeout(self) -> float:
        times = [child.restart_at for child in self.children if child.pid == 0 and child.restart_at]
        if self.drain_deadline:
            times.append(self.drain_deadline)
        return max(0.0, min(times) - time.monotonic()) if times else 60.0

    def _finished(self) -> bool:
        if self.signals == 0:
            return False
        if self.signals > 1 or time.monotonic() >= self.drain_deadline:
            return True
        return all(child.idle or child.pid == 0 for child in self.children)

    # Children ------------------------------------------------------------------------------------

    def _fork(self, child: Child) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_CONTROL_BYTES)
        child.generation += 1
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _die_with_parent(parent)
                ours.close()
                self._drop_inherited()
                control = ControlChannel(theirs)
                status = run_child(child.cls, child.index, child.generation, self.settings, self.run_dir, control)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        theirs.close()
        child.pid, child.started, child.restart_at = pid, time.monotonic(), 0.0
        child.ready = child.idle = False
        child.control = ControlChannel(ours)
        self.selector.register(child.control, selectors.EVENT_READ, child)

    def _drop_inherited(self) -> None:
        """In the child: close what belongs to the supervisor and to siblings."""
        self.selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for other in self.children:
            if other.control is not None:
                other.control.close()

    def _on_control(self, child: Child) -> None:
        while child.control is not None:
            try:
                message: ControlMessage | None = child.control.receive()
            except BlockingIOError:
                return
            if message is None:
                self._drop_control(child)
            elif isinstance(message, Ready):
                child.ready = True
                print(f"smg: {child.role} {child.index} pid {child.pid} {message.detail}".rstrip(), flush=True)  # noqa: T201
                self._announce()
            elif isinstance(message, Idle):
                child.idle = True

    def _announce(self) -> None:
        for role in {child.role for child in self.children}:
            self.metrics.running.set(sum(child.ready for child in self.children if child.role == role), role)
        table = PeerTable([self._peer(child) for child in self.children if child.ready])
        for child in self.children:
            if child.control is not None:
                child.control.send(table)
        if not self.announced and all(child.ready for child in self.children):
            self.announced = True
            scheme = "https" if self.settings.tls_cert_path else "http"
            print(f"smg: ready on {scheme}://{self.settings.host}:{self.settings.port}", flush=True)  # noqa: T201

    def _peer(self, child: Child) -> Peer:
        address = peer_address(self.run_dir, child.role, child.index, child.generation)
        return Peer(child.role, child.index, child.generation, address)

    def _drop_control(self, child: Child) -> None:
        if child.control is not None:
            self.selector.unregister(child.control)
            child.control.close()
            child.control = None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for child in self.children:
                if child.pid == pid:
                    self._on_exit(child, status)

    def _on_exit(self, child: Child, status: int) -> None:
        self._drop_control(child)
        mark_process_dead(child.pid, str(self.run_dir / "metrics"))  # type: ignore[no-untyped-call]
        address = self._peer(child).address.removeprefix("ipc://")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
        lived = time.monotonic() - child.started
        pid, child.pid, child.ready = child.pid, 0, False
        if self.signals:
            return
        child.failures = 1 if lived > STABLE_AFTER_SECS else child.failures + 1
        delay = min(BACKOFF_LIMIT_SECS, BACKOFF_FIRST_SECS * 2 ** (child.failures - 1))
        child.restart_at = time.monotonic() + delay
        cause = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        self.metrics.restarts.inc(child.role)
        log.warning("%s %d (pid %d) ended with %s, restart in %.1f s", child.role, child.index, pid, cause, delay)
        self._announce()

    # The end -------------------------------------------------------------------------------------

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            self.signals += 1
            if self.signals == 1:
                grace = max(0, self.settings.shutdown_grace_period_secs)
                log.info("shutting down: draining for at most %d s", grace)
                inherited().close()  # the children's copies stay open until they have drained
                self.drain_deadline = time.monotonic() + grace
                for child in self.children:
                    if child.control is not None:
                        child.control.send(Drain(self.drain_deadline))
            else:
                self.exit_status = 128 + number

    def _end_children(self) -> None:
        """Close every control channel (children then stop by themselves), kill what is left."""
        if self.signals > 1:
            self._kill(signal.SIGKILL)
        for child in self.children:
            self._drop_control(child)
        limit = time.monotonic() + STOP_SECS
        while any(child.pid for child in self.children) and time.monotonic() < limit:
            self.selector.select(max(0.0, min(0.2, limit - time.monotonic())))
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._reap()
        self._kill(signal.SIGKILL)
        for child in self.children:
            if child.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, 0)
        self.selector.close()
        signal.set_wakeup_fd(-1)

    def _kill(self, number: int) -> None:
        for child in self.children:
            if child.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this child when the supervisor is gone (a SIGKILLed supervisor can't tell anybody)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _ring(settings: Settings) -> list[tuple[str, int, type[ChildProcess]]]:
    from smg.detok.process import DetokProcess
    from smg.frontend.process import FrontendProcess
    from smg.router.process import RouterProcess
    from smg.telemetry.process import TelemetryProcess
    from smg.tokenizer_pool.process import TokenizerProcess

    return [
        ("router", 1, RouterProcess),
        ("tokenizer", settings.tokenizer_procs, TokenizerProcess),
        ("detok", settings.detok_procs, DetokProcess),
        ("frontend", settings.frontend_procs, FrontendProcess),
        ("telemetry", 1, TelemetryProcess),
    ]


def run(settings: Settings) -> int:
    """Run a gateway in the foreground until it is signalled; returns the exit status. Raises ``ConfigError``."""
    with contextlib.closing(bind_listeners(settings)) as listeners, run_dir(settings.run_dir) as directory:
        metrics_dir = directory / "metrics"
        metrics_dir.mkdir(mode=0o700)
        # prometheus_client decides about multiprocess mode when it is first imported.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_dir)
        # What gRPC has to say of a connection is in the errors of its calls; its own lines are in no log format.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        configure(settings.prometheus_duration_buckets)
        publish(listeners)
        return Supervisor(settings, directory).run()
