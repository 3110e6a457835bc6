"""round_robin: every candidate in turn."""

from __future__ import annotations

from collections.abc import Sequence

from smg.router.policies.base import Policy, RouteFacts
from smg.router.worker import Worker


class RoundRobin(Policy):
    """A counter modulo the candidates."""

    name = "round_robin"

    def __init__(self) -> None:
        self._next = 0

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        worker = candidates[self._next % len(candidates)]
        self._next += 1
        return worker
