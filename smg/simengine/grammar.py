"""Generation under a constraint: a random walk through what xgrammar allows, inclined to come to an end."""

from __future__ import annotations

import json
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smg.simengine.vocabulary import Vocabulary

CACHED_GRAMMARS = 64
# Up to this many allowed tokens the grammar is spelling something out and the longest token is taken, as a model would.
NARROW = 64
# Chance per token to close what is open, and the length after which everything that can be closed is closed.
CLOSING_STEP = 0.15
SOFT_LIMIT = 256
ARGUMENTS = b'"parameters":'  # in the list of calls that a JSON schema forces
CLOSERS = (b"}", b"]", b"</")
GOING_ON = frozenset(bytes((code,)) for code in b",0123456789+-.eE")
PUNCTUATION = frozenset(bytes((code,)) for code in b"!#$%&'()*+,-./:;<=>?@[]^_`{|}~")
MAX_CONSTRAINT_BYTES = 1 << 20
# What ends a text value in the notations that xgrammar knows beside JSON.
VALUE_CLOSE = {
    "qwen_xml": "</parameter>",
    "minimax_xml": "</parameter>",
    "deepseek_xml": "</｜DSML｜parameter>",
    "glm_xml": "</arg_value>",
}
# What xgrammar puts in front of its messages: time, file and line of its own source.
SOURCE_POSITION = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class GrammarError(Exception):
    """The constraint cannot be used (not understood, too big, or xgrammar is not installed)."""


