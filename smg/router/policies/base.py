"""The interface of a worker selection policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from smg.router.worker import Worker

MAX_KEY_BYTES = 128


@dataclass(slots=True)
class RouteFacts:
    """What a policy may know of a request. ``block_hashes`` are little-endian uint64 values, one per full block of
    the prompt, each chained with its predecessor, so that equal hashes at one position mean equal prompts up to
    there. ``now`` is ``time.monotonic()``. ``served`` are all registered workers of the model in registration order,
    available or not. ``key_source`` says where ``routing_key`` comes from: "header" or "rid" (the request's own id).
    """

    model: str
    prompt_tokens: int
    block_hashes: bytes
    routing_key: str
    target_worker: str
    now: float
    served: Sequence[Worker] = ()
    key_source: str = "header"

    @property
    def header_key(self) -> str:
        """The routing key if a header carried it and it is not too long, else ""."""
        key = self.routing_key
        if not key or self.key_source != "header" or len(key) > MAX_KEY_BYTES or len(key.encode()) > MAX_KEY_BYTES:
            return ""
        return key


class Policy(ABC):
    """Chooses among the workers that can take a request. One instance per model."""

    name: str

    @abstractmethod
    def select(self, candidates: Sequence[Worker], request: RouteFacts) -> Worker | None:
        """The worker to use; None if the policy refuses all of them. ``candidates`` is not empty and in registration
        order.
        """

    def no_candidates(self) -> None:  # noqa: B027 - most policies count nothing
        """A request found no available worker."""

    def forget(self, worker: Worker) -> None:  # noqa: B027 - most policies hold no worker
        """The worker left the registry."""

    def tick(self, now: float) -> bool:
        """Periodic upkeep, off the request path; True if there is more to do and the next call should come soon."""
        return False
