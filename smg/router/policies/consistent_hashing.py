"""consistent_hashing: a routing key always reaches the same worker, as long as that worker is available."""

from __future__ import annotations

import random
from collections.abc import Sequence

from smg.router.policies.base import Policy, RouteFacts
from smg.router.policies.ring import HashRing
from smg.router.worker import Worker
from smg.telemetry.router_metrics import PolicyMetrics

MAX_TARGET_DIGITS = 9


class ConsistentHashing(Policy):
    """By the ``x-smg-routing-key`` header; without one a random candidate. ``x-smg-target-worker`` names a worker by
    its index (from 0) among the registered workers of the model, in registration order, and wins over the key; an index
    that names no available worker refuses the request."""

    name = "consistent_hashing"

    def __init__(self, rng: random.Random, metrics: PolicyMetrics) -> None:
        self._rng = rng
        self._metrics = metrics
        self._ring = HashRing()

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        if request.target_worker:
            worker = self._target(candidates, request)
            self._count("target_worker_miss" if worker is None else "target_worker_hit")
            return worker
        key = request.header_key
        if not key:
            self._count("random_fallback")
            return self._rng.choice(candidates)
        self._ring.admit(candidates)
        self._count("routing_key_hit")
        return self._ring.owner(key.encode(), candidates)

    def _target(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        text = request.target_worker
        if not (text.isascii() and text.isdigit()) or len(text) > MAX_TARGET_DIGITS:
            return None
        served = request.served or candidates
        index = int(text)
        if index >= len(served):
            return None
        worker = served[index]
        # Candidates may lack a worker that an earlier attempt failed on; who names a worker wants it all the same.
        return worker if worker in candidates or worker.selectable(request.now) else None

    def no_candidates(self) -> None:
        self._count("no_healthy_workers")

    def forget(self, worker: Worker) -> None:
        self._ring.remove(worker)

    def _count(self, branch: str) -> None:
        self._metrics.branch(self.name, branch)
