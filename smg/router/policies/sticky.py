"""Keys pinned to workers, for manual mode and for sticky sessions on top of another policy."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from smg.router.worker import Worker
from smg.telemetry.router_metrics import RouterMetrics
from smg.telemetry.series import worker_label

MAX_KEYS = 1_000_000

Assign = Callable[[Sequence[Worker]], Worker | None]


class Pin:
    """The workers of one key: the first is preferred, the second stands in while the first is unavailable. ``used`` is
    monotonic seconds."""

    __slots__ = ("used", "workers")

    def __init__(self, workers: list[Worker], used: float) -> None:
        self.workers = workers
        self.used = used


class StickyKeys:
    """Pins by key, least recently used first. Idle keys go after ``max_idle`` seconds; beyond ``max_keys`` the oldest
    make room."""

    def __init__(self, max_idle: float, metrics: RouterMetrics, max_keys: int = MAX_KEYS) -> None:
        self._max_idle = max_idle
        self._max_keys = max_keys
        self._metrics = metrics
        self._pins: OrderedDict[str, Pin] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def route(self, key: str, candidates: Sequence[Worker], now: float, assign: Assign) -> tuple[str, Worker | None]:
        """The branch taken ("occupied_hit", "occupied_miss" or "vacant") and the worker of ``key``; ``assign`` chooses
        for a key whose workers are none of the candidates."""
        pin = self._pins.get(key)
        if pin is not None:
            pin.used = now
            self._pins.move_to_end(key)
            for worker in pin.workers:
                if worker in candidates:
                    return "occupied_hit", worker
        branch = "vacant" if pin is None else "occupied_miss"
        chosen = assign(candidates)
        if chosen is not None:
            self._pin(key, pin, chosen, now)
        return branch, chosen

    def forget(self, worker: Worker) -> None:
        """The worker is gone for good: its keys keep their other worker, or are free again."""
        for key in [key for key, pin in self._pins.items() if worker in pin.workers]:
            pin = self._pins[key]
            pin.workers.remove(worker)
            if not pin.workers:
                self._drop(key)

    def expire(self, now: float) -> None:
        """Drop the keys that were idle too long."""
        while self._pins:
            key, pin = next(iter(self._pins.items()))
            if now - pin.used <= self._max_idle:
                return
            self._drop(key)

    def _pin(self, key: str, pin: Pin | None, worker: Worker, now: float) -> None:
        if pin is None:
            if len(self._pins) >= self._max_keys:
                self._drop(next(iter(self._pins)))
            self._pins[key] = Pin([worker], now)
            self._metrics.policies.manual_entries.inc()
        else:
            for replaced in pin.workers[1:]:
                self._count(replaced, -1)
            pin.workers[1:] = [worker]
        self._count(worker, 1)

    def _drop(self, key: str) -> None:
        for worker in self._pins.pop(key).workers:
            self._count(worker, -1)
        self._metrics.policies.manual_entries.dec()

    def _count(self, worker: Worker, step: int) -> None:
        worker.pinned_keys += step
        self._metrics.workers.routing_keys.set(worker.pinned_keys, worker_label(worker.name))


class Assigner:
    """Worker of a new key: by "min_load" (fewest requests in flight), "min_group" (fewest keys), or else at random."""

    def __init__(self, mode: str, rng: random.Random) -> None:
        self._mode = mode
        self._rng = rng

    def __call__(self, candidates: Sequence[Worker]) -> Worker:
        if self._mode == "min_load":
            counts = [worker.inflight for worker in candidates]
        elif self._mode == "min_group":
            counts = [worker.pinned_keys for worker in candidates]
        else:
            return self._rng.choice(candidates)
        fewest = min(counts)
        return self._rng.choice([w for w, count in zip(candidates, counts, strict=True) if count == fewest])
