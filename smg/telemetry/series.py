"""Labelled metric families with children bound once, and the guards against unbounded label values.

Every process writes its values to files in ``PROMETHEUS_MULTIPROC_DIR`` (see ``smg.telemetry.cells``) and the
exposition adds them up. Without the variable values live in the process alone, which is what unit tests want.

Gauges add up over the living processes, and ``mark_process_dead`` takes a dead process out of the sum. A label set of a
gauge that has to vanish (a removed worker) is set to NaN, which the exposition leaves out: the files cannot shrink.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Generic, TypeVar
from urllib.parse import urlsplit, urlunsplit

from smg.telemetry.cells import Cell, HistogramCell

DURATION_BUCKETS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0,
    240.0, 300.0, 480.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0, 5400.0, 7200.0,
)  # fmt: skip
BACKOFF_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LOOP_DELAY_BUCKETS = (0.0, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

OTHER = "other"
UNKNOWN = "unknown"
MAX_LABEL_SETS = 2000

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"})

_duration_buckets: tuple[float, ...] = DURATION_BUCKETS


def configure(duration_buckets: Iterable[float] | None) -> None:
    """Replace the buckets of the duration histograms (``--prometheus-duration-buckets``). Called before any is made."""
    global _duration_buckets
    chosen = sorted({float(bound) for bound in duration_buckets or () if math.isfinite(bound)})
    _duration_buckets = tuple(chosen) or DURATION_BUCKETS


def duration_buckets() -> tuple[float, ...]:
    """The buckets of duration histograms, in seconds, ascending, without +Inf."""
    return _duration_buckets


def method_label(method: str) -> str:
    """The method, or ``other`` for one that no standard names."""
    return method if method in _METHODS else OTHER


def worker_label(url: str) -> str:
    """A worker's name without credentials; a data-parallel rank at its end (``grpc://host:port@3``) stays."""
    if "@" not in url:
        return url
    base, _, rank = url.rpartition("@")
    suffix = f"@{rank}" if rank.isdigit() else ""
    parts = urlsplit(base if suffix else url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) + suffix


class ModelGuard:
    """Maps model names of requests to label values: served ids stay, everything else is ``other`` or ``unknown``."""

    def __init__(self, served: Iterable[str] = ()) -> None:
        self._served = frozenset(served)

    def update(self, served: Iterable[str]) -> None:
        """Replace the set of served ids."""
        self._served = frozenset(served)

    def label(self, model: str) -> str:
        """The label value of a request's model."""
        if model in self._served:
            return model
        return OTHER if model else UNKNOWN


Child = TypeVar("Child", Cell, HistogramCell)


class _Family(Generic[Child]):
    """Bound children by label values; beyond the bound new sets are counted together under ``other``."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], limit: int) -> None:
        self.name = name
        self.text = text
        self.label_names = labels
        self._limit = limit
        self._children: dict[tuple[str, ...], Child] = {}
        if not labels:
            self.child()

    def _make(self, values: tuple[str, ...]) -> Child:
        raise NotImplementedError

    def child(self, *values: str) -> Child:
        """The bound value of one label set, created at 0."""
        found = self._children.get(values)
        if found is not None:
            return found
        if len(values) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, got {values}")
        if len(self._children) >= self._limit:
            values = (OTHER,) * len(values)
            found = self._children.get(values)
        if found is None:
            found = self._children[values] = self._make(values)
        return found


class Counters(_Family[Cell]):
    """A counter family; its name ends in ``_total``. Without labels it exists at 0 from the start."""

    def __init__(self, name: str, text: str, *labels: str, limit: int = MAX_LABEL_SETS) -> None:
        super().__init__(name, text, labels, limit)

    def _make(self, values: tuple[str, ...]) -> Cell:
        return Cell("counter", self.name.removesuffix("_total"), self.name, self.label_names, values, self.text)

    def inc(self, *values: str) -> None:
        """Add one."""
        (self._children.get(values) or self.child(*values)).inc()

    def add(self, amount: float, *values: str) -> None:
        """Add ``amount`` >= 0."""
        (self._children.get(values) or self.child(*values)).inc(amount)


class Gauges(_Family[Cell]):
    """A gauge family that adds up over the living processes."""

    def __init__(self, name: str, text: str, *labels: str, limit: int = MAX_LABEL_SETS) -> None:
        super().__init__(name, text, labels, limit)

    def _make(self, values: tuple[str, ...]) -> Cell:
        return Cell("gauge_livesum", self.name, self.name, self.label_names, values, self.text)

    def set(self, value: float, *values: str) -> None:
        """Set this process's share."""
        (self._children.get(values) or self.child(*values)).set(value)

    def forget(self, *values: str) -> None:
        """Take a label set out of the exposition; a later ``set`` brings it back."""
        child = self._children.get(values)
        if child is not None:
            child.set(math.nan)

    def forget_where(self, position: int, value: str) -> None:
        """Forget every label set whose label at ``position`` has this value."""
        for values in self._children:
            if values[position] == value:
                self.forget(*values)


class Histograms(_Family[HistogramCell]):
    """A histogram family."""

    def __init__(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str, limit: int = MAX_LABEL_SETS
    ) -> None:
        self._bounds = buckets
        super().__init__(name, text, labels, limit)

    def _make(self, values: tuple[str, ...]) -> HistogramCell:
        return HistogramCell(self.name, self._bounds, self.label_names, values, self.text)

    def observe(self, amount: float, *values: str) -> None:
        """Record one observation."""
        (self._children.get(values) or self.child(*values)).observe(amount)
