"""vLLM's engine core protocol, the engine's side."""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from smg.simengine.core import Choice, Generation, RefusalError, SimEngine, SimRequest, synthetic_logprobs
from smg.simengine.zmq.checks import FatalRequestError, VllmAdd, check_vllm

VERSION = "0.32.0"
STOP, LENGTH, ABORT, ERROR = 0, 1, 2, 3
REASONS = {"stop": STOP, "length": LENGTH, "abort": ABORT}
CONSTRAINTS = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}
OUTPUT_WIDTH = 18
# Arrays of this many bytes leave the message and travel as frames of their own.
AUX_BYTES = 256
_RAW = 3

_decode_add = msgspec.msgpack.Decoder(VllmAdd).decode
_encode = msgspec.msgpack.Encoder().encode


class VllmProtocol:
    """Messages of one engine. ``hello`` and ``registration`` as vLLM sends them."""

    hello_local = False

    def __init__(self, engine: SimEngine, rank: int, ranks: int, *, lockstep: bool) -> None:
        self._engine = engine
        self._rank = rank
        self._ranks = ranks if lockstep else 1

    def registration(self) -> dict[str, Any]:
        vocabulary, options = self._engine.vocabulary, self._engine.options
        return {
            "max_model_len": vocabulary.context_length, "num_gpu_blocks": 8192,
            "block_size": self._engine.cache.block_size, "dp_stats_address": None, "dtype": "bfloat16",
            "vllm_version": VERSION, "world_size": 1, "data_parallel_size": self._ranks, "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1, "data_parallel_rank": self._rank, "max_num_seqs": options.max_concurrency,
            "max_num_batched_tokens": 8192, "kv_cache_size_tokens": 8192 * self._engine.cache.block_size,
        }  # fmt: skip

    def read_add(self, payload: bytes, live: Collection[str], clients: int) -> tuple[SimRequest, int]:
        """The request and its client. Raises ``FatalRequestError``, or ``RefusedRequestError`` for one that is answered
        with an error."""
        try:
            add = _decode_add(payload)
        except msgspec.DecodeError as error:
            raise FatalRequestError(f"a request that cannot be read: {error}", deaf=True) from error
        check_vllm(add, self._engine.vocabulary, live, clients)
        sampling = add.sampling_params
        if sampling is None or sampling.max_tokens is None:
            raise RefusedRequestError(add.request_id, add.client_index)
        constraint = None
        if sampling.structured_outputs is not None:
            constraint = self._constraint(add, sampling.structured_outputs)
        request = SimRequest(
            request_id=add.request_id,
            prompt_ids=add.prompt_token_ids,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.eos_token_id is None,
            seed=sampling.seed,
            logit_bias=sampling.logit_bias or {},
            constraint=constraint,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
        )
        return request, add.client_index

    def _constraint(self, add: VllmAdd, params: dict[str, Any]) -> tuple[str, str]:
        kind = next((name for name in CONSTRAINTS if name in params), None)
        if kind is None or params.get("_backend") != "xgrammar":
            raise RefusedRequestError(add.request_id, add.client_index)
        value = params[kind]
        return CONSTRAINTS[kind], value if isinstance(value, str) else msgspec.json.encode(value).decode()

    # ---- outputs

    def row(self, generation: Generation, choice: Choice, ids: list[int], aux: list[bytes]) -> list[Any]:
        """The output of one request for one step; large arrays go to ``aux``."""
        start = choice.sent - len(ids)
        row: list[Any] = [None] * OUTPUT_WIDTH
        request = generation.request
        row[0], row[1], row[13] = request.request_id, ids, 0
        if request.logprobs is not None and ids:
            row[2] = self._logprobs(ids, start, request.logprobs, aux)
        if start == 0:
            if request.prompt_logprobs is not None and len(request.prompt_ids) > 1:
                row[3] = self._prompt_logprobs(request, aux)
            now = time.monotonic()
            row[7] = [{"type": 1, "timestamp": now}, {"type": 2, "timestamp": now}]
            row[11] = {
                "num_prompt_tokens": len(request.prompt_ids),
                "num_computed_tokens": len(request.prompt_ids) - generation.cached_tokens,
                "num_cached_tokens": generation.cached_tokens,
                "num_local_cached_tokens": generation.cached_tokens,
                "num_external_cached_tokens": 0,
                "num_cache_creation_tokens": 0,
            }
        if choice.done:
            row[5] = REASONS.get(choice.finish_reason, ERROR)
            eos = self._engine.vocabulary.eos_ids[0]
            row[6] = None if choice.matched_stop == eos else choice.matched_stop
        return row

    def failed(self, request_id: str) -> list[Any]:
        """The output of a request that broke."""
        return [request_id, [], None, None, None, ERROR, *[None] * (OUTPUT_WIDTH - 6)]

    def step(self, rows: list[list[Any]], aux: list[bytes], finished: list[str] | None) -> list[bytes]:
        """Frames of the message of one step."""
        return [_encode([self._rank, rows, self._stats(), time.monotonic(), None, finished, None, None, None]), *aux]

    def _stats(self) -> dict[str, Any]:
        load = self._engine.loads()[0]
        cache = {"reset": False, "requests": 0, "queries": 0, "hits": 0, "preempted_requests": 0}
        return {
            "num_running_reqs": load.running, "num_waiting_reqs": load.waiting, "num_skipped_waiting_reqs": 0,
            "step_counter": 0, "current_wave": 0, "kv_cache_usage": min(load.used_tokens / 131072, 1.0),
            "prefix_cache_stats": cache, "kv_cache_eviction_events": [], "spec_decoding_stats": None,
            "waiting_lora_adapters": {}, "running_lora_adapters": {},
        }  # fmt: skip

    def wave_complete(self, wave: int) -> list[bytes]:
        """The group has come to rest."""
        return [_encode([self._rank, [], None, time.monotonic(), None, None, wave, None, None])]

    def utility(self, payload: bytes) -> tuple[int, list[bytes]]:
        """Client and frames of the answer to a call."""
        client, call_id, method, _arguments = msgspec.msgpack.decode(payload)
        answers: dict[str, Any] = {
            "is_sleeping": False,
            "reset_prefix_cache": True,
            "get_supported_tasks": ["generate"],
        }
        if method == "reset_prefix_cache":
            self._engine.cache.clear()
        if method in answers:
            answer = [call_id, None, [None, answers[method]]]
        else:
            answer = [call_id, f"Call to {method} method failed: 'EngineCoreProc' has no attribute '{method}'", None]
        return client, [_encode([self._rank, [], None, time.monotonic(), answer, None, None, None, None])]

    def _logprobs(self, ids: list[int], start: int, wanted: int, aux: list[bytes]) -> list[Any]:
        values, tops = synthetic_logprobs(ids, start, wanted, self._engine.vocabulary.size)
        tokens = [token for i, row in zip(ids, tops, strict=True) for token in (i, *(t for t, _ in row))]
        logprobs = [value for own, row in zip(values, tops, strict=True) for value in (own, *(v for _, v in row))]
        shape = [len(ids), 1 + wanted]
        ranks = _array("<i8", [len(ids)], "q", [1] * len(ids), aux)
        return [_array("<i4", shape, "i", tokens, aux), _array("<f4", shape, "f", logprobs, aux), ranks, None]

    def _prompt_logprobs(self, request: SimRequest, aux: list[bytes]) -> list[Any]:
        ids, wanted = request.prompt_ids, request.prompt_logprobs or 0
        values, tops = synthetic_logprobs(ids, 0, wanted, self._engine.vocabulary.size)
        tokens = [token for i, row in zip(ids[1:], tops[1:], strict=True) for token in (i, *(t for t, _ in row))]
        logprobs = [v for own, row in zip(values[1:], tops[1:], strict=True) for v in (own, *(v for _, v in row))]
        shape = [len(ids) - 1, 1 + wanted]
        ranks = _array("int32", shape[:1], "i", [1] * shape[0], aux)
        arrays = [_array("int32", shape, "i", tokens, aux), _array("float32", shape, "f", logprobs, aux)]
        return [*arrays, ranks, None, None]


class RefusedRequestError(RefusalError):
    """The engine ends this request with an error."""

    def __init__(self, request_id: str, client: int) -> None:
        super().__init__("INVALID_ARGUMENT", "the request cannot be processed")
        self.request_id = request_id
        self.client = client


def _array(dtype: str, shape: list[int], code: str, values: Sequence[float], aux: list[bytes]) -> list[Any]:
    data = struct.pack(f"<{len(values)}{code}", *values)
    if len(data) < AUX_BYTES:
        return [dtype, shape, msgspec.msgpack.Ext(_RAW, data)]
    aux.append(data)
    return [dtype, shape, len(aux)]
