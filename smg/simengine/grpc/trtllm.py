"""TensorRT-LLM's service: counts are totals, the last message holds all ids, stop tokens are cut off unless kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from smg.engines.grpc.pb import trtllm_service_pb2 as pb
from smg.simengine.core import Choice, Generation, RefusalError, SimRequest, synthetic_logprobs
from smg.simengine.grpc.adapter import VERSION, Adapter, optional

_Guide = pb.GuidedDecodingParams
GUIDES = {
    _Guide.GUIDE_TYPE_JSON_SCHEMA: "json_schema",
    _Guide.GUIDE_TYPE_REGEX: "regex",
    _Guide.GUIDE_TYPE_EBNF_GRAMMAR: "ebnf",
    _Guide.GUIDE_TYPE_STRUCTURAL_TAG: "structural_tag",
}


class TrtllmAdapter(Adapter):
    kind: ClassVar[str] = "trtllm"
    pb: ClassVar[Any] = pb
    has_loads: ClassVar[bool] = False

    def request(self, message: Any) -> SimRequest:
        config = message.sampling_config
        if not message.max_tokens:
            raise RefusalError("INVALID_ARGUMENT", "max_tokens is required")
        return SimRequest(
            request_id=message.request_id,
            prompt_ids=list(message.tokenized.input_token_ids),
            n=config.num_return_sequences or 1,
            max_tokens=message.max_tokens,
            min_tokens=config.min_tokens,
            stop_token_ids=list(message.stop_token_ids),
            stop=list(message.stop),
            ignore_eos=message.ignore_eos,
            seed=optional(config, "seed"),
            constraint=self._guide(message),
            logprobs=optional(message.output_config, "logprobs"),
            prompt_logprobs=optional(message.output_config, "prompt_logprobs"),
            trim_stop=not message.include_stop_token_in_output,
            stream=message.streaming,
        )

    @staticmethod
    def _guide(message: Any) -> tuple[str, str] | None:
        if not message.HasField("guided_decoding"):
            return None
        guide = message.guided_decoding
        if guide.guide_type == _Guide.GUIDE_TYPE_JSON:
            return "json_schema", '{"type":"object"}'
        if guide.guide_type not in GUIDES:
            raise RefusalError("INVALID_ARGUMENT", "guided decoding without a guide type")
        return GUIDES[guide.guide_type], guide.guide

    def _logprobs(self, ids: Sequence[int], start: int, wanted: int | None) -> list[Any]:
        if wanted is None:
            return []
        values, top = synthetic_logprobs(ids, start, wanted, self.engine.vocabulary.size)
        return [
            pb.TokenLogprob(
                token_id=token,
                logprob=value,
                top_logprobs=[pb.TopLogprob(token_id=other, logprob=logprob) for other, logprob in row],
            )
            for token, value, row in zip(ids, values, top, strict=True)
        ]

    def chunk(self, generation: Generation, choice: Choice, ids: list[int]) -> bytes:
        request = generation.request
        chunk = pb.GenerateStreamChunk(
            token_ids=ids,
            sequence_index=choice.index,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=choice.sent,
            cached_tokens=generation.cached_tokens,
            logprobs=self._logprobs(ids, choice.sent - len(ids), request.logprobs),
        )
        data: bytes = pb.GenerateResponse(request_id=request.request_id, chunk=chunk).SerializeToString()
        return data

    def complete(self, generation: Generation, choice: Choice, last: list[int]) -> bytes:
        request = generation.request
        reported = choice.matched_stop in request.stop_token_ids or isinstance(choice.matched_stop, str)
        complete = pb.GenerateComplete(
            output_token_ids=choice.plan,
            sequence_index=choice.index,
            finish_reason=choice.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=choice.sent,
            cached_tokens=generation.cached_tokens,
            logprobs=self._logprobs(choice.plan, 0, request.logprobs),
            prompt_logprobs=self._logprobs(request.prompt_ids, 0, request.prompt_logprobs),
            **(self.matched(choice) if reported else {}),
        )
        data: bytes = pb.GenerateResponse(request_id=request.request_id, complete=complete).SerializeToString()
        return data

    def aborted_ids(self, message: Any) -> list[str]:
        return [message.request_id]

    def health(self) -> Any:
        return pb.HealthCheckResponse(status="OK")

    def model_info(self) -> Any:
        vocabulary = self.engine.vocabulary
        return pb.GetModelInfoResponse(
            model_id=self.model_name,
            max_input_len=vocabulary.context_length - 1,
            max_seq_len=vocabulary.context_length,
            max_batch_size=self.engine.options.max_concurrency,
            vocab_size=vocabulary.size,
            supported_features=["guided_decoding"],
        )

    def server_info(self) -> Any:
        return pb.GetServerInfoResponse(
            version=VERSION,
            backend="pytorch",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            context_parallel_size=1,
            world_size=1,
        )
