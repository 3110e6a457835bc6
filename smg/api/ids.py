"""Request ids. A version-7 UUID sorts by time and needs no coordination between processes."""

from __future__ import annotations

import os
import random
import time

# Seeded by the operating system, again in every forked process: ids must differ, but may be guessed.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def uuid7() -> str:
    """A fresh version-7 UUID (RFC 9562) as text: 48 bits of Unix milliseconds, 74 random bits."""
    stamp = time.time_ns() // 1_000_000
    noise = _random.getrandbits(80)
    high = (stamp << 16) | 0x7000 | (noise >> 68)
    low = 0x8000_0000_0000_0000 | (noise & 0x3FFF_FFFF_FFFF_FFFF)
    text = f"{high:016x}{low:016x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def engine_ids(request_id: str, count: int, rid: str | None = None) -> list[str]:
    """The ids that engines see, one per prompt. ``rid`` (the client's own id) replaces the id of a single prompt
    verbatim."""
    if count == 1:
        return [rid or f"{request_id}-{uuid7()}"]
    return [f"{rid or request_id}-p{index}-{uuid7()}" for index in range(count)]


def body_id(request_id: str, ids: list[str], rid: str | None = None) -> str:
    """The id that the answer carries: the engine's for one prompt, the request's own for a batch."""
    return ids[0] if len(ids) == 1 else rid or request_id
