"""least_load: the candidate with the shortest expected wait."""

from __future__ import annotations

from collections.abc import Sequence

from smg.router.policies.base import Policy, RouteFacts
from smg.router.policies.score import LoadScore
from smg.router.worker import Worker


class LeastLoad(Policy):
    """The lowest score over all candidates. ``max_waiting`` > 0 leaves out workers with that many waiting requests,
    counting what this gateway sent since the worker's last report; when all are left out, the request is refused."""

    name = "least_load"

    def __init__(self, score: LoadScore, max_waiting: int = 0) -> None:
        self._score = score
        self._max_waiting = max_waiting

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        if self._max_waiting > 0:
            candidates = [worker for worker in candidates if self._has_room(worker, request.now)]
            if not candidates:
                return None
        return self._score.best(candidates, request.now)

    def _has_room(self, worker: Worker, now: float) -> bool:
        load = self._score.fresh_load(worker, now)
        return load is None or load.waiting + worker.requests_since_report < self._max_waiting
