"""Circuit breaker and retry delays."""

from __future__ import annotations

import random

import pytest
from router_context import make_worker

from smg.api.grpc_status import breaker_outcome, is_retryable
from smg.router.breaker import CLOSED, HALF_OPEN, NAMES, OPEN, BreakerRules, CircuitBreaker
from smg.router.process import spared, start_failed
from smg.router.retry import RetryRules, counted
from smg.settings import Settings

RULES = BreakerRules(failure_threshold=3, success_threshold=2, timeout=60.0)


class Watched:
    """A breaker and its transitions."""

    def __init__(self, rules: BreakerRules = RULES) -> None:
        self.changes: list[tuple[str, str]] = []
        self.breaker = CircuitBreaker(rules, lambda old, new: self.changes.append((NAMES[old], NAMES[new])))

    def fail(self, times: int, now: float = 0.0) -> None:
        for _ in range(times):
            self.breaker.failure(now)


def test_consecutive_failures_open_and_any_success_resets() -> None:
    watched = Watched()
    watched.fail(2)
    watched.breaker.success()
    watched.fail(2)
    assert watched.breaker.state == CLOSED and watched.breaker.allows(0.0)
    watched.fail(1)
    assert watched.breaker.state == OPEN and not watched.breaker.allows(59.9)
    assert watched.changes == [("closed", "open")]


def test_half_open_closes_after_enough_successes() -> None:
    watched = Watched()
    watched.fail(3)
    assert watched.breaker.allows(60.0)
    assert watched.breaker.state == HALF_OPEN
    watched.breaker.success()
    assert watched.breaker.state == HALF_OPEN
    watched.breaker.success()
    assert watched.breaker.state == CLOSED and watched.breaker.failures == 0
    assert watched.changes == [("closed", "open"), ("open", "half_open"), ("half_open", "closed")]


def test_one_failure_opens_a_half_open_breaker_again() -> None:
    watched = Watched()
    watched.fail(3)
    assert watched.breaker.allows(60.0)
    watched.breaker.success()
    watched.fail(1, now=70.0)
    assert watched.breaker.state == OPEN
    assert not watched.breaker.allows(129.0) and watched.breaker.allows(130.0)
    watched.breaker.success()
    assert watched.breaker.state == HALF_OPEN, "successes before the failure do not count"


def test_late_outcomes_do_not_move_an_open_breaker() -> None:
    watched = Watched()
    watched.fail(3)
    watched.breaker.success()
    watched.fail(1, now=50.0)
    assert watched.breaker.state == OPEN and watched.breaker.allows(60.0)


def test_the_prober_readmits_an_open_breaker_only() -> None:
    watched = Watched()
    assert watched.breaker.readmit() is False and watched.breaker.state == CLOSED
    watched.fail(3)
    assert watched.breaker.readmit() is True and watched.breaker.state == HALF_OPEN


def test_a_disabled_breaker_never_opens() -> None:
    watched = Watched(BreakerRules(failure_threshold=1, enabled=False))
    watched.fail(50)
    assert watched.breaker.allows(0.0) and watched.changes == []


@pytest.mark.parametrize(
    ("code", "retried", "outcome"),
    [
        ("UNAVAILABLE", True, "failure"),
        ("RESOURCE_EXHAUSTED", True, "neutral"),
        ("DEADLINE_EXCEEDED", True, "failure"),
        ("CANCELLED", True, "failure"),
        ("UNKNOWN", True, "failure"),
        ("DATA_LOSS", True, "failure"),
        ("INTERNAL", False, "failure"),
        ("INVALID_ARGUMENT", False, "success"),
        ("NOT_FOUND", False, "success"),
        ("UNIMPLEMENTED", False, "success"),
        ("PERMISSION_DENIED", False, "success"),
        ("FAILED_PRECONDITION", False, "success"),
    ],
)
def test_grpc_codes(code: str, retried: bool, outcome: str) -> None:
    assert (is_retryable(code), breaker_outcome(code)) == (retried, outcome)


def test_retry_delays_grow_to_the_ceiling() -> None:
    rules = RetryRules.from_settings(Settings(retry_jitter_factor=0.0, retry_max_backoff_ms=150))
    assert [rules.delay(n) for n in range(1, 6)] == pytest.approx([0.05, 0.075, 0.1125, 0.15, 0.15])


def test_retry_jitter_goes_both_ways_and_stays_in_its_bounds() -> None:
    rules = RetryRules.from_settings(Settings())
    rules.rng = random.Random(1)
    delays = [rules.delay(2) for _ in range(500)]
    assert 0.06 <= min(delays) < 0.065 and 0.085 < max(delays) <= 0.09


def test_a_huge_number_of_attempts_has_a_delay() -> None:
    rules = RetryRules(jitter=0.0)
    assert rules.delay(2000) == 30.0


def test_attempts_are_the_total() -> None:
    assert RetryRules.from_settings(Settings()).attempts == 5
    assert RetryRules.from_settings(Settings(retry_max_retries=2)).attempts == 2
    assert RetryRules.from_settings(Settings(disable_retries=True)).attempts == 1


def test_a_request_counts_once_per_worker() -> None:
    """The worker of every failed attempt so far, and whether the last one's was counted when it went elsewhere."""
    assert not counted([], "a")
    assert not counted(["a", "a", "a"], "a")
    assert not counted(["b", "a"], "a")
    assert counted(["a", "b", "a"], "a")
    assert counted(["a", "b"], "a")


def test_other_servers_are_tried_first_then_other_ranks() -> None:
    server = [make_worker(0, dp_rank=rank) for rank in range(2)]
    other = make_worker(1)
    assert spared([*server, other], ["grpc://w0:1@0"]) == [other]
    assert spared(server, ["grpc://w0:1@0"]) == [server[1]]
    assert spared([other], ["grpc://w1:1"]) == [other]


def test_the_last_attempt_is_answered() -> None:
    error = start_failed("chat", "UNAVAILABLE", "gone")
    assert (error.status, error.code) == (503, "start_generation_failed")
    error = start_failed("embeddings", "INTERNAL", "broken")
    assert (error.status, error.code) == (500, "start_embedding_failed")
