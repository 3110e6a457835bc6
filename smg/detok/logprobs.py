"""Log-probabilities of one choice, kept in step with the text that is released.

A token's entry is due once text from its first character on has been released: entries of tokens that only fed a stop
string never appear, and a character that spans tokens brings the entries of all its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import isnan
from typing import Any, NamedTuple

from smg.engines.base import TokenLogprobs
from smg.vocab.decode import DecodeTable, IncrementalDecoder


class Entry(NamedTuple):
    """One token: ``top`` are ``(token_id, logprob)`` alternatives, ``start`` the offset of its text in the choice's
    output, ``answer`` False if it belongs to the reasoning."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]
    start: int
    answer: bool


class LogprobTracker:
    """Collects entries and hands them out in order. ``released`` is the number of characters released so far;
    ``reported``: the engine has sent log-probabilities, be it of tokens that nobody sees."""

    __slots__ = ("_taken", "decoded", "entries", "released", "reported")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.decoded = 0
        self.released = 0
        self.reported = False
        self._taken = 0

    def add(self, token_id: int, source: TokenLogprobs | None, position: int, length: int, *, answer: bool) -> None:
        """Record a token whose text is ``length`` characters long; ``position`` is its place in ``source``."""
        if source is not None and position < len(source.logprobs):
            top = source.top[position] if position < len(source.top) else ()
            self.entries.append(Entry(token_id, source.logprobs[position], top, self.decoded, answer))
        self.decoded += length

    def take(self, *, all_left: bool = False) -> list[Entry]:
        """Entries that became due. ``all_left``: the output ended, whatever has no text is due too."""
        begin = self._taken
        end = begin
        entries = self.entries
        while end < len(entries) and (all_left or entries[end].start < self.released):
            end += 1
        self._taken = end
        return entries[begin:end]


def chat_entries(entries: Sequence[Entry], table: DecodeTable, alternatives: int) -> list[dict[str, Any]]:
    """The ``content`` list of a chat logprobs object. ``bytes`` are the token's own bytes, also inside a character."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        raw = table.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        shown(entry.token_id, entry.logprob)
        | {"top_logprobs": [shown(token_id, logprob) for token_id, logprob in entry.top[:alternatives]]}
        for entry in entries
    ]


def completion_logprobs(entries: Sequence[Entry], table: DecodeTable, alternatives: int, base: int) -> dict[str, Any]:
    """The logprobs object of the completions API; ``base``: where the choice's text begins in what the client sees."""
    tops = [_by_text(entry.top, table, alternatives) for entry in entries]
    return {
        "tokens": [_token_text(table, entry.token_id) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops if alternatives else None,
        "text_offset": [base + entry.start for entry in entries],
    }


def prompt_logprobs(source: TokenLogprobs, table: DecodeTable, alternatives: int) -> dict[str, Any]:
    """The same for the tokens of an echoed prompt. The first has nothing it could depend on: its values are null."""
    decoder = IncrementalDecoder(table)
    offsets, position = [], 0
    for token_id in source.token_ids:
        offsets.append(position)
        position += len(decoder.feed((token_id,)))
    values = [None if isnan(value) else value for value in source.logprobs]
    tops = [
        None if value is None else _by_text(top, table, alternatives)
        for value, top in zip_longest(values, source.top[: len(values)], fillvalue=())
    ]
    return {
        "tokens": [_token_text(table, token_id) for token_id in source.token_ids],
        "token_logprobs": values,
        "top_logprobs": tops if alternatives else None,
        "text_offset": offsets,
    }


def joined_logprobs(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two logprobs objects of the completions API as one."""
    if first is None or second is None:
        return first or second
    return {name: None if values is None else values + second[name] for name, values in first.items()}


def _token_text(table: DecodeTable, token_id: int) -> str:
    raw = table.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _by_text(top: Sequence[tuple[int, float]], table: DecodeTable, alternatives: int) -> dict[str, float]:
    return {_token_text(table, token_id): logprob for token_id, logprob in top[:alternatives]}
