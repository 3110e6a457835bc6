"""Text to token ids, and what a vocabulary knows about its special tokens.

Two libraries do the work. ``tokenizers`` reads every format and is the reference; ``fastokens`` is an order of
magnitude faster and releases the interpreter lock, and is used once it has given the same ids on texts in many scripts.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from tokenizers import Tokenizer

from smg.models.prompt import Piece
from smg.vocab.build import build_tokenizer, is_kimi
from smg.vocab.controls import AddedToken, TextFinder
from smg.vocab.load import TIKTOKEN, ModelFiles

logger = logging.getLogger(__name__)

Ids = TypeVar("Ids", "list[int]", "array[int]")

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

# Texts on which two encoders must agree: scripts, marks, joiners, digits, white space, code, broken-up words.
SELF_CHECK_TEXTS = (
    "Hello, world! It's the dogs' 2nd birthday; they'll be 12345678 days old -- aren't they?",
    "   leading,  double   and trailing spaces   \n\n\n\ttabs\t\tand \r\n line ends \r\n\r\n",
    "naïve café Ångström e\u0301 a\u0308\u0323 ﬁ ligature № ½ ① ２３",
    "早上好！你今天怎么样？请用中文介绍一下你自己。漢字かな交じり文、カタカナ１２３。한국어 문장입니다.",
    "Привет, как дела? Καλημέρα κόσμε. שלום עולם. مرحبا بالعالم ٣٤٥ नमस्ते दुनिया สวัสดีชาวโลก",
    "🚀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇫🇷🇩🇪 \u200b zero\u200dwidth \ufeff \u00a0 nbsp \u3000 wide \u2028 line",
    'def f(x: int) -> str:\n    """Doc."""\n    return f"{x!r:>10}"  # done\n\n\nclass A(B):\n\tpass\n',
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2.5, -3e-7], "ok": true, "x": null}}',
    '<p class="a">x &amp; y</p> $\\frac{1}{2}$ http://example.com/a_b?q=1#f user@host C:\\dir\\file.txt ***bold*** ___',
    "CamelCaseIdentifier snake_case_identifier SCREAMING_CASE kebab-case x1y2z3 0xDEADBEEF 1,234,567.89 1e10",
    "a" * 70 + " " * 40 + "=" * 90 + "\n" * 12 + "ab" * 50 + "…" * 9 + "!?" * 20,
    "\x00\x01\x7f\x85 control \x1b[31mred\x1b[0m \\u0041 \uffff \U0010ffff \U000e0041",
)

# Kimi's published tokenizer encodes long texts in slices; no merge crosses a slice, so the cuts are part of the format.
_KIMI_SLICE = 400_000
_KIMI_RUN = 25_000
_RUNS = re.compile(r"\s+|\S+")

_GUESSED_NAMES = {
    "bos_token": ("<s>", "<|startoftext|>", "<BOS>", "[CLS]"),
    "eos_token": ("</s>", "<|endoftext|>", "<EOS>", "[SEP]"),
    "unk_token": ("<unk>", "<|unk|>", "<UNK>", "[UNK]"),
    "pad_token": ("<pad>", "<|pad|>", "<PAD>", "[PAD]"),
}


class Encoder:
    """The encoding side of one vocabulary. Immutable after construction, apart from a lazily built helper.

    ``vocab_size`` counts the base vocabulary without added tokens; ``id_limit`` is one more than the largest id.
    ``special_tokens`` maps named special tokens (``bos_token`` ...) to their text. ``special_ids`` are the ids that
    decoding may strip. ``eos_ids`` end a generation: ``config.json``, ``generation_config.json`` and the tokenizer's
    ``eos_token`` together. ``backend`` is "fastokens" or "tokenizers"; ``fallbacks`` counts texts on which the fast
    encoder failed.
    """

    def __init__(self, files: ModelFiles, *, fast: bool = True) -> None:
        """Raises ``TokenizerLoadError``. ``fast`` False keeps to ``tokenizers``."""
        tokenizer = build_tokenizer(files)
        self.files = files
        self.tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=False)
        self.special_tokens = _named_tokens(files, tokenizer)
        ids = [tokenizer.token_to_id(text) for text in self.special_tokens.values()]
        named = {token for token in ids if token is not None}
        self.added_tokens = _added_tokens(tokenizer, named)
        self.special_ids = frozenset(token.id for token in self.added_tokens if token.special) | named
        self._added_ids = {token.text: token.id for token in self.added_tokens}
        self.id_limit: int = max([*tokenizer.get_vocab(with_added_tokens=True).values()], default=-1) + 1
        self.finder = TextFinder([token.text for token in self.added_tokens])
        config = files.tokenizer_config
        self.add_bos_token = bool(config.get("add_bos_token"))
        self.add_eos_token = bool(config.get("add_eos_token"))
        self.eos_ids = self._end_ids()
        self._sliced = files.kind == TIKTOKEN and is_kimi(files)
        self._prefixing = _adds_prefix(tokenizer)
        self.frame = None if files.kind == TIKTOKEN else self._read_frame()
        self._plain: Tokenizer | None = None
        self.backend = "tokenizers"
        self.fallbacks = 0
        self._encode_text: Callable[[str], list[int]] = self._encode_reference
        self._encode_ordinary: Callable[[str], list[int]] = self._encode_without_tokens
        self._encode_array: Callable[[str], array[int]] = self._encode_list
        if fast:
            self._try_fast()

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; special-token text in it becomes special tokens, none is added around it."""
        if self._sliced and len(text) > _KIMI_RUN:
            return [token for part in _kimi_slices(text) for token in self._encode_text(part)]
        return self._encode_text(text)

    def encode_ids(self, text: str) -> array[int]:
        """``encode`` as an array of uint32. The fast encoder fills it without an object per id."""
        if self._sliced and len(text) > _KIMI_RUN:
            return array("I", self.encode(text))
        return self._encode_array(text)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of ``text`` as ordinary text: no added token is recognised in it, and no control id comes out."""
        if not text:
            return []
        if self._sliced and len(text) > _KIMI_RUN:
            ids = [token for part in _kimi_slices(text) for token in self._encode_ordinary(part)]
        else:
            ids = self._encode_ordinary(text)
        if self.special_ids.isdisjoint(ids) or not self.finder.search(text):
            return ids
        # The base vocabulary itself spells a control token: cut every one behind its first character.
        assert self.finder.pattern is not None
        cuts = [match.start() + 1 for match in self.finder.pattern.finditer(text) if len(match.group()) > 1]
        parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        return [token for part in parts for token in self._encode_without_tokens(part)]

    def encode_pieces(self, pieces: Sequence[Piece]) -> array[int]:
        """The ids of a prompt in pieces, each encoded on its own: trusted ones like ``encode``, others like
        ``encode_plain``."""
        if len(pieces) == 1 and pieces[0].trusted:
            return self.encode_ids(pieces[0].text)
        ids = array("I")
        added = self._added_ids
        for text, trusted in pieces:
            if not trusted:
                ids.extend(self.encode_plain(text))
            elif (token_id := added.get(text)) is not None:
                ids.append(token_id)
            else:
                ids += self.encode_ids(text)
        return ids

    def encode_framed(self, text: str) -> list[int]:
        """The ids of ``text`` with the special tokens that the tokenizer puts around a sequence (embeddings)."""
        if self.files.kind == TIKTOKEN:
            return self.encode(text)
        if self.frame is None:
            return list(self.tokenizer.encode(text, add_special_tokens=True).ids)
        before, after = self.frame
        return [*before, *self.encode(text), *after]

    def is_added_token(self, text: str) -> bool:
        """Whether a text is exactly one added token."""
        return text in self._added_ids

    def cuts_up(self, text: str) -> bool:
        """Whether a text is so long that it is encoded in slices, which begin at its start and not at a token."""
        return self._sliced and len(text) > _KIMI_RUN and len(_kimi_slices(text)) > 1

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling, added tokens included."""
        return self.tokenizer.token_to_id(token)

    def named_id(self, name: str) -> int | None:
        """The id of a named special token ("bos_token" ...), None when the model has none."""
        text = self.special_tokens.get(name)
        return None if text is None else self.tokenizer.token_to_id(text)

    def _end_ids(self) -> list[int]:
        found: list[int] = []
        for config in (self.files.config, self.files.generation_config):
            value = config.get("eos_token_id")
            found += [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
        named = self.named_id("eos_token")
        return list(dict.fromkeys(found if named is None else [*found, named]))

    def _encode_reference(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_list(self, text: str) -> array[int]:
        return array("I", self._encode_text(text))

    def _encode_without_tokens(self, text: str) -> list[int]:
        """Reference for ``encode_plain``: the same vocabulary without added tokens. Built on first use, because it
        holds the vocabulary a second time. An anchor in front keeps rules for the start of a text from applying."""
        if self._plain is None:
            value = json.loads(self.tokenizer.to_str())
            value["added_tokens"] = []
            value["post_processor"] = None
            self._plain = Tokenizer.from_str(json.dumps(value))
            if self._prefixing:
                self._plain.add_special_tokens([_ANCHOR])
        if not self._prefixing:
            return list(self._plain.encode(text, add_special_tokens=False).ids)
        return list(self._plain.encode(_ANCHOR + text, add_special_tokens=False).ids[1:])

    def _read_frame(self) -> tuple[list[int], list[int]] | None:
        """Ids before and after a sequence, None when they depend on the text. The two flags of
        ``tokenizer_config.json`` replace what ``tokenizer.json`` says."""
        bos, eos = self.named_id("bos_token"), self.named_id("eos_token")
        if self.add_bos_token or self.add_eos_token:
            before = [bos] if self.add_bos_token and bos is not None else []
            return before, [eos] if self.add_eos_token and eos is not None else []
        frames = set()
        for probe in ("ab", " x", "1 2", "été"):
            plain = self._encode_reference(probe)
            framed = list(self.tokenizer.encode(probe, add_special_tokens=True).ids)
            starts = [at for at in range(len(framed) - len(plain) + 1) if framed[at : at + len(plain)] == plain]
            if not starts:
                return None
            frames.add((tuple(framed[: starts[0]]), tuple(framed[starts[0] + len(plain) :])))
        if len(frames) != 1:
            return None
        before_ids, after_ids = frames.pop()
        return list(before_ids), list(after_ids)

    def _try_fast(self) -> None:
        """Switch to fastokens if it reads this tokenizer and agrees on the self-check."""
        try:
            import fastokens

            source = self.tokenizer.to_str()
            fast = fastokens.Tokenizer.from_json_str(source)
        except Exception as error:  # a young library: whatever it cannot read is encoded by the reference
            logger.info("tokenizer %s: fastokens cannot read it (%s)", self.files.source, type(error).__name__)
            return
        reason = self._disagreement(fast)
        if reason:
            logger.warning("tokenizer %s: fastokens %s; using tokenizers", self.files.source, reason)
            return
        flat, ordinary = fast.encode_batch_flat, fast.encode_ordinary

        def encode_array(text: str) -> array[int]:
            ids = array("I")
            ids.frombytes(flat([text])[0])  # all ids as uint32, and where each text's begin
            return ids

        self._encode_text = self._guarded(lambda text: fast.encode(text).ids, self._encode_reference)
        if sys.byteorder == "little":
            self._encode_array = self._guarded(encode_array, lambda text: array("I", self._encode_reference(text)))
        if not self._prefixing:
            self._encode_ordinary = self._guarded(lambda text: ordinary(text).ids, self._encode_without_tokens)
        self.backend = "fastokens"

    def _guarded(self, encode: Callable[[str], Ids], reference: Callable[[str], Ids]) -> Callable[[str], Ids]:
        """The fast encoder, with the reference for a text on which it fails (a regex limit, a fault in it)."""

        def run(text: str) -> Ids:
            try:
                return encode(text)
            except (UnicodeEncodeError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a panic of native code is no Exception
                self.fallbacks += 1
            return reference(text)

        return run

    def _own_words(self) -> list[str]:
        """Texts made of the vocabulary's own tokens. Encoders that split a text differently differ where a token lies
        across the split, and those are mostly tokens that mix kinds of characters."""
        ids = range(self.id_limit)
        added = set(self._added_ids.values())
        words = self.tokenizer.decode_batch([[token] for token in ids if token not in added])
        words = [word for word in words if word and "\ufffd" not in word]
        mixed = [word for word in words if not word.isascii() and not word.strip().isalpha()]
        chosen = mixed[:_CHECKED_TOKENS] + words[:: max(len(words) // _CHECKED_TOKENS, 1)]
        return ["".join(chosen), "\n".join(chosen), " ".join(chosen)]

    def _disagreement(self, fast: Any) -> str:
        """What differs between the fast encoder and the reference, "" when nothing does."""
        tokens = [token.text for token in self.added_tokens]
        sample = tokens[:8] + tokens[-8:]
        mixed = [f"{a}text {a}{b}\n{b} 早 {a}  x" for a, b in zip(sample, reversed(sample), strict=True)]
        try:
            texts = (*SELF_CHECK_TEXTS, *mixed, "".join(sample), " ".join(SELF_CHECK_TEXTS), *self._own_words())
            for text in texts:
                expected = self._encode_reference(text)
                if fast.encode(text).ids != expected:
                    return "gives other ids"
                if fast.encode_batch_flat([text])[0] != array("I", expected).tobytes() and sys.byteorder == "little":
                    return "gives other ids in a batch"
            for text in texts:
                if not self.finder.search(text) and fast.encode_ordinary(text).ids != self._encode_reference(text):
                    return "gives other ids for ordinary text"
        except Exception as error:
            return f"failed ({type(error).__name__})"
        return ""


# How many of its own tokens a vocabulary is checked with, of each kind.
_CHECKED_TOKENS = 6000

_ANCHOR = "\U000f0000\U000f0001"


def load_encoder(files: ModelFiles, *, fast: bool = True) -> Encoder:
    """The encoder of a model's files. Raises ``TokenizerLoadError``."""
    return Encoder(files, fast=fast)


def _kimi_slices(text: str) -> list[str]:
    """A text cut every 400000 characters, and every run of white space or of other characters in these cut to at most
    25000."""
    slices = []
    for start in range(0, len(text), _KIMI_SLICE):
        part = text[start : start + _KIMI_SLICE]
        position = 0
        for run in _RUNS.finditer(part):
            for cut in range(run.start() + _KIMI_RUN, run.end(), _KIMI_RUN):
                slices.append(part[position:cut])
                position = cut
        slices.append(part[position:])
    return slices


def _named_tokens(files: ModelFiles, tokenizer: Tokenizer) -> dict[str, str]:
    """Named special tokens. Without a ``tokenizer_config.json`` they are guessed from the vocabulary; a token that an
    existing one leaves null stays undefined."""
    if files.has_tokenizer_config:
        found = {name: files.named_token(name) for name in NAMED_TOKENS}
        return {name: text for name, text in found.items() if text is not None}
    guessed = {}
    for name, candidates in _GUESSED_NAMES.items():
        known = next((text for text in candidates if tokenizer.token_to_id(text) is not None), None)
        if known is not None:
            guessed[name] = known
    return guessed


def _added_tokens(tokenizer: Tokenizer, named: set[int]) -> list[AddedToken]:
    """Added tokens by id."""
    tokens = []
    for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        if token.content:
            exact = not (token.lstrip or token.rstrip or token.single_word)
            special = bool(token.special) or token_id in named
            tokens.append(AddedToken(token_id, token.content, special, exact, bool(token.normalized)))
    return tokens


def _adds_prefix(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary treats the beginning of a text specially (a space put in front)."""
    rules = json.loads(tokenizer.to_str())
    text = json.dumps([rules.get("normalizer"), rules.get("pre_tokenizer")])
    return any(mark in text for mark in ('"Prepend"', '"Metaspace"', '"add_prefix_space": true'))
