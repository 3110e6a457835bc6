"""Token ids to text: a table per vocabulary, and an incremental decoder per output.

The rules are those of the decoders of the ``tokenizers`` library, applied to one token at a time:

* byte-level: a token spells bytes, one printable character each; a token with any other character stands for its own
  UTF-8 text;
* SentencePiece style: U+2581 is a space, ``<0xNN>`` a byte, and the text may lose one leading space;
* WordPiece: a token is a word unless it begins with ``##``;
* none: tokens are words.

A ``DecodeTable`` holds the tokens as they are spelled and works out the text of a token when it first occurs. It can be
written to a file that other processes map into memory: opening it costs nothing per token.
"""

from __future__ import annotations

import codecs
import json
import mmap
import os
import struct
import threading
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from smg.vocab.build import byte_alphabet
from smg.vocab.load import TokenizerLoadError

BYTE_LEVEL, METASPACE, WORDPIECE, WORDS = "byte_level", "metaspace", "wordpiece", "words"

_MAGIC = b"SMGDEC01"
_HEAD = struct.Struct("<8sII")  # magic, length of the JSON description, number of ids
_META = "\u2581"
_BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}
_UTF8 = codecs.getincrementaldecoder("utf-8")
_CLEANUP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
            (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


class _Texts(dict[int, str | None]):
    """id -> text, filled on demand. None marks a token that is not text by itself (a part of a character)."""

    def __init__(self, table: DecodeTable, hidden: frozenset[int]) -> None:
        super().__init__()
        self._table = table
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | None:
        # Ids outside the vocabulary are not stored: an engine could send any number of them.
        if not 0 <= token_id < self._table.size:
            return ""
        text = "" if token_id in self._hidden else self._table.whole_text(token_id)
        self[token_id] = text
        return text


class _Bytes(dict[int, bytes]):
    """id -> bytes, filled on demand; for byte-level vocabularies."""

    def __init__(self, table: DecodeTable, hidden: frozenset[int]) -> None:
        super().__init__()
        self._table = table
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._table.size:
            return b""
        data = b"" if token_id in self._hidden else self._table.token_bytes(token_id)
        self[token_id] = data
        return data


class DecodeTable:
    """The decoding side of one vocabulary.

    ``size`` is one more than the largest id; ids without a token (and those outside) decode to nothing. ``special_ids``
    are dropped when special tokens are skipped. ``kind`` is one of the rules above.
    """

    def __init__(self, description: dict[str, Any], offsets: Any, spelled: Any) -> None:
        self._description = description
        self._offsets = offsets  # size + 1 unsigned 32-bit positions
        self._spelled = spelled  # UTF-8 of all tokens, one behind the other
        self.size = len(offsets) - 1
        self.kind: str = description["kind"]
        self.special_ids = frozenset(description["special_ids"])
        self.strip_first: bool = description["strip_first"]
        self._byte_fallback: bool = description["byte_fallback"]
        self._prefix: str = description["prefix"]
        self._cleanup: bool = description["cleanup"]
        self._replacements: list[tuple[str, str]] = [(old, new) for old, new in description["replacements"]]
        self.visible = _Texts(self, self.special_ids)
        self.all = _Texts(self, frozenset())
        self.visible_bytes = _Bytes(self, self.special_ids)
        self.all_bytes = _Bytes(self, frozenset())

    @classmethod
    def build(cls, tokenizer: Tokenizer, special_ids: Iterable[int]) -> DecodeTable:
        """The table of a tokenizer. Raises ``TokenizerLoadError`` for a decoder that is none of the rules above."""
        description = _describe(json.loads(tokenizer.to_str())["decoder"])
        description["special_ids"] = sorted(special_ids)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        tokens = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            tokens[token_id] = token.encode("utf-8")
        offsets = array("I", [0])
        position = 0
        for spelled in tokens:
            position += len(spelled)
            offsets.append(position)
        return cls(description, offsets, b"".join(tokens))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table for ``open``; the file appears whole or not at all."""
        target = Path(path)
        description = json.dumps(self._description).encode()
        description += b" " * (-(len(description) + _HEAD.size) % 4)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        with temporary.open("wb") as file:
            file.write(_HEAD.pack(_MAGIC, len(description), self.size))
            file.write(description)
            file.write(bytes(self._offsets))
            file.write(self._spelled)
        temporary.replace(target)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> DecodeTable:
        """Map a table that ``save`` wrote. Raises ``TokenizerLoadError`` when the file is none."""
        try:
            with Path(path).open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            magic, length, size = _HEAD.unpack_from(view)
            if magic != _MAGIC:
                raise ValueError("wrong magic")
            start = _HEAD.size + length
            end = start + 4 * (size + 1)
            description = json.loads(bytes(view[_HEAD.size : start]))
            return cls(description, view[start:end].cast("I"), view[end:])
        except (OSError, ValueError, struct.error, KeyError, TypeError) as error:
            raise TokenizerLoadError(f"'{path}' is not a decode table: {error}") from None

    def spelling(self, token_id: int) -> str:
        """The token as the vocabulary spells it, "" for an id without one."""
        if not 0 <= token_id < self.size:
            return ""
        return bytes(self._spelled[self._offsets[token_id] : self._offsets[token_id + 1]]).decode("utf-8")

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the output, in the middle of a text, as bytes."""
        token = self.spelling(token_id)
        if self.kind == BYTE_LEVEL:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:
                return token.encode("utf-8")
        if self._byte_fallback and _is_byte(token):
            return bytes([int(token[3:5], 16)])
        return self._middle_text(token).encode("utf-8")

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def whole_text(self, token_id: int) -> str | None:
        """The text of one token in the middle of an output, None when its bytes are not complete characters."""
        if self.is_byte(token_id):
            # Its neighbours decide what it means, even when it is a character of its own.
            return None
        try:
            return self.token_bytes(token_id).decode("utf-8")
        except UnicodeDecodeError:
            return None

    def first_text(self, token_id: int) -> str:
        """The text of one token at the very beginning of an output, where the rule differs there."""
        token = self.spelling(token_id)
        if self.kind == WORDPIECE:
            return _clean(token) if self._cleanup else token
        if self.kind == METASPACE and self._prefix:
            return token.replace(self._prefix, "")
        return token if self.kind == WORDS else self.token_text(token_id)

    @property
    def first_differs(self) -> bool:
        """Whether the first token of an output has a rule of its own."""
        return self.kind in (WORDPIECE, WORDS) or (self.kind == METASPACE and bool(self._prefix))

    def is_byte(self, token_id: int) -> bool:
        """Whether the token stands for one byte by SentencePiece's byte fallback."""
        return self._byte_fallback and _is_byte(self.spelling(token_id))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        decoder = IncrementalDecoder(self, skip_special_tokens)
        return decoder.feed(token_ids) + decoder.finish()

    def _middle_text(self, token: str) -> str:
        if self.kind == WORDPIECE:
            text = token[len(self._prefix) :] if token.startswith(self._prefix) else " " + token
            return _clean(text) if self._cleanup else text
        if self.kind == WORDS:
            return " " + token
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token


class IncrementalDecoder:
    """Text of one output as its tokens arrive.

    Pieces concatenate to what decoding all ids at once gives; a character whose bytes are spread over tokens appears
    with its last byte, and U+FFFD only where no more bytes could complete it. ``spaces_between_special_tokens`` is
    accepted because the APIs have it; like in the fast tokenizers that these tables stand for, it changes nothing.
    """

    __slots__ = ("_apart", "_data", "_pending", "_skip_space", "_started", "_table", "_texts", "_utf8")

    def __init__(
        self, table: DecodeTable, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        self._table = table
        self._texts = table.visible if skip_special_tokens else table.all
        self._data = table.visible_bytes if skip_special_tokens else table.all_bytes
        self._utf8: codecs.IncrementalDecoder | None = None  # made when a character is spread over tokens
        self._pending = b""  # byte-fallback tokens of an unfinished run
        self._skip_space = table.strip_first
        self._started = not table.first_differs
        # True while the next token cannot simply be looked up.
        self._apart = self._skip_space or not self._started

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` add."""
        texts = self._texts
        if self._apart:
            return self._feed_apart(token_ids)
        if len(token_ids) == 1:
            text = texts[token_ids[0]]
            return self._feed_apart(token_ids) if text is None else text
        parts = [texts[token_id] for token_id in token_ids]
        if None in parts:
            return self._feed_apart(token_ids)
        return "".join(parts)  # type: ignore[arg-type]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each of ``token_ids`` adds."""
        if not self._apart:
            texts = self._texts
            if len(token_ids) == 1:
                text = texts[token_ids[0]]
                if text is not None:
                    return [text]
            else:
                parts = [texts[token_id] for token_id in token_ids]
                if None not in parts:
                    return parts  # type: ignore[return-value]
        feed = self.feed
        return [feed((token_id,)) for token_id in token_ids]

    def finish(self) -> str:
        """What is left at the end: bytes of a character that was never completed, as U+FFFD."""
        if self._pending:
            text = "\ufffd" * len(self._pending)
            self._pending = b""
        else:
            text = self._utf8.decode(b"", True) if self._utf8 is not None else ""
        return self._without_first_space(text) if self._skip_space else text

    def _feed_apart(self, token_ids: Sequence[int]) -> str:
        """``feed`` where some token is no text by itself, or the rules of the beginning still apply."""
        if self._table.kind == BYTE_LEVEL:
            data, utf8 = self._data, self._utf8
            if utf8 is None:
                utf8 = self._utf8 = _UTF8("replace")
            text = utf8.decode(b"".join([data[token_id] for token_id in token_ids]))
            self._apart = bool(utf8.getstate()[0])
            return text
        texts, add = self._texts, self._add_text
        text = "".join([add(token_id) for token_id in token_ids if texts[token_id] != ""])
        if self._skip_space:
            text = self._without_first_space(text)
        self._apart = bool(self._pending) or self._skip_space or not self._started
        return text

    def _add_text(self, token_id: int) -> str:
        if not self._started:
            self._started = True
            return self._table.first_text(token_id)
        text = self._texts[token_id]
        if text is not None:
            if not self._pending:
                return text
            text = "\ufffd" * len(self._pending) + text
            self._pending = b""
            return text
        return self._add_byte(self._table.token_bytes(token_id))

    def _add_byte(self, byte: bytes) -> str:
        """One byte-fallback token: a run of them is text if it is valid UTF-8, else one U+FFFD per byte."""
        pending = self._pending + byte
        decoder = _UTF8("strict")
        try:
            text = decoder.decode(pending)
        except UnicodeDecodeError:
            self._pending = b""
            return "\ufffd" * len(pending)
        self._pending = b"" if text else pending
        return text

    def _without_first_space(self, text: str) -> str:
        if text:
            self._skip_space = False
        return text[1:] if text.startswith(" ") else text


def _is_byte(token: str) -> bool:
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return False
    return all(digit in "0123456789abcdefABCDEF" for digit in token[3:5])


def _clean(text: str) -> str:
    """WordPiece's clean-up of spaces in front of punctuation and contractions."""
    for old, new in _CLEANUP:
        text = text.replace(old, new)
    return text


def _describe(decoder: dict[str, Any] | None) -> dict[str, Any]:
    """The rules of a ``decoder`` entry of tokenizer.json."""
    rules: dict[str, Any] = {
        "kind": METASPACE,
        "strip_first": False,
        "byte_fallback": False,
        "prefix": "",
        "cleanup": False,
        "replacements": [],
    }
    if decoder is None:
        return rules | {"kind": WORDS}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return rules | {"kind": BYTE_LEVEL}
    if [step["type"] for step in steps] == ["WordPiece"]:
        return rules | {"kind": WORDPIECE, "prefix": steps[0]["prefix"], "cleanup": steps[0]["cleanup"]}
    fused = False
    for step in steps:
        fused = _add_step(rules, step, fused)
    return rules


def _add_step(rules: dict[str, Any], step: dict[str, Any], fused: bool) -> bool:
    """Take one step of a SentencePiece-style decoder into the rules; returns whether tokens are joined after it."""
    kind = step["type"]
    if kind == "Replace" and "String" in step["pattern"] and not fused:
        rules["replacements"].append([step["pattern"]["String"], step["content"]])
    elif kind == "ByteFallback" and not fused:
        rules["byte_fallback"] = True
    elif kind == "Metaspace" and not fused:
        rules["replacements"].append([step["replacement"], " "])
        if step.get("prepend_scheme", "always") != "never":
            rules["prefix"] = step["replacement"]
    elif kind == "Strip" and fused and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
        rules["strip_first"] = True
    elif kind == "Fuse":
        return True
    else:
        raise TokenizerLoadError(f"Decoder step '{kind}' is not supported")
    return fused
