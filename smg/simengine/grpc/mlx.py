"""MLX's service: one token per message, counts are totals, a streamed last message holds no ids."""

from __future__ import annotations

from typing import Any, ClassVar

from smg.engines.grpc.pb import mlx_engine_pb2 as pb
from smg.simengine.core import Choice, Generation, SimRequest
from smg.simengine.grpc.adapter import Adapter, optional


class MlxAdapter(Adapter):
    kind: ClassVar[str] = "mlx"
    pb: ClassVar[Any] = pb
    has_loads: ClassVar[bool] = False

    def request(self, message: Any) -> SimRequest:
        params = message.sampling_params
        ids = list(message.tokenized.input_ids)
        if message.WhichOneof("input") == "text":
            ids = self.engine.vocabulary.encode(message.text)
        return SimRequest(
            request_id=message.request_id,
            prompt_ids=ids,
            max_tokens=optional(params, "max_tokens"),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            seed=optional(params, "seed"),
            logit_bias=dict(params.logit_bias),
            logprobs=optional(params, "logprobs"),
            stream=message.stream,
        )

    def chunk(self, generation: Generation, choice: Choice, ids: list[int]) -> bytes | None:
        if not ids:
            return None
        chunk = pb.GenerateStreamChunk(
            token_ids=ids,
            prompt_tokens=len(generation.request.prompt_ids),
            completion_tokens=choice.sent,
            cached_tokens=generation.cached_tokens,
            index=choice.index,
            output_logprobs=self.output_logprobs(generation, ids, choice.sent - len(ids)),
        )
        data: bytes = pb.GenerateResponse(chunk=chunk).SerializeToString()
        return data

    def complete(self, generation: Generation, choice: Choice, last: list[int]) -> bytes:
        whole = not generation.request.stream
        complete = pb.GenerateComplete(
            output_ids=choice.plan if whole else [],
            finish_reason=choice.finish_reason,
            prompt_tokens=len(generation.request.prompt_ids),
            completion_tokens=choice.sent,
            cached_tokens=generation.cached_tokens,
            index=choice.index,
            output_logprobs=self.output_logprobs(generation, choice.plan, 0) if whole else None,
            matched_stop_token_id=choice.matched_stop if isinstance(choice.matched_stop, int) else None,
        )
        data: bytes = pb.GenerateResponse(complete=complete).SerializeToString()
        return data

    def aborted_ids(self, message: Any) -> list[str]:
        return list(message.request_ids)

    def server_info(self) -> Any:
        return pb.GetServerInfoResponse(server_type="mlx-grpc")
