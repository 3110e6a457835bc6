"""A whole gateway under test: the real command, real processes, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
START_LIMIT = 40.0
_LINE = re.compile(r"smg: (\w+) (\d+) pid (\d+)")


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class Gateway:
    """One running ``smg launch``. ``pids`` maps (role, index) to the newest process that said it is ready."""

    def __init__(
        self, process: asyncio.subprocess.Process, port: int, metrics_port: int, run_dir: Path, authority: Path | None
    ) -> None:
        self.process = process
        self.port = port
        self.metrics_port = metrics_port
        self.run_dir = run_dir
        self.url = f"{'https' if authority else 'http'}://127.0.0.1:{port}"
        self.pids: dict[tuple[str, int], int] = {}
        self.all_pids: set[int] = set()
        self.lines: list[str] = []
        self.ready = asyncio.Event()
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())
        trusted = ssl.create_default_context(cafile=authority) if authority else True
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=self.url, timeout=30.0, limits=limits, verify=trusted)

    async def _read(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        async for raw in stdout:
            line = raw.decode(errors="replace").rstrip()
            self.lines.append(line)
            if line.startswith("smg: ready"):
                self.ready.set()
            if found := _LINE.match(line):
                async with self._news:
                    pid = int(found[3])
                    self.pids[(found[1], int(found[2]))] = pid
                    self.all_pids.add(pid)
                    self._news.notify_all()

    @property
    def log(self) -> str:
        return "\n".join(self.lines[-60:])

    async def wait_ready(self, *, workers: int = 1) -> None:
        """Until all processes run and ``workers`` workers are ready."""
        await asyncio.wait_for(self.ready.wait(), START_LIMIT)
        async with asyncio.timeout(START_LIMIT):
            while True:
                answer = await self.http.get("/readiness")
                if workers == 0 or (answer.status_code == 200 and answer.json()["healthy_workers"] >= workers):
                    return
                await asyncio.sleep(0.02)

    async def kill(self, role: str, index: int = 0) -> None:
        """SIGKILL one process and wait until its successor is ready."""
        old = self.pids[(role, index)]
        os.kill(old, signal.SIGKILL)
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: self.pids[(role, index)] != old), START_LIMIT)

    async def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 16} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the supervisor and wait; returns the exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        status = await asyncio.wait_for(self.process.wait(), START_LIMIT)
        await self._reader
        return status

    def leftovers(self) -> list[str]:
        """Processes and files that outlived the gateway."""
        return [f"pid {pid}" for pid in self.all_pids if alive(pid)] + [str(p) for p in self.run_dir.glob("*")]


@asynccontextmanager
async def gateway(*workers: str, flags: tuple[str, ...] = (), authority: Path | None = None) -> AsyncIterator[Gateway]:
    """A gateway in front of ``workers``; stopped, and checked for leftovers, at the end. ``authority``: the certificate
    that its clients trust, where ``flags`` have it speak TLS."""
    run_dir = Path(tempfile.mkdtemp(prefix="smgt-"))  # socket paths must be short
    port, metrics = free_port(), free_port()
    command = [
        sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1",
        "--prometheus-port", str(metrics), "--run-dir", str(run_dir), "--tokenizer-procs", "1", "--detok-procs", "1",
        "--frontend-procs", "1", "--worker-startup-check-interval", "1", "--log-level", "warn",
        *(["--worker-urls", *workers] if workers else []), *flags,
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True
    )
    running = Gateway(process, port, metrics, run_dir, authority)
    try:
        await running.wait_ready(workers=len(workers))
        yield running
    except BaseException:
        print(running.log)
        raise
    finally:
        await running.http.aclose()
        if process.returncode is None:
            try:
                await running.stop()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert running.leftovers() == []
    run_dir.rmdir()
