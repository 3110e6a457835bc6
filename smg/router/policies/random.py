"""random: any candidate, all equally likely."""

from __future__ import annotations

import random
from collections.abc import Sequence

from smg.router.policies.base import Policy, RouteFacts
from smg.router.worker import Worker


class Random(Policy):
    """Uniform choice."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        return self._rng.choice(candidates)
