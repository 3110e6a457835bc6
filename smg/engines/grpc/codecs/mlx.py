"""MLX over gRPC (``proto/mlx_engine.proto``)."""

from __future__ import annotations

from typing import Any, ClassVar

from smg.engines.base import BuildError, Delta, EngineRequest
from smg.engines.grpc.codecs import base
from smg.engines.grpc.facts import Health, WorkerFacts
from smg.engines.grpc.pb import mlx_engine_pb2 as pb

OPTIONAL_FIELDS = ("min_p", "frequency_penalty", "presence_penalty", "max_tokens")
MODEL_LABELS = (
    "model_path",
    "is_generation",
    "max_context_length",
    "vocab_size",
    "served_model_name",
    "model_type",
    "architectures",
    "eos_token_ids",
    "pad_token_id",
    "bos_token_id",
    "max_req_input_len",
)


class MlxCodec(base.GrpcCodec):
    """Codec for MLX workers."""

    kind: ClassVar[str] = "mlx"
    service: ClassVar[str] = pb.SERVICE
    request_class: ClassVar[Any] = pb.GenerateRequest

    def build(self, request: EngineRequest) -> Any:
        refuse_unsupported(request)
        sampling = request.sampling
        message = pb.GenerateRequest(stream=request.stream)
        params = message.sampling_params
        if sampling.temperature is not None:
            params.temperature = sampling.temperature
        elif request.api not in ("chat", "completions"):
            params.temperature = 1.0
        params.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        params.repetition_penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
        params.top_k = max(sampling.top_k or 0, 0)
        base.fill(params, sampling, OPTIONAL_FIELDS)
        params.stop_token_ids.extend(sampling.stop_token_ids)
        params.ignore_eos = sampling.ignore_eos
        seed = base.seed_of(sampling)
        if seed is not None:
            params.seed = base.int32(seed)
        if sampling.logit_bias:
            params.logit_bias.update(sampling.logit_bias)
        if request.logprobs is not None:
            params.logprobs = max(request.logprobs, 1) if request.api == "chat" else request.logprobs
        return message

    def decoder(self, *, streaming: bool) -> base.Decoder:
        return MlxDecoder(streaming)

    def continuation_parts(self, message: Any) -> tuple[Any, Any, list[tuple[Any, str, int | None]]]:
        params = message.sampling_params
        return message.tokenized.input_ids, params, [(params, "max_tokens", 1)]

    def is_constrained(self, message: Any) -> bool:
        return False

    def abort_request(self, request_id: str, reason: str) -> bytes:
        data: bytes = pb.AbortRequest(request_ids=[request_id]).SerializeToString()
        return data

    def parse_health(self, payload: bytes) -> Health:
        answer = pb.HealthCheckResponse.FromString(payload)
        return Health(answer.healthy, answer.message)

    def facts(self, model_info: bytes, server_info: bytes) -> WorkerFacts:
        model = pb.GetModelInfoResponse.FromString(model_info)
        return WorkerFacts(
            kind=self.kind,
            model_id=model.served_model_name or model.model_path,
            labels=base.labels(model, MODEL_LABELS, always=("is_generation",)),
            model_path=model.model_path,
            served_model_name=model.served_model_name,
            context_length=model.max_context_length,
            vocab_size=model.vocab_size,
            eos_token_ids=list(model.eos_token_ids),
            architectures=list(model.architectures),
            model_type=model.model_type,
            is_generation=model.is_generation,
        )


def refuse_unsupported(request: EngineRequest) -> None:
    """Raise ``BuildError`` for what this engine has no field for and the gateway cannot do in its place."""
    if request.sampling.n > 1:
        raise BuildError("MLX backend does not support n > 1 (parallel samples)")
    if request.sampling.stop:
        raise BuildError("MLX backend does not support string stop sequences")
    if request.prompt_logprobs is not None:
        raise BuildError("MLX backend does not support log-probabilities of the prompt")
    constraint = request.constraint
    if constraint is None:
        return
    if request.api in base.RAW_TEXT_APIS:
        raise BuildError("MLX backend does not support structured output constraints")
    if constraint.origin == "output" and constraint.kind == "json_schema":
        raise BuildError("MLX backend does not support response_format (structured outputs)")
    raise BuildError(f"MLX backend does not support structured output constraint: {constraint.kind}")


_parse = pb.GenerateResponse.FromString


class MlxDecoder(base.Decoder):
    """One token per chunk, counts are totals; a streamed final message holds no ids."""

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
        delta = Delta(chunk.index, chunk.token_ids[:])
        delta.prompt_tokens = chunk.prompt_tokens
        delta.completion_tokens = chunk.completion_tokens
        delta.cached_tokens = chunk.cached_tokens
        if chunk.HasField("output_logprobs"):
            delta.logprobs = base.output_logprobs(chunk.output_logprobs)
        return delta

    def _complete(self, complete: Any) -> Delta:
        streaming = self._streaming
        delta = base.closing_delta(complete, complete.index, [] if streaming else complete.output_ids[:])
        if not streaming and complete.HasField("output_logprobs"):
            delta.logprobs = base.output_logprobs(complete.output_logprobs)
        if complete.HasField("matched_stop_token_id"):
            delta.matched_stop = complete.matched_stop_token_id
        return delta
