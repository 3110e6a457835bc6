"""TensorRT-LLM over gRPC (``proto/trtllm_service.proto``)."""

from __future__ import annotations

from collections.abc import Iterable
from math import nan
from typing import Any, ClassVar

from smg.engines.base import Delta, EngineRequest, TokenLogprobs
from smg.engines.grpc.codecs import base
from smg.engines.grpc.facts import Health, WorkerFacts
from smg.engines.grpc.pb import trtllm_service_pb2 as pb

_Guide = pb.GuidedDecodingParams
GUIDE_TYPES = {
    "json_schema": _Guide.GUIDE_TYPE_JSON_SCHEMA,
    "regex": _Guide.GUIDE_TYPE_REGEX,
    "ebnf": _Guide.GUIDE_TYPE_EBNF_GRAMMAR,
    "structural_tag": _Guide.GUIDE_TYPE_STRUCTURAL_TAG,
}
OPTIONAL_FIELDS = ("min_p", "frequency_penalty", "presence_penalty", "min_tokens")
# The engine wants a limit; these are used when the client names none.
DEFAULT_MAX_TOKENS = 2048
DEFAULT_MAX_TOKENS_COMPLETIONS = 16
UINT64_MASK = 2**64 - 1
MODEL_LABELS = (
    "model_id",
    "max_input_len",
    "max_seq_len",
    "max_batch_size",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "supported_features",
)
SERVER_LABELS = (
    "version",
    "backend",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "world_size",
)
RENAMED = {"tensor_parallel_size": "tp_size", "pipeline_parallel_size": "pp_size", "context_parallel_size": "cp_size"}


class TrtllmCodec(base.GrpcCodec):
    """Codec for TensorRT-LLM workers."""

    kind: ClassVar[str] = "trtllm"
    service: ClassVar[str] = pb.SERVICE
    request_class: ClassVar[Any] = pb.GenerateRequest
    prompt_ids: ClassVar[str] = "input_token_ids"

    def build(self, request: EngineRequest) -> Any:
        sampling = request.sampling
        message = pb.GenerateRequest(streaming=request.stream)
        config = message.sampling_config
        config.beam_width = 1
        config.num_return_sequences = sampling.n
        config.temperature = 1.0 if sampling.temperature is None else sampling.temperature
        config.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        config.repetition_penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
        if sampling.top_k is not None:
            config.top_k = max(sampling.top_k, 0)
        base.fill(config, sampling, OPTIONAL_FIELDS)
        seed = base.seed_of(sampling)
        if seed is not None:
            config.seed = seed & UINT64_MASK
        message.max_tokens = max_tokens(request)
        message.stop.extend(sampling.stop)
        message.stop_token_ids.extend(sampling.stop_token_ids)
        message.ignore_eos = sampling.ignore_eos
        # The engine cuts the stop token off. A client that wants to see its own stop token must get it from there, and
        # so must a parser whose messages end with one.
        message.include_stop_token_in_output = request.keep_stop_token or (
            sampling.no_stop_trim and (request.api == "completions" or bool(sampling.stop_token_ids))
        )
        message.output_config.exclude_input_from_output = True
        if request.logprobs is not None:
            message.output_config.logprobs = request.logprobs
        if request.prompt_logprobs is not None:
            message.output_config.prompt_logprobs = request.prompt_logprobs
        if request.constraint is not None:
            message.guided_decoding.guide_type = GUIDE_TYPES[request.constraint.kind]
            message.guided_decoding.guide = request.constraint.value
        return message

    def decoder(self, *, streaming: bool) -> base.Decoder:
        return TrtllmDecoder(streaming)

    def continuation_parts(self, message: Any) -> tuple[Any, Any, list[tuple[Any, str, int | None]]]:
        config = message.sampling_config
        return message.tokenized.input_token_ids, config, [(message, "max_tokens", 1), (config, "min_tokens", None)]

    def is_constrained(self, message: Any) -> bool:
        constrained: bool = message.HasField("guided_decoding")
        return constrained

    def abort_request(self, request_id: str, reason: str) -> bytes:
        data: bytes = pb.AbortRequest(request_id=request_id).SerializeToString()
        return data

    def parse_health(self, payload: bytes) -> Health:
        status = pb.HealthCheckResponse.FromString(payload).status
        return Health(status.upper() == "OK", status)

    def facts(self, model_info: bytes, server_info: bytes) -> WorkerFacts:
        model = pb.GetModelInfoResponse.FromString(model_info)
        server = pb.GetServerInfoResponse.FromString(server_info)
        labels = base.labels(model, MODEL_LABELS)
        for name, value in base.labels(server, SERVER_LABELS).items():
            labels[RENAMED.get(name, name)] = value
        return WorkerFacts(
            kind=self.kind,
            model_id=model.model_id,
            labels=labels,
            context_length=max(model.max_seq_len, 0),
            vocab_size=max(model.vocab_size, 0),
        )


def max_tokens(request: EngineRequest) -> int:
    """The token limit; a client's 0 is sent as proto's 0, which is absent on the wire."""
    if request.sampling.max_tokens is not None:
        return request.sampling.max_tokens
    return DEFAULT_MAX_TOKENS_COMPLETIONS if request.api == "completions" else DEFAULT_MAX_TOKENS


def token_logprobs(entries: Iterable[Any]) -> TokenLogprobs:
    """Logprobs from one message per token."""
    token_ids, values, top = [], [], []
    for entry in entries:
        token_ids.append(entry.token_id)
        values.append(entry.logprob)
        top.append([(alternative.token_id, alternative.logprob) for alternative in entry.top_logprobs])
    return TokenLogprobs(token_ids, values, top)


_parse = pb.GenerateResponse.FromString


class TrtllmDecoder(base.Decoder):
    """Chunk counts are totals; the final message holds the whole output even when streaming."""

    __slots__ = ("_streaming",)

    def __init__(self, streaming: bool) -> None:
        self._streaming = streaming

    def decode(self, payload: bytes) -> Delta | None:
        message = _parse(payload)
        if not message.HasField("chunk"):
            return self._complete(message.complete) if message.HasField("complete") else None
        if not self._streaming:
            return None
        chunk = message.chunk
        delta = Delta(chunk.sequence_index, chunk.token_ids[:])
        delta.prompt_tokens = chunk.prompt_tokens
        delta.completion_tokens = chunk.completion_tokens
        delta.cached_tokens = chunk.cached_tokens
        if chunk.logprobs:
            delta.logprobs = token_logprobs(chunk.logprobs)
        return delta

    def _complete(self, complete: Any) -> Delta:
        streaming = self._streaming
        token_ids = [] if streaming else complete.output_token_ids[:]
        delta = base.closing_delta(complete, complete.sequence_index, token_ids)
        if delta.finish_reason == "stop_word":  # the engine's own name for a stop string or token
            delta.finish_reason = "stop"
        if not streaming and complete.logprobs:
            delta.logprobs = token_logprobs(complete.logprobs)
        if complete.prompt_logprobs:
            prompt = token_logprobs(complete.prompt_logprobs)
            # The message has no way to say that the first token depends on nothing.
            delta.prompt_logprobs = TokenLogprobs(prompt.token_ids, [nan, *prompt.logprobs[1:]], [(), *prompt.top[1:]])
        delta.matched_stop = base.matched_stop(complete)
        delta.spec_accepted = complete.spec_accepted_tokens
        delta.spec_draft = complete.spec_draft_tokens
        return delta
