"""passthrough: always the first candidate, for gateways in front of one worker."""

from __future__ import annotations

from collections.abc import Sequence

from smg.router.policies.base import Policy, RouteFacts
from smg.router.worker import Worker


class Passthrough(Policy):
    """The candidate that was registered first."""

    name = "passthrough"

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        return candidates[0]
