"""consistent_hashing, prefix_hash, manual and sticky sessions."""

from __future__ import annotations

import random
import struct
from collections import Counter
from typing import Any

import pytest
from blake3 import blake3
from router_context import NOW, branches, facts, hashes_of, make_worker, make_workers
from xxhash import xxh3_64_hexdigest

from smg.router.policies import Policy, make_policy
from smg.router.worker import NOT_READY, Worker
from smg.settings import Settings
from smg.telemetry.router_metrics import POLICY_BRANCHES, RouterMetrics


class Bed:
    def __init__(self, name: str, count: int, **settings: Any) -> None:
        self.metrics = RouterMetrics()
        self.policy: Policy = make_policy(Settings(**settings), self.metrics, "m", name, random.Random(5))
        self.workers = make_workers(count)

    def pick(self, workers: list[Worker] | None = None, **request: Any) -> Worker | None:
        return self.policy.select(
            self.workers if workers is None else workers, facts(**{"served": self.workers, **request})
        )

    def branches(self, policy: str) -> dict[str, int]:
        return branches(self.metrics, policy)


def ring_owner(key: bytes, urls: list[str]) -> str:
    """The rule, written out: 150 points per URL, the first at or after the key."""

    def place(data: bytes) -> int:
        (position,) = struct.unpack("<Q", blake3(data).digest()[:8])
        return int(position)

    points = sorted((place(f"{url}#{i}".encode()), url) for url in urls for i in range(150))
    return next((url for point, url in points if point >= place(key)), points[0][1])


def test_consistent_hashing_follows_the_ring() -> None:
    bed = Bed("consistent_hashing", 5)
    urls = [worker.url for worker in bed.workers]
    for i in range(100):
        chosen = bed.pick(key=f"user-{i}")
        assert chosen is not None and chosen.url == ring_owner(f"user-{i}".encode(), urls)
    assert bed.branches("consistent_hashing") == {"routing_key_hit": 100}


def test_consistent_hashing_moves_only_the_keys_of_an_unavailable_worker() -> None:
    bed = Bed("consistent_hashing", 5)
    keys = [f"session-{i}" for i in range(400)]
    before = {key: bed.pick(key=key) for key in keys}
    gone = bed.workers[2]
    left = [worker for worker in bed.workers if worker is not gone]
    for key in keys:
        now = bed.pick(left, key=key)
        assert now is not gone
        assert now is before[key] or before[key] is gone
    assert {key: bed.pick(key=key) for key in keys} == before, "they come back with it"
    bed.policy.forget(gone)
    assert all(bed.pick(left, key=key) is before[key] for key in keys if before[key] is not gone)
    assert all(40 < count < 140 for count in Counter(w.url for w in before.values() if w is not None).values())


def test_consistent_hashing_without_a_usable_key_is_random() -> None:
    bed = Bed("consistent_hashing", 3)
    for request in ({}, {"key": "k" * 129}, {"key": "ü" * 65}, {"key": "rid-1", "source": "rid"}):
        assert len({bed.pick(**request) for _ in range(60)}) == 3
    assert bed.pick(key="k" * 128) is bed.pick(key="k" * 128)
    assert bed.branches("consistent_hashing") == {"random_fallback": 240, "routing_key_hit": 2}


def test_target_worker_wins_over_the_key() -> None:
    bed = Bed("consistent_hashing", 3)
    for index in range(3):
        assert bed.pick(key="k", target=str(index)) is bed.workers[index]
    assert bed.branches("consistent_hashing") == {"target_worker_hit": 3}


@pytest.mark.parametrize("target", ["3", "-1", "one", "1.0", "0x1", " 1", "²", "1" * 4000])
def test_bad_target_workers_are_refused(target: str) -> None:
    bed = Bed("consistent_hashing", 3)
    assert bed.pick(key="k", target=target) is None
    assert bed.branches("consistent_hashing") == {"target_worker_miss": 1}


def test_target_worker_counts_registered_workers() -> None:
    bed = Bed("consistent_hashing", 3)
    bed.workers[0].status = NOT_READY
    available = bed.workers[1:]
    assert bed.pick(available, target="2") is bed.workers[2]
    assert bed.pick(available, target="0") is None
    assert bed.pick([bed.workers[1]], target="2") is bed.workers[2], "a failed attempt does not hide it"


