"""Find added tokens in text: which ones there are, where they stand, and a cheap test for "none here"."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# More distinct token beginnings than this and testing each of them costs more than running the pattern.
_MAX_PREFIXES = 12
_MAX_FIRSTS = 4


class AddedToken(NamedTuple):
    """A token that is matched in text before the vocabulary's own rules apply.

    ``special``: stripped from output. ``exact``: matched as written, without swallowing white space around it and
    without word-boundary rules. ``normalized``: matched in normalized text."""

    id: int
    text: str
    special: bool
    exact: bool = True
    normalized: bool = False


def alternation(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of ``words`` at a position. Words with a common beginning share a
    branch: a vocabulary may have a thousand placeholders that differ in one digit, and the pattern is run at every
    ``<`` of a prompt."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branch(trie)


def _branch(node: dict[str, Any]) -> str:
    ends = "" in node
    choices = []
    for character, child in node.items():
        if character:
            # Chains of single children are written out flat, which keeps the nesting of groups shallow.
            text = re.escape(character)
            while len(child) == 1 and "" not in child:
                character, child = next(iter(child.items()))
                text += re.escape(character)
            choices.append(text + (_branch(child) if len(child) > 1 or "" not in child else ""))
    if not choices:
        return ""
    if len(choices) == 1 and not ends:
        return choices[0]
    return "(?:" + "|".join(choices) + ")" + ("?" if ends else "")


class TextFinder:
    """Finds any of a fixed set of texts, leftmost and longest."""

    __slots__ = ("_firsts", "_prefixes", "pattern")

    def __init__(self, texts: Sequence[str]) -> None:
        self.pattern: re.Pattern[str] | None = re.compile(alternation(texts)) if texts else None
        firsts, prefixes = {text[0] for text in texts}, {text[:2] for text in texts}
        self._firsts = tuple(firsts) if 0 < len(firsts) <= _MAX_FIRSTS else ()
        self._prefixes = tuple(prefixes) if 0 < len(prefixes) <= _MAX_PREFIXES else ()

    def search(self, text: str) -> bool:
        """Whether one of the texts occurs."""
        if self.pattern is None:
            return False
        # One character is found at the speed of memory, two are not, and a pattern is slower still.
        for beginnings in (self._firsts, self._prefixes):
            for beginning in beginnings:
                if beginning in text:
                    break
            else:
                if beginnings:
                    return False
        return self.pattern.search(text) is not None


class JsonFinder:
    """Finds texts in the UTF-8 JSON form of a value (written without escaping non-ASCII)."""

    __slots__ = ("_firsts", "_pattern")

    def __init__(self, texts: Sequence[str]) -> None:
        escaped = [json.dumps(text, ensure_ascii=False)[1:-1].encode() for text in texts]
        # The pattern is built over the bytes as characters: in bytes, a first character is found at memory speed.
        pattern = alternation([text.decode("latin-1") for text in escaped])
        self._pattern = re.compile(pattern.encode("latin-1")) if escaped else None
        firsts = {text[:1] for text in escaped}
        self._firsts = tuple(firsts) if len(firsts) <= _MAX_FIRSTS else ()

    def search(self, value: bytes) -> bool:
        """Whether one of the texts occurs."""
        if self._pattern is None or (self._firsts and not any(first in value for first in self._firsts)):
            return False
        return self._pattern.search(value) is not None
