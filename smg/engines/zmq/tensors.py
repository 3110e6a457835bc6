"""Arrays inside vLLM's messages: ``[dtype, shape, data]``.

``dtype`` is a numpy string (``<i4``) for sampled tokens and a torch name (``int32``) for prompts. ``data`` is an
extension value of type 3 with the raw bytes, or the index of the ZMQ frame that holds them (large arrays).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from smg.engines.base import TokenLogprobs

RAW_EXTENSION = 3
# dtype without its byte order -> type code of ``array``. Torch names are little-endian like everything torch sends.
_CODES = {
    "i1": "b", "u1": "B", "i2": "h", "i4": "i", "i8": "q", "f4": "f", "f8": "d", "u4": "I", "u8": "Q",
    "int8": "b", "uint8": "B", "int16": "h", "int32": "i", "int64": "q", "float32": "f", "float64": "d",
}  # fmt: skip


# What decoders raise for bytes that are no message.
UNREADABLE = (msgspec.DecodeError, RecursionError)


class WireError(Exception):
    """A message is no message of this protocol."""


def extension(code: int, data: memoryview) -> bytes:
    """Extension hook of the decoders. Types 1 and 2 are pickles: never opened."""
    if code != RAW_EXTENSION:
        raise WireError(f"extension type {code} is not accepted")
    return bytes(data)


def read_array(value: Any, frames: Sequence[bytes]) -> tuple[list[int], Any]:
    """Shape and flat elements. ``frames`` are the frames of the message, the payload first. Raises ``WireError``."""
    try:
        dtype, shape, data = value
        raw = frames[data] if isinstance(data, int) and data > 0 else data
        code = _CODES[dtype.lstrip("<>=|")]
        elements = array(code)
        elements.frombytes(raw)
        count = 1
        for size in shape:
            count *= size
        if len(elements) != count:
            raise WireError(f"an array of shape {shape} has {len(elements)} elements")
        if (dtype[0] == ">") != (sys.byteorder == "big"):
            elements.byteswap()
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise WireError(f"an array cannot be read: {error!r}") from None
    return shape, elements


def read_logprobs(value: Any, frames: Sequence[bytes]) -> tuple[int, int, Any, Any]:
    """``(rows, columns, ids, logprobs)`` of a logprobs tuple ``[ids, values, ranks, ...]``. Raises ``WireError``."""
    if not isinstance(value, list) or len(value) < 2:
        raise WireError("log-probabilities are no tuple of arrays")
    shape, ids = read_array(value[0], frames)
    other, values = read_array(value[1], frames)
    if len(shape) != 2 or shape != other:
        raise WireError(f"log-probabilities of shapes {shape} and {other}")
    return shape[0], shape[1], ids, values


def append_logprobs(target: TokenLogprobs, value: Any, frames: Sequence[bytes]) -> None:
    """Add the rows of a logprobs tuple to ``target``, whose members are lists. Raises ``WireError``.

    Column 0 is the token itself, the others are the best ones in order, where it may come again. The alternatives are
    the token first, then the best others, one less than there are columns.
    """
    rows, columns, ids, values = read_logprobs(value, frames)
    tokens, logprobs, tops = target.token_ids, target.logprobs, target.top
    assert isinstance(tokens, list) and isinstance(logprobs, list) and isinstance(tops, list)
    start = 0
    for _ in range(rows):
        end = start + columns
        sampled = ids[start]
        tokens.append(sampled)
        logprobs.append(values[start])
        if columns > 1:
            row = [(sampled, values[start])]
            row += [(ids[i], values[i]) for i in range(start + 1, end) if ids[i] != sampled]
            del row[columns - 1 :]
            tops.append(row)
        else:
            tops.append(())
        start = end