def test_prefix_hash_is_the_ring_over_the_last_full_block_of_the_head() -> None:
    bed = Bed("prefix_hash", 4)
    urls = [worker.url for worker in bed.workers]
    rng = random.Random(1)
    for length in [16, 40, 255, 256, 257, 800] * 4:
        tokens = [rng.randrange(50_000) for _ in range(length)]
        block = min(length, 256) // 16 * 8
        (key,) = struct.unpack("<Q", hashes_of(tokens)[block - 8 : block])
        chosen = bed.pick(tokens=tokens)
        assert chosen is not None and chosen.url == ring_owner(b"%016x" % key, urls)
        assert bed.pick(tokens=tokens[: max(16, length - length % 16)] + [1] * 3) is chosen or length < 256
    assert "load_balance_walk" not in bed.branches("prefix_hash")


def test_prefix_hash_prefers_the_routing_key() -> None:
    bed = Bed("prefix_hash", 4)
    urls = [worker.url for worker in bed.workers]
    for i in range(12):
        chosen = bed.pick(tokens=[i] * 300, key=f"k{i}")
        assert chosen is not None and chosen.url == ring_owner(xxh3_64_hexdigest(b"k%d" % i).encode(), urls)


def test_prefix_hash_of_a_short_prompt_is_least_loaded() -> None:
    bed = Bed("prefix_hash", 3)
    for worker in bed.workers[:2]:
        worker.sent(0, 1)
    assert bed.pick(tokens=[1] * 15) is bed.workers[2]
    assert bed.branches("prefix_hash") == {"no_routing_key": 1}


@pytest.mark.parametrize(
    ("owner_load", "others", "walks"),
    [(15, 0, False), (16, 0, True), (53, 40, False), (54, 40, False), (60, 40, True)],
)
def test_prefix_hash_leaves_an_overloaded_owner(owner_load: int, others: int, walks: bool) -> None:
    """Limit: the greater of 1.25 times and 10 more than (total + 1) / 3."""
    bed = Bed("prefix_hash", 3)
    owner = bed.pick(tokens=[9] * 256)
    assert owner is not None
    for worker in bed.workers:
        for _ in range(owner_load if worker is owner else others):
            worker.sent(0, 1)
    mean = (owner_load + 2 * others + 1) / 3
    assert walks is (owner_load > max(mean * 1.25, mean + 10)), "the example itself"
    assert (bed.pick(tokens=[9] * 256) is not owner) is walks
    assert bed.branches("prefix_hash") == ({"ring_hit": 1, "load_balance_walk": 1} if walks else {"ring_hit": 2})


def test_manual_keeps_keys_where_they_are() -> None:
    bed = Bed("manual", 3)
    homes = {f"k{i}": bed.pick(key=f"k{i}") for i in range(30)}
    assert len(set(homes.values())) == 3
    bed.workers.append(make_worker(3))
    assert all(bed.pick(key=key) is home for key, home in homes.items())
    assert bed.branches("manual") == {"vacant": 30, "occupied_hit": 30}
    assert bed.metrics.policies.manual_entries.value == 30
    assert sum(worker.pinned_keys for worker in bed.workers) == 30


def test_manual_remembers_a_second_worker() -> None:
    bed = Bed("manual", 3)
    first = bed.pick(key="k")
    left = [worker for worker in bed.workers if worker is not first]
    second = bed.pick(left, key="k")
    assert second in left
    assert all(bed.pick(left, key="k") is second for _ in range(10))
    assert bed.pick(key="k") is first, "the first is preferred again"
    third = bed.pick([worker for worker in left if worker is not second], key="k")
    assert third not in (first, second)
    assert bed.pick(left, key="k") is third, "two workers are remembered, no more"
    assert [w.pinned_keys for w in (first, second, third)] == [1, 0, 1]  # type: ignore[union-attr]
    assert bed.branches("manual") == {"vacant": 1, "occupied_miss": 2, "occupied_hit": 12}


