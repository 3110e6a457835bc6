"""A cheap closed-loop load client: streamed chats over raw sockets, in a process of its own.

    python tests/load/load_client.py --port PORT --streams N --max-tokens T [--spread S] --warm-up S --seconds S

Every connection sends the next request when its stream has ended. After the warm-up it prints ``begin``, after the
measured window ``end`` and one line of JSON; whoever started it reads CPU times at these two moments. Nothing is
decoded on the way: events are counted in the bytes, so the client costs a few microseconds per read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from array import array
from itertools import count
from typing import Any

import uvloop

_CONTENT = b'"content":'
_CARRY = len(_CONTENT) - 1
_LAST_CHUNK = b"0\r\n\r\n"
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_TEXT = (
    "The harbour lay still in the early light, and the boats had not yet gone out. A keeper walked along the quay and "
    "counted them, as he did every morning, while the gulls quarrelled over what the night had left on the stones. "
)


class Totals:
    """What was seen in the measured window. Times in seconds; ``gaps`` holds one entry per event behind the first of
    its stream, 0 for events that came in the same read. An event may carry several tokens: how many there are on
    average is known from the requests that ended in the window."""

    def __init__(self) -> None:
        self.measuring = False
        self.requests = 0
        self.events = 0
        self.ended_events = 0
        self.ended_tokens = 0
        self.errors = 0
        self.first = array("d")
        self.gaps = array("d")
        self.whole = array("d")
        self.wrong_length = 0

    def report(self, seconds: float) -> dict[str, float]:
        tokens_per_event = self.ended_tokens / self.ended_events if self.ended_events else 1.0
        found: dict[str, float] = {
            "seconds": seconds, "requests": self.requests, "events": self.events,
            "tokens": self.events * tokens_per_event, "errors": self.errors, "wrong_length": self.wrong_length,
        }  # fmt: skip
        for name, values in (("ttft", self.first), ("gap", self.gaps), ("e2e", self.whole)):
            ordered = sorted(values)
            for share in (50, 99):
                position = min(len(ordered) - 1, len(ordered) * share // 100)
                found[f"{name}_p{share}_ms"] = ordered[position] * 1000 if ordered else float("nan")
            found[f"{name}_max_ms"] = ordered[-1] * 1000 if ordered else float("nan")
        return found


class Stream(asyncio.Protocol):
    """One connection: one request after the other."""

    def __init__(self, totals: Totals, requests: Requests) -> None:
        self.totals = totals
        self.requests = requests
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.events = 0
        self.carry = b""
        self.begun = self.last = time.perf_counter()
        self.transport.write(self.requests.next())

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        totals = self.totals
        if not self.carry and not data.startswith(b"HTTP/1.1 200"):
            self.fail()
            return
        # Events that have content; the first only names the role.
        fresh = (self.carry + data).count(_CONTENT)
        before = max(0, self.events - 1)
        self.events += fresh
        new = max(0, self.events - 1) - before
        if new and totals.measuring:
            totals.events += new
            if before == 0:
                totals.first.append(now - self.begun)
            else:
                totals.gaps.append(now - self.last)
            if new > 1:
                totals.gaps.extend([0.0] * (new - 1))
        if new:
            self.last = now
        self.carry = data[-_CARRY:]
        if data.endswith(_LAST_CHUNK):
            self.finished(data, now)

    def finished(self, data: bytes, now: float) -> None:
        totals = self.totals
        if totals.measuring:
            totals.requests += 1
            totals.whole.append(now - self.begun)
            said = _COMPLETION_TOKENS.search(data)
            tokens = int(said[1]) if said is not None else 0
            totals.ended_tokens += tokens
            totals.ended_events += self.events - 1
            totals.wrong_length += tokens != self.requests.max_tokens
        self.send()

    def fail(self) -> None:
        self.transport.abort()  # counted when the connection is lost

    def connection_lost(self, _error: Exception | None) -> None:
        if self.requests.running:
            self.totals.errors += 1


class Requests:
    """Bytes of requests; no two prompts are equal. ``prompt_words`` is their rough length."""

    def __init__(self, port: int, model: str, max_tokens: int, prompt_words: int) -> None:
        self.max_tokens = max_tokens
        self.running = True
        self._number = count()
        text = (_TEXT * (prompt_words // 30 + 1)).split(" ")[:prompt_words]
        body = json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": "Letter 00000000. " + " ".join(text)}],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        before, self._after = body.split(b"00000000")
        self._before = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + before

    def next(self) -> bytes:
        return b"%s%08d%s" % (self._before, next(self._number), self._after)


async def run(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    totals = Totals()
    requests = Requests(options.port, options.model, options.max_tokens, options.prompt_words)
    streams = []
    begun = time.perf_counter()
    for number in range(options.streams):
        if options.spread:
            await asyncio.sleep(begun + options.spread * number / options.streams - time.perf_counter())
        _, stream = await loop.create_connection(lambda: Stream(totals, requests), "127.0.0.1", options.port)
        streams.append(stream)
    await asyncio.sleep(begun + options.warm_up - time.perf_counter())
    print("begin", flush=True)
    begun = time.perf_counter()
    totals.measuring = True
    await asyncio.sleep(options.seconds)
    totals.measuring = False
    seconds = time.perf_counter() - begun
    print("end", flush=True)
    requests.running = False
    for stream in streams:
        stream.transport.abort()
    print(json.dumps(totals.report(seconds)), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--model", default="bench")
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--max-tokens", type=int, default=128)
    options.add_argument("--prompt-words", type=int, default=150)
    options.add_argument("--spread", type=float, default=0.0, help="seconds over which the connections start")
    options.add_argument("--warm-up", type=float, default=1.0, help="seconds from the start to the measured window")
    options.add_argument("--seconds", type=float, default=5.0)
    uvloop.run(run(options.parse_args()))


if __name__ == "__main__":
    main()
