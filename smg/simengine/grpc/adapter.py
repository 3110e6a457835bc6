"""What the gRPC adapters of all engine kinds share.

An adapter reads a protocol's requests into ``SimRequest`` and writes what the core says in the shape in which that
engine's servicer sends it: which ids the last message of a stream repeats, whether counts are totals, whether a stop
token stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from smg.simengine.core import KV_TOKENS, Choice, Generation, SimEngine, SimRequest, synthetic_logprobs

VERSION = "sim-1"


class Adapter(ABC):
    """Translation for one engine kind; ``pb`` is the module of its messages."""

    kind: ClassVar[str]
    pb: ClassVar[Any]
    has_loads: ClassVar[bool] = True
    has_embed: ClassVar[bool] = False

    def __init__(self, engine: SimEngine, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name

    # ---- generation

    @abstractmethod
    def request(self, message: Any) -> SimRequest:
        """The neutral form of a GenerateRequest."""

    @abstractmethod
    def chunk(self, generation: Generation, choice: Choice, ids: list[int]) -> bytes | None:
        """The stream message for the newest ``ids`` of a choice; None when this engine sends none."""

    @abstractmethod
    def complete(self, generation: Generation, choice: Choice, last: list[int]) -> bytes:
        """The final message of a choice; ``last`` are the ids of its last step."""

    def final_ids(self, generation: Generation, choice: Choice, last: list[int]) -> tuple[list[int], int]:
        """Ids in the final message and the position of the first: of the last step when streaming, else all."""
        return (last, choice.sent - len(last)) if generation.request.stream else (choice.plan, 0)

    def output_logprobs(self, generation: Generation, ids: Sequence[int], start: int) -> Any:
        """``OutputLogProbs`` for ids at positions from ``start`` on, None when none are wanted."""
        wanted = generation.request.logprobs
        if wanted is None:
            return None
        values, top = synthetic_logprobs(ids, start, wanted, self.engine.vocabulary.size)
        return self.pb.OutputLogProbs(token_logprobs=values, token_ids=ids, top_logprobs=self._top(top))

    def input_logprobs(self, generation: Generation) -> Any:
        """``InputLogProbs`` for the prompt (its first token has no value), None when none are wanted."""
        wanted = generation.request.prompt_logprobs
        if wanted is None:
            return None
        ids = generation.request.prompt_ids
        values, top = synthetic_logprobs(ids, 0, wanted, self.engine.vocabulary.size)
        entries = [
            self.pb.InputTokenLogProb(value=value) if i else self.pb.InputTokenLogProb()
            for i, value in enumerate(values)
        ]
        return self.pb.InputLogProbs(token_logprobs=entries, token_ids=ids, top_logprobs=self._top(top))

    def _top(self, rows: Sequence[Sequence[tuple[int, float]]]) -> list[Any]:
        return [
            self.pb.TopLogProbs(values=[value for _, value in row], token_ids=[token for token, _ in row])
            for row in rows
        ]

    def matched(self, choice: Choice) -> dict[str, Any]:
        """The ``matched_stop`` oneof of a final message."""
        if choice.matched_stop is None:
            return {}
        name = "matched_token_id" if isinstance(choice.matched_stop, int) else "matched_stop_str"
        return {name: choice.matched_stop}

    # ---- information

    def health(self) -> Any:
        return self.pb.HealthCheckResponse(healthy=True, message="ok")

    @abstractmethod
    def aborted_ids(self, message: Any) -> list[str]:
        """The request ids that an AbortRequest names."""

    def abort_answer(self, found: bool) -> Any:
        return filled(self.pb.AbortResponse, {"success": found, "message": "" if found else "no such request"})

    def model_info(self) -> Any:
        vocabulary = self.engine.vocabulary
        sampling = msgspec.json.encode(vocabulary.default_sampling).decode() if vocabulary.default_sampling else ""
        values = {
            "model_path": str(vocabulary.path),
            "tokenizer_path": str(vocabulary.path),
            "served_model_name": self.model_name,
            "is_generation": True,
            "max_context_length": vocabulary.context_length,
            "max_req_input_len": vocabulary.context_length - 1,
            "vocab_size": vocabulary.size,
            "model_type": vocabulary.model_type,
            "architectures": vocabulary.architectures,
            "eos_token_ids": vocabulary.eos_ids,
            "pad_token_id": vocabulary.pad_id,
            "bos_token_id": vocabulary.bos_id,
            "default_sampling_params_json": sampling,
        }
        return filled(self.pb.GetModelInfoResponse, values)

    @abstractmethod
    def server_info(self) -> Any: ...

    def scheduler_args(self) -> dict[str, Any]:
        """The ``server_args`` struct of the engines that send one."""
        options = self.engine.options
        return {
            "model_path": str(self.engine.vocabulary.path),
            "served_model_name": self.model_name,
            "tp_size": 1,
            "dp_size": options.dp_size,
            "max_running_requests": options.max_concurrency,
            "page_size": self.engine.cache.block_size,
        }

    def loads(self, message: Any) -> Any:
        """The answer to a GetLoadsRequest."""
        wanted = message.dp_rank if message.HasField("dp_rank") else None
        rows = []
        for rank, stats in enumerate(self.engine.loads()):
            if wanted is not None and rank != wanted:
                continue
            usage = min(stats.used_tokens / KV_TOKENS, 1.0)
            rows.append(
                self.pb.SchedulerLoad(
                    dp_rank=rank,
                    num_running_reqs=stats.running,
                    num_waiting_reqs=stats.waiting,
                    num_total_reqs=stats.running + stats.waiting,
                    num_used_tokens=stats.used_tokens,
                    max_total_num_tokens=KV_TOKENS,
                    token_usage=usage,
                    gen_throughput=self.engine.throughput,
                    max_running_requests=self.engine.options.max_concurrency,
                    num_waiting_uncached_tokens=stats.waiting_tokens,
                )
            )
        return self.pb.GetLoadsResponse(version=VERSION, dp_rank_count=self.engine.options.dp_size, loads=rows)

    def embedding(self, ids: list[int]) -> Any:
        vector = self.engine.embed(ids)
        return self.pb.EmbedResponse(embedding=vector, embedding_dim=len(vector), prompt_tokens=len(ids))


def filled(message_class: Any, values: dict[str, Any]) -> Any:
    """A message with those of ``values`` that it has fields for."""
    names = message_class.DESCRIPTOR.fields_by_name
    return message_class(**{name: value for name, value in values.items() if name in names})


def constraint_of(params: Any, kinds: dict[str, str]) -> tuple[str, str] | None:
    """The constraint oneof of ``params``; ``kinds`` maps member names to neutral kinds."""
    name = params.WhichOneof("constraint")
    return (kinds[name], getattr(params, name)) if name is not None else None


def optional(message: Any, name: str) -> Any:
    """The value of a field with presence, None when it is unset."""
    return getattr(message, name) if message.HasField(name) else None
