"""SGLang over gRPC (``proto/sglang_scheduler.proto``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from smg.engines.base import Delta, EngineRequest, Sampling
from smg.engines.grpc.codecs import base
from smg.engines.grpc.facts import Embedding, Health, LoadReport, WorkerFacts
from smg.engines.grpc.pb import sglang_scheduler_pb2 as pb

CONSTRAINT_FIELDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf_grammar",
    "structural_tag": "structural_tag",
}
OPTIONAL_FIELDS = ("min_p", "frequency_penalty", "presence_penalty")
MODEL_LABELS = (
    "model_path",
    "tokenizer_path",
    "is_generation",
    "preferred_sampling_params",
    "weight_version",
    "served_model_name",
    "max_context_length",
    "vocab_size",
    "supports_vision",
    "model_type",
    "eos_token_ids",
    "pad_token_id",
    "bos_token_id",
    "max_req_input_len",
    "architectures",
    "id2label_json",
    "num_labels",
    "default_sampling_params_json",
)
SERVER_ARGS = ("dp_size", "tp_size", "max_running_requests", "page_size")
# Reasoning is switched per prompt; raw completions have no thinking block to speak of.
REASONING_APIS = frozenset(("chat", "messages", "responses"))


class SglangCodec(base.GrpcCodec):
    """Codec for SGLang workers."""

    kind: ClassVar[str] = "sglang"
    service: ClassVar[str] = pb.SERVICE
    request_class: ClassVar[Any] = pb.GenerateRequest
    supports_loads: ClassVar[bool] = True
    supports_flush: ClassVar[bool] = True
    supports_profile: ClassVar[bool] = True
    supports_embedding: ClassVar[bool] = True

    def build(self, request: EngineRequest) -> Any:
        sampling = request.sampling
        message = pb.GenerateRequest(stream=request.stream)
        params = message.sampling_params
        params.temperature = 1.0 if sampling.temperature is None else sampling.temperature
        params.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        params.top_k = -1 if sampling.top_k is None else sampling.top_k
        params.repetition_penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
        base.fill(params, sampling, OPTIONAL_FIELDS)
        if sampling.max_tokens is not None:
            params.max_new_tokens = sampling.max_tokens
        params.min_new_tokens = sampling.min_tokens or 0
        params.n = sampling.n
        params.stop_token_ids.extend(stop_token_ids(sampling, request.stop_encodings))
        params.ignore_eos = sampling.ignore_eos
        params.no_stop_trim = sampling.no_stop_trim
        params.skip_special_tokens = base.skip_special_tokens(request)
        params.spaces_between_special_tokens = True
        if sampling.logit_bias:
            params.logit_bias.update({str(token): bias for token, bias in sampling.logit_bias.items()})
        base.set_constraint(params, request.constraint, CONSTRAINT_FIELDS)
        message.logprob_start_len = logprob_start_len(request)
        if request.logprobs is not None or request.prompt_logprobs is not None:
            message.return_logprob = True
            message.top_logprobs_num = request.logprobs or request.prompt_logprobs or 0
        message.token_ids_logprob.extend(request.token_ids_logprob)
        message.return_hidden_states = request.return_hidden_states
        message.log_metrics = request.log_metrics and request.api == "generate"
        message.require_reasoning = request.reasoning_on and request.api in REASONING_APIS
        return message

    def decoder(self, *, streaming: bool) -> base.Decoder:
        return SglangDecoder(streaming)

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
        labels = base.labels(model, MODEL_LABELS, always=("is_generation",))
        for name in SERVER_ARGS:
            if value := base.struct_int(server.server_args, name):
                labels[name] = str(value)
        if server.sglang_version:
            labels["version"] = server.sglang_version
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
            is_generation=model.is_generation,
            supports_embedding=True,
        )

    def loads_request(self, include: Sequence[str], dp_rank: int | None = None) -> bytes:
        data: bytes = pb.GetLoadsRequest(include=include, dp_rank=dp_rank).SerializeToString()
        return data

    def parse_loads(self, payload: bytes) -> LoadReport:
        return base.load_report(pb.GetLoadsResponse.FromString(payload))

    def embed_request(self, request_id: str, text: str, token_ids: Sequence[int]) -> bytes:
        message = pb.EmbedRequest(request_id=request_id)
        message.tokenized.original_text = text
        message.tokenized.input_ids.extend(token_ids)
        data: bytes = message.SerializeToString()
        return data

    def parse_embed(self, payload: bytes) -> Embedding:
        answer = pb.EmbedResponse.FromString(payload)
        return Embedding(answer.embedding[:], answer.prompt_tokens)


def stop_token_ids(sampling: Sampling, encodings: dict[str, list[int]]) -> list[int]:
    """Stop tokens plus the stop strings that are one token. The engine has no tokenizer to match longer ones with; the
    gateway matches those itself."""
    ids = list(sampling.stop_token_ids)
    for text in sampling.stop:
        encoded = encodings.get(text, ())
        if len(encoded) == 1 and encoded[0] not in ids:
            ids.append(encoded[0])
    return ids


def logprob_start_len(request: EngineRequest) -> int:
    """First prompt position whose logprob is wanted, -1 for none."""
    if request.logprob_start_len is not None:
        return request.logprob_start_len
    return -1 if request.prompt_logprobs is None else 0


_parse = pb.GenerateResponse.FromString


class SglangDecoder(base.Decoder):
    """Chunk counts are totals already; a streamed final message repeats the last chunk's ids."""

    __slots__ = ("_first", "_streaming")

    def __init__(self, streaming: bool) -> None:
        self._streaming = streaming
        self._first = True

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
        if self._first:
            self._first = False
            if chunk.HasField("input_logprobs"):
                delta.prompt_logprobs = base.input_logprobs(chunk.input_logprobs)
        return delta

    def _complete(self, complete: Any) -> Delta:
        streaming = self._streaming
        delta = base.closing_delta(complete, complete.index, [] if streaming else complete.output_ids[:])
        if not streaming:
            if complete.HasField("output_logprobs"):
                delta.logprobs = base.output_logprobs(complete.output_logprobs)
            if complete.HasField("input_logprobs"):
                delta.prompt_logprobs = base.input_logprobs(complete.input_logprobs)
        delta.matched_stop = base.matched_stop(complete)
        # 0 is also what an engine sends that does not count them.
        delta.reasoning_tokens = complete.reasoning_tokens or -1
        delta.spec_accepted = complete.spec_accepted_tokens
        delta.spec_draft = complete.spec_draft_tokens
        if complete.all_hidden_states:
            delta.hidden_states = [row.values[:] for row in complete.all_hidden_states]
        return delta
