"""One worker as the router sees it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class Worker:
    """``inflight`` counts the requests of this gateway per detok process; ``tokens_since_report`` the prompt tokens
    sent since the worker's last load report. ``spec`` is the registration body, kept so that a restarted router can
    register it again."""

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
    report: LoadReport | None = None
    report_at: float = 0.0
    tokens_since_report: int = 0
    requests_since_report: int = 0
    error: str = ""
    updated: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """The URL, with the rank where there are several workers behind one URL."""
        return f"{self.url}@{self.dp_rank}" if self.dp_rank >= 0 else self.url

    def selectable(self, now: float) -> bool:
        """Ready, and its breaker lets requests through."""
        return self.status == READY and self.breaker.allows(now)

    def ref(self) -> WorkerRef:
        return WorkerRef(self.url, self.kind, self.transport, self.dp_rank)

    def sent(self, detok: int, prompt_tokens: int) -> None:
        """A request leaves for this worker through ``detok``."""
        self.inflight += 1
        self.processed += 1
        self.detok_inflight[detok] = self.detok_inflight.get(detok, 0) + 1
        self.tokens_since_report += prompt_tokens
        self.requests_since_report += 1

    def released(self, detok: int) -> None:
        """A request ended."""
        count = self.detok_inflight.get(detok, 0)
        if count:
            self.detok_inflight[detok] = count - 1
            self.inflight -= 1

    def forget_detok(self, detok: int) -> None:
        """A detok process died: nothing it ran is in flight any more."""
        self.inflight -= self.detok_inflight.pop(detok, 0)

    def reported(self, report: LoadReport, now: float) -> None:
        """Take over a load report."""
        self.report, self.report_at = report, now
        self.tokens_since_report = 0
        self.requests_since_report = 0
