"""What a real engine core does not survive. It trusts its client, so a gateway must never let such a request through;
the embedded engine dies of it in the same way, so that a test notices."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import msgspec

from smg.simengine.vocabulary import Vocabulary


class FatalRequestError(Exception):
    """The engine goes down: ``deaf`` if only its input ends, without a last word on the outputs."""

    def __init__(self, message: str, *, deaf: bool = False) -> None:
        super().__init__(message)
        self.deaf = deaf


class VllmSampling(msgspec.Struct, rename={"eos_token_id": "_eos_token_id", "all_stops": "_all_stop_token_ids"}):
    """The sampling parameters that vLLM's engine core acts on; unknown keys are skipped."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: list[int] = []
    eos_token_id: int | None = None
    all_stops: list[int] = []
    structured_outputs: dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None


class VllmAdd(msgspec.Struct, array_like=True):
    """An ADD message; fewer than nine elements cannot be read."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: Any
    sampling_params: VllmSampling | None
    pooling_params: Any
    arrival_time: float
    lora_request: Any
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0


def check_vllm(add: VllmAdd, vocabulary: Vocabulary, live: Collection[str], clients: int) -> None:
    """Raises ``FatalRequestError`` for what takes vLLM's engine core down."""
    prompt, sampling = add.prompt_token_ids, add.sampling_params
    if not prompt or len(prompt) >= vocabulary.context_length:
        raise FatalRequestError(f"a prompt of {len(prompt)} tokens")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary.size:
        raise FatalRequestError("a token id outside the vocabulary")
    if add.request_id in live:
        raise FatalRequestError(f"request id {add.request_id} is in use")
    if not 0 <= add.client_index < clients:
        raise FatalRequestError(f"there is no client {add.client_index}")
    if sampling is not None:
        _check_sampling(sampling)
        if any(token >= vocabulary.size for token in sampling.logit_bias or ()):
            raise FatalRequestError("logit_bias of a token outside the vocabulary")
        if sampling.min_tokens and any(token >= vocabulary.size for token in sampling.all_stops):
            raise FatalRequestError("a masked token outside the vocabulary")


def _check_sampling(sampling: VllmSampling) -> None:
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty, *penalties)
    kinds = [name for name in sampling.structured_outputs or () if not name.startswith(("_", "disable", "white"))]
    bad = (
        not all(map(math.isfinite, numbers))
        or not 0.0 <= sampling.temperature <= 2.0
        or not 0.0 < sampling.top_p <= 1.0
        or sampling.top_k < -1
        or not 0.0 <= sampling.min_p <= 1.0
        or any(not -2.0 <= penalty <= 2.0 for penalty in penalties)
        or sampling.repetition_penalty <= 0.0
        or (sampling.max_tokens is not None and sampling.max_tokens < 1)
        or not 0 <= sampling.min_tokens <= (sampling.max_tokens or sampling.min_tokens)
        or (sampling.logprobs or 0) < -1
        or len(kinds) > 1
    )
    if bad:
        raise FatalRequestError(f"invalid sampling parameters: {sampling}", deaf=True)
