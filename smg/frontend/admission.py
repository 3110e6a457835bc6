"""Admission: how many requests of the serving routes run at once, and who waits.

A slot is held until the last byte of the response body. Beyond the bound requests wait in a FIFO queue of bounded
length and time. An optional token bucket limits the sustained rate.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque

from smg.settings import Settings


class RefusedError(Exception):
    """No slot: ``code`` is ``admission_queue_full`` (429) or ``admission_queue_timeout`` (503)."""

    def __init__(self, status: int, code: str, message: str, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.reason = reason


def concurrency_bound(settings: Settings) -> int:
    """The bound of one frontend process; 0 = unlimited. The flag's bound is for the whole gateway."""
    bound = settings.max_concurrent_requests
    if bound < 0:
        bound = max(4096, 1024 * (os.cpu_count() or 1))
    return -(-bound // settings.frontend_procs)


class Admission:
    """Counts slots. ``inflight`` and ``waiting`` are for the metrics."""

    def __init__(self, settings: Settings) -> None:
        self._bound = concurrency_bound(settings)
        self._queue_size = -(-settings.queue_size // settings.frontend_procs)
        self._queue_secs = settings.queue_timeout_secs
        rate = settings.rate_limit_tokens_per_second or 0
        self._rate = rate / settings.frontend_procs
        self._burst = float(self._bound or max(1.0, self._rate))
        self._tokens = self._burst
        self._refilled = time.monotonic()
        self._queue: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.inflight = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def try_enter(self) -> bool:
        """Take a slot without waiting."""
        if self._queue or not self._has_room():
            return False
        self._take()
        return True

    async def enter(self) -> None:
        """Take a slot, waiting for one if the queue allows. Raises ``RefusedError``."""
        if self.try_enter():
            return
        if self._queue_size <= 0:
            message = "concurrency limit reached and queuing is disabled"
            raise RefusedError(429, "admission_queue_full", message, "full")
        if len(self._queue) >= self._queue_size:
            raise RefusedError(429, "admission_queue_full", "admission queue is full", "full")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._wake_for_tokens()
        try:
            await asyncio.wait_for(turn, self._queue_secs)
        except TimeoutError:
            self._forget(turn)
            message = f"no slot became free within {self._queue_secs} s"
            raise RefusedError(503, "admission_queue_timeout", message, "timeout") from None
        except asyncio.CancelledError:
            self._forget(turn)
            raise

    def leave(self) -> None:
        """Give the slot back."""
        self.inflight -= 1
        self._admit_waiting()

    def _has_room(self) -> bool:
        if self._bound and self.inflight >= self._bound:
            return False
        return not self._rate or self._refill() >= 1.0

    def _refill(self) -> float:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._refilled) * self._rate)
        self._refilled = now
        return self._tokens

    def _take(self) -> None:
        self.inflight += 1
        if self._rate:
            self._tokens -= 1.0

    def _admit_waiting(self) -> None:
        while self._queue and self._has_room():
            turn = self._queue.popleft()
            if not turn.done():
                self._take()
                turn.set_result(None)
        self._wake_for_tokens()

    def _wake_for_tokens(self) -> None:
        """With a rate limit nobody may leave for a while: come back when the next token is there."""
        if self._rate and self._queue and self._timer is None:
            delay = max(0.001, (1.0 - self._tokens) / self._rate)
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._admit_waiting()

    def _forget(self, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            self.leave()  # the slot was given in the same moment
        elif turn in self._queue:
            self._queue.remove(turn)
