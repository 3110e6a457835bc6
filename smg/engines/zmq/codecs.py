"""Request codecs of the ZMQ engine kinds (tokenizer processes)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from smg.engines.base import BuildError, EngineRequest, PromptEncoder
from smg.engines.zmq.request import (
    SEED_MASK,
    ZmqRequest,
    check_sampling,
    encode_prompt,
    encode_stored,
    extended,
    highest_id,
    seed_value,
    stop_ids,
)
from smg.engines.zmq.tokenspeed import ALL_TOKENS, GREEDY_BELOW, SamplingParams
from smg.engines.zmq.vllm import encode_pairs

SUFFIX = "-zmq"
# vLLM's name for each kind of constraint.
VLLM_CONSTRAINTS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
# The engine core keeps the backend of its first structured request for life; this one takes all our constraints.
GRAMMAR_BACKEND = "xgrammar"
MAX_TOP_K = 127


def zmq_kind(engine: str) -> str:
    """The engine kind of a request for ``engine`` ("vllm", "tokenspeed") over ZMQ."""
    return engine + SUFFIX


class ZmqCodec:
    """What the codecs share. ``kind`` is the engine kind over ZMQ, ``engine`` the engine's own name."""

    kind: ClassVar[str]
    engine: ClassVar[str]
    supports_embedding: ClassVar[bool] = False

    def encode(self, request: EngineRequest) -> bytes:
        """The request's bytes for a detok process. Raises ``BuildError``."""
        return self.bind(request)(request.request_id, request.text, request.token_ids)

    def bind(self, request: EngineRequest) -> PromptEncoder:
        """See ``RequestCodec.bind``. Neither id nor text of the prompt is part of the stored request."""
        sampling = request.sampling
        check_sampling(sampling)
        stored = self.build(request)

        def encode(request_id: str, text: str, token_ids: Sequence[int]) -> bytes:
            stored.top_id = highest_id(token_ids, sampling)
            stored.prompt = encode_prompt(token_ids)
            stored.prompt_tokens = len(token_ids)
            return encode_stored(stored)

        return encode

    def build(self, request: EngineRequest) -> ZmqRequest:
        """The request without its prompt, checked sampling given."""
        sampling = request.sampling
        return ZmqRequest(
            n=sampling.n,
            prompt=encode_prompt(()),
            prompt_tokens=0,
            top_id=0,
            sampling=b"",
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens or 0,
            seed=seed_value(sampling),
            eos_ids=list(request.eos_ids),
            constrained=request.constraint is not None,
            hold=not request.stream and not request.watched,
            stream=request.stream,
        )

    def extend(self, request: bytes, generated: Sequence[int]) -> bytes:
        """The request continued behind ``generated`` tokens. Raises ``BuildError``."""
        return extended(request, generated)

    def embed_request(self, request_id: str, text: str, token_ids: Sequence[int]) -> NoReturn:
        raise BuildError(f"{self.engine} workers over ZMQ do not embed")


class VllmZmqCodec(ZmqCodec):
    """vLLM's engine core. ``ZmqRequest.sampling`` holds the entries of the sampling map that are known here; limits and
    seed are added per choice."""

    kind: ClassVar[str] = zmq_kind("vllm")
    engine: ClassVar[str] = "vllm"

    def build(self, request: EngineRequest) -> ZmqRequest:
        stored = super().build(request)
        sampling = request.sampling
        pairs: list[tuple[str, Any]] = [
            ("temperature", _or(sampling.temperature, 1.0)),
            ("top_p", _or(sampling.top_p, 1.0)),
            ("top_k", max(sampling.top_k or 0, 0)),
            ("min_p", _or(sampling.min_p, 0.0)),
            ("frequency_penalty", _or(sampling.frequency_penalty, 0.0)),
            ("presence_penalty", _or(sampling.presence_penalty, 0.0)),
            ("repetition_penalty", _or(sampling.repetition_penalty, 1.0)),
        ]
        pairs += _ends(request)
        if request.logprobs is not None:
            stored.logprobs = max(request.logprobs, 1) if request.api == "chat" else request.logprobs
            pairs.append(("logprobs", stored.logprobs))
        if request.prompt_logprobs is not None:
            stored.prompt_logprobs = True
            pairs.append(("prompt_logprobs", request.prompt_logprobs))
        if sampling.logit_bias:
            pairs.append(("logit_bias", sampling.logit_bias))
        if request.constraint is not None:
            name = VLLM_CONSTRAINTS[request.constraint.kind]
            pairs.append(("structured_outputs", {name: request.constraint.value, "_backend": GRAMMAR_BACKEND}))
        stored.sampling = bytes((len(pairs),)) + encode_pairs(pairs)
        return stored


