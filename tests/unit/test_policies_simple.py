"""round_robin, random, passthrough, power_of_two, least_load, bucket, and the score they compare workers by."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from router_context import NOW, facts, make_worker, make_workers, report

from smg.router.policies import make_policy
from smg.router.policies.score import LoadScore
from smg.router.worker import Worker
from smg.settings import Settings
from smg.telemetry.router_metrics import RouterMetrics


def policy(name: str, **settings: object):  # type: ignore[no-untyped-def]
    return make_policy(Settings(**settings), RouterMetrics(), "m", name, random.Random(7))  # type: ignore[arg-type]


def score(**settings: object) -> LoadScore:
    return LoadScore(Settings(**settings), random.Random(7))  # type: ignore[arg-type]


def shares(policy: object, workers: list[Worker], count: int = 3000) -> list[int]:
    chosen = Counter(policy.select(workers, facts()).url for _ in range(count))  # type: ignore[attr-defined]
    return [chosen[worker.url] for worker in workers]


def test_round_robin_is_even_and_follows_the_candidates() -> None:
    workers = make_workers(3)
    robin = policy("round_robin")
    assert shares(robin, workers, 300) == [100, 100, 100]
    assert [robin.select(workers[:2], facts()) for _ in range(4)] == [workers[0], workers[1], workers[0], workers[1]]


def test_random_is_uniform() -> None:
    assert all(abs(count - 1000) < 120 for count in shares(policy("random"), make_workers(3)))


def test_passthrough_takes_the_first() -> None:
    workers = make_workers(3)
    assert policy("passthrough").select(workers[1:], facts()) is workers[1]


def test_score_of_a_report() -> None:
    worker = make_worker(0)
    report(worker, num_running_reqs=3, gen_throughput=10.0, token_usage=0.00123)
    assert score().scores([worker], NOW) == [pytest.approx(307.2002, abs=5e-5)]
    worker.sent(0, 129)
    assert score().scores([worker], NOW) == [pytest.approx(320.1002, abs=5e-5)]
    report(worker, num_running_reqs=3, gen_throughput=10.0, token_usage=0.00123)
    assert score().scores([worker], NOW) == [pytest.approx(307.2002, abs=5e-5)]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"num_waiting_uncached_tokens": 500, "num_waiting_reqs": 3}, 0.25),
        ({"num_waiting_reqs": 3}, 3 * 1024 / 2000),
        ({"num_waiting_reqs": 3, "gen_throughput": 512.0}, 6.0),
        ({"token_usage": 0.5}, 0.15),
        ({"token_usage": 1.0}, 0.15 * 999),
        ({"token_usage": -1.0}, 0.0),
    ],
)
def test_score_terms(load: dict[str, float], expected: float) -> None:
    worker = make_worker(0)
    report(worker, **load)
    assert score().scores([worker], NOW) == [pytest.approx(expected)]


def test_score_flags() -> None:
    worker = make_worker(0)
    report(worker, num_waiting_reqs=2, token_usage=0.5)
    scores = score(
        least_load_mean_prefill_tokens=100, least_load_default_throughput=50.0, least_load_kv_pressure_weight=2.0
    ).scores([worker], NOW)
    assert scores == [pytest.approx(2 * 100 / 50 + 2.0)]


def test_score_of_a_silent_worker_uses_the_mean_throughput_of_the_others() -> None:
    silent, slow, fast = make_workers(3)
    silent.sent(0, 999)
    silent.sent(0, 999)
    report(slow, gen_throughput=100.0)
    report(fast, gen_throughput=300.0)
    assert score().scores([silent, slow, fast], NOW) == [pytest.approx(2 * 1024 / 200), 0.0, 0.0]


def test_scores_without_any_report_are_requests_in_flight() -> None:
    workers = make_workers(2)
    workers[1].sent(0, 5000)
    assert score().scores(workers, NOW) == [0.0, 1.0]


def test_a_report_counts_for_three_intervals() -> None:
    worker = make_worker(0)
    report(worker, num_running_reqs=1, gen_throughput=1024.0)
    worker.sent(0, 2048)
    worker.sent(0, 0)
    assert score(load_monitor_interval=10).scores([worker], NOW + 30) == [3.0]
    assert score(load_monitor_interval=10).scores([worker], NOW + 31) == [2.0]


def test_a_rank_takes_its_own_part_of_a_report_and_a_whole_server_all_of_it() -> None:
    from smg.engines.grpc.facts import LoadReport, RankLoad

    both = [RankLoad(0, num_running_reqs=1, gen_throughput=10.0), RankLoad(1, num_running_reqs=5, gen_throughput=30.0)]
    rank, server, stranger = make_worker(0, dp_rank=1), make_worker(1), make_worker(2, dp_rank=7)
    for worker in (rank, server, stranger):
        worker.reported(LoadReport("", "", 2, both), NOW)
    assert rank.load is not None and (rank.load.running, rank.load.throughput) == (5, 30.0)
    assert server.load is not None and (server.load.running, server.load.throughput) == (6, 40.0)
    assert stranger.load is None and stranger.report is None


def test_least_load_takes_the_lowest_and_breaks_ties_at_random() -> None:
    workers = make_workers(4)
    for worker, running in zip(workers, (2, 1, 1, 3), strict=True):
        report(worker, num_running_reqs=running, gen_throughput=10.0)
    first, second, third, fourth = shares(policy("least_load"), workers)
    assert first == fourth == 0
    assert abs(second - third) < 200


def test_least_load_leaves_out_workers_with_a_full_queue() -> None:
    full, busy = make_workers(2)
    report(full, num_waiting_reqs=2, gen_throughput=1e9)
    report(busy, num_running_reqs=50, gen_throughput=10.0)
    least = policy("least_load", least_load_max_waiting_requests=3)
    assert least.select([full, busy], facts()) is full
    full.sent(0, 10)
    assert least.select([full, busy], facts()) is busy
    for _ in range(3):
        busy.sent(0, 10)
    assert least.select([full, busy], facts()) is None


def test_power_of_two_never_takes_the_worst_of_three() -> None:
    workers = make_workers(3)
    for worker, running in zip(workers, (0, 5, 9), strict=True):
        report(worker, num_running_reqs=running, gen_throughput=10.0)
    best, middle, worst = shares(policy("power_of_two"), workers)
    assert worst == 0
    assert abs(best - 2000) < 200 and abs(middle - 1000) < 200


@pytest.mark.parametrize(("metric", "winner"), [("expected_wait", 0), ("requests", 1), ("least_requests", 2)])
def test_power_of_two_metrics(metric: str, winner: int) -> None:
    """Three workers of which each is the best by one of the metrics."""
    workers = make_workers(3)
    for _ in range(4):
        workers[0].sent(0, 0)
        workers[2].sent(0, 0)
    report(workers[0], num_running_reqs=9, gen_throughput=1e6)
    report(workers[1], num_running_reqs=8, gen_throughput=10.0)
    report(workers[2], num_running_reqs=1, num_waiting_uncached_tokens=10**6, gen_throughput=10.0)
    two = policy("power_of_two", power_of_two_load_metric=metric)
    for other in {0, 1, 2} - {winner}:
        pair = [workers[winner], workers[other]]
        assert {two.select(pair, facts()) for _ in range(20)} == {workers[winner]}


def test_power_of_two_with_one_candidate() -> None:
    [worker] = make_workers(1)
    assert policy("power_of_two").select([worker], facts()) is worker


def test_bucket_splits_lengths_and_learns_them() -> None:
    workers = make_workers(2)
    bucket = policy("bucket", bucket_adjust_interval_secs=5)
    pick = lambda length, now=NOW: workers.index(bucket.select(workers, facts([0] * length, now=now)))  # noqa: E731
    assert [pick(10), pick(2047), pick(2048), pick(90_000)] == [0, 0, 1, 1]
    bucket = policy("bucket", bucket_adjust_interval_secs=5)
    lengths = [100] * 90 + [1000] * 9
    assert {pick(length) for length in lengths} == {0}
    assert [pick(100, NOW + 6), pick(1000, NOW + 6)] == [0, 1]


def test_bucket_gives_way_to_the_least_loaded() -> None:
    workers = make_workers(2)
    for _ in range(65):
        workers[0].sent(0, 1)
    bucket = policy("bucket")
    assert bucket.select(workers, facts([0] * 10)) is workers[1]
    workers[1].sent(0, 1)
    assert bucket.select(workers, facts([0] * 10)) is workers[0]


def test_every_policy_name_of_the_settings_can_be_made() -> None:
    from smg.settings import POLICIES

    for name in POLICIES:
        workers = make_workers(2)
        assert policy(name).name == name
        assert policy(name, policy="random").select(workers, facts(list(range(64)), "key")) in workers
        assert policy("", policy=name, routing_key_override=True).name == name
    with pytest.raises(ValueError, match="unknown worker selection policy 'best'"):
        policy("best")
