"""One gateway in front of two embedded engines (vLLM and SGLang protocol), and the official SDK clients of both APIs.

The model names choose the parsers: a Qwen3 name brings the ``qwen3`` reasoning parser and the ``qwen`` tool parser,
whose formats are those of the model that comes with the embedded engine. The clients validate every answer against
their own types.
"""

from __future__ import annotations

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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

ROOT = Path(__file__).parents[2]
START_SECS = 60.0
VLLM_MODEL, SGLANG_MODEL = "qwen3-vllm", "qwen3-sglang"
MODELS = [VLLM_MODEL, SGLANG_MODEL]

WEATHER = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
TIME = {"name": "get_time", "arguments": {"zone": "Europe/Oslo"}}
# The more specific entries first: the engine takes the first whose "match" occurs in the prompt.
SCRIPT: list[dict[str, Any]] = [
    {"match": "4 degrees and rain", "content": "It is 4 degrees in Oslo, with rain."},
    {"match": "thoughtful rain", "reasoning": "Now I know.", "content": "It is 4 degrees in Oslo, with rain."},
    {"match": "Is it cold in Oslo", "reasoning": "I should look it up.", "tool_calls": [WEATHER]},
    {"match": "weather and time", "content": "Two things to look up.", "tool_calls": [WEATHER, TIME]},
    {"match": "Say the alphabet", "content": "alpha beta gamma delta epsilon"},
    {"match": "Grüße", "content": "Grüße aus Köln 🐋 — «ça va»?"},
    {"match": "Break down", "content": "never", "error": {"code": "INTERNAL", "message": "out of memory", "at": 0}},
    {"match": "Break later", "content": "one two three", "error": {"code": "INTERNAL", "message": "gone", "at": 2}},
]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def running(*words: str, until: str) -> Iterator[str]:
    """``python -m smg WORDS`` until the end of the block; gives the line of its output that starts with ``until``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "smg", *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield _line(process, until)
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            process.stdout.close()


def _line(process: subprocess.Popen[bytes], start: str) -> str:
    assert process.stdout is not None
    limit = time.monotonic() + START_SECS
    seen = b""
    while time.monotonic() < limit:
        readable, _, _ = select.select([process.stdout], [], [], 1.0)
        chunk = os.read(process.stdout.fileno(), 65536) if readable else b""
        if readable and not chunk:
            break
        seen += chunk
        for line in seen.decode(errors="replace").splitlines():
            if line.startswith(start):
                return line
    raise AssertionError(f"no line {start!r} in:\n{seen.decode(errors='replace')}")


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the gateway."""
    script = tmp_path_factory.mktemp("engine") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    port = free_port()
    with ExitStack() as stack:
        workers = []
        for kind, model in (("vllm", VLLM_MODEL), ("sglang", SGLANG_MODEL)):
            words = ("sim-engine", "--kind", kind, "--model-name", model, "--script", str(script), "--step-ms", "2")
            line = stack.enter_context(running(*words, until="sim-engine ready"))
            workers.append(line.rpartition("url=")[2])
        stack.enter_context(
            running(
                "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
                "--prometheus-port", str(free_port()), "--tokenizer-procs", "1", "--detok-procs", "1",
                "--frontend-procs", "1", "--log-level", "error", "--worker-urls", *workers,
                until="smg: ready",
            )
        )  # fmt: skip
        address = f"http://127.0.0.1:{port}"
        until_served(address, len(MODELS))
        yield address


def until_served(address: str, workers: int) -> None:
    """Until that many workers are ready."""
    limit = time.monotonic() + START_SECS
    while time.monotonic() < limit:
        try:
            with urllib.request.urlopen(f"{address}/readiness", timeout=5) as answer:
                if json.load(answer)["healthy_workers"] == workers:
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("the workers did not become ready")


@pytest.fixture(scope="session")
def openai_client(url: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=30.0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="session")
def lenient_client(openai_client: OpenAI) -> OpenAI:
    """For what the API sends and the client's types leave out: ``finish_reason: null`` in streamed completions, and
    base64 embeddings."""
    return openai_client.copy(_extra_kwargs={"_strict_response_validation": False})


@pytest.fixture(scope="session")
def anthropic_client(url: str) -> Iterator[Anthropic]:
    with Anthropic(
        base_url=url, api_key="unused", max_retries=0, timeout=30.0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
