"""Incremental search for the markers of a format in text that comes in pieces.

A machine keeps what it has not decided yet in one string and asks :meth:`Markers.search` for the next marker. The
answer is either a complete marker or the place from which text could still grow into one, so that everything before
it can be sent at once and at most ``longest marker - 1`` characters stay behind. Work is linear: a held tail is that
short, and text that was released is never looked at again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class Markers:
    """A fixed set of literal markers, none of which is a prefix of another. Immutable: build once per format and share.

    ``search`` is a single character search for text that has no first character of a marker, which is nearly all text.
    """

    __slots__ = ("_first", "_longest", "_pattern", "_prefixes", "_start", "markers")

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(dict.fromkeys(markers))
        if not self.markers or "" in self.markers:
            raise ValueError("a marker set needs at least one marker, and none may be empty")
        firsts = sorted({marker[0] for marker in self.markers})
        self._first = firsts[0] if len(firsts) == 1 else ""
        self._start = re.compile("[" + re.escape("".join(firsts)) + "]")
        self._pattern = re.compile("|".join(map(re.escape, self.markers)))
        self._longest = max(map(len, self.markers))
        self._prefixes = frozenset(marker[:end] for marker in self.markers for end in range(1, len(marker)))

    def may_start(self, text: str) -> bool:
        """Whether ``text`` holds the first character of a marker at all."""
        if self._first:
            return self._first in text
        return self._start.search(text) is not None

    def search(self, text: str, pos: int = 0) -> tuple[int, str]:
        """The first marker at or after ``pos``: ``(index, marker)``.

        Without one: ``(index, "")``, where ``text[index:]`` is the longest tail that is a proper prefix of a marker
        (``index == len(text)`` when there is none), so ``text[pos:index]`` can't belong to a marker.
        """
        if self._first:
            first = text.find(self._first, pos)
            if first < 0:
                return len(text), ""
        else:
            start = self._start.search(text, pos)
            if start is None:
                return len(text), ""
            first = start.start()
        found = self._pattern.search(text, first)
        if found is not None:
            return found.start(), found.group()
        return self._hold(text, first), ""

    def _hold(self, text: str, pos: int) -> int:
        size = len(text)
        pos = max(pos, size - self._longest + 1)
        while True:
            start = self._start.search(text, pos)
            if start is None:
                return size
            pos = start.start()
            if text[pos:] in self._prefixes:
                return pos
            pos += 1
