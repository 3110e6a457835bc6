"""power_of_two: two random candidates, the less loaded one takes the request."""

from __future__ import annotations

import random
from collections.abc import Sequence

from smg.router.policies.base import Policy, RouteFacts
from smg.router.policies.score import LoadScore
from smg.router.worker import Worker


class PowerOfTwo(Policy):
    """Two distinct candidates are compared by ``metric``: "expected_wait" (the score of ``LoadScore``), "requests"
    (this gateway's requests in flight) or "least_requests" (the engine's running and waiting requests plus those sent
    since its report; requests in flight without a fresh report)."""

    name = "power_of_two"

    def __init__(self, score: LoadScore, metric: str, rng: random.Random) -> None:
        self._score = score
        self._metric = metric
        self._rng = rng

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        if len(candidates) == 1:
            return candidates[0]
        pair = self._rng.sample(candidates, 2)
        if self._metric == "expected_wait":
            return self._score.best(pair, request.now)
        if self._metric == "requests":
            return self._score.fewest_inflight(pair)
        return self._score.lowest(pair, [self._requests(worker, request.now) for worker in pair])

    def _requests(self, worker: Worker, now: float) -> int:
        load = self._score.fresh_load(worker, now)
        if load is None:
            return worker.inflight
        return load.running + load.waiting + worker.requests_since_report
