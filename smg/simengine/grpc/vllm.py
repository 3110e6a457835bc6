"""vLLM's service: counts per message, the last message repeats the last step, EOS stays in the ids unreported."""

from __future__ import annotations

from typing import Any, ClassVar

from smg.engines.grpc.pb import vllm_engine_pb2 as pb
from smg.simengine.core import Choice, Generation, SimRequest
from smg.simengine.grpc.adapter import Adapter, constraint_of, optional

CONSTRAINTS = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}


class VllmAdapter(Adapter):
    kind: ClassVar[str] = "vllm"
    pb: ClassVar[Any] = pb
    has_embed: ClassVar[bool] = True

    def request(self, message: Any) -> SimRequest:
        params = message.sampling_params
        ids = list(message.tokenized.input_ids)
        if message.WhichOneof("input") == "text":
            ids = self.engine.vocabulary.encode(message.text)
        return SimRequest(
            request_id=message.request_id,
            prompt_ids=ids,
            n=params.n or 1,
            max_tokens=optional(params, "max_tokens"),
            min_tokens=params.min_tokens,
            stop_token_ids=list(params.stop_token_ids),
            stop=list(params.stop),
            ignore_eos=params.ignore_eos,
            seed=optional(params, "seed"),
            logit_bias=dict(params.logit_bias),
            constraint=constraint_of(params, CONSTRAINTS),
            logprobs=optional(params, "logprobs"),
            prompt_logprobs=optional(params, "prompt_logprobs"),
            stream=message.stream,
            dp_rank=optional(message, "data_parallel_rank"),
        )

    def chunk(self, generation: Generation, choice: Choice, ids: list[int]) -> bytes:
        start = choice.sent - len(ids)
        chunk = pb.GenerateStreamChunk(
            token_ids=ids,
            prompt_tokens=len(generation.request.prompt_ids),
            completion_tokens=len(ids),
            cached_tokens=generation.cached_tokens,
            index=choice.index,
            output_logprobs=self.output_logprobs(generation, ids, start),
            input_logprobs=None if start else self.input_logprobs(generation),
        )
        data: bytes = pb.GenerateResponse(chunk=chunk).SerializeToString()
        return data

    def complete(self, generation: Generation, choice: Choice, last: list[int]) -> bytes:
        ids, start = self.final_ids(generation, choice, last)
        by_eos = choice.matched_stop in self.engine.vocabulary.eos_ids
        complete = pb.GenerateComplete(
            output_ids=ids,
            finish_reason=choice.finish_reason,
            prompt_tokens=len(generation.request.prompt_ids),
            completion_tokens=len(ids),
            cached_tokens=generation.cached_tokens,
            index=choice.index,
            output_logprobs=self.output_logprobs(generation, ids, start),
            input_logprobs=self.input_logprobs(generation),
            **({} if by_eos else self.matched(choice)),
        )
        data: bytes = pb.GenerateResponse(complete=complete).SerializeToString()
        return data

    def aborted_ids(self, message: Any) -> list[str]:
        return list(message.request_ids)

    def server_info(self) -> Any:
        options = self.engine.options
        return pb.GetServerInfoResponse(
            server_type="vllm-grpc",
            data_parallel_size=options.dp_size,
            block_size=self.engine.cache.block_size,
            max_num_seqs=options.max_concurrency,
            model_dtype="torch.bfloat16",
            kv_cache_dtype="auto",
            constrained_decoding_start="first_token",
        )
