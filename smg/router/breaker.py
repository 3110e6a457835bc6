"""The circuit breaker of one worker.

closed -> open after ``failure_threshold`` consecutive failures; open -> half open after ``timeout`` seconds; half
open -> closed after ``success_threshold`` successes, -> open again with one failure. An open breaker takes the worker
out of selection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CLOSED, OPEN, HALF_OPEN = 0, 1, 2
NAMES = ("closed", "open", "half_open")


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """Thresholds of all breakers; ``enabled`` False never opens."""

    failure_threshold: int = 10
    success_threshold: int = 3
    timeout: float = 60.0
    enabled: bool = True


class CircuitBreaker:
    """State machine of one worker; ``on_change(old, new)`` is told about transitions."""

    __slots__ = ("_on_change", "_rules", "failures", "opened_at", "state", "successes")

    def __init__(self, rules: BreakerRules, on_change: Callable[[int, int], None] | None = None) -> None:
        self._rules = rules
        self._on_change = on_change
        self.state = CLOSED
        self.failures = 0
        self.successes = 0
        self.opened_at = 0.0

    def allows(self, now: float) -> bool:
        """Whether the worker may be selected at ``now`` (monotonic seconds)."""
        if self.state == OPEN and now - self.opened_at >= self._rules.timeout:
            self._go(HALF_OPEN)
        return self.state != OPEN

    def success(self) -> None:
        """A request was answered, or refused for the caller's own fault."""
        self.failures = 0
        self.successes += 1
        if self.state == HALF_OPEN and self.successes >= self._rules.success_threshold:
            self._go(CLOSED)

    def failure(self, now: float) -> None:
        """The worker failed a request."""
        self.successes = 0
        self.failures += 1
        if not self._rules.enabled:
            return
        if self.state == HALF_OPEN or (self.state == CLOSED and self.failures >= self._rules.failure_threshold):
            self.opened_at = now
            self._go(OPEN)

    def readmit(self) -> bool:
        """The health prober found the worker ready again: an open breaker half opens at once. True if it was open."""
        if self.state != OPEN:
            return False
        self._go(HALF_OPEN)
        return True

    def _go(self, state: int) -> None:
        old, self.state = self.state, state
        self.successes = 0
        if state == CLOSED:
            self.failures = 0
        if self._on_change is not None:
            self._on_change(old, state)
