"""cache_aware: to the worker that has most of the prompt in its KV cache, unless it is too busy.

| Case | Worker | Branch |
|---|---|---|
| more than the threshold of the prompt is indexed | least loaded holder of the longest match | tree_match |
| that holder's load is out of proportion | least loaded candidate | spill |
| no such match | least loaded candidate | expected_wait_fallback |
| no holder is available | first candidate, not recorded | first_healthy_fallback |

Load is the expected wait of ``LoadScore``. The prompt is recorded for the worker that gets it, so that hot prefixes
spread over workers.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence

from smg.router.policies.base import Policy, RouteFacts
from smg.router.policies.prefix_index import PrefixIndex
from smg.router.policies.score import LoadScore, mean_inflight
from smg.router.worker import Worker
from smg.settings import Settings
from smg.telemetry.router_metrics import PolicyMetrics

EVICTIONS_PER_TICK = 1000
MIN_SPILL_MARGIN = 4


class CacheAware(Policy):
    """See the module's text. Prompts shorter than a block never match and are not recorded."""

    name = "cache_aware"

    def __init__(self, settings: Settings, score: LoadScore, metrics: PolicyMetrics, model: str) -> None:
        self.index: PrefixIndex[Worker] = PrefixIndex(max(1, settings.max_tree_size // settings.block_size))
        self._block_size = settings.block_size
        self._threshold = settings.cache_threshold
        self._relative = settings.balance_rel_threshold
        self._absolute = settings.balance_abs_threshold
        self._score = score
        self._metrics = metrics
        self._branch = {
            name: metrics.branches[self.name].child(name)
            for name in ("tree_match", "spill", "expected_wait_fallback", "first_healthy_fallback")
        }
        self._model = model

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        hashes = array("Q", request.block_hashes)
        if sys.byteorder != "little":
            hashes.byteswap()
        match = self.index.find(hashes)
        matched, segment, _ = match
        ratio = matched * self._block_size / request.prompt_tokens if request.prompt_tokens else 0.0
        self._metrics.match_ratio.observe(ratio)
        if segment is None or ratio <= self._threshold:
            branch, worker = "expected_wait_fallback", self._score.best(candidates, request.now)
        else:
            holders = [holder for holder in segment.holders if holder in candidates]
            if not holders:
                self._branch["first_healthy_fallback"].inc()
                return candidates[0]
            branch, worker = "tree_match", self._score.best(holders, request.now)
            if self.overloaded(worker, candidates):
                branch, worker = "spill", self._score.best(candidates, request.now)
        self._branch[branch].inc()
        self.index.record(hashes, match, worker)
        return worker

    def overloaded(self, worker: Worker, candidates: Sequence[Worker]) -> bool:
        """Whether the worker's requests in flight exceed the candidates' mean by the relative and the absolute margin;
        the absolute one is never more than twice the natural swing (the root) of the mean, but at least 4."""
        if not worker.inflight or len(candidates) == 1:
            return False
        mean = mean_inflight(candidates)
        margin = min(self._absolute, max(MIN_SPILL_MARGIN, math.ceil(2 * math.sqrt(mean))))
        return worker.inflight > mean * self._relative and worker.inflight > mean + margin

    def forget(self, worker: Worker) -> None:
        self.index.forget(worker)

    def tick(self, now: float) -> bool:
        """Evict down to ``--max-tree-size``, a part at a time so that routing never waits for it."""
        if not self.index.evict(EVICTIONS_PER_TICK):
            return True
        self._metrics.tree_tokens.set(self.index.blocks * self._block_size, self._model)
        self._metrics.tree_tenants.set(len(self.index.holders()), self._model, "token")
        return False
