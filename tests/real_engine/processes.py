"""A real engine and a gateway as processes of their own sessions; nothing of them may be left at the end."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from smg.engines.zmq.addresses import handshake_port

ROOT = Path(__file__).parents[2]
BIN = os.environ.get("SMG_TEST_ENGINE_BIN", "")
MODEL = os.environ.get("SMG_TEST_ENGINE_MODEL", "")
START_SECS = 240.0
STOP_SECS = 30.0
GRPC_READY = "vLLM gRPC server started"
OPTIONS = (
    "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8", "--dtype", "bfloat16",
    "--num-gpu-blocks-override", "128",
    "--structured-outputs-config", '{"backend":"xgrammar","disable_any_whitespace":true}',
)  # fmt: skip
# Without a parser the engine's own server refuses requests with tools.
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1", "SMG_VLLM_SERVICER_WARMUP": "off", "SMG_VLLM_SERVICER_KV_EVENTS": "0",
}  # fmt: skip


_ports = itertools.cycle(range(30000, 31000))


def free_port() -> int:
    """A port nobody listens on, below those that the system gives to outgoing connections: an engine that is
    restarted must find it free again."""
    for port in itertools.islice(_ports, 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def log_dir() -> Path:
    return Path(os.environ.get("SMG_TEST_ENGINE_LOGS") or tempfile.mkdtemp(prefix="smg-engine-logs-"))


def wait_for(condition: Callable[[], bool], limit: float, alive: Callable[[], bool] = lambda: True) -> float:
    """Wait until ``condition`` holds; seconds it took. Fails when ``alive`` is false or the time is over."""
    start = time.monotonic()
    while not condition():
        assert alive(), "the process ended"
        assert time.monotonic() - start < limit, f"not within {limit} s"
        time.sleep(0.02)
    return time.monotonic() - start


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


class Process:
    """One command in a session of its own, its output in a file."""

    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True, env=os.environ | environment
            )

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """SIGKILL to every process of the session."""
        for pid in members(self.popen.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        wait_for(lambda: not members(self.popen.pid), STOP_SECS)

    def stop(self) -> None:
        """An orderly end; fails if something is left."""
        if self.running:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_SECS)
        try:
            wait_for(lambda: not members(self.popen.pid), STOP_SECS)
        finally:
            self.kill()


class Engine:
    """vLLM in one of its modes: "http", "grpc" or "zmq"."""

    def __init__(self, mode: str, logs: Path) -> None:
        self.mode = mode
        self.log = logs / f"engine-{mode}.log"
        self.log.unlink(missing_ok=True)
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="smge-"))
        path = str(self.directory / "e")
        self.url = {"zmq": f"ipc://{path}", "grpc": f"grpc://127.0.0.1:{self.port}"}.get(
            mode, f"http://127.0.0.1:{self.port}"
        )
        self._dial = handshake_port(path)
        self._starts = 0
        self.process: Process | None = None

    def command(self) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        ranks = ["--data-parallel-size", "1", "--data-parallel-size-local", "1"]
        dial = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(self._dial)]
        own = {"zmq": ["--headless", *ranks, *dial], "grpc": ["--grpc", *address], "http": [*address, *TOOLS]}[
            self.mode
        ]
        return [f"{BIN}/vllm", "serve", MODEL, *own, *OPTIONS]

    def start(self) -> None:
        self._starts += 1
        environment = ENVIRONMENT | {"PATH": f"{BIN}:{os.environ['PATH']}"}
        self.process = Process(f"engine {self.mode}", self.command(), self.log, environment)
        # On few cores the engine's busy loops would starve the gateway.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.process.popen.pid}/autogroup").write_text("15")

    def wait_ready(self) -> None:
        """Until it serves; a headless engine is ready when its gateway is."""
        if self.mode == "http":
            wait_for(lambda: answers(f"{self.url}/health"), START_SECS, self.alive)
        elif self.mode == "grpc":
            wait_for(lambda: self.log.read_text().count(GRPC_READY) == self._starts, START_SECS, self.alive)

    def alive(self) -> bool:
        return self.process is not None and self.process.running

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def stop(self) -> None:
        try:
            if self.process is not None:
                self.process.stop()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


class GatewayProcess:
    """``smg launch`` in front of one engine."""

    def __init__(self, engine: Engine, logs: Path) -> None:
        self.engine = engine
        self.log = logs / f"gateway-{engine.mode}.log"
        self.port = free_port()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120.0)
        self.process: Process | None = None

    def start(self) -> None:
        command = [
            sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(self.port),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--detok-procs", "2",
            "--tokenizer-procs", "1", "--frontend-procs", "1", "--worker-urls", self.engine.url, "--backend", "vllm",
            "--model-path", MODEL, "--tool-call-parser", "qwen", "--reasoning-parser", "qwen3",
            "--worker-startup-check-interval", "1",
        ]  # fmt: skip
        self.process = Process(f"gateway {self.engine.mode}", command, self.log, {})

    @property
    def ready(self) -> bool:
        return answers(f"http://127.0.0.1:{self.port}/readiness")

    def wait_ready(self) -> float:
        return wait_for(lambda: self.ready, START_SECS, self.engine.alive)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False
