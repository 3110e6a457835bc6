"""When and how often a request is tried again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from smg.settings import Settings


def counted(failed: Sequence[str], worker: str) -> bool:
    """Whether a request's failure at ``worker`` was counted before. A request counts once per worker, however often it
    was tried there: when it goes elsewhere, or ends. ``failed`` lists the worker of every failed attempt."""
    end = len(failed)
    while end and failed[end - 1] == worker:
        end -= 1
    return worker in failed[:end]


@dataclass(slots=True)
class RetryRules:
    """``attempts`` is the total, the first one included; delays are seconds."""

    attempts: int = 5
    first: float = 0.05
    ceiling: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2
    rng: random.Random = field(default_factory=random.Random)

    @classmethod
    def from_settings(cls, settings: Settings) -> RetryRules:
        return cls(
            settings.max_attempts,
            settings.retry_initial_backoff_ms / 1000,
            settings.retry_max_backoff_ms / 1000,
            settings.retry_backoff_multiplier,
            settings.retry_jitter_factor,
        )

    def delay(self, failed_attempts: int) -> float:
        """Pause after ``failed_attempts`` (at least 1): exponential, bounded, with a random share either way."""
        try:
            delay = min(self.first * self.multiplier ** (failed_attempts - 1), self.ceiling)
        except OverflowError:
            delay = self.ceiling
        return max(0.0, delay * (1 + self.rng.uniform(-self.jitter, self.jitter)))
