"""Metric values of one process: floats in a memory-mapped file that the exposition adds up over all processes.

The files have the format of ``prometheus_client``'s multiprocess mode and are read by its collector. Its own metric
objects cost about a microsecond per update (a lock, a process id check, exemplars), twenty times per request; a cell
costs a fifth. Cells belong to the process that made them and to its one loop thread.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.utils import floatToGoString

_files: dict[str, MmapedDict] = {}


def _forget_files() -> None:
    _files.clear()


os.register_at_fork(after_in_child=_forget_files)


def _file(kind: str) -> MmapedDict | None:
    """This process's file for values of one kind; None without ``PROMETHEUS_MULTIPROC_DIR``."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is None:
        return None
    path = os.path.join(directory, f"{kind}_{os.getpid()}.db")
    found = _files.get(path)
    if found is None:
        found = _files[path] = MmapedDict(path)  # type: ignore[no-untyped-call]
    return found


class Cell:
    """One value. ``kind`` is "counter", "histogram" or "gauge_livesum"; ``sample`` is the exposed name."""

    __slots__ = ("_shared", "name", "value")

    def __init__(
        self, kind: str, family: str, sample: str, names: Sequence[str], values: Sequence[str], text: str
    ) -> None:
        self.name = sample
        self.value = 0.0
        # The place of the value in the file. A file that grows is mapped anew, but the older mapping shows the same
        # pages, so the place stays good. The time stamp next to it is only asked of other kinds of gauges.
        self._shared: memoryview[float] | list[float] = [0.0]
        file = _file(kind)
        if file is not None:
            key = mmap_key(family, sample, list(names), list(values), text)
            self.value, _ = file.read_value(key)  # type: ignore[no-untyped-call]
            at: int = file._positions[key]
            self._shared = memoryview(file._m)[at : at + 8].cast("d")

    def inc(self, amount: float = 1.0) -> None:
        """Add ``amount``."""
        self.value = self._shared[0] = self.value + amount

    def dec(self, amount: float = 1.0) -> None:
        """Subtract ``amount`` (gauges only)."""
        self.inc(-amount)

    def set(self, value: float) -> None:
        """Replace the value (gauges only)."""
        if value != self.value:
            self.value = self._shared[0] = value


class HistogramCell:
    """One histogram: a cell per bucket and one for the sum; the collector makes the buckets cumulative."""

    __slots__ = ("_bounds", "_buckets", "_sum", "name")

    def __init__(
        self, family: str, bounds: tuple[float, ...], names: Sequence[str], values: Sequence[str], text: str
    ) -> None:
        self.name = family
        self._bounds = bounds
        self._sum = Cell("histogram", family, f"{family}_sum", names, values, text)
        self._buckets = [
            Cell("histogram", family, f"{family}_bucket", (*names, "le"), (*values, floatToGoString(bound)), text)  # type: ignore[no-untyped-call]
            for bound in (*bounds, float("inf"))
        ]

    def observe(self, amount: float) -> None:
        """Record one observation."""
        self._sum.inc(amount)
        self._buckets[bisect_left(self._bounds, amount)].inc()
