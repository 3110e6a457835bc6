"""manual: a routing key stays on the worker it was first given to."""

from __future__ import annotations

import random
from collections.abc import Sequence

from smg.router.policies.base import Policy, RouteFacts
from smg.router.policies.sticky import Assigner, StickyKeys
from smg.router.worker import Worker
from smg.telemetry.router_metrics import PolicyMetrics


class Manual(Policy):
    """Keys come from the ``x-smg-routing-key`` header; a request without one goes to a random candidate. New workers
    attract new keys only."""

    name = "manual"

    def __init__(self, keys: StickyKeys, assign: Assigner, rng: random.Random, metrics: PolicyMetrics) -> None:
        self._keys = keys
        self._assign = assign
        self._rng = rng
        self._metrics = metrics

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        key = request.header_key
        if not key:
            self._metrics.branch(self.name, "no_routing_id")
            return self._rng.choice(candidates)
        branch, worker = self._keys.route(key, candidates, request.now, self._assign)
        self._metrics.branch(self.name, branch)
        return worker

    def no_candidates(self) -> None:
        self._metrics.branch(self.name, "no_healthy_workers")

    def forget(self, worker: Worker) -> None:
        self._keys.forget(worker)

    def tick(self, now: float) -> bool:
        self._keys.expire(now)
        return False
