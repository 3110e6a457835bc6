"""``smg serve`` and ``smg launch`` as processes: start, answer, exit statuses, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

STARTUP_SECS = 60


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def lines_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    """Lines of the process's output up to the first one that contains ``wanted``."""
    assert process.stdout is not None
    lines: list[str] = []
    while select.select([process.stdout], [], [], STARTUP_SECS)[0]:
        line = process.stdout.readline()
        lines.append(line)
        if wanted in line or not line:
            break
    assert lines, "the process said nothing"
    assert wanted in lines[-1], "".join(lines)
    return lines


def processes() -> list[tuple[int, int, int]]:
    """(pid, parent, session) of every process that is no zombie."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as stat:
                state, parent, _group, session = stat.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z":
            found.append((int(entry), int(parent), int(session)))
    return found


def until_ready(port: int) -> None:
    """Ask the readiness route until it says 200."""
    limit = time.monotonic() + STARTUP_SECS
    while time.monotonic() < limit:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readiness", timeout=5):
            return
        time.sleep(0.05)
    raise AssertionError("the gateway did not become ready")


@pytest.fixture
def serve() -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    port, metrics_port, worker_port = free_port(), free_port(), free_port()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "smg", "serve", "--backend", "sim", "--port", str(port),
            "--worker-base-port", str(worker_port), "--router-prometheus-port", str(metrics_port),
            "--router-prometheus-host", "127.0.0.1", "--router-shutdown-grace-period-secs", "5",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, start_new_session=True,
    )  # fmt: skip
    try:
        yield process, port, metrics_port
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_serve_sim_answers_and_leaves_nothing_behind(serve: tuple[subprocess.Popen[str], int, int]) -> None:
    process, port, metrics_port = serve
    lines_until(process, "smg: ready")
    until_ready(port)
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(), {"content-type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 8
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30) as answer:
        assert 'token_type="output"} 8.0' in answer.read().decode()
    children = {pid for pid, parent, _ in processes() if parent == process.pid}
    assert len(children) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(STARTUP_SECS) == 128 + signal.SIGTERM
    assert [pid for pid, _, session in processes() if session in children] == []


def test_a_taken_port_stops_startup_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)],
            capture_output=True, text=True, timeout=STARTUP_SECS, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"Error starting router: Failed to bind the HTTP listener on 127.0.0.1:{port}: ")
    assert "Traceback" not in done.stderr


def test_an_engine_that_dies_stops_everything() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "smg", "serve", "--backend", "sim", "--port", str(free_port()), "--worker-base-port",
            str(free_port()), "--router-prometheus-port", str(free_port()), "--script", "/no/such/script.json",
        ],
        capture_output=True, text=True, timeout=STARTUP_SECS, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "sim-0 ended with status 2 before it was ready" in done.stderr
