"""vLLM over gRPC (``proto/vllm_engine.proto``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from smg.engines.base import Delta, EngineRequest
from smg.engines.grpc.codecs import base
from smg.engines.grpc.facts import Embedding, Health, LoadReport, WorkerFacts
from smg.engines.grpc.pb import vllm_engine_pb2 as pb

CONSTRAINT_FIELDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
OPTIONAL_FIELDS = (
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "max_tokens",
    "min_tokens",
)
MODEL_LABELS = (
    "model_path",
    "is_generation",
    "max_context_length",
    "vocab_size",
    "supports_vision",
    "served_model_name",
    "tokenizer_path",
    "model_type",
    "architectures",
    "eos_token_ids",
    "pad_token_id",
    "bos_token_id",
    "max_req_input_len",
    "default_sampling_params_json",
)
SERVER_LABELS = (
    "kv_connector",
    "kv_role",
    "kv_engine_id",
    "data_parallel_size",
    "kv_cache_dtype",
    "block_size",
    "attention_backend",
    "model_dtype",
    "pairing_protocol",
    "mm_processor",
    "mm_device_do_normalize",
    "max_num_seqs",
    "engine_reasoning_parser",
    "constrained_decoding_start",
)
RENAMED = {"data_parallel_size": "dp_size", "block_size": "page_size"}


class VllmCodec(base.GrpcCodec):
    """Codec for vLLM workers."""

    kind: ClassVar[str] = "vllm"
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
        if sampling.temperature is not None:
            params.temperature = sampling.temperature
        elif request.api not in ("chat", "completions"):
            params.temperature = 1.0
        params.top_p = 1.0 if sampling.top_p is None else sampling.top_p
        params.repetition_penalty = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
        params.top_k = max(sampling.top_k or 0, 0)
        params.n = sampling.n
        params.skip_special_tokens = base.skip_special_tokens(request)
        params.spaces_between_special_tokens = True
        params.ignore_eos = sampling.ignore_eos
        params.stop.extend(sampling.stop)
        params.stop_token_ids.extend(sampling.stop_token_ids)
        params.include_stop_str_in_output = sampling.no_stop_trim and request.api == "completions"
        base.fill(params, sampling, OPTIONAL_FIELDS)
        seed = base.seed_of(sampling)
        if seed is not None:
            params.seed = base.int32(seed)
        if sampling.logit_bias:
            params.logit_bias.update(sampling.logit_bias)
        if request.logprobs is not None:
            params.logprobs = vllm_logprobs(request)
        if request.prompt_logprobs is not None:
            params.prompt_logprobs = request.prompt_logprobs
        base.set_constraint(params, request.constraint, CONSTRAINT_FIELDS)
        return message

    def decoder(self, *, streaming: bool) -> base.Decoder:
        return VllmDecoder(streaming)

    def continuation_parts(self, message: Any) -> tuple[Any, Any, list[tuple[Any, str, int | None]]]:
        params = message.sampling_params
        return message.tokenized.input_ids, params, [(params, "max_tokens", 1), (params, "min_tokens", None)]

    def abort_request(self, request_id: str, reason: str) -> bytes:
        data: bytes = pb.AbortRequest(request_ids=[request_id]).SerializeToString()
        return data

    def parse_health(self, payload: bytes) -> Health:
        answer = pb.HealthCheckResponse.FromString(payload)
        return Health(answer.healthy, answer.message)

    def facts(self, model_info: bytes, server_info: bytes) -> WorkerFacts:
        model = pb.GetModelInfoResponse.FromString(model_info)
        server = pb.GetServerInfoResponse.FromString(server_info)
        labels = base.labels(model, MODEL_LABELS, always=("is_generation", "supports_vision"))
        for name, value in base.labels(server, SERVER_LABELS, always=("mm_device_do_normalize",)).items():
            labels[RENAMED.get(name, name)] = value
        return WorkerFacts(
            kind=self.kind,
            model_id=model.served_model_name or model.model_path,
            labels=labels,
            model_path=model.model_path,
            tokenizer_path=model.tokenizer_path,
            served_model_name=model.served_model_name,
            context_length=model.max_context_length,
            vocab_size=model.vocab_size,
            eos_token_ids=list(model.eos_token_ids),
            default_sampling_params=model.default_sampling_params_json,
            dp_size=max(server.data_parallel_size, 1),
            block_size=server.block_size,
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


def vllm_logprobs(request: EngineRequest) -> int:
    """Alternatives to ask for. On chat 0 means that the client named no number; one is asked for then."""
    asked = request.logprobs or 0
    return max(asked, 1) if request.api == "chat" else asked


_parse = pb.GenerateResponse.FromString
_parse_chunk = pb.GenerateStreamChunk.FromString
_ids: dict[bytes, tuple[int, ...]] = {}
_rests: dict[bytes, bytes] = {}

KNOWN_RESTS = 4096
REST_TRIES = 4


class VllmDecoder(base.Decoder):
    """vLLM counts per message, in chunks and in a streamed final message alike; the totals are kept here.

    The chunks of a stream differ in their ids, mostly in nothing else. What follows the ids is kept: a chunk with the
    same bytes there says the same as the one before, and only its ids are read."""

    __slots__ = ("_first", "_last", "_rest", "_streaming", "_totals", "_tries")

    def __init__(self, streaming: bool) -> None:
        self._streaming = streaming
        self._first = True
        self._totals: dict[int, int] = {}
        self._rest = b""  # what followed the ids in ``_last``
        self._last: Delta | None = None  # holds the total of its choice
        self._tries = REST_TRIES

    def decode(self, payload: bytes) -> Delta | None:
        last, rest = self._last, self._rest
        if last is not None and payload.endswith(rest) and payload[1] == len(payload) - 2:
            lead = payload[: len(payload) - len(rest)]
            token_ids = _ids.get(lead) or base.read_lead(lead, _ids)
            if token_ids is not None:
                last.token_ids = token_ids
                last.completion_tokens += len(token_ids)
                return last
        if last is not None:
            self._totals[last.index] = last.completion_tokens
            self._last = None
        message = _parse(payload)
        if not message.HasField("chunk"):
            return self._complete(message.complete) if message.HasField("complete") else None
        if not self._streaming:
            return None
        chunk = message.chunk
        index = chunk.index
        new_ids: list[int] = chunk.token_ids[:]
        delta = Delta(index, new_ids)
        totals = self._totals
        delta.completion_tokens = totals[index] = totals.get(index, 0) + len(new_ids)
        delta.prompt_tokens = chunk.prompt_tokens
        delta.cached_tokens = chunk.cached_tokens
        if chunk.HasField("output_logprobs"):
            delta.logprobs = base.output_logprobs(chunk.output_logprobs)
        if chunk.HasField("input_logprobs"):
            if self._first:
                delta.prompt_logprobs = base.input_logprobs(chunk.input_logprobs)
        elif self._tries and delta.logprobs is None:
            self._remember(payload, delta)
        self._first = False
        return delta

    def _remember(self, payload: bytes, delta: Delta) -> None:
        """Keep what follows the ids of a chunk: it stands for what ``delta`` says. Not in streams where it is always
        something else."""
        self._tries -= 1
        rest = base.behind_ids(payload)
        if rest and not _parse_chunk(rest).token_ids:
            # One object for all streams that say the same: it stays in the processor's cache.
            if len(_rests) >= KNOWN_RESTS:
                _rests.clear()
            self._rest, self._last = _rests.setdefault(rest, rest), delta

    def _complete(self, complete: Any) -> Delta:
        index = complete.index
        streaming = self._streaming
        delta = base.closing_delta(complete, index, [] if streaming else complete.output_ids[:])
        if streaming:
            delta.completion_tokens = max(delta.completion_tokens, self._totals.get(index, 0))
        else:
            if complete.HasField("output_logprobs"):
                delta.logprobs = base.output_logprobs(complete.output_logprobs)
            if complete.HasField("input_logprobs"):
                delta.prompt_logprobs = base.input_logprobs(complete.input_logprobs)
        delta.matched_stop = base.matched_stop(complete)
        delta.spec_accepted = complete.spec_accepted_tokens
        delta.spec_draft = complete.spec_draft_tokens
        return delta
