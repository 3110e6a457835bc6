"""Workers and request facts for router tests, without processes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from smg.engines.grpc.facts import LoadReport, RankLoad
from smg.router.breaker import BreakerRules, CircuitBreaker
from smg.router.policies import RouteFacts
from smg.router.worker import READY, ModelCard, Worker
from smg.telemetry.router_metrics import RouterMetrics

NOW = 1000.0
BLOCK = 16


def make_worker(number: int, rules: BreakerRules | None = None, **fields: object) -> Worker:
    """A ready worker ``grpc://w<number>:1`` of model "m"."""
    worker = Worker(f"grpc://w{number}:1", {}, CircuitBreaker(rules or BreakerRules()), status=READY)
    worker.kind = "vllm"
    worker.cards = [ModelCard("m")]
    for name, value in fields.items():
        setattr(worker, name, value)
    return worker


def make_workers(count: int) -> list[Worker]:
    return [make_worker(number) for number in range(count)]


def report(worker: Worker, when: float = NOW, **load: float) -> None:
    """A load report of the worker's only rank."""
    worker.reported(LoadReport("", "", 1, [RankLoad(**load)]), when)  # type: ignore[arg-type]


def hashes_of(tokens: Sequence[int], block: int = BLOCK) -> bytes:
    """Chained hashes of the full blocks of a prompt."""
    found = array("Q")
    chained = 0
    for start in range(0, len(tokens) - block + 1, block):
        chained = xxh3_64_intdigest(array("I", tokens[start : start + block]).tobytes(), chained)
        found.append(chained)
    return found.tobytes()


def facts(
    tokens: Sequence[int] = (),
    key: str = "",
    *,
    target: str = "",
    source: str = "header",
    now: float = NOW,
    served: Sequence[Worker] = (),
) -> RouteFacts:
    return RouteFacts("m", len(tokens), hashes_of(tokens), key, target, now, served, source)


BRANCHES = (
    "tree_match", "spill", "expected_wait_fallback", "first_healthy_fallback", "no_healthy_workers", "occupied_hit",
    "occupied_miss", "vacant", "no_routing_id", "cap_respill", "target_worker_hit", "target_worker_miss",
    "routing_key_hit", "random_fallback", "no_routing_key", "ring_hit", "load_balance_walk", "fallback_least_load",
)  # fmt: skip


def branches(metrics: RouterMetrics, policy: str) -> dict[str, int]:
    """The branches a policy took, those with a count."""
    counts = {name: int(metrics.policies.branches[policy].child(name).value) for name in BRANCHES}
    return {name: count for name, count in counts.items() if count}
