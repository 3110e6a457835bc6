"""prefix_hash: prompts that begin alike go to the same worker, by hash and without an index."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_hexdigest

from smg.router.policies.base import Policy, RouteFacts
from smg.router.policies.ring import HashRing
from smg.router.policies.score import LoadScore
from smg.router.worker import Worker
from smg.settings import Settings
from smg.telemetry.router_metrics import PolicyMetrics

HASH_BYTES = 8


class PrefixHash(Policy):
    """The key is the chained hash of the last full block within the first ``--prefix-token-count`` tokens, written as
    16 hexadecimal digits and placed on the ring: the router has no token ids, but equal chained hashes mean equal
    tokens up to there. A routing key header replaces the prompt (XXH3-64 of its bytes, written alike).

    An owner whose load exceeds both margins over the mean hands the request to the least loaded worker."""

    name = "prefix_hash"

    def __init__(self, settings: Settings, score: LoadScore, metrics: PolicyMetrics) -> None:
        self._blocks = max(1, settings.prefix_token_count // settings.block_size)
        self._factor = settings.prefix_hash_load_factor
        self._margin = settings.prefix_hash_balance_abs_threshold
        self._score = score
        self._metrics = metrics
        self._ring = HashRing()

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        key = self._key(request)
        if not key:
            self._count("no_routing_key")
            return self._score.fewest_inflight(candidates)
        self._ring.admit(candidates)
        owner = self._ring.owner(key.encode(), candidates)
        if owner is None:
            self._count("fallback_least_load")
            return self._score.fewest_inflight(candidates)
        limit = self._limit(candidates)
        if owner.inflight > limit:
            free = [worker for worker in candidates if worker.inflight <= limit]
            if free:
                self._count("load_balance_walk")
                return self._score.fewest_inflight(free)
        self._count("ring_hit")
        return owner

    def _key(self, request: RouteFacts) -> str:
        """16 hexadecimal digits, "" if there is nothing to hash."""
        if request.header_key:
            return xxh3_64_hexdigest(request.header_key.encode())
        end = min(self._blocks * HASH_BYTES, len(request.block_hashes))
        if not end:
            return ""
        return f"{int.from_bytes(request.block_hashes[end - HASH_BYTES : end], 'little'):016x}"

    def _limit(self, candidates: Sequence[Worker]) -> float:
        mean = (sum(worker.inflight for worker in candidates) + 1) / len(candidates)
        return max(mean * self._factor, mean + self._margin)

    def no_candidates(self) -> None:
        self._count("no_healthy_workers")

    def forget(self, worker: Worker) -> None:
        self._ring.remove(worker)

    def _count(self, branch: str) -> None:
        self._metrics.branch(self.name, branch)
