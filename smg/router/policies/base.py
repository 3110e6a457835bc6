"""The interface of a worker selection policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from smg.router.worker import Worker


@dataclass(slots=True)
class RouteFacts:
    """What a policy may know of a request. ``block_hashes`` are little-endian uint64 values, one per full block of
    the prompt, each chained with its predecessor, so that equal hashes at one position mean equal prompts up to
    there. ``now`` is ``time.monotonic()``."""

    model: str
    prompt_tokens: int
    block_hashes: bytes
    routing_key: str
    target_worker: str
    now: float


class Policy(Protocol):
    """Chooses among the workers that can take a request. One instance per model."""

    name: str

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        """The worker to use; None if the policy refuses all of them. ``candidates`` is not empty and in registration
        order.
        """

    def forget(self, worker: Worker) -> None:
        """The worker left the registry."""
