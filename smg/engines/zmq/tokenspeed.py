"""The messages of a TokenSpeed engine.

Structs are arrays whose element 0 is the class name. Outputs are columns: element ``i`` of each belongs to request
``i``. Only input and output socket 0 are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from smg.engines.zmq.tensors import UNREADABLE, WireError

ADD, ABORT = b"\x00", b"\x01"
DEAD = b"ENGINE_CORE_DEAD"
REQUEST_TAG, OUTPUT_TAG = "TokenizedGenerateReqInput", "BatchTokenIDOutSlim"
# Any token: what top_k -1 is on this wire.
ALL_TOKENS = 1 << 30
GREEDY_BELOW = 1e-6

_encode = msgspec.msgpack.Encoder().encode


class SamplingParams(msgspec.Struct, array_like=True):
    """Positional. With ``is_normalized`` the engine derives nothing from what it gets."""

    max_new_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = ALL_TOKENS
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    thinking_budget: int | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1
    stop_strs: list[str] = []
    stop_str_max_len: int = 0
    is_normalized: bool = True


class Request(msgspec.Struct, array_like=True, tag=REQUEST_TAG):
    """The ADD payload. ``input_ids`` is encoded already."""

    rid: str
    http_worker_ipc: str | None
    input_text: str | None
    input_ids: msgspec.Raw
    sampling_params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = True


class Outputs(msgspec.Struct, array_like=True, tag=OUTPUT_TAG, gc=False):
    """One step. ``finished_reasons``: "" running, "stop", "length", "abort"; ``completion_tokens`` are totals.
    ``kv_total_pages`` 0: the load is not known."""

    rids: list[str]
    output_ids: list[list[int]]
    finished_reasons: list[str]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    logprobs: list[list[float]]
    logprob_ids: list[list[int]]
    engine_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_active_pages: int = 0
    kv_total_pages: int = 0


_decode = msgspec.msgpack.Decoder(Outputs).decode
_decode_any = msgspec.msgpack.Decoder().decode


def decode_outputs(payload: bytes) -> Outputs:
    """The message of one step, columns of one length. Raises ``WireError``."""
    try:
        step = _decode(payload)
    except UNREADABLE as error:
        raise WireError(f"an output message cannot be read: {error}") from None
    count = len(step.rids)
    columns: tuple[Sequence[Any], ...] = (
        step.output_ids, step.finished_reasons, step.prompt_tokens, step.completion_tokens, step.cached_tokens,
        step.logprobs, step.logprob_ids,
    )  # fmt: skip
    if any(len(column) != count for column in columns):
        raise WireError("the columns of an output message differ in length")
    return step


def salvage_ids(payload: bytes) -> list[str]:
    """The request ids of an output message that ``decode_outputs`` refuses; empty when there are none to be found."""
    try:
        message = _decode_any(payload)
        return [rid for rid in message[1] if isinstance(rid, str)] if message[0] == OUTPUT_TAG else []
    except (*UNREADABLE, TypeError, IndexError, KeyError):
        return []


def encode_request(request: Request) -> bytes:
    """An ADD payload."""
    return _encode(request)


def encode_abort(request_ids: Sequence[str]) -> bytes:
    """An ABORT payload."""
    return _encode(request_ids)
