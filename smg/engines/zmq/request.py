"""A request on its way from a tokenizer process to an engine over ZMQ.

The wire message cannot be finished in the tokenizer process: ids on the wire must be unique among all live requests
of the engine, several choices are several requests, and limits depend on the engine's context. ``ZmqRequest`` is
everything else, encoded once; the detok process adds the rest by joining bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from smg.engines.base import BuildError, Sampling

INT32_MAX = 2**31 - 1
SEED_MASK = 2**63 - 1

_encode = msgspec.msgpack.Encoder().encode


class ZmqRequest(msgspec.Struct, array_like=True):
    """``prompt`` is the msgpack array of the prompt's ids, ``prompt_tokens`` its length. ``top_id`` is the highest
    token id that the request names anywhere. ``sampling`` is for the wire format's own use. ``hold``: nobody needs the
    tokens before the end (no stream, no stop strings to look for)."""

    n: int
    prompt: msgspec.Raw
    prompt_tokens: int
    top_id: int
    sampling: bytes
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    eos_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: bool = False
    constrained: bool = False
    hold: bool = False
    stream: bool = False

    def limits(self, context: int) -> tuple[int | None, int]:
        """``max_tokens`` and ``min_tokens`` for an engine with this context length (0 = unknown)."""
        maximum, minimum = self.max_tokens, self.min_tokens
        if context:
            room = max(context - self.prompt_tokens, 1)
            maximum = room if maximum is None or maximum > room else maximum
        return maximum, minimum if maximum is None or minimum < maximum else maximum

    def seed_of(self, index: int) -> int | None:
        """The seed of choice ``index``: consecutive ones, so that choices differ and can be repeated."""
        return None if self.seed is None else (self.seed + index) & SEED_MASK


encode_stored = msgspec.msgpack.Encoder().encode
decode_stored = msgspec.msgpack.Decoder(ZmqRequest).decode


def encode_prompt(token_ids: Sequence[int]) -> msgspec.Raw:
    """The msgpack array of token ids."""
    return msgspec.Raw(_encode(token_ids if isinstance(token_ids, list | tuple) else list(token_ids)))


def extended(stored: bytes, generated: Sequence[int]) -> bytes:
    """A request whose prompt goes on with ``generated``, its limits lowered by as many tokens. Raises ``BuildError``
    when such a continuation cannot be right."""
    request = decode_stored(stored)
    if request.n > 1:
        raise BuildError("a request for several choices cannot be continued")
    if request.constrained:
        raise BuildError("a constrained generation cannot be continued")
    count = len(generated)
    if request.max_tokens is not None:
        request.max_tokens -= count
        if request.max_tokens < 1:
            raise BuildError("no token is left to generate")
    request.min_tokens = max(request.min_tokens - count, 0)
    request.prompt = encode_prompt([*msgspec.msgpack.decode(request.prompt, type=list[int]), *generated])
    request.prompt_tokens += count
    request.top_id = max(request.top_id, *generated) if count else request.top_id
    return encode_stored(request)


# ---- what an engine core takes without a check of its own, and may not survive

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 2.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


def check_sampling(sampling: Sampling) -> None:
    """Raises ``BuildError`` for a value an engine core would not survive."""
    for name, low, high in _RANGES:
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:  # NaN is in no range
            raise BuildError(f"{name} must be between {low:g} and {high:g}, got {value}")
    if sampling.top_p is not None and not 0.0 < sampling.top_p <= 1.0:
        raise BuildError(f"top_p must be above 0 and at most 1, got {sampling.top_p}")
    if sampling.top_k is not None and not -1 <= sampling.top_k <= INT32_MAX:
        raise BuildError(f"top_k must be at least -1, got {sampling.top_k}")
    penalty = sampling.repetition_penalty
    if penalty is not None and not (penalty > 0.0 and math.isfinite(penalty)):
        raise BuildError(f"repetition_penalty must be above 0, got {penalty}")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise BuildError(f"max_tokens must be at least 1, got {sampling.max_tokens}")
    minimum = sampling.min_tokens or 0
    if minimum < 0 or (sampling.max_tokens is not None and minimum > sampling.max_tokens):
        raise BuildError(f"min_tokens must be between 0 and max_tokens, got {minimum}")
    for token, bias in (sampling.logit_bias or {}).items():
        if not 0 <= token <= INT32_MAX or not math.isfinite(bias):
            raise BuildError(f"logit_bias of token {token} is not usable")


def highest_id(token_ids: Sequence[int], sampling: Sampling) -> int:
    """The highest token id of the prompt and of everything else that indexes the vocabulary. Raises ``BuildError`` for
    an empty prompt."""
    if not token_ids:
        raise BuildError("the prompt is empty")
    highest = max(token_ids)
    if sampling.logit_bias:
        highest = max(highest, *sampling.logit_bias)
    if sampling.min_tokens:
        # Only then are the end tokens masked; otherwise an id that does not exist just never comes.
        highest = max([highest, *stop_ids(sampling)])
    return highest


def stop_ids(sampling: Sampling) -> list[int]:
    """The client's stop tokens, without what can be no token id."""
    return [token for token in sampling.stop_token_ids if 0 <= token <= INT32_MAX]


def seed_value(sampling: Sampling) -> int | None:
    """The seed under either of its names, folded into 63 bits."""
    seed = sampling.seed if sampling.seed is not None else sampling.sampling_seed
    return None if seed is None else seed & SEED_MASK
