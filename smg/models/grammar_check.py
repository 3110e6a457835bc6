"""Compiles constraints with xgrammar before they reach an engine, where that library is installed.

An engine may die of a grammar that it cannot compile, so a request with such a grammar is refused here. The work
happens in a
child process: a compile that takes too long or too much memory is ended with it, and the parent never imports the
library.
Without xgrammar nothing is checked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any

from smg.engines.base import Constraint

log = logging.getLogger(__name__)

_START_SECONDS = 120.0
_EXTRA_MEMORY = 2 << 30
_CACHED = 1024
_MESSAGE_CHARS = 300


class _OverdueError(Exception):
    """The child did not answer in time."""


class GrammarChecker:
    """Checks constraints one after the other; thread-safe, blocking (call it off the event loop).

    ``seconds`` bounds one compile, ``max_chars`` the length of a constraint. The child starts with the first check.
    """

    def __init__(self, *, seconds: float = 5.0, max_chars: int = 1 << 20) -> None:
        self._seconds = seconds
        self._max_chars = max_chars
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[tuple[str, str], str | None] = OrderedDict()
        self.available = importlib.util.find_spec("xgrammar") is not None

    def check(self, constraint: Constraint) -> str | None:
        """None when the constraint compiles (or cannot be checked here), else what is wrong with it."""
        if not self.available:
            return None
        if len(constraint.value) > self._max_chars:
            return f"the constraint is longer than {self._max_chars} characters"
        key = (constraint.kind, constraint.value)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
            try:
                verdict = self._ask(constraint)
            except OSError as error:
                self._stop()
                self.available = False
                log.warning("constraints are no longer checked before dispatch: %s", error)
                return None
            self._verdicts[key] = verdict
            if len(self._verdicts) > _CACHED:
                self._verdicts.popitem(last=False)
            return verdict

    def close(self) -> None:
        """Ends the child."""
        with self._lock:
            self._stop()

    def _ask(self, constraint: Constraint) -> str | None:
        child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        request = json.dumps([constraint.kind, constraint.value]) + "\n"
        try:
            child.stdin.write(request.encode())
            child.stdin.flush()
            answer = _read_line(child.stdout, self._seconds)
        except _OverdueError:
            self._stop()
            return f"the constraint takes longer than {self._seconds:g} s to compile"
        except BrokenPipeError:
            answer = None
        if answer is None:
            self._stop()
            return "the constraint needs too much memory to compile"
        verdict: object = json.loads(answer)
        return verdict if verdict is None else str(verdict)

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        path = os.environ.get("PYTHONPATH")
        environment = os.environ | {"PYTHONPATH": root + os.pathsep + path if path else root}
        child = subprocess.Popen(
            [sys.executable, "-m", "smg.models.grammar_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._child = child
        assert child.stdout is not None
        try:
            ready = _read_line(child.stdout, _START_SECONDS)
        except _OverdueError:
            ready = None
        if ready is None:
            raise OSError("the grammar compiler does not start")
        return child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _read_line(pipe: IO[bytes], seconds: float) -> bytes | None:
    """The next line of the child, None when it is gone. Raises ``_OverdueError``."""
    deadline = time.monotonic() + seconds
    parts: list[bytes] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            raise _OverdueError
        part = os.read(pipe.fileno(), 65536)
        if not part:
            return None
        parts.append(part)
        if part.endswith(b"\n"):
            return b"".join(parts)


def _compiler() -> dict[str, Any]:
    """The compile functions by constraint kind. A vocabulary of the 256 bytes is enough to find what does not
    compile."""
    import xgrammar

    vocabulary = [bytes([value]) for value in range(256)] + [b"</s>"]
    tokens = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    return {
        "json_schema": compiler.compile_json_schema,
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "structural_tag": compiler.compile_structural_tag,
    }


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + _EXTRA_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The child: one JSON line ``[kind, value]`` in, one JSON line (null or the error) out, until the input ends."""
    compilers = _compiler()
    _limit_memory()
    answers.write(b"ready\n")
    answers.flush()
    for line in requests:
        kind, value = json.loads(line)
        try:
            compilers[kind](value)
            verdict = None
        except Exception as error:  # the library raises many kinds for one fault
            verdict = _shown(str(error))
        answers.write(json.dumps(verdict).encode() + b"\n")
        answers.flush()


def _shown(message: str) -> str:
    """The library's message without the position in its own source and its assertion text."""
    text = message.split(": ", 1)[-1] if message.startswith("[") else message
    if text.startswith("Check failed:"):
        text = text.split(" is false: ", 1)[-1]
    return " ".join(text.split())[:_MESSAGE_CHARS] or "the grammar does not compile"


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
