"""TokenSpeed's protocol, the engine's side."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from smg.simengine.core import Choice, Generation, SimEngine, SimRequest, synthetic_logprobs
from smg.simengine.zmq.checks import FatalRequestError

VERSION = "tokenspeed-0.1.1"
TOTAL_PAGES = 4096
PAGE_TOKENS = 64
REQUEST_WIDTH, SAMPLING_WIDTH = 11, 29
TAG = "TokenizedGenerateReqInput"
GRAMMARS = {11: "json_schema", 12: "regex", 13: "ebnf", 14: "structural_tag"}

_encode = msgspec.msgpack.Encoder().encode


class TokenspeedProtocol:
    """Messages of one engine."""

    hello_local = True

    def __init__(self, engine: SimEngine, rank: int, ranks: int, *, lockstep: bool) -> None:
        self._engine = engine
        self._rank = rank

    def registration(self) -> dict[str, Any]:
        vocabulary, options = self._engine.vocabulary, self._engine.options
        return {
            "max_model_len": vocabulary.context_length, "num_gpu_blocks": TOTAL_PAGES,
            "prefix_granularity": PAGE_TOKENS, "dp_stats_address": None, "dtype": "bfloat16",
            "multimodal_encoder_dtype": None, "vllm_version": VERSION, "world_size": 1, "data_parallel_size": 1,
            "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_rank": self._rank,
            "max_num_seqs": options.max_concurrency, "max_num_batched_tokens": -1,
            "kv_cache_size_tokens": TOTAL_PAGES * PAGE_TOKENS,
        }  # fmt: skip

    def read_add(self, payload: bytes, live: Collection[str], clients: int) -> tuple[SimRequest, int]:
        """The request; its client is 0. Raises ``FatalRequestError`` for what the engine would drop without a word."""
        message = msgspec.msgpack.decode(payload)
        if not isinstance(message, list) or len(message) < REQUEST_WIDTH or message[0] != TAG:
            raise FatalRequestError("a request that cannot be read", deaf=True)
        params = message[5]
        if len(params) != SAMPLING_WIDTH or params[28] is not True or message[1] in live:
            raise FatalRequestError("a request that hangs", deaf=True)
        constraint = next(((kind, params[at]) for at, kind in GRAMMARS.items() if params[at] is not None), None)
        request = SimRequest(
            request_id=message[1],
            prompt_ids=message[4],
            max_tokens=params[0],
            min_tokens=params[10],
            stop_token_ids=params[2] or (),
            ignore_eos=params[15],
            seed=params[23],
            logit_bias={int(token): bias for token, bias in (params[22] or {}).items()},
            constraint=constraint,
            logprobs=0 if message[6] else None,
            stream=message[10],
        )
        return request, 0

    def row(self, generation: Generation, choice: Choice, ids: list[int], aux: list[bytes]) -> list[Any]:
        """The columns of one request."""
        request = generation.request
        values: list[float] = []
        if request.logprobs is not None:
            values, _ = synthetic_logprobs(ids, choice.sent - len(ids), 0, self._engine.vocabulary.size)
        return [
            request.request_id, ids, choice.finish_reason if choice.done else "", len(request.prompt_ids),
            choice.sent, generation.cached_tokens, values, ids if values else [],
        ]  # fmt: skip

    def failed(self, request_id: str) -> list[Any]:
        """A request that broke or was not taken."""
        return [request_id, [], "abort", 0, 0, 0, [], []]

    def step(self, rows: list[list[Any]], aux: list[bytes], finished: list[str] | None) -> list[bytes]:
        """Frames of the message of one step."""
        columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(8)]
        load = self._engine.loads()[0]
        pages = min(load.used_tokens // PAGE_TOKENS, TOTAL_PAGES)
        tail = [self._rank, load.running, load.waiting, pages, TOTAL_PAGES]
        return [_encode(["BatchTokenIDOutSlim", *columns, *tail])]
