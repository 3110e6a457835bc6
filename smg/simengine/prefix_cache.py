"""A stand-in for an engine's prefix cache: which blocks of prompts have been seen, the least recent forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 16
MAX_BLOCKS = 65536


class PrefixCache:
    """Remembers prompt prefixes in whole blocks of ``block_size`` tokens."""

    def __init__(self, block_size: int = BLOCK_SIZE, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def lookup(self, ids: Sequence[int]) -> int:
        """Tokens of ``ids`` that a former prompt shares from the start, without the last token (which must be computed
        to go on); the prompt is remembered."""
        blocks, size = self._blocks, self.block_size
        chain, cached, unbroken = 0, 0, True
        for start in range(0, len(ids) - size + 1, size):
            chain = hash((chain, *ids[start : start + size]))
            if chain in blocks:
                blocks.move_to_end(chain)
                cached += size if unbroken else 0
            else:
                unbroken = False
                blocks[chain] = None
        while len(blocks) > self.max_blocks:
            blocks.popitem(last=False)
        return min(cached, len(ids) - 1)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
