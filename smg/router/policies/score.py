"""How busy a worker is: the seconds a new request can expect to wait there.

    (queued tokens + running tokens + tokens sent since the report) / throughput + weight * k / (1 - k)

Queued tokens are the engine's waiting uncached prompt tokens, or its waiting requests at a mean size when it does not
say; running tokens its running requests at that mean size; ``k`` is the share of the KV cache in use. A report counts
for ``FRESH_INTERVALS`` load-monitor intervals: one lost poll is no news, three are.

A worker without a fresh report, while others have one, is estimated by this gateway's requests in flight there at the
mean size and the others' mean throughput. When no worker has a fresh report, all of them are compared by their
requests in flight.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from smg.router.worker import EngineLoad, Worker
from smg.settings import Settings

FRESH_INTERVALS = 3
MAX_KV_USAGE = 0.999


class LoadScore:
    """Scores of workers; lower is better, exact ties are broken uniformly at random."""

    def __init__(self, settings: Settings, rng: random.Random) -> None:
        self._rng = rng
        self._mean_tokens = settings.least_load_mean_prefill_tokens
        self._default_throughput = max(settings.least_load_default_throughput, 1e-6)
        self._kv_weight = settings.least_load_kv_pressure_weight
        self._fresh_secs = FRESH_INTERVALS * float(settings.load_monitor_interval)

    def fresh_load(self, worker: Worker, now: float) -> EngineLoad | None:
        """The worker's load report if it still counts at ``now`` (monotonic seconds)."""
        load = worker.load
        return None if load is None or worker.report_at < now - self._fresh_secs else load

    def scores(self, workers: Sequence[Worker], now: float) -> list[float]:
        """One score per worker: expected seconds of wait, or requests in flight when no worker has a fresh report."""
        oldest = now - self._fresh_secs
        scores: list[float] = []
        silent: list[int] = []
        rates = 0.0
        for worker in workers:
            load = worker.load
            if load is None or worker.report_at < oldest:
                silent.append(len(scores))
                scores.append(float(worker.inflight))
                continue
            tokens, rate, pressure = load.terms or self._terms(load)
            scores.append((tokens + worker.tokens_since_report) / rate + pressure)
            rates += rate
        if silent and len(silent) < len(scores):
            mean_rate = rates / (len(scores) - len(silent))
            for index in silent:
                scores[index] *= self._mean_tokens / mean_rate
        return scores

    def best(self, workers: Sequence[Worker], now: float) -> Worker:
        """The worker with the lowest score; ``workers`` is not empty."""
        if len(workers) == 1:
            return workers[0]
        return self.lowest(workers, self.scores(workers, now))

    def fewest_inflight(self, workers: Sequence[Worker]) -> Worker:
        """The worker with the fewest requests in flight from this gateway."""
        return self.lowest(workers, [worker.inflight for worker in workers])

    def lowest(self, workers: Sequence[Worker], scores: Sequence[float]) -> Worker:
        """The worker whose entry in ``scores`` is the lowest."""
        lowest = min(scores)
        if scores.count(lowest) == 1:
            return workers[scores.index(lowest)]
        return self._rng.choice([worker for worker, score in zip(workers, scores, strict=True) if score == lowest])

    def _terms(self, load: EngineLoad) -> tuple[float, float, float]:
        """The parts of the score that stay the same until the next report: tokens, tokens per second, seconds."""
        mean = self._mean_tokens
        tokens = (load.queued_tokens or load.waiting * mean) + load.running * mean
        k = min(max(load.kv_usage, 0.0), MAX_KV_USAGE)
        rate = load.throughput if load.throughput > 0 else self._default_throughput
        load.terms = (float(tokens), rate, self._kv_weight * k / (1 - k))
        return load.terms


def mean_inflight(workers: Iterable[Worker]) -> float:
    """Mean number of requests in flight; ``workers`` is not empty."""
    counts = [worker.inflight for worker in workers]
    return sum(counts) / len(counts)