def test_manual_without_a_header_is_random() -> None:
    bed = Bed("manual", 3)
    assert len({bed.pick() for _ in range(60)}) == 3
    assert len({bed.pick(key="own-id", source="rid") for _ in range(60)}) == 3
    assert bed.branches("manual") == {"no_routing_id": 120}


def test_manual_assignment_modes() -> None:
    bed = Bed("manual", 3, assignment_mode="min_load")
    for worker in bed.workers[1:]:
        worker.sent(0, 1)
    assert bed.pick(key="a") is bed.pick(key="b") is bed.workers[0]
    bed = Bed("manual", 3, assignment_mode="min_group")
    for i in range(30):
        bed.pick(key=f"k{i}")
    assert [worker.pinned_keys for worker in bed.workers] == [10, 10, 10]


def test_manual_forgets_idle_keys_and_removed_workers() -> None:
    bed = Bed("manual", 2, max_idle_secs=100)
    old = bed.pick(key="old")
    bed.pick(key="young", now=NOW + 50)
    bed.policy.tick(NOW + 101)
    assert bed.metrics.policies.manual_entries.value == 1
    bed.pick(key="young", now=NOW + 149)
    bed.policy.tick(NOW + 240)
    assert bed.metrics.policies.manual_entries.value == 1, "use keeps a key"
    for worker in bed.workers:
        bed.policy.forget(worker)
    assert bed.metrics.policies.manual_entries.value == 0
    assert old is not None


def test_sticky_keys_are_bounded() -> None:
    from smg.router.policies.sticky import StickyKeys

    metrics = RouterMetrics()
    keys = StickyKeys(100.0, metrics, max_keys=3)
    worker = make_worker(0)
    for i in range(10):
        keys.route(f"k{i}", [worker], NOW, lambda workers: workers[0])
    assert (len(keys), worker.pinned_keys) == (3, 3)
    assert keys.route("k9", [worker], NOW, lambda workers: None) == ("occupied_hit", worker)
    assert keys.route("k0", [worker], NOW, lambda workers: None) == ("vacant", None)


def test_override_pins_keys_on_any_policy() -> None:
    bed = Bed("round_robin", 3, routing_key_override=True)
    assert bed.policy.name == "round_robin"
    order = [bed.pick(key="a"), bed.pick(key="b"), bed.pick(), bed.pick(key="a"), bed.pick(), bed.pick(key="b")]
    w0, w1, w2 = bed.workers
    assert order == [w0, w1, w2, w0, w0, w1], "first assignments and keyless requests come from the base policy"
    assert bed.pick(key="conversation", source="rid") is bed.pick(key="conversation", source="rid")
    source = bed.metrics.policies.key_source
    assert (source.child("header").value, source.child("rid").value) == (4, 2)


def test_override_passes_over_a_worker_that_runs_the_key_twice() -> None:
    bed = Bed("round_robin", 2, routing_key_override=True)
    home = bed.pick(key="k")
    assert home is not None
    home.sent(0, 1, "k")
    assert bed.pick(key="k") is home
    home.sent(1, 1, "k")
    assert bed.pick(key="k") is not home
    assert bed.pick([home], key="k") is home, "there is no other"
    home.released(1, "k")
    assert bed.pick(key="k") is home
    assert bed.branches("manual")["cap_respill"] == 1


def test_override_does_not_apply_to_policies_that_have_keys_of_their_own() -> None:
    for name in ("manual", "consistent_hashing"):
        bed = Bed(name, 3, routing_key_override=True)
        assert len({bed.pick(key="own-id", source="rid") for _ in range(60)}) == 3


def test_override_with_an_assignment_mode() -> None:
    bed = Bed("passthrough", 3, routing_key_override=True, assignment_mode="min_group")
    assert {bed.pick(key=key) for key in "abc"} == set(bed.workers)
    assert bed.pick() is bed.workers[0]


def test_requests_without_candidates_are_counted() -> None:
    for name in set(POLICY_BRANCHES) - {"cache_aware"}:
        bed = Bed(name, 1)
        bed.policy.no_candidates()
        assert bed.branches(name) == {"no_healthy_workers": 1}
