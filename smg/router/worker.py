"""One worker as the router sees it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from smg.engines.grpc.facts import LoadReport
from smg.messages import WorkerRef
from smg.router.breaker import CircuitBreaker

PENDING, READY, NOT_READY, DRAINING = "pending", "ready", "not_ready", "draining"


@dataclass(slots=True)
class ModelCard:
    """What a worker's registration says about one model it serves; empty fields are filled from labels and facts."""

    id: str
    display_name: str = ""
    aliases: list[str] = field(default_factory=list)
    context_length: int = 0
    tokenizer_path: str = ""
    chat_template: str = ""
    reasoning_parser: str = ""
    tool_parser: str = ""
    architectures: list[str] = field(default_factory=list)
    hf_model_type: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class EngineLoad:
    """What policies use of a worker's load report, over all its ranks: requests, uncached prompt tokens of the waiting
    ones, generated tokens per second, and the used share of the KV cache. ``terms`` is what their score makes of it,
    computed once."""

    queued_tokens: int
    waiting: int
    running: int
    throughput: float
    kv_usage: float
    terms: tuple[float, float, float] | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """``inflight`` counts the requests of this gateway per detok process; ``tokens_since_report`` the prompt tokens
    sent since the worker's last load report. ``spec`` is the registration body, kept so that a restarted router can
    register it again. ``pinned_keys`` counts the sticky keys that name this worker, ``key_inflight`` the requests in
    flight per detok process and routing key. ``detoks`` are the detok processes that can reach the engine, None = all
    of them. ``error`` says why a pending worker does not answer, or why the last change of a registered one failed, at
    ``failed_at``."""

    url: str
    spec: dict[str, Any]
    breaker: CircuitBreaker
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    kind: str = ""
    transport: str = "grpc"
    dp_rank: int = -1
    dp_size: int = 1
    status: str = PENDING
    cards: list[ModelCard] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    worker_type: str = "regular"
    priority: int = 50
    cost: float = 1.0
    context_length: int = 0
    vocab_size: int = 0
    default_sampling: dict[str, float] = field(default_factory=dict)
    supports_embedding: bool = False
    successes: int = 0
    failures: int = 0
    detok_inflight: dict[int, int] = field(default_factory=dict)
    inflight: int = 0
    processed: int = 0
    detoks: frozenset[int] | None = None
    pinned_keys: int = 0
    key_inflight: dict[int, dict[str, int]] = field(default_factory=dict)
    report: LoadReport | None = None
    load: EngineLoad | None = None
    report_at: float = 0.0
    tokens_since_report: int = 0
    requests_since_report: int = 0
    error: str = ""
    failed_at: float = 0.0

    @property
    def name(self) -> str:
        """The URL, with the rank where there are several workers behind one URL."""
        return f"{self.url}@{self.dp_rank}" if self.dp_rank >= 0 else self.url

    @property
    def wire_kind(self) -> str:
        """The engine kind as the codecs name it: over ZMQ an engine speaks another protocol than over gRPC."""
        return f"{self.kind}-zmq" if self.transport == "zmq" and self.kind else self.kind

    def describe_like(self, other: Worker) -> None:
        """Take over what the engine said about another rank of the same server."""
        self.kind = other.kind
        self.cards = other.cards
        self.labels = other.labels
        self.context_length = other.context_length
        self.vocab_size = other.vocab_size
        self.default_sampling = other.default_sampling
        self.supports_embedding = other.supports_embedding
        self.dp_size = other.dp_size

    def take_over(self, old: Worker) -> None:
        """Stand in for an older entry of the same worker: its requests in flight end here."""
        self.inflight, self.detok_inflight, self.key_inflight = old.inflight, old.detok_inflight, old.key_inflight
        self.processed = old.processed

    def selectable(self, now: float) -> bool:
        """Ready, and its breaker lets requests through."""
        return self.status == READY and self.breaker.allows(now)

    def ref(self) -> WorkerRef:
        return WorkerRef(self.url, self.wire_kind, self.transport, self.dp_rank)

    def inflight_of(self, key: str) -> int:
        """Requests in flight with this routing key."""
        return sum(keys.get(key, 0) for keys in self.key_inflight.values())

    def sent(self, detok: int, prompt_tokens: int, key: str = "") -> None:
        """A request leaves for this worker through ``detok``."""
        self.inflight += 1
        self.processed += 1
        self.detok_inflight[detok] = self.detok_inflight.get(detok, 0) + 1
        self.tokens_since_report += prompt_tokens
        self.requests_since_report += 1
        if key:
            keys = self.key_inflight.setdefault(detok, {})
            keys[key] = keys.get(key, 0) + 1

    def released(self, detok: int, key: str = "") -> None:
        """A request ended."""
        count = self.detok_inflight.get(detok, 0)
        if count:
            self.detok_inflight[detok] = count - 1
            self.inflight -= 1
        if key:
            keys = self.key_inflight.get(detok, {})
            left = keys.pop(key, 0) - 1
            if left > 0:
                keys[key] = left

    def forget_detok(self, detok: int) -> None:
        """A detok process died: nothing it ran is in flight any more."""
        self.inflight -= self.detok_inflight.pop(detok, 0)
        self.key_inflight.pop(detok, None)

    def reported(self, report: LoadReport, now: float) -> None:
        """Take over a load report: the worker's own rank of it, or all ranks for a worker without one."""
        ranks = [rank for rank in report.loads if self.dp_rank in (-1, rank.dp_rank)]
        if not ranks:
            return
        self.report, self.report_at = replace(report, loads=ranks), now
        self.load = EngineLoad(
            sum(rank.num_waiting_uncached_tokens for rank in ranks),
            sum(rank.num_waiting_reqs for rank in ranks),
            sum(rank.num_running_reqs for rank in ranks),
            sum(rank.gen_throughput for rank in ranks),
            sum(rank.token_usage for rank in ranks) / len(ranks),
        )
        self.tokens_since_report = 0
        self.requests_since_report = 0
