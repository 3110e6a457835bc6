"""The life of ``smg serve``: engines and gateway as process groups, readiness, the end.

Everything stops when one replica or the gateway ends. The gateway is stopped first, so that it can drain while its
engines still answer; a second signal skips the waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from smg.engine_commands import Replica
from smg.settings import Settings

log = logging.getLogger("smg.serve")

POLL_SECS = 2.0
FIRST_POLL_SECS = 0.1
ENGINE_STOP_SECS = 30.0
PROBE_SECS = 2.0
_PR_SET_PDEATHSIG = 1
_SERVING = b"\x08\x01"


class NotStartedError(Exception):
    """An engine did not become healthy in time, or ended before it did."""


@dataclass(slots=True)
class Running:
    """A started process group."""

    name: str
    process: subprocess.Popen[bytes]

    def signal(self, number: int) -> None:
        """Signal the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def end_with_parent() -> None:
    """Ask the kernel to end this process when its parent is killed (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start_engine(replica: Replica) -> Running:
    """Start an engine as the leader of its own session. Raises ``OSError``. Runs before any thread exists."""
    process = subprocess.Popen(  # noqa: S603 - the command was put together by engine_commands
        replica.command,
        env={**os.environ, **replica.environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    return Running(replica.name, process)


def start_gateway(settings: Settings) -> Running:
    """Start the gateway as the leader of its own session, its settings on stdin. Raises ``OSError``."""
    command = [sys.executable, "-m", "smg.gateway_child"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.msgpack.encode(settings))
        process.stdin.close()
    return Running("gateway", process)


def grpc_ready(url: str) -> bool:
    """Whether the standard health service says SERVING; an engine without that service is ready when it answers."""
    import grpc

    address = url.partition("://")[2]
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        try:
            answer: bytes = check(b"", timeout=PROBE_SECS)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNIMPLEMENTED)
    return answer == _SERVING


def http_ready(url: str) -> bool:
    """Whether ``GET /health`` answers 200."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=PROBE_SECS) as answer:  # noqa: S310 - our own worker URL
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def is_ready(url: str) -> bool:
    """Whether a replica can take requests. A ZMQ engine dials the gateway, so there is nothing to wait for."""
    if url.startswith("ipc://"):
        return True
    return http_ready(url) if url.startswith("http") else grpc_ready(url)


class Serve:
    """Runs replicas and one gateway until a signal or a death."""

    def __init__(self, replicas: list[Replica], settings: Settings, startup_timeout: float) -> None:
        self.replicas = replicas
        self.settings = settings
        self.startup_timeout = startup_timeout
        self.engines: list[Running] = []
        self.gateway: Running | None = None
        self.signals: list[int] = []

    def run(self) -> int:
        """Start everything, wait, stop everything; returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _frame: self.signals.append(got))
        status = 0
        try:
            for replica in self.replicas:
                # Not the command: engine flags may hold keys.
                log.info("starting %s at %s", replica.name, replica.url)
                self.engines.append(start_engine(replica))
            self._wait_ready()
            if not self.signals:
                self.gateway = start_gateway(self.settings)
            status = self._watch()
        except (OSError, NotStartedError) as error:
            log.error("%s", error)
            status = 1
        finally:
            self._stop()
        return 128 + self.signals[0] if self.signals else status

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.startup_timeout
        pause = FIRST_POLL_SECS
        waiting = list(self.replicas)
        while waiting and not self.signals:
            self._raise_if_dead()
            waiting = [replica for replica in waiting if not is_ready(replica.url)]
            if not waiting:
                return
            if time.monotonic() > deadline:
                names = ", ".join(replica.name for replica in waiting)
                raise NotStartedError(f"{names} not healthy within {self.startup_timeout:g} s")
            self._sleep(pause)
            pause = min(POLL_SECS, pause * 1.5)

    def _raise_if_dead(self) -> None:
        for engine in self.engines:
            if engine.process.poll() is not None:
                raise NotStartedError(
                    f"{engine.name} ended with status {engine.process.returncode} before it was ready"
                )

    def _watch(self) -> int:
        """Wait for a signal or the first death; returns the status to exit with."""
        while not self.signals:
            for running in [*self.engines, *([self.gateway] if self.gateway else [])]:
                code = running.process.poll()
                if code is not None:
                    log.error("%s ended with status %d, stopping the others", running.name, code)
                    return code if running is self.gateway and code > 0 else 1
            self._sleep(0.5)
        return 0

    def _sleep(self, seconds: float) -> None:
        """Sleep, cut short by a signal."""
        limit = time.monotonic() + seconds
        seen = len(self.signals)
        while len(self.signals) == seen and (left := limit - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def _stop(self) -> None:
        if self.gateway is not None:
            grace = max(0, self.settings.shutdown_grace_period_secs) + 5.0
            self._end([self.gateway], grace, lambda: len(self.signals) > 1)
        self._end(self.engines, ENGINE_STOP_SECS, lambda: len(self.signals) > 1)

    def _end(self, group: list[Running], grace: float, hurry: Callable[[], bool]) -> None:
        for running in group:
            running.signal(signal.SIGTERM)
        limit = time.monotonic() + grace
        while any(running.process.poll() is None for running in group) and time.monotonic() < limit and not hurry():
            time.sleep(0.05)
        for running in group:
            # Also when the leader is gone: engines leave helpers behind.
            running.signal(signal.SIGKILL)
            running.process.wait()
