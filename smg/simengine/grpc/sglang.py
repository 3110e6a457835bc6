"""SGLang's service: counts are totals, the last message repeats the last step, stop tokens stay and are reported."""

from __future__ import annotations

from typing import Any, ClassVar

from smg.engines.grpc.pb import sglang_scheduler_pb2 as pb
from smg.simengine.core import Choice, Generation, SimRequest
from smg.simengine.grpc.adapter import VERSION, Adapter, constraint_of, optional

CONSTRAINTS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
}


class SglangAdapter(Adapter):
    kind: ClassVar[str] = "sglang"
    pb: ClassVar[Any] = pb
    has_embed: ClassVar[bool] = True

    def request(self, message: Any) -> SimRequest:
        params = message.sampling_params
        wants_prompt = message.return_logprob and message.logprob_start_len >= 0
        return SimRequest(
            request_id=message.request_id,
            prompt_ids=list(message.tokenized.input_ids),
            n=params.n or 1,
            max_tokens=optional(params, "max_new_tokens"),
            min_tokens=params.min_new_tokens,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            logit_bias={int(token): bias for token, bias in params.logit_bias.items()},
            constraint=constraint_of(params, CONSTRAINTS),
            logprobs=message.top_logprobs_num if message.return_logprob else None,
            prompt_logprobs=message.top_logprobs_num if wants_prompt else None,
            stream=message.stream,
            dp_rank=optional(message, "data_parallel_rank"),
        )

    def chunk(self, generation: Generation, choice: Choice, ids: list[int]) -> bytes:
        start = choice.sent - len(ids)
        chunk = pb.GenerateStreamChunk(
            token_ids=ids,
            prompt_tokens=len(generation.request.prompt_ids),
            completion_tokens=choice.sent,
            cached_tokens=generation.cached_tokens,
            index=choice.index,
            output_logprobs=self.output_logprobs(generation, ids, start),
            input_logprobs=None if start else self.input_logprobs(generation),
        )
        data: bytes = pb.GenerateResponse(request_id=generation.request.request_id, chunk=chunk).SerializeToString()
        return data

    def complete(self, generation: Generation, choice: Choice, last: list[int]) -> bytes:
        ids, start = self.final_ids(generation, choice, last)
        complete = pb.GenerateComplete(
            output_ids=ids,
            finish_reason=choice.finish_reason,
            prompt_tokens=len(generation.request.prompt_ids),
            completion_tokens=choice.sent,
            cached_tokens=generation.cached_tokens,
            index=choice.index,
            output_logprobs=self.output_logprobs(generation, ids, start),
            input_logprobs=None if generation.request.stream else self.input_logprobs(generation),
            **self.matched(choice),
        )
        request_id = generation.request.request_id
        data: bytes = pb.GenerateResponse(request_id=request_id, complete=complete).SerializeToString()
        return data

    def aborted_ids(self, message: Any) -> list[str]:
        return [message.request_id]

    def server_info(self) -> Any:
        answer = pb.GetServerInfoResponse(sglang_version=VERSION)
        answer.server_args.update(self.scheduler_args())
        return answer
