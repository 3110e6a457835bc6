"""Microseconds per token of every registered output parser.

    python tests/load/bench_parsers.py [--tokens N] [--rounds N] [NAME ...]

Each parser is fed token by token, the way a stream without batching would: prose without any marker, one call with a
long string argument, and many small calls (tools), or a thought and an answer (reasoning). The best round counts.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from typing import Protocol

from smg.messages import ParserEvent
from smg.models.family import ToolCall, ToolSpec
from smg.models.reasoning import encode_reasoning, reasoning_parser
from smg.models.registry import REASONING_PARSERS, TOOL_PARSERS, reasoning_format, tool_format

# About the sizes of BPE tokens: markers whole, short runs of letters with a leading space, punctuation in pairs.
_TOKENS = re.compile(r"<[|｜][^>]{1,40}[|｜]>|\[TOOL_CALLS\]|</?[a-z_:]{3,20}>| ?\w{1,6}|[^\w\s]{1,2}|\s+", re.DOTALL)

_SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "options": {"type": "object"},
    },
}
_TOOLS = [ToolSpec("write_file", _SCHEMA), ToolSpec("get_weather", {"type": "object"})]
_PROSE = "The quick brown fox, jumps over (the) lazy dog; see 'it'. "
_LINE = 'line with some "quotes" and (brackets), then more words.\n'


class _Parser(Protocol):
    def feed(self, text: str) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...


def measure(make: Callable[[], _Parser], text: str, tokens: int, rounds: int) -> float:
    """Best µs per token over ``rounds`` runs of the first ``tokens`` tokens of ``text``."""
    pieces = _TOKENS.findall(text)
    if "".join(pieces) != text:
        raise AssertionError("the token pattern loses text")
    pieces = pieces[:tokens]
    best = float("inf")
    for _ in range(rounds):
        parser = make()
        feed = parser.feed
        start = time.perf_counter()
        for piece in pieces:
            feed(piece)
        parser.finish()
        best = min(best, time.perf_counter() - start)
    return best / len(pieces) * 1e6


def bench_tool(name: str, tokens: int, rounds: int) -> list[float]:
    declared = tool_format(name)

    def make() -> _Parser:
        return declared.parser(_TOOLS)

    texts = [_PROSE * (tokens // 10)]
    if declared.encode is not None:
        large = {
            "path": "/tmp/a.txt",
            "text": _LINE * (tokens // 10),
            "count": 3,
            "options": {"a": [1, 2.5, True, None]},
        }
        small = [ToolCall("get_weather", {"city": "Oslo", "days": day, "units": "c"}) for day in range(tokens // 20)]
        texts += [declared.encode("", [ToolCall("write_file", large)]), declared.encode("", small)]
    return [measure(make, text, tokens, rounds) for text in texts]


def bench_reasoning(name: str, tokens: int, rounds: int) -> list[float]:
    declared = reasoning_format(name)
    half = _PROSE * (tokens // 20)
    text = encode_reasoning(declared, half, half)
    return [measure(lambda: reasoning_parser(declared), text, tokens, rounds)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help="parsers to run (default: all)")
    options.add_argument("--tokens", type=int, default=2000)
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    print(f"{'tools':16}{'prose':>8}{'long':>8}{'small':>8}   µs/token")
    for name in TOOL_PARSERS:
        if not chosen.names or name in chosen.names:
            figures = bench_tool(name, chosen.tokens, chosen.rounds)
            print(f"{name:16}" + "".join(f"{figure:8.2f}" for figure in figures))
    print(f"{'reasoning':16}{'text':>8}")
    for name in REASONING_PARSERS:
        if not chosen.names or name in chosen.names:
            print(
                f"{name:16}"
                + "".join(f"{figure:8.2f}" for figure in bench_reasoning(name, chosen.tokens, chosen.rounds))
            )


if __name__ == "__main__":
    main()