class TokenspeedZmqCodec(ZmqCodec):
    """TokenSpeed. ``ZmqRequest.sampling`` is the encoded ``SamplingParams`` without limits and seed."""

    kind: ClassVar[str] = zmq_kind("tokenspeed")
    engine: ClassVar[str] = "tokenspeed"

    def build(self, request: EngineRequest) -> ZmqRequest:
        stored = super().build(request)
        sampling = request.sampling
        if request.prompt_logprobs is not None:
            raise BuildError("prompt log-probabilities are not supported by TokenSpeed")
        if (request.logprobs or 0) > 1:
            raise BuildError("top_logprobs are not supported over the TokenSpeed ZMQ backend")
        stored.logprobs = request.logprobs
        if sampling.sampling_seed is not None:  # the engine's own name goes before the common one
            stored.seed = sampling.sampling_seed & SEED_MASK
        params = SamplingParams(
            stop_token_ids=stop_ids(sampling) or None,
            temperature=_or(sampling.temperature, 1.0),
            top_p=_or(sampling.top_p, 1.0),
            top_k=_top_k(sampling.top_k),
            min_p=_or(sampling.min_p, 0.0),
            frequency_penalty=_or(sampling.frequency_penalty, 0.0),
            presence_penalty=_or(sampling.presence_penalty, 0.0),
            repetition_penalty=_or(sampling.repetition_penalty, 1.0),
            ignore_eos=sampling.ignore_eos,
            logit_bias={str(token): bias for token, bias in (sampling.logit_bias or {}).items()} or None,
        )
        if params.temperature < GREEDY_BELOW:
            params.temperature, params.top_k = 1.0, 1
        if request.constraint is not None:
            setattr(params, request.constraint.kind, request.constraint.value)
        stored.sampling = encode_stored(params)
        stored.stream = request.stream or request.watched
        return stored


def _top_k(value: int | None) -> int:
    """TokenSpeed samples from at most 127 tokens, or from all."""
    if value is not None and value > MAX_TOP_K:
        raise BuildError(f"top_k above {MAX_TOP_K} is not supported over the TokenSpeed ZMQ backend")
    return value if value and value > 0 else ALL_TOKENS


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _ends(request: EngineRequest) -> list[tuple[str, Any]]:
    """The entries that end a generation. The engine core knows no EOS of its own; the first id ends a grammar too.

    ``_all_stop_token_ids`` are the tokens that must not come before ``min_tokens``."""
    sampling = request.sampling
    client, eos = stop_ids(sampling), list(request.eos_ids)
    stops = client if sampling.ignore_eos else [*dict.fromkeys((*client, *eos[1:]))]
    pairs: list[tuple[str, Any]] = [
        ("stop_token_ids", stops),
        ("_all_stop_token_ids", [*dict.fromkeys((*stops, *eos))]),
    ]
    if eos and not sampling.ignore_eos:
        pairs.append(("_eos_token_id", eos[0]))
    return pairs


ZMQ_CODECS: dict[str, ZmqCodec] = {codec.kind: codec for codec in (VllmZmqCodec(), TokenspeedZmqCodec())}
