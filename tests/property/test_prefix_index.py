"""The prefix index against a model that stores every prefix of every prompt."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from smg.router.policies.prefix_index import MAX_HOLDERS, PrefixIndex

prompts = st.lists(st.integers(0, 2), max_size=12)
steps = st.lists(st.tuples(prompts, st.integers(0, 3)), max_size=40)


def chained(blocks: list[int]) -> array[int]:
    hashes = array("Q")
    last = 0
    for block in blocks:
        last = xxh3_64_intdigest(block.to_bytes(4, "little"), last)
        hashes.append(last)
    return hashes


class Naive:
    def __init__(self) -> None:
        self.holders: dict[tuple[int, ...], set[int]] = {}

    def find(self, prompt: list[int]) -> tuple[int, set[int]]:
        for length in range(len(prompt), 0, -1):
            found = self.holders.get(tuple(prompt[:length]))
            if found:
                return length, found
        return 0, set()

    def record(self, prompt: list[int], holder: int) -> None:
        for length in range(1, len(prompt) + 1):
            self.holders.setdefault(tuple(prompt[:length]), set()).add(holder)

    def forget(self, holder: int) -> None:
        for held in self.holders.values():
            held.discard(holder)
        self.holders = {prefix: held for prefix, held in self.holders.items() if held}


def check(index: PrefixIndex[int], naive: Naive, prompt: list[int]) -> None:
    matched, segment, inside = index.find(chained(prompt))
    length, holders = naive.find(prompt)
    assert matched == length
    if segment is None:
        assert length == 0
    else:
        assert 1 <= inside <= len(segment.hashes)
        assert set(segment.holders) == holders


@settings(max_examples=100, deadline=None)
@given(steps, st.sets(st.integers(0, 3)), prompts)
def test_index_equals_the_model(history: list[tuple[list[int], int]], gone: set[int], probe: list[int]) -> None:
    index: PrefixIndex[int] = PrefixIndex(10_000)
    naive = Naive()
    for prompt, holder in history:
        check(index, naive, prompt)
        hashes = chained(prompt)
        index.record(hashes, index.find(hashes), holder)
        naive.record(prompt, holder)
        check(index, naive, prompt)
        assert index.blocks == len(naive.holders)
    for holder in gone:
        index.forget(holder)
        naive.forget(holder)
        assert index.blocks == len(naive.holders)
        assert index.holders() == {holder for held in naive.holders.values() for holder in held}
    for prompt, _ in [*history, (probe, 0)]:
        check(index, naive, prompt)


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(1, 20), st.integers(1, 6))
def test_eviction_keeps_the_bounds_and_never_invents_a_prefix(
    history: list[tuple[list[int], int]], max_blocks: int, max_segments: int
) -> None:
    index: PrefixIndex[int] = PrefixIndex(max_blocks, max_segments)
    naive = Naive()
    for prompt, holder in history:
        hashes = chained(prompt)
        index.record(hashes, index.find(hashes), holder)
        naive.record(prompt, holder)
        assert index.blocks <= 2 * max_blocks and len(index) <= 2 * max_segments
        matched, segment, _ = index.find(hashes)
        assert matched <= len(prompt)
        if segment is not None:
            assert set(segment.holders) <= naive.holders[tuple(prompt[:matched])]
    while not index.evict(1):
        pass
    assert index.blocks <= max_blocks and len(index) <= max_segments


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=12, unique_by=tuple))
def test_everything_can_be_evicted(all_prompts: list[list[int]]) -> None:
    index: PrefixIndex[int] = PrefixIndex(1, 1)
    for number, prompt in enumerate(all_prompts):
        hashes = chained(prompt)
        index.record(hashes, index.find(hashes), number)
    index.evict(1000)
    assert (index.blocks, len(index)) == (1, 1)
    for number in range(len(all_prompts)):
        index.forget(number)
    assert (index.blocks, len(index)) == (0, 0)


def record(index: PrefixIndex[int], blocks: list[int], holder: int = 0) -> None:
    hashes = chained(blocks)
    index.record(hashes, index.find(hashes), holder)


def matched(index: PrefixIndex[int], blocks: list[int]) -> int:
    return index.find(chained(blocks))[0]


def test_the_least_recently_used_leaf_goes_first() -> None:
    index: PrefixIndex[int] = PrefixIndex(12)
    shared = [1, 2, 3, 4]
    for branch in ([10] * 4, [20] * 4, [30] * 4):
        record(index, shared + branch)
    record(index, shared + [10] * 4)
    index.evict(100)
    assert [matched(index, shared + [b] * 4) for b in (10, 20, 30)] == [8, 4, 8]


def test_a_bound_cuts_the_end_of_a_leaf() -> None:
    index: PrefixIndex[int] = PrefixIndex(12)
    record(index, list(range(18)))
    index.evict(1)
    assert (index.blocks, matched(index, list(range(18)))) == (12, 12)


def test_a_growing_conversation_is_one_segment() -> None:
    index: PrefixIndex[int] = PrefixIndex(1000)
    for length in range(1, 200):
        record(index, list(range(length)))
    assert (len(index), index.blocks) == (1, 199)


def test_a_segment_remembers_the_latest_holders() -> None:
    index: PrefixIndex[int] = PrefixIndex(1000)
    for holder in range(12):
        record(index, [1, 2, 3], holder)
    segment = index.find(chained([1, 2, 3]))[1]
    assert segment is not None
    assert segment.holders == tuple(range(12 - MAX_HOLDERS, 12))
