"""cache_aware: what is a hit, when a busy holder is left, what is remembered."""

from __future__ import annotations

import random
from array import array

import pytest
from router_context import NOW, branches, facts, hashes_of, make_workers, report

from smg.router.policies import make_policy
from smg.router.policies.cache_aware import CacheAware
from smg.router.worker import Worker
from smg.settings import Settings
from smg.telemetry.router_metrics import RouterMetrics

PROMPT = list(range(1000, 1129))  # 129 tokens, eight full blocks


class Bed:
    """A policy over workers of which only chosen ones are free."""

    def __init__(self, count: int, **settings: object) -> None:
        self.metrics = RouterMetrics()
        made = make_policy(Settings(**settings), self.metrics, "m", "cache_aware", random.Random(3))  # type: ignore[arg-type]
        assert isinstance(made, CacheAware)
        self.policy = made
        self.workers = make_workers(count)

    def pick(self, tokens: list[int], workers: list[Worker] | None = None, now: float = NOW) -> Worker:
        chosen = self.policy.select(workers or self.workers, facts(tokens, now=now))
        assert chosen is not None
        return chosen

    def seed(self, worker: Worker, tokens: list[int]) -> None:
        """Record a prompt for a worker."""
        hashes = array("Q", hashes_of(tokens))
        self.policy.index.record(hashes, self.policy.index.find(hashes), worker)

    def branches(self) -> dict[str, int]:
        return branches(self.metrics, "cache_aware")


def test_a_known_prompt_goes_to_its_holder() -> None:
    bed = Bed(4)
    holder = bed.pick(PROMPT)
    assert all(bed.pick(PROMPT) is holder for _ in range(20))
    assert bed.branches() == {"expected_wait_fallback": 1, "tree_match": 20}
    assert bed.policy.index.blocks == 8


def test_the_match_ratio_counts_the_uncut_prompt_and_must_exceed_the_threshold() -> None:
    """48 of 160 tokens are 0.3 exactly: no hit; 48 of 159 are one."""
    for length, hit in ((160, False), (159, True)):
        bed = Bed(2)
        idle, holder = bed.workers
        bed.seed(holder, PROMPT[:48])
        report(holder, num_running_reqs=1, gen_throughput=10.0)
        report(idle, gen_throughput=10.0)
        assert (bed.pick(PROMPT[:48] + list(range(length - 48))) is holder) is hit


def test_prompts_shorter_than_a_block_are_not_recorded() -> None:
    bed = Bed(2)
    for _ in range(3):
        bed.pick(PROMPT[:15])
    assert bed.branches() == {"expected_wait_fallback": 3}
    assert bed.policy.index.blocks == 0


def test_only_the_holders_of_the_deepest_match_are_compared() -> None:
    bed = Bed(3)
    short, long, other = bed.workers
    bed.seed(short, PROMPT[:64])
    bed.seed(long, PROMPT[:96])
    report(long, num_running_reqs=2, gen_throughput=10.0)
    report(short, gen_throughput=10.0)
    report(other, gen_throughput=10.0)
    assert bed.pick(PROMPT) is long


def test_the_less_loaded_of_two_holders_wins() -> None:
    bed = Bed(3)
    for worker in bed.workers[:2]:
        bed.seed(worker, PROMPT)
    report(bed.workers[0], num_running_reqs=5, gen_throughput=10.0)
    report(bed.workers[1], num_running_reqs=1, gen_throughput=10.0)
    assert {bed.pick(PROMPT) for _ in range(10)} == {bed.workers[1]}


def test_without_reports_the_holder_with_the_fewest_requests_wins() -> None:
    bed = Bed(3)
    for worker in bed.workers[:2]:
        bed.seed(worker, PROMPT)
    bed.workers[0].sent(0, 100)
    assert {bed.pick(PROMPT) for _ in range(10)} == {bed.workers[1]}


@pytest.mark.parametrize(
    ("load", "others", "settings", "spilled"),
    [
        # mean 2, margin max(4, 3) = 4: from 7 on
        (6, [0, 0], {}, False),
        (7, [0, 0], {}, True),
        # mean 18, margin max(4, 9) = 9
        (27, [9, 18], {}, False),
        (28, [9, 18], {}, True),
        # an absolute threshold below the swing is used as given
        (4, [1, 1], {"balance_abs_threshold": 1}, True),
        (5, [2, 2], {"balance_abs_threshold": 1}, True),
        (4, [4, 4], {"balance_abs_threshold": 1}, False),
        # both parts must be exceeded
        (20, [10, 10], {"balance_rel_threshold": 3.0}, False),
        (64, [0, 0], {"balance_rel_threshold": 2.9}, True),
    ],
)
def test_spill_gate(load: int, others: list[int], settings: dict[str, object], spilled: bool) -> None:
    bed = Bed(3, **settings)
    holder = bed.workers[0]
    bed.seed(holder, PROMPT)
    for worker, count in zip(bed.workers, [load, *others], strict=True):
        for _ in range(count):
            worker.sent(0, 10)
    before = dict(bed.branches())
    chosen = bed.pick(PROMPT)
    assert (chosen is not holder) is spilled
    assert bed.branches() == before | {"spill" if spilled else "tree_match": 1}
    if spilled:
        # The prefix now lives on both workers: the less loaded one gets it without another spill.
        assert bed.pick(PROMPT) is not holder
        assert bed.branches()["tree_match"] == 1


def test_holders_that_are_all_unavailable() -> None:
    bed = Bed(3)
    bed.seed(bed.workers[2], PROMPT)
    assert bed.pick(PROMPT, bed.workers[:2]) is bed.workers[0]
    assert bed.branches()["first_healthy_fallback"] == 1
    report(bed.workers[0], num_running_reqs=9, gen_throughput=10.0)
    assert bed.pick(PROMPT) is bed.workers[2], "nothing was recorded for the stand-in"


def test_a_removed_worker_is_forgotten() -> None:
    bed = Bed(2)
    bed.seed(bed.workers[1], PROMPT)
    bed.policy.forget(bed.workers[1])
    assert bed.policy.index.blocks == 0
    bed.pick(PROMPT)
    assert bed.branches() == {"expected_wait_fallback": 1}


def test_upkeep_cuts_the_index_and_publishes_its_size() -> None:
    bed = Bed(2, max_tree_size=160, block_size=16)
    bed.seed(bed.workers[0], list(range(128)))
    bed.seed(bed.workers[1], list(range(500, 628)))
    assert bed.policy.tick(NOW) is False
    assert bed.policy.index.blocks == 10
    assert bed.pick(list(range(500, 628))) is bed.workers[1], "the newer prompt is whole"
    policies = bed.metrics.policies
    assert policies.tree_tokens.child("m").value == 160
    assert policies.tree_tenants.child("m", "token").value == 2
