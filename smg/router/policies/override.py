"""Sticky sessions on top of another policy (``--routing-key-override``)."""

from __future__ import annotations

from collections.abc import Sequence

from smg.router.policies.base import MAX_KEY_BYTES, Policy, RouteFacts
from smg.router.policies.sticky import Assigner, StickyKeys
from smg.router.worker import Worker
from smg.telemetry.router_metrics import PolicyMetrics

# A pinned worker that runs this many requests of the key already is passed over: a key is a conversation, and one that
# floods its worker would gain nothing from the cache it shares.
MAX_KEY_INFLIGHT = 2


class StickyOverride(Policy):
    """A request with a routing key, from a header or its own id, is pinned as in manual mode. Without ``assign`` the
    first assignment is up to ``base``, which also serves the requests without a key."""

    def __init__(self, base: Policy, keys: StickyKeys, assign: Assigner | None, metrics: PolicyMetrics) -> None:
        self.name = base.name
        self._base = base
        self._keys = keys
        self._assign = assign
        self._metrics = metrics

    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        key = request.routing_key
        if not key or len(key) > MAX_KEY_BYTES:
            return self._base.select(candidates, request)
        self._metrics.key_source.inc(request.key_source)

        def assign(workers: Sequence[Worker]) -> Worker | None:
            return self._assign(workers) if self._assign is not None else self._base.select(workers, request)

        branch, worker = self._keys.route(key, candidates, request.now, assign)
        if worker is not None and worker.inflight_of(key) >= MAX_KEY_INFLIGHT and len(candidates) > 1:
            branch = "cap_respill"
            worker = self._base.select([other for other in candidates if other is not worker], request)
        self._metrics.branch("manual", branch)
        return worker

    def no_candidates(self) -> None:
        self._base.no_candidates()

    def forget(self, worker: Worker) -> None:
        self._keys.forget(worker)
        self._base.forget(worker)

    def tick(self, now: float) -> bool:
        self._keys.expire(now)
        return self._base.tick(now)
