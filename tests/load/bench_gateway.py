"""What the gateway costs under load: rates, latencies, and CPU time of each of its processes.

    python tests/load/bench_gateway.py [--scenario NAME ...] [--seconds S] [--rounds N]
    python tests/load/bench_gateway.py --peer "other-gateway --port {port} --worker {worker} --model-dir {model_dir}"

The embedded engine, the gateway and the load client run as processes of their own on this machine. CPU time is read
from ``/proc`` for the gateway's whole process tree over the measured window; engine and client are left out of it and
shown apart, so that it can be seen when they set the pace. On a busy machine the figures to compare are CPU
microseconds, side by side in the same minutes: ``--peer`` alternates two gateway commands and prints the medians and
their ratio. In a command, ``{port}``, ``{prom_port}``, ``{worker}`` (host:port of a vLLM gRPC worker), ``{model_dir}``
and ``{model}`` are replaced.

In a paced load the CPU time per token counts: a request lasts about as long as the window.

A benchmark reports and does not judge: the exit status is 0 whatever the figures are. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = "bench"
MODEL_DIR = ROOT / "smg" / "simengine" / "model"
OWN = (
    f"{shlex.quote(sys.executable)} -m smg launch --host 127.0.0.1 --port {{port}} --prometheus-host 127.0.0.1 "
    "--prometheus-port {prom_port} --worker-urls grpc://{worker} --log-level error"
)
START_SECS = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Scenario:
    """One load. ``step_ms``: time between the tokens of a stream, 0 = as fast as the engine goes. ``spread``: seconds
    over which the streams start."""

    text: str
    streams: int
    max_tokens: int
    step_ms: float = 0.0
    warm_up: float = 1.5
    spread: float = 0.0


SCENARIOS = {
    "saturated": Scenario("64 streams of 128 tokens, engine at full speed", 64, 128),
    "short": Scenario("64 streams of 8 tokens, engine at full speed", 64, 8),
    "paced": Scenario("512 streams of 100 tokens at 20 tokens/s", 512, 100, step_ms=50.0, warm_up=6.0, spread=5.0),
}


@dataclass
class Result:
    """One run. ``cpu`` is seconds by process of the gateway, ``others`` the same of engine and client."""

    load: dict[str, float]
    cpu: dict[str, float]
    others: dict[str, float]

    @property
    def per_token(self) -> float:
        """µs of the gateway per output token."""
        return sum(self.cpu.values()) / max(1.0, self.load["tokens"]) * 1e6

    @property
    def per_request(self) -> float:
        """µs of the gateway per finished request."""
        return sum(self.cpu.values()) / max(1.0, self.load["requests"]) * 1e6


@dataclass
class Process:
    """One process as ``/proc`` shows it."""

    parent: int
    name: str
    seconds: float


@dataclass
class Tree:
    """CPU time of a process and all its descendants, by process name."""

    root: int
    start: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        self.start = {pid: process.seconds for pid, process in self._members().items()}

    def spent(self) -> dict[str, float]:
        """Seconds since ``begin`` by process."""
        found: dict[str, float] = {}
        for pid, process in self._members().items():
            found[process.name] = found.get(process.name, 0.0) + process.seconds - self.start.get(pid, 0.0)
        return found

    def _members(self) -> dict[int, Process]:
        every = {int(entry): shown for entry in filter(str.isdecimal, os.listdir("/proc")) if (shown := _show(entry))}
        members = {self.root}
        while grown := {pid for pid, process in every.items() if process.parent in members} - members:
            members |= grown
        return {pid: every[pid] for pid in members if pid in every}


def _show(pid: str) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    title = words[0].decode(errors="replace")
    # The gateway's children name themselves "smg: detok 0"; others keep their command line.
    name = title.removeprefix("smg: ") if title.startswith("smg: ") else stat.partition("(")[2].rpartition(")")[0]
    return Process(int(fields[1]), name, (int(fields[11]) + int(fields[12])) / TICKS)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def started(command: list[str], *, quiet: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process in its own session; the whole session is gone afterwards."""
    output = subprocess.DEVNULL if quiet else subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_served(port: int, process: subprocess.Popen[str], model: str = MODEL) -> None:
    """Until the gateway answers a chat."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    limit = time.monotonic() + START_SECS
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise SystemExit(f"the gateway ended with status {process.returncode}")
        with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(request, timeout=10):
            return
        time.sleep(0.1)
    raise SystemExit(f"the gateway did not serve within {START_SECS:g} s")


def measure(command: str, scenario: Scenario, seconds: float) -> Result:
    """Start everything, load it, stop everything."""
    worker, port = free_port(), free_port()
    engine_command = [
        sys.executable, "-m", "smg", "sim-engine", "--kind", "vllm", "--model-name", MODEL, "--port", str(worker),
        "--max-concurrency", "4096", "--step-ms", str(scenario.step_ms),
    ]  # fmt: skip
    words = [
        word.format(
            port=port, prom_port=free_port(), worker=f"127.0.0.1:{worker}", model_dir=str(MODEL_DIR), model=MODEL
        )
        for word in shlex.split(command)
    ]
    client_command = [
        sys.executable, str(Path(__file__).with_name("load_client.py")), "--port", str(port), "--model", MODEL,
        "--streams", str(scenario.streams), "--max-tokens", str(scenario.max_tokens),
        "--warm-up", str(scenario.warm_up), "--spread", str(scenario.spread), "--seconds", str(seconds),
    ]  # fmt: skip
    with started(engine_command) as engine, started(words, quiet=True) as gateway:
        wait_served(port, gateway)
        with started(client_command) as client:
            trees = [Tree(process.pid) for process in (gateway, engine, client)]
            _expect(client, "begin")
            for tree in trees:
                tree.begin()
            _expect(client, "end")
            cpu, *others = [tree.spent() for tree in trees]
            assert client.stdout is not None
            load: dict[str, float] = json.loads(client.stdout.readline())
    engine_seconds, client_seconds = (sum(tree.values()) for tree in others)
    return Result(load, cpu, {"engine": engine_seconds, "client": client_seconds})


def _expect(client: subprocess.Popen[str], word: str) -> None:
    assert client.stdout is not None
    line = client.stdout.readline().strip()
    if line != word:
        raise SystemExit(f"the load client said {line!r} instead of {word!r}")


def show(result: Result) -> None:
    """One run, in full."""
    load, seconds = result.load, result.load["seconds"]
    tokens, requests = max(1.0, load["tokens"]), max(1.0, load["requests"])
    print(f"  {load['requests'] / seconds:.0f} requests/s, {load['tokens'] / seconds:.0f} output tokens/s")
    print(f"  TTFT p50 {load['ttft_p50_ms']:.1f} ms, p99 {load['ttft_p99_ms']:.1f} ms")
    print(f"  inter-token p50 {load['gap_p50_ms']:.1f} ms, p99 {load['gap_p99_ms']:.1f} ms", end="")
    print(f" ({tokens / max(1.0, load['events']):.2f} tokens per event)")
    if load["errors"] or load["wrong_length"]:
        print(f"  {load['errors']:.0f} errors, {load['wrong_length']:.0f} answers of another length than asked for")
    print(f"  {'CPU':14}{'cores':>8}{'µs/request':>12}{'µs/token':>10}")
    rows = [*sorted(result.cpu.items()), ("gateway, all", sum(result.cpu.values()))]
    for name, spent in rows:
        if spent or name == "gateway, all":
            print(f"  {name:14}{spent / seconds:8.2f}{spent / requests * 1e6:12.0f}{spent / tokens * 1e6:10.2f}")
    print(
        "  not counted:  " + ", ".join(f"{name} {spent / seconds:.2f} cores" for name, spent in result.others.items())
    )


FIGURES = {
    "µs/request": lambda result: result.per_request,
    "µs/token": lambda result: result.per_token,
    "requests/s": lambda result: result.load["requests"] / result.load["seconds"],
    "tokens/s": lambda result: result.load["tokens"] / result.load["seconds"],
    "TTFT p50 ms": lambda result: result.load["ttft_p50_ms"],
    "TTFT p99 ms": lambda result: result.load["ttft_p99_ms"],
    "gap p99 ms": lambda result: result.load["gap_p99_ms"],
}


def show_ratios(first: list[Result], second: list[Result]) -> None:
    """Medians of two gateways and second / first."""
    print(f"  {'':14}{'A':>12}{'B':>12}{'B/A':>8}   medians of {len(first)}")
    for name, figure in FIGURES.items():
        a, b = (statistics.median(map(figure, results)) for results in (first, second))
        print(f"  {name:14}{a:12.2f}{b:12.2f}{b / a if a else float('nan'):8.2f}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    options.add_argument("--seconds", type=float, default=5.0, help="length of the measured window")
    options.add_argument("--rounds", type=int, help="runs per scenario (default 1, with --peer 3)")
    options.add_argument("--gateway", metavar="CMD", default=OWN, help="gateway A (default: this one)")
    options.add_argument("--peer", metavar="CMD", help="gateway B, run in turn with A")
    chosen = options.parse_args()
    rounds = chosen.rounds or (3 if chosen.peer else 1)
    for name in chosen.scenario:
        scenario = SCENARIOS[name]
        print(f"{name}: {scenario.text}")
        first: list[Result] = []
        second: list[Result] = []
        for _ in range(rounds):
            first.append(measure(chosen.gateway, scenario, chosen.seconds))
            if chosen.peer:
                second.append(measure(chosen.peer, scenario, chosen.seconds))
            else:
                show(first[-1])
        if chosen.peer:
            show_ratios(first, second)


if __name__ == "__main__":
    main()