class GrammarGenerator:
    """Compiles constraints for one vocabulary and generates under them. Not thread-safe: one call at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    @cached_property
    def _xgrammar(self) -> Any:
        try:
            import xgrammar  # an optional dependency that takes seconds to import
        except ImportError as error:
            raise GrammarError("constrained generation needs the package xgrammar, which is not installed") from error
        return xgrammar

    @cached_property
    def _info(self) -> Any:
        xgrammar, tokenizer = self._xgrammar, self._vocabulary.tokenizer
        names = [""] * self._vocabulary.size
        for name, token in tokenizer.get_vocab(with_added_tokens=True).items():
            names[token] = name
        decoder = (json.loads(tokenizer.to_str()).get("decoder")) or {}
        kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
        kind = xgrammar.VocabType.RAW
        if "ByteLevel" in kinds:
            kind = xgrammar.VocabType.BYTE_LEVEL
        elif "ByteFallback" in kinds:
            kind = xgrammar.VocabType.BYTE_FALLBACK
        return xgrammar.TokenizerInfo(names, kind, vocab_size=len(names), stop_token_ids=self._vocabulary.eos_ids)

    @cached_property
    def _compiler(self) -> Any:
        return self._xgrammar.GrammarCompiler(self._info, max_threads=1)

    @cached_property
    def _bytes(self) -> list[bytes]:
        return list(self._info.decoded_vocab)

    @cached_property
    def _wordlike(self) -> Any:
        """Boolean array: tokens that are an ASCII word, with or without a space in front."""
        import numpy  # comes with xgrammar

        special = self._vocabulary.special_ids
        return numpy.array(
            [
                len(word := text.removeprefix(b" ")) > 1 and word.isalpha() and word.isascii() and token not in special
                for token, text in enumerate(self._bytes)
            ]
        )

    def compile(self, kind: str, value: str) -> Any:
        """The compiled grammar of a constraint. Raises ``GrammarError``."""
        if len(value) > MAX_CONSTRAINT_BYTES:
            raise GrammarError("the constraint is too big")
        key = (kind, value)
        if (found := self._compiled.get(key)) is not None:
            self._compiled.move_to_end(key)
            return found
        compiler = self._compiler
        try:
            if kind == "json_schema":
                compiled = compiler.compile_json_schema(value, any_whitespace=False)
            elif kind == "regex":
                compiled = compiler.compile_regex(value)
            elif kind == "ebnf":
                compiled = compiler.compile_grammar(value)
            else:
                compiled = compiler.compile_structural_tag(value)
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(f"invalid {kind}: {SOURCE_POSITION.sub('', str(error))}") from error
        self._compiled[key] = compiled
        if len(self._compiled) > CACHED_GRAMMARS:
            self._compiled.popitem(last=False)
        return compiled

    def generate(self, kind: str, value: str, rng: random.Random, limit: int) -> tuple[list[int], bool]:
        """At most ``limit`` ids under the constraint and whether they are complete. Raises ``GrammarError``."""
        compiled = self.compile(kind, value)
        import numpy  # comes with xgrammar

        matcher = self._xgrammar.GrammarMatcher(compiled)
        mask = numpy.full((1, (self._vocabulary.size + 31) // 32), -1, dtype=numpy.int32)

        def allowed_now() -> Any:
            # False: nothing is forbidden here, and the mask was left alone.
            if matcher.fill_next_token_bitmask(mask):
                return numpy.unpackbits(mask.view(numpy.uint8), bitorder="little")[: self._vocabulary.size]
            return numpy.ones(self._vocabulary.size, dtype=numpy.uint8)

        def spelled_behind(text: bytes) -> bool | None:
            """Whether something is spelled out behind ``text``; None when it may not come."""
            if not matcher.accept_string(text):
                return None
            count = int(allowed_now().sum())
            matcher.rollback(1)
            return count <= NARROW

        markers = _markers(kind, value)
        walk = _Walk(self._bytes, self._wordlike, set(self._vocabulary.eos_ids), rng, markers, spelled_behind)
        ids: list[int] = []
        while len(ids) < limit:
            token = walk.choose(allowed_now(), len(ids))
            if token is None:
                return ids, True
            if not matcher.accept_token(token):
                raise GrammarError("the grammar came to a dead end")
            ids.append(token)
        return ids, bool(matcher.is_completed())


@dataclass(frozen=True, slots=True)
class _Markers:
    """The fixed texts of a structural tag: ``begins`` and ``ends`` of its parts, ``others`` between them."""

    begins: tuple[bytes, ...] = ()
    ends: tuple[bytes, ...] = ()
    others: tuple[bytes, ...] = ()


def _markers(kind: str, value: str) -> _Markers:
    """The markers of a structural tag: random words would never hit them."""
    if kind != "structural_tag":
        return _Markers()
    begins: dict[str, None] = {}
    ends: dict[str, None] = {}
    others: dict[str, None] = {}

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(begin := node.get("begin"), str):
                begins[begin] = None
            if node.get("type") == "const_string" and isinstance(text := node.get("value"), str):
                others[text] = None
            end = node.get("end")
            ends.update((each, None) for each in (end if isinstance(end, list) else [end]) if isinstance(each, str))
            if (close := VALUE_CLOSE.get(str(node.get("style")))) is not None:
                ends[close] = None
            for key, child in node.items():
                if key != "json_schema":
                    visit(child)
        elif isinstance(node, list):
            for child in node:
                visit(child)

    try:
        visit(json.loads(value))
    except (ValueError, RecursionError):
        return _Markers()
    return _Markers(*(tuple(text.encode() for text in texts if text) for texts in (begins, ends, others)))


class _Walk:
    """Chooses the next token of one output."""

    def __init__(
        self,
        texts: list[bytes],
        wordlike: Any,
        eos: set[int],
        rng: random.Random,
        markers: _Markers,
        spelled_behind: Callable[[bytes], bool | None],
    ) -> None:
        self._texts = texts
        self._wordlike = wordlike
        self._eos = eos
        self._rng = rng
        self._markers = markers
        self._spelled_behind = spelled_behind
        self._kept = max(2 * len(ARGUMENTS), *map(len, markers.begins), 0)
        self._structural = markers != _Markers()
        self._ahead = b""  # rest of a marker that has been begun
        self._blank = False  # the last token was white space
        self._tail = b""  # end of the output, as long as what is looked for in it
        self._done = False  # a structure was opened: what remains is to finish it
        self._run = 0  # tokens since the last change between spelling and free choice
        self._spelling = False
        self._newline = texts.index(b"\n") if b"\n" in texts else None
        short = {text: token for token, text in enumerate(texts) if 0 < len(text) < 3}
        self._any_value = [
            [short.get(space + text) for text in (b"{", b"[", b'"', b"z")]  # the last one is never a value
            for space in (b"", b" ")
        ]

    def choose(self, bits: Any, count: int) -> int | None:
        """A token whose bit is set; None to end the output. ``count``: tokens so far."""
        token = self._choose(bits, count)
        self._blank = token is not None and not self._texts[token].strip()
        if token is not None:
            self._tail += self._texts[token]
            self._done = self._done or any(begin in self._tail for begin in self._markers.begins)
            self._tail = self._tail[-self._kept :]
        return token

    def _choose(self, bits: Any, count: int) -> int | None:
        allowed = bits.nonzero()[0]
        token = self._follow(allowed) if self._ahead else None
        if token is None:
            token = self._arguments(bits)
        if token is not None:
            return token
        if self._spelling != (len(allowed) <= NARROW):
            self._spelling = not self._spelling
            self._run = 0
        closing = count >= SOFT_LIMIT or self._rng.random() < CLOSING_STEP * self._run
        self._run += 1
        going_on = [int(token) for token in allowed if token not in self._eos] if self._spelling else None
        if going_on == [] or ((closing or self._done) and any(bits[token] for token in self._eos)):
            return None
        if going_on is not None:
            return self._spell(going_on, closing)
        token = self._close(bits, allowed) if closing else None
        return self._word(bits, allowed) if token is None else token

    def _arguments(self, bits: Any) -> int | None:
        """The beginning of an object where any JSON value may come as the arguments of a call: no model would write
        another."""
        if not self._structural and not self._tail.rstrip().endswith(ARGUMENTS):
            return None
        for brace, bracket, quote, letter in self._any_value:
            values = [token is not None and bool(bits[token]) for token in (brace, bracket, quote)]
            if all(values) and (letter is None or not bits[letter]):
                return brace
        return None

    def _spell(self, allowed: list[int], closing: bool) -> int:
        """One of the texts that may come, in as few tokens as it takes; closing ones are preferred."""
        texts = self._texts
        if closing and (ends := [end for end in self._markers.ends if self._spelled_behind(end) is not None]):
            self._ahead = max(ends, key=len)
            following = self._follow(allowed)
            if following is not None:
                return following
        # One token may close an object and begin the next: such a list would never end.
        closers = [token for token in allowed if texts[token].startswith(CLOSERS) and b"," not in texts[token]]
        pool = closers if closers and (closing or self._rng.random() < 0.75) else allowed
        if closing and not self._blank:  # numbers and lists end as soon as they may, if only with a line end
            pool = [token for token in pool if texts[token][:1] not in GOING_ON] or pool
        visible = [token for token in pool if texts[token].strip()] or pool
        first = texts[self._rng.choice(visible)]
        fitting = [token for token in visible if texts[token].startswith(first) or first.startswith(texts[token])]
        # A token that goes on behind a quote has begun the string: keep its first words for free choice.
        token = self._longest([token for token in fitting if texts[token].endswith(b'"')] or fitting)
        return self._within(token, allowed) if self._structural else token

    def _within(self, token: int, allowed: list[int]) -> int:
        """``token``, or a shorter one where it reaches from a marker into the free text behind it."""
        texts = self._texts
        for size in range(1, len(texts[token])):
            if self._spelled_behind(texts[token][:size]) is False:
                marker = texts[token][:size]
                return self._longest([other for other in allowed if texts[other] and marker.startswith(texts[other])])
        return token

    def _close(self, bits: Any, allowed: Any) -> int | None:
        """A token that begins a marker, ends a string, or leaves a run of letters."""
        texts = self._texts
        # Free text takes a line end, a JSON string does not.
        if self._structural and self._newline is not None and bits[self._newline]:
            markers = self._markers.begins + self._markers.ends + self._markers.others
            exits = [marker for marker in markers if self._spelled_behind(marker)]
            if exits:
                self._ahead = self._rng.choice(exits)
                token = self._follow(allowed)
                if token is not None:
                    return token
        quotes = [int(token) for token in allowed if texts[token].startswith(b'"')]
        ways_out = quotes or [int(token) for token in allowed if texts[token][:1] in PUNCTUATION]
        ways_out = [token for token in ways_out if texts[token][:1] != b"_"] or ways_out  # an underscore joins words
        return self._rng.choice(ways_out) if ways_out else None

    def _follow(self, allowed: Iterable[Any]) -> int | None:
        """The longest token on the way through the marker that has been begun."""
        texts, ahead = self._texts, self._ahead
        fitting = [int(token) for token in allowed if texts[token] and ahead.startswith(texts[token])]
        if not fitting:
            self._ahead = b""
            return None
        token = self._longest(fitting)
        self._ahead = ahead[len(texts[token]) :]
        return token

    def _longest(self, tokens: list[int]) -> int:
        return max(tokens, key=lambda token: (len(self._texts[token]), -token))

    def _word(self, bits: Any, allowed: Any) -> int:
        words = (bits.astype(bool) & self._wordlike).nonzero()[0]
        pool = words if len(words) else [token for token in allowed if token not in self._eos]
        return int(self._rng.choice(pool))
