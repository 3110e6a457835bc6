"""TokenSpeed over gRPC (``proto/tokenspeed_scheduler.proto``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from smg.engines.base import BuildError, Delta, EngineRequest
from smg.engines.grpc.codecs import base
from smg.engines.grpc.facts import Health, LoadReport, WorkerFacts
from smg.engines.grpc.pb import tokenspeed_scheduler_pb2 as pb

CONSTRAINT_FIELDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf_grammar",
    "structural_tag": "structural_tag",
}
# The engine's own defaults apply to what is absent, so the gateway names its defaults, all of them except on generate.
DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
PENALTY_DEFAULTS: dict[str, Any] = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
MODEL_LABELS = (
    "model_path",
    "tokenizer_path",
    "served_model_name",
    "model_type",
    "architectures",
    "max_context_length",
    "max_req_input_len",
    "vocab_size",
    "eos_token_ids",
    "pad_token_id",
    "bos_token_id",
    "weight_version",
    "default_sampling_params_json",
    "supports_vision",
    "supports_multimodal",
    "model_dtype",
)
SERVER_ARGS = ("dp_size", "tp_size", "max_running_requests", "page_size")


class TokenspeedCodec(base.GrpcCodec):
    """Codec for TokenSpeed workers."""

    kind: ClassVar[str] = "tokenspeed"
    service: ClassVar[str] = pb.SERVICE
    request_class: ClassVar[Any] = pb.GenerateRequest
    supports_loads: ClassVar[bool] = True
    supports_flush: ClassVar[bool] = True
    supports_profile: ClassVar[bool] = True

    def build(self, request: EngineRequest) -> Any:
        if request.prompt_logprobs is not None:
            raise BuildError("prompt log-probabilities are not supported by TokenSpeed")
        sampling = request.sampling
        message = pb.GenerateRequest(stream=request.stream)
        params = message.sampling_params
        for name, default in DEFAULTS.items():
            value = getattr(sampling, name)
            setattr(params, name, default if value is None else value)
        for name, default in PENALTY_DEFAULTS.items():
            value = getattr(sampling, name)
            if value is not None or request.api != "generate":
                setattr(params, name, default if value is None else value)
        if sampling.max_tokens is not None:
            params.max_new_tokens = sampling.max_tokens
        params.min_new_tokens = sampling.min_tokens or 0
        params.n = sampling.n
        params.stop.extend(sampling.stop)
        params.stop_token_ids.extend(sampling.stop_token_ids)
        params.ignore_eos = sampling.ignore_eos
        params.no_stop_trim = sampling.no_stop_trim
        params.skip_special_tokens = base.skip_special_tokens(request)
        params.spaces_between_special_tokens = True
        # The engine's own name for the seed goes before the common one.
        seed = sampling.seed if sampling.sampling_seed is None else sampling.sampling_seed
        if seed is not None:
            if seed < 0:
                raise BuildError("sampling seed must be an unsigned integer")
            params.sampling_seed = seed
        if sampling.logit_bias:
            params.logit_bias.update({str(token): bias for token, bias in sampling.logit_bias.items()})
        base.set_constraint(params, request.constraint, CONSTRAINT_FIELDS)
        set_logprobs(message, request)
        return message

    def decoder(self, *, streaming: bool) -> base.Decoder:
        return TokenspeedDecoder(streaming)

    def continuation_parts(self, message: Any) -> tuple[Any, Any, list[tuple[Any, str, int | None]]]:
        params = message.sampling_params
        return message.tokenized.input_ids, params, [(params, "max_new_tokens", 1), (params, "min_new_tokens", None)]

    def abort_request(self, request_id: str, reason: str) -> bytes:
        data: bytes = pb.AbortRequest(request_id=request_id, reason=reason).SerializeToString()
        return data

    def parse_health(self, payload: bytes) -> Health:
        answer = pb.HealthCheckResponse.FromString(payload)
        return Health(answer.healthy, answer.message)

    def facts(self, model_info: bytes, server_info: bytes) -> WorkerFacts:
        model = pb.GetModelInfoResponse.FromString(model_info)
        server = pb.GetServerInfoResponse.FromString(server_info)
        labels = base.labels(model, MODEL_LABELS, always=("supports_multimodal",))
        for name in SERVER_ARGS:
            if value := base.struct_int(server.server_args, name):
                labels[name] = str(value)
        if server.tokenspeed_version:
            labels["version"] = server.tokenspeed_version
        if server.constrained_decoding:
            labels["constrained_decoding"] = server.constrained_decoding
        return WorkerFacts(
            kind=self.kind,
            model_id=model.served_model_name or model.model_path,
            labels=labels,
            model_path=model.model_path,
            tokenizer_path=model.tokenizer_path,
            served_model_name=model.served_model_name,
            context_length=max(model.max_context_length, 0),
            vocab_size=max(model.vocab_size, 0),
            eos_token_ids=list(model.eos_token_ids),
            default_sampling_params=model.default_sampling_params_json,
            dp_size=max(base.struct_int(server.server_args, "dp_size", 1), 1),
            block_size=base.struct_int(server.server_args, "page_size"),
            architectures=list(model.architectures),
            model_type=model.model_type,
        )

    def loads_request(self, include: Sequence[str], dp_rank: int | None = None) -> bytes:
        data: bytes = pb.GetLoadsRequest(include=include, dp_rank=dp_rank).SerializeToString()
        return data

    def parse_loads(self, payload: bytes) -> LoadReport:
        return base.load_report(pb.GetLoadsResponse.FromString(payload))


def set_logprobs(message: Any, request: EngineRequest) -> None:
    if request.logprobs is not None:
        message.return_logprob = True
        message.top_logprobs_num = request.logprobs
    if request.logprob_start_len is not None:
        message.logprob_start_len = request.logprob_start_len
    elif request.api != "messages":
        message.logprob_start_len = -1
    message.token_ids_logprob.extend(request.token_ids_logprob)


_parse = pb.GenerateResponse.FromString


class TokenspeedDecoder(base.Decoder):
    """Chunk counts are totals already; a streamed final message repeats the last chunk's ids."""

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
        delta.matched_stop = base.matched_stop(complete)
        delta.spec_accepted = complete.spec_accepted_tokens
        delta.spec_draft = complete.spec_draft_tokens
        return delta
