"""Encode caches with exact results: whole texts (L0) and text prefixes up to a special token (L1).

Both give the ids that a plain encode gives, for every text. L1 rests on a property of vocabularies that is tested when
the cache is made: what follows a special token is encoded independently of what precedes it. Special tokens that lack
the property (they swallow white space, or the text behind them starts differently) are no boundaries.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from smg.vocab.controls import AddedToken, TextFinder

Encode = Callable[[str], "array[int]"]

_PROBES = ("ab", " x", "1 2", "été")
# Bytes of an entry beside its text and ids: the two objects, the key, the slot in the table.
_ENTRY_BYTES = 256
_ID_BYTES = 4
# Boundaries stored of one text: system prompt and tools end at the first ones, the next turn starts at the last.
_FIRST_BOUNDARIES = 8
_LAST_BOUNDARIES = 2


class CacheCounters:
    """Totals since the start. ``reused_bytes`` are UTF-8 bytes of text that needed no encoding."""

    __slots__ = ("evictions", "hits", "misses", "reused_bytes")

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.reused_bytes = 0


class _Store:
    """Key -> ids, least recently used first out, within a number of entries and of bytes."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.counters = CacheCounters()
        self.memory = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str | bytes, tuple[array[int], int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str | bytes) -> bool:
        return key in self._entries

    def get(self, key: str | bytes) -> array[int] | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: str | bytes, ids: Sequence[int], key_bytes: int) -> None:
        """Store one entry. What is above a quarter of the byte bound is not stored."""
        size = key_bytes + _ID_BYTES * len(ids) + _ENTRY_BYTES
        if size > self._max_bytes // 4 or key in self._entries:
            return
        self._entries[key] = (array("I", ids), size)
        self.memory += size
        while self.memory > self._max_bytes or len(self._entries) > self._max_entries:
            _, (_, freed) = self._entries.popitem(last=False)
            self.memory -= freed
            self.counters.evictions += 1


class ExactCache:
    """L0: text -> ids."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._store = _Store(max_entries, max_bytes)
        self.counters = self._store.counters

    def __len__(self) -> int:
        return len(self._store)

    @property
    def memory(self) -> int:
        """Bytes in use."""
        return self._store.memory

    def get(self, text: str) -> array[int] | None:
        """The ids of a text that was encoded before (a fresh array), or None."""
        ids = self._store.get(text)
        if ids is None:
            self.counters.misses += 1
            return None
        self.counters.hits += 1
        self.counters.reused_bytes += utf8_length(text)
        return ids[:]

    def put(self, text: str, ids: Sequence[int]) -> None:
        """Remember the ids of a text."""
        self._store.put(text, ids, utf8_length(text))


class PrefixCache:
    """L1: the ids of texts up to a special token. ``encode`` is the plain encoder that results are equal to."""

    def __init__(self, encode: Encode, added_tokens: Sequence[AddedToken], max_bytes: int) -> None:
        self._encode = encode
        self._store = _Store(1 << 30, max_bytes)
        self.counters = self._store.counters
        raw = [token for token in added_tokens if not token.normalized]
        self._boundaries = {token.text: token.id for token in raw if token.special and self._is_boundary(token)}
        # A boundary inside a longer added token is none: all tokens that are matched in raw text take part.
        self._finder = TextFinder([token.text for token in raw] if self._boundaries else [])
        # Keys are digests that a client cannot predict: a forged collision would give one text the ids of another.
        self._secret = secrets.token_bytes(16)

    def __len__(self) -> int:
        return len(self._store)

    @property
    def memory(self) -> int:
        """Bytes in use."""
        return self._store.memory

    @property
    def boundaries(self) -> frozenset[str]:
        """The special tokens behind which a prefix may end."""
        return frozenset(self._boundaries)

    def encode(self, text: str) -> array[int]:
        """The ids of a text, from its longest known prefix on."""
        cuts = self._cuts(text)
        if not cuts:
            self.counters.misses += 1
            return self._encode(text)
        keys = self._keys(text, [end for end, _ in cuts])
        for index in range(len(cuts) - 1, -1, -1):
            known = self._store.get(keys[index])
            if known is not None:
                self.counters.hits += 1
                self.counters.reused_bytes += utf8_length(text[: cuts[index][0]])
                return self._extend(text, cuts, keys, index, known[:])
        self.counters.misses += 1
        ids = self._encode(text[: cuts[0][0]])
        if not ids or ids[-1] != self._boundaries[cuts[0][1]]:
            return self._encode(text)
        self._store.put(keys[0], ids, 0)
        return self._extend(text, cuts, keys, 0, ids)

    def _extend(
        self, text: str, cuts: list[tuple[int, str]], keys: list[bytes], index: int, ids: array[int]
    ) -> array[int]:
        """``ids`` are those up to cut ``index``: add the rest, store what is worth it."""
        first = index + 1
        kept = {*range(first, min(first + _FIRST_BOUNDARIES, len(cuts)))}
        kept |= {*range(max(first, len(cuts) - _LAST_BOUNDARIES), len(cuts))}
        while index < len(cuts):
            start, token = cuts[index]
            # Cuts that are not stored need no segment of their own.
            following = next((later for later in range(index + 1, len(cuts)) if later in kept), None)
            end = len(text) if following is None else cuts[following][0]
            segment = self._encode(token + text[start:end])
            if not segment or segment[0] != self._boundaries[token]:
                return self._encode(text)
            ids += segment[1:]
            if following is None:
                break
            self._store.put(keys[following], ids, 0)
            index = following
        return ids

    def _cuts(self, text: str) -> list[tuple[int, str]]:
        """Positions right behind a boundary token, with the token; never the end of the text."""
        pattern = self._finder.pattern
        if pattern is None:
            return []
        boundaries = self._boundaries
        cuts = [(match.end(), match.group()) for match in pattern.finditer(text) if match.group() in boundaries]
        if cuts and cuts[-1][0] == len(text):
            cuts.pop()
        return cuts

    def _keys(self, text: str, ends: list[int]) -> list[bytes]:
        """Digests of the text up to each end, in one pass."""
        digest = hashlib.blake2b(key=self._secret, digest_size=16)
        keys = []
        start = 0
        for end in ends:
            digest.update(text[start:end].encode("utf-8", "surrogatepass"))
            keys.append(digest.copy().digest())
            start = end
        return keys

    def _is_boundary(self, token: AddedToken) -> bool:
        """Whether text on the two sides of a token is encoded independently."""
        if not token.exact or self._encode(token.text).tolist() != [token.id]:
            return False
        for probe in _PROBES:
            before, behind = self._encode(probe + token.text), self._encode(token.text + probe)
            if behind[:1].tolist() != [token.id] or self._encode(probe + token.text + probe) != before + behind[1:]:
                return False
        return True


def utf8_length(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
