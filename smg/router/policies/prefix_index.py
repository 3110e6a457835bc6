"""Which worker has seen which prompt prefix: a radix tree over chained block hashes.

A chained hash names the whole prefix up to its block. So a tree node needs no edges to its children: one dictionary
maps the first hash of every segment to the segment, and a look-up hops from segment to segment. Inside a segment equal
hashes come first and unequal ones after them, so the last equal one is found by comparing the end and, failing that,
by binary search. A look-up costs one dictionary access per segment and an insertion one array copy, whatever the
number of blocks; memory is eight bytes per block.

A conversation that grows on one worker extends its segment in place, so the tree is as deep as prompts *branch*.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Generic, TypeVar

MAX_HOLDERS = 8
MAX_SEGMENTS = 500_000
# Between two evictions the index may outgrow its bound; from here on it makes room at every insertion.
HARD_FACTOR = 2

H = TypeVar("H")


class Segment(Generic[H]):
    """A run of blocks without a branch. ``holders`` are those that have all of it, the latest last; ``used`` is the
    index's clock when a look-up last ended here."""

    __slots__ = ("children", "hashes", "holders", "parent", "used")

    def __init__(self, hashes: array[int], parent: Segment[H] | None, holders: tuple[H, ...], used: int) -> None:
        self.hashes = hashes
        self.parent = parent
        self.holders = holders
        self.children = 0
        self.used = used


# (blocks matched, the segment in which the match ends, blocks matched inside it)
Match = tuple[int, Segment[H] | None, int]


class PrefixIndex(Generic[H]):
    """Holders (any hashable objects) by prefix. ``blocks`` is the number of indexed blocks."""

    def __init__(self, max_blocks: int, max_segments: int = MAX_SEGMENTS) -> None:
        self.blocks = 0
        self._max_blocks = max_blocks
        self._max_segments = max_segments
        self._starts: dict[int, Segment[H]] = {}
        self._leaves: OrderedDict[Segment[H], None] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        """Number of segments."""
        return len(self._starts)

    def find(self, hashes: array[int]) -> Match[H]:
        """The longest indexed prefix of ``hashes`` (uint64, one per block). Changes nothing."""
        starts = self._starts
        count = len(hashes)
        matched = inside = 0
        last: Segment[H] | None = None
        while matched < count:
            segment = starts.get(hashes[matched])
            if segment is None:
                break
            last = segment
            own = segment.hashes
            size = len(own)
            inside = min(size, count - matched)
            if own[inside - 1] != hashes[matched + inside - 1]:
                inside = _common(own, hashes, matched, inside)
            matched += inside
            if inside < size:
                break
        return matched, last, inside

    def record(self, hashes: array[int], match: Match[H], holder: H) -> None:
        """``holder`` now has the whole of ``hashes``; ``match`` is the answer of ``find`` for them, nothing recorded or
        evicted in between."""
        matched, segment, inside = match
        if not len(hashes):
            return
        has_tail = matched < len(hashes)
        if segment is not None:
            if inside < len(segment.hashes) and (has_tail or holder not in segment.holders):
                segment = self._split(segment, inside)
            self._add_holder(segment, holder)
        if has_tail:
            segment = self._append(segment, hashes[matched:], holder)
        assert segment is not None
        self._touch(segment)
        while self.blocks > HARD_FACTOR * self._max_blocks or len(self._starts) > HARD_FACTOR * self._max_segments:
            self._evict_one()

    def evict(self, steps: int) -> bool:
        """Cut the index to its bounds, least recently used leaves first; at most ``steps`` of them. True when done."""
        for _ in range(steps):
            if self.blocks <= self._max_blocks and len(self._starts) <= self._max_segments:
                return True
            self._evict_one()
        return self.blocks <= self._max_blocks and len(self._starts) <= self._max_segments

    def forget(self, holder: H) -> None:
        """Purge everything that only ``holder`` has."""
        for segment in self._starts.values():
            if holder in segment.holders:
                segment.holders = tuple(other for other in segment.holders if other != holder)
        pending = [leaf for leaf in self._leaves if not leaf.holders]
        while pending:
            leaf = pending.pop()
            parent = leaf.parent
            self._remove(leaf)
            if parent is not None and not parent.children and not parent.holders:
                pending.append(parent)

    def holders(self) -> set[H]:
        """All holders of the index."""
        return {holder for segment in self._starts.values() for holder in segment.holders}

    def _add_holder(self, segment: Segment[H], holder: H) -> None:
        """Who holds a prefix holds all of its beginnings; the walk up ends where that is known already."""
        node: Segment[H] | None = segment
        while node is not None and holder not in node.holders:
            node.holders = (*node.holders[1 - MAX_HOLDERS :], holder)
            node = node.parent

    def _append(self, parent: Segment[H] | None, tail: array[int], holder: H) -> Segment[H]:
        self.blocks += len(tail)
        if parent is not None:
            if not parent.children and len(parent.holders) == 1:
                parent.hashes.extend(tail)
                return parent
            parent.children += 1
            self._leaves.pop(parent, None)
        segment = Segment(tail, parent, (holder,), self._clock)
        self._starts[tail[0]] = segment
        return segment

    def _split(self, lower: Segment[H], at: int) -> Segment[H]:
        """Make the first ``at`` blocks of a segment one of their own and return it."""
        own = lower.hashes
        upper = Segment(own[:at], lower.parent, lower.holders, lower.used)
        upper.children = 1
        lower.hashes = own[at:]
        lower.parent = upper
        self._starts[own[0]] = upper
        self._starts[own[at]] = lower
        return upper

    def _touch(self, segment: Segment[H]) -> None:
        self._clock += 1
        segment.used = self._clock
        if not segment.children:
            self._leaves[segment] = None
            self._leaves.move_to_end(segment)

    def _evict_one(self) -> None:
        """Drop the oldest leaf, or as much of its end as there is too much."""
        leaf = next(iter(self._leaves))
        excess = self.blocks - self._max_blocks
        if 0 < excess < len(leaf.hashes) and len(self._starts) <= self._max_segments:
            del leaf.hashes[-excess:]
            self.blocks -= excess
        else:
            self._remove(leaf)

    def _remove(self, leaf: Segment[H]) -> None:
        self.blocks -= len(leaf.hashes)
        del self._leaves[leaf]
        self._starts.pop(leaf.hashes[0], None)
        parent = leaf.parent
        if parent is None:
            return
        parent.children -= 1
        if not parent.children:
            # A parent that was not used for itself since is as old as the child it lost; otherwise it counts as young.
            self._leaves[parent] = None
            if parent.used <= leaf.used:
                self._leaves.move_to_end(parent, last=False)


def _common(own: array[int], hashes: array[int], start: int, size: int) -> int:
    """How many of the ``size`` hashes from ``start`` equal those of a segment: at least 1, fewer than ``size``."""
    low, high = 1, size - 1
    while low < high:
        middle = (low + high + 1) // 2
        if own[middle - 1] == hashes[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
