"""The consistent-hash ring: a key belongs to the first point clockwise from its own position.

Every worker has ``POINTS`` points; point ``i`` lies where the BLAKE3 hash of ``<url>#<i>`` says, a key where the hash
of its bytes says (first eight bytes, little-endian). A worker that comes or goes moves only the keys next to its
points.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable

from blake3 import blake3

from smg.router.worker import Worker

POINTS = 150


def position(data: bytes) -> int:
    """Where ``data`` lies on the ring, 0 to 2^64 - 1."""
    return int.from_bytes(blake3(data).digest(length=8), "little")


class HashRing:
    """Points of all workers seen so far. Unavailable ones keep their points, so that their keys come back to them."""

    def __init__(self) -> None:
        self._members: dict[Worker, list[int]] = {}
        self._points: list[int] = []
        self._owners: list[Worker] = []

    def admit(self, workers: Iterable[Worker]) -> None:
        """Add the workers that have no points yet."""
        new = [worker for worker in workers if worker not in self._members]
        if new:
            for worker in new:
                self._members[worker] = [position(f"{worker.name}#{i}".encode()) for i in range(POINTS)]
            self._rebuild()

    def remove(self, worker: Worker) -> None:
        """The worker is gone for good."""
        if self._members.pop(worker, None) is not None:
            self._rebuild()

    def owner(self, key: bytes, available: Collection[Worker]) -> Worker | None:
        """The worker of ``key`` among the ``available`` ones; None if none of them is on the ring."""
        owners = self._owners
        count = len(owners)
        start = bisect_left(self._points, position(key))
        for step in range(count):
            worker = owners[(start + step) % count]
            if worker in available:
                return worker
        return None

    def _rebuild(self) -> None:
        pairs = [(point, worker) for worker, points in self._members.items() for point in points]
        pairs.sort(key=lambda pair: pair[0])
        self._points = [point for point, _ in pairs]
        self._owners = [worker for _, worker in pairs]
