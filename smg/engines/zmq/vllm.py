"""The messages of a vLLM engine core (0.26 and later), as far as a gateway reads and writes them.

Requests and outputs are positional arrays, sampling parameters and statistics are maps. A shorter array has defaults
in its tail; what lies behind the last declared element is skipped without being built. The trailing elements of a
release nobody here has seen do no harm.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from smg.engines.zmq.tensors import UNREADABLE, WireError, extension

# First frame behind the identity: what the next one holds.
ADD, ABORT, START_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
DEAD = b"ENGINE_CORE_DEAD"
FINISH_REASONS = ("stop", "length", "abort", "error", "stop")
REPETITION = 4
_REPETITION_STOP = "repetition_detected"

_encode = msgspec.msgpack.Encoder().encode
_NIL = b"\xc0"


class Stats(msgspec.Struct, gc=False):
    """Load of one engine; ``kv_cache_usage`` from 0 to 1."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0


class Output(msgspec.Struct, array_like=True, gc=False):
    """What one step brought for one request; ``finish_reason`` is an index of ``FINISH_REASONS``. The logprobs are raw
    (see ``tensors``)."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[Any] | None = None
    new_prompt_logprobs: list[Any] | None = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None


class FirstOutput(Output, array_like=True, gc=False):
    """An output with the elements that only the first one of a request fills."""

    events: Any = None
    kv_transfer_params: Any = None
    extra_9: Any = None
    extra_10: Any = None
    extra_11: Any = None

    @property
    def prefill_stats(self) -> dict[str, int] | None:
        """Counts of the prompt's tokens. They sit at 11, before release 0.26 at 10."""
        for candidate in (self.extra_11, self.extra_10):
            if isinstance(candidate, dict) and "num_prompt_tokens" in candidate:
                return candidate
        return None


class Envelope(msgspec.Struct, array_like=True, gc=False):
    """One engine step for one client. ``utility`` is ``[call_id, failure or nil, [type, value] or nil]``."""

    engine_index: int
    outputs: list[Output]
    stats: Stats | None = None
    timestamp: float = 0.0
    utility: list[Any] | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None


class FirstEnvelope(msgspec.Struct, array_like=True, gc=False):
    """The same, with everything the first outputs of requests hold."""

    engine_index: int
    outputs: list[FirstOutput]
    stats: Stats | None = None
    timestamp: float = 0.0
    utility: list[Any] | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None


_decode_envelope = msgspec.msgpack.Decoder(Envelope, ext_hook=extension).decode
_decode_first = msgspec.msgpack.Decoder(FirstEnvelope, ext_hook=extension).decode
_decode_any = msgspec.msgpack.Decoder(ext_hook=lambda code, data: None).decode


def decode_outputs(payload: bytes, *, first: bool) -> Envelope | FirstEnvelope:
    """The message of one step. ``first``: also read what only first outputs hold. Raises ``WireError``."""
    try:
        return _decode_first(payload) if first else _decode_envelope(payload)
    except UNREADABLE as error:
        raise WireError(f"an output message cannot be read: {error}") from None


def salvage_ids(payload: bytes) -> list[str]:
    """The request ids of an output message that ``decode_outputs`` refuses; empty when there are none to be found."""
    try:
        outputs = _decode_any(payload)[1]
        return [output[0] for output in outputs if isinstance(output[0], str)]
    except (*UNREADABLE, TypeError, IndexError, KeyError):
        return []


def finish_reason(output: Output) -> tuple[str, str | int | None]:
    """Reason of a finished output as clients know it, and what matched."""
    number = output.finish_reason
    assert number is not None
    reason = FINISH_REASONS[number] if 0 <= number < len(FINISH_REASONS) else "stop"
    return reason, _REPETITION_STOP if number == REPETITION else output.stop_reason


def utility_result(answer: Sequence[Any]) -> tuple[int, str | None, Any]:
    """Call id, failure text and value of an answer to a UTILITY call. Raises ``WireError``."""
    if len(answer) < 3 or not isinstance(answer[0], int):
        raise WireError("an answer to a utility call cannot be read")
    value = answer[2]
    return answer[0], answer[1], value[1] if isinstance(value, list) and len(value) > 1 else None


# ---- requests


def map_header(count: int) -> bytes:
    """Head of a msgpack map of ``count`` entries."""
    return bytes((0x80 | count,)) if count < 16 else b"\xde" + count.to_bytes(2, "big")


def encode_pairs(pairs: Iterable[tuple[str, Any]]) -> bytes:
    """The entries of a map, without its head."""
    return b"".join(_encode(key) + _encode(value) for key, value in pairs)


def encode_add(
    request_id: str, prompt: bytes, sampling: Sequence[bytes], client: int, rank: int | None = None
) -> bytes:
    """An ADD payload. ``prompt`` is the msgpack array of ids, ``sampling`` the pieces of the msgpack map. The output
    goes to output socket ``client``; ``rank`` is for the engine's information."""
    return b"".join(
        (
            b"\x9c", _encode(request_id), prompt, _NIL, *sampling, _NIL, _encode(time.time()), _NIL, _NIL,
            _NIL if rank is None else _encode(rank), _NIL, _NIL, _encode(client),
        )
    )  # fmt: skip


def encode_abort(request_ids: Sequence[str]) -> bytes:
    """An ABORT payload; unknown ids do no harm."""
    return _encode(request_ids)


def encode_utility(client: int, call_id: int, method: str, arguments: Sequence[Any] = ()) -> bytes:
    """A UTILITY payload; the answer comes to output socket ``client``."""
    return _encode((client, call_id, method, list(arguments)))


def encode_wave(wave: int) -> bytes:
    """A START_DP_WAVE payload that excludes no rank."""
    return _encode((wave, None))
