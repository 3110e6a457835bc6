"""Codex CLI and Claude Code complete a tool loop through the gateway (README.md says how to run this)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port, running, until_served
from recorder import Seen, recording

PACKAGES = Path(os.environ.get("SMG_TEST_AGENTS_DIR") or "/nonexistent").absolute() / "node_modules"
CODEX = PACKAGES / ".bin" / "codex"
CLAUDE = PACKAGES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
pytestmark = [
    pytest.mark.skipif(not CODEX.exists() or not CLAUDE.exists(), reason="SMG_TEST_AGENTS_DIR has not both agents"),
    pytest.mark.timeout(180),
]

MODEL = "qwen3-sim"
SHELL = "echo step-$((70+7))"
SCRIPT: list[dict[str, Any]] = [
    # Reached only by the command's own output: no other part of a prompt holds the sum.
    {"match": "step-77", "reasoning": "There it is.", "content": "The command printed step-77."},
    {
        "match": "ask codex", "reasoning": "Run it.",
        "tool_calls": [{"name": "exec_command", "arguments": {"cmd": SHELL}}],
    },
    {
        "match": "ask claude", "reasoning": "Run it.",
        "tool_calls": [{"name": "Bash", "arguments": {"command": SHELL, "description": "Echo"}}],
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script = tmp_path_factory.mktemp("engine") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    port = free_port()
    with ExitStack() as stack:
        line = stack.enter_context(
            running("sim-engine", "--kind", "vllm", "--model-name", MODEL, "--script", str(script), until="sim-engine")
        )
        stack.enter_context(
            running(
                "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
                "--tokenizer-procs", "1", "--detok-procs", "1", "--frontend-procs", "1", "--log-level", "error",
                "--worker-urls", line.rpartition("url=")[2], until="smg: ready",
            )
        )  # fmt: skip
        address = f"http://127.0.0.1:{port}"
        until_served(address, 1)
        yield address


def agent(words: list[str], home: Path, **environment: str) -> str:
    """What the agent prints. It sees nothing of the caller's environment but the path."""
    work = home / "work"
    work.mkdir()
    done = subprocess.run(
        words, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(seen: list[Seen], path: str) -> None:
    """Two generations at least, and no request that was refused."""
    refused = [one for one in seen if one.status >= 400 and (one.method, one.path) != ("HEAD", "/")]
    assert refused == []
    assert sum(one.path == path for one in seen) >= 2


def test_codex(gateway: str, tmp_path: Path) -> None:
    home = tmp_path / "codex"
    home.mkdir()
    with recording(gateway) as (url, seen):
        (home / "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "gateway"\napproval_policy = "never"\n'
            'sandbox_mode = "danger-full-access"\n'
            f'[model_providers.gateway]\nname = "gateway"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
            'env_key = "GATEWAY_KEY"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
        )
        words = [str(CODEX), "exec", "--skip-git-repo-check"]
        said = agent([*words, "ask codex"], tmp_path, CODEX_HOME=str(home), GATEWAY_KEY="unused")
    assert "The command printed step-77." in said
    check(seen, "/v1/responses")


@pytest.mark.parametrize("form", ["json", "stream-json"])
def test_claude_code(gateway: str, tmp_path: Path, form: str) -> None:
    with recording(gateway) as (url, seen):
        words = ["node", str(CLAUDE), "-p", "ask claude", "--allowedTools", "Bash", "--output-format", form]
        said = agent(
            [*words, *(("--verbose",) if form == "stream-json" else ())],
            tmp_path,
            ANTHROPIC_BASE_URL=url, ANTHROPIC_AUTH_TOKEN="unused", ANTHROPIC_MODEL=MODEL,
            ANTHROPIC_SMALL_FAST_MODEL=MODEL, DISABLE_TELEMETRY="1", DISABLE_ERROR_REPORTING="1",
            DISABLE_AUTOUPDATER="1", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )  # fmt: skip
    last = json.loads(said.splitlines()[-1])
    assert last["subtype"] == "success"
    assert last["result"].strip() == "The command printed step-77."
    check(seen, "/v1/messages")


def test_claude_code_counts_its_context(gateway: str, tmp_path: Path) -> None:
    with recording(gateway) as (url, seen):
        said = agent(
            ["node", str(CLAUDE), "-p", "/context"], tmp_path,
            ANTHROPIC_BASE_URL=url, ANTHROPIC_AUTH_TOKEN="unused", ANTHROPIC_MODEL=MODEL, DISABLE_TELEMETRY="1",
        )  # fmt: skip
    assert "Context Usage" in said
    counts = [one for one in seen if one.path == "/v1/messages/count_tokens"]
    assert counts
    assert [one.status for one in counts] == [200] * len(counts)
