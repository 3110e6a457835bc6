"""TokenSpeed's service: as SGLang's, but a matched stop token is cut off unless the request keeps it."""

from __future__ import annotations

from typing import Any, ClassVar

from smg.engines.grpc.pb import tokenspeed_scheduler_pb2 as pb
from smg.simengine.core import Choice, Generation, SimRequest
from smg.simengine.grpc.adapter import VERSION, Adapter, constraint_of, optional
from smg.simengine.grpc.sglang import CONSTRAINTS


class TokenspeedAdapter(Adapter):
    kind: ClassVar[str] = "tokenspeed"
    pb: ClassVar[Any] = pb

    def request(self, message: Any) -> SimRequest:
        params = message.sampling_params
        return SimRequest(
            request_id=message.request_id,
            prompt_ids=list(message.tokenized.input_ids),
            n=params.n or 1,
            max_tokens=optional(params, "max_new_tokens"),
            min_tokens=params.min_new_tokens,
            stop_token_ids=list(params.stop_token_ids),
            stop=list(params.stop),
            ignore_eos=params.ignore_eos,
            seed=optional(params, "sampling_seed"),
            logit_bias={int(token): bias for token, bias in params.logit_bias.items()},
            constraint=constraint_of(params, CONSTRAINTS),
            logprobs=message.top_logprobs_num if message.return_logprob else None,
            trim_stop=not params.no_stop_trim,
            stream=message.stream,
            dp_rank=optional(message, "data_parallel_rank"),
        )

    def chunk(self, generation: Generation, choice: Choice, ids: list[int]) -> bytes | None:
        start = choice.sent - len(ids)
        if not ids and start:
            return None
        chunk = pb.GenerateStreamChunk(
            token_ids=ids,
            prompt_tokens=len(generation.request.prompt_ids),
            completion_tokens=choice.sent,
            cached_tokens=generation.cached_tokens,
            index=choice.index,
            output_logprobs=self.output_logprobs(generation, ids, start) if ids else None,
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
            output_logprobs=self.output_logprobs(generation, ids, start) if ids else None,
            **self.matched(choice),
        )
        request_id = generation.request.request_id
        data: bytes = pb.GenerateResponse(request_id=request_id, complete=complete).SerializeToString()
        return data

    def aborted_ids(self, message: Any) -> list[str]:
        return [message.request_id]

    def server_info(self) -> Any:
        answer = pb.GetServerInfoResponse(tokenspeed_version=VERSION)
        answer.server_args.update(self.scheduler_args())
        return answer
