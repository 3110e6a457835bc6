"""Chained hashes of token blocks: equal hashes at position ``i`` mean equal tokens up to and including block ``i``."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from struct import iter_unpack

from xxhash import xxh3_64_intdigest

BLOCK_SIZE = 16
_TOKEN_BYTES = 4


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises ``OverflowError`` for an id outside 32 bits."""
    packed = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    if sys.byteorder != "little":
        packed = array("I", packed)
        packed.byteswap()
    return packed.tobytes()


def block_hashes(token_ids: Sequence[int], block_size: int = BLOCK_SIZE) -> bytes:
    """One hash (little-endian uint64) per full block of ``block_size`` tokens.

    The hash of a block is xxh3_64 of its ids as little-endian uint32, seeded with the hash of the block before it
    (0 for the first). A rest shorter than a block has none.
    """
    size = block_size * _TOKEN_BYTES
    data = token_bytes(token_ids)
    hashes: list[int] = []
    add = hashes.append
    digest = xxh3_64_intdigest
    chained = 0
    for (block,) in iter_unpack(f"{size}s", data[: len(data) - len(data) % size]):
        chained = digest(block, chained)
        add(chained)
    packed = array("Q", hashes)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()
