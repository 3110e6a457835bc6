"""Stop strings, cut exactly, across any token boundary.

The matcher behaves as if the text arrived one character at a time: the stop string that is complete first wins; of
those that end at the same place the longest. It holds back only what can still become a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text, get the text that is safe to release. After a match ``matched`` names the string and feeds give "";
    ``behind`` counts the characters that followed it in its feed."""

    __slots__ = ("_held", "_strings", "behind", "keep", "matched")

    def __init__(self, strings: Sequence[str], *, keep: bool = False) -> None:
        """``keep`` leaves the matched string in the text."""
        self._strings = tuple(string for string in strings if string)
        self.keep = keep
        self._held = ""
        self.matched: str | None = None
        self.behind = 0

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        text = self._held + text
        best_end = best_start = -1
        for string in self._strings:
            start = text.find(string)
            if start < 0:
                continue
            end = start + len(string)
            if best_end < 0 or end < best_end or (end == best_end and start < best_start):
                best_start, best_end = start, end
                self.matched = string
        if self.matched is not None:
            self._held = ""
            self.behind = len(text) - best_end
            return text[: best_end if self.keep else best_start]
        hold = self._held_length(text)
        if hold:
            self._held = text[-hold:]
            return text[:-hold]
        self._held = ""
        return text

    def finish(self) -> str:
        """Release what was held back: the output ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        longest = 0
        for string in self._strings:
            start = max(0, len(text) - len(string) + 1)
            first = string[0]
            while True:
                start = text.find(first, start)
                if start < 0 or len(text) - start <= longest:
                    break
                if string.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start += 1
        return longest
