"""bucket: prompts of similar length share a worker, so that short ones do not wait behind long ones.

The range of prompt lengths is split over the workers. At first every range is equally wide; at every adjustment the
lengths seen since the last one are split so that each range carries the same number of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from smg.router.policies.base import Policy, RouteFacts
from smg.router.policies.score import LoadScore
from smg.router.worker import Worker
from smg.settings import Settings

FIRST_RANGE_TOKENS = 4096
MAX_WINDOW = 100_000


class Bucket(Policy):
    """For prefill workers. When requests in flight differ by more than both thresholds, the least loaded worker takes
    the request whatever its length."""

    name = "bucket"

    def __init__(self, settings: Settings, score: LoadScore) -> None:
        self._interval = float(settings.bucket_adjust_interval_secs)
        self._absolute = settings.balance_abs_threshold
        self._relative = settings.balance_rel_threshold
        self._score = score
        self._bounds: list[int] = []
        self._lengths: list[int] = []
        self._adjusted = 0.0

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        if len(self._bounds) != len(candidates) - 1:
            self._bounds = self._equal_widths(len(candidates))
            self._adjusted = request.now
        elif request.now - self._adjusted >= self._interval:
            self._adjust(len(candidates))
            self._adjusted = request.now
        if len(self._lengths) < MAX_WINDOW:
            self._lengths.append(request.prompt_tokens)
        counts = [worker.inflight for worker in candidates]
        low, high = min(counts), max(counts)
        if high - low > self._absolute and high > self._relative * low:
            return self._score.fewest_inflight(candidates)
        return candidates[bisect_right(self._bounds, request.prompt_tokens)]

    @staticmethod
    def _equal_widths(count: int) -> list[int]:
        """Lower bounds of all ranges but the first, which begins at 0; the last has no end."""
        return [FIRST_RANGE_TOKENS * i // count for i in range(1, count)]

    def _adjust(self, count: int) -> None:
        lengths, self._lengths = sorted(self._lengths), []
        if len(lengths) < count:
            return
        share = sum(lengths) / count
        bounds: list[int] = []
        carried = 0
        for length in lengths:
            if len(bounds) < count - 1 and carried >= share * (len(bounds) + 1):
                bounds.append(length)
            carried += length
        self._bounds = bounds + [lengths[-1] + 1] * (count - 1 - len(bounds))
