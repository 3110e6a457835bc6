"""The prompt part of a generate request, written without the protobuf library.

Every gRPC engine kind takes a request id and a submessage with the prompt's text and ids. Serialized messages
concatenate to their merge, so a request is the bytes of these fields followed by those of everything else. That lets
requests share the latter, and a long prompt be written from its array of ids: through the library every id becomes a
Python integer first, which costs more than tokenizing did.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Shorter prompts cost less through plain Python than through arrays.
_LONG = 128
# Ids below this have their varint in a table; a prompt with a larger one is written by the library.
_TABLE_SIZE = 1 << 19

_Words: TypeAlias = NDArray[np.uint32]


def varint(value: int) -> bytes:
    """A protobuf varint."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


@cache
def _table() -> tuple[_Words, _Words]:
    """For every id its varint in a little-endian word, and which bytes of the word count."""
    ids: _Words = np.arange(_TABLE_SIZE, dtype=np.uint32)
    two, three = (ids >= 1 << 7).astype(np.uint32), (ids >= 1 << 14).astype(np.uint32)
    low, middle, high = ids & 0x7F, ids >> 7 & 0x7F, ids >> 14
    # As the bytes of little-endian words, on any machine.
    words = (low | two << 7 | (middle | three << 7) << 8 | high << 16).astype("<u4")
    used = (1 | two << 8 | three << 16).astype("<u4")
    return words, used


def packed_ids(ids: array[int]) -> bytes | None:
    """The ids as consecutive varints; None when one of them is too large for the table."""
    values = np.frombuffer(ids, dtype=np.uint32)
    words, used = _table()
    try:
        kept = used.take(values).view(np.bool_)
    except IndexError:
        return None
    packed: bytes = words.take(values).view(np.uint8).compress(kept).tobytes()
    return packed


class PromptFields:
    """Writes the prompt of one message class. ``tokenized`` names the submessage, ``ids`` its field of token ids."""

    def __init__(self, request_class: Any, ids: str) -> None:
        self._request_class = request_class
        self._ids_name = ids
        fields = request_class.DESCRIPTOR.fields_by_name
        inner = fields["tokenized"].message_type.fields_by_name
        self._id_tag = varint(fields["request_id"].number << 3 | 2)
        self._tokenized_tag = varint(fields["tokenized"].number << 3 | 2)
        self._text_tag = varint(inner["original_text"].number << 3 | 2)
        self._ids_tag = varint(inner[ids].number << 3 | 2)
        self._text_first = inner["original_text"].number < inner[ids].number

    def encode(self, request_id: str, text: str, token_ids: Sequence[int]) -> bytes:
        """The fields of a request. Raises ``ValueError`` or ``TypeError`` for ids that are no uint32 and for text that
        is not Unicode."""
        if isinstance(token_ids, array):
            packed = packed_ids(token_ids) if len(token_ids) >= _LONG else None
            if packed is not None:
                return self._written(request_id.encode(), text.encode(), packed)
            token_ids = token_ids.tolist()  # the library reads a list twice as fast
        message = self._request_class(request_id=request_id)
        message.tokenized.original_text = text
        getattr(message.tokenized, self._ids_name).extend(token_ids)
        data: bytes = message.SerializeToString()
        return data

    def _written(self, request_id: bytes, text: bytes, packed: bytes) -> bytes:
        texts = (self._text_tag, varint(len(text)), text) if text else ()
        ids = (self._ids_tag, varint(len(packed)), packed)
        inner = b"".join((*texts, *ids) if self._text_first else (*ids, *texts))
        head = (self._id_tag, varint(len(request_id)), request_id, self._tokenized_tag, varint(len(inner)))
        return b"".join((*head, inner))
