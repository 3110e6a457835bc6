"""What the documentation shows works as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
ADDRESS = "http://127.0.0.1:8080"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def endpoints() -> list[tuple[str, str]]:
    """(method, path) of every row of the table of endpoints."""
    rows = re.findall(
        r"^\| ([A-Z, ]+) \| `(/[^`]*)` \| (?:open|serving|admin) ", (ROOT / "docs/api.md").read_text(), re.M
    )
    return [(method, path) for methods, path in rows for method in methods.split(", ")]


def test_the_table_of_endpoints_is_found() -> None:
    assert len(endpoints()) > 30


@pytest.mark.parametrize(("method", "path"), endpoints(), ids=" ".join)
def test_every_endpoint_exists(url: str, method: str, path: str) -> None:
    asked = urllib.request.Request(
        url + re.sub(r"\{\w+\}", "none", path), b"{}" if method != "GET" else None, method=method
    )
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert answer.status < 300
    except urllib.error.HTTPError as refused:
        assert refused.code not in (405, 501)
        assert b"unknown_url" not in refused.read()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_python_example_runs(url: str) -> None:
    [source] = blocks("README.md", "python")
    assert ADDRESS in source
    source = source.replace(ADDRESS, url).replace('"sim"', '"qwen3-vllm"')
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20


def test_the_curl_example_has_a_body_that_is_answered(url: str) -> None:
    [line] = [block for block in blocks("README.md", "sh") if block.startswith("curl")]
    words = shlex.split(line.replace("\\\n", " "))
    body = words[words.index("-d") + 1].replace('"sim"', '"qwen3-vllm"')
    asked = urllib.request.Request(
        words[1].replace(ADDRESS, url), body.encode(), {"content-type": words[words.index("-H") + 1].partition(": ")[2]}
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert b'"choices"' in answer.read()


def test_every_command_of_the_readme_exists() -> None:
    from smg.cli import COMMANDS

    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`|&& )make (\w+)", text, re.M)) <= targets
    assert set(re.findall(r"(?:^|`)smg ([a-z-]+)", text, re.M)) <= set(COMMANDS)


def test_every_flag_that_the_docs_name_exists() -> None:
    known = (ROOT / "docs" / "flags.md").read_text()
    for page in PAGES:
        named = set(re.findall(r"`(--[a-z][a-z-]+)", page.read_text())) - {"--router-", "--help", "--list", "--events"}
        assert [flag for flag in sorted(named) if flag not in known] == [], page.name
