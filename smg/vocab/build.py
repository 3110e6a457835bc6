"""Build a ``tokenizers.Tokenizer`` from every vocabulary format the gateway reads."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from smg.vocab.load import QWEN2_BPE, SENTENCEPIECE, TIKTOKEN, ModelFiles, TokenizerLoadError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN2_SPLIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Runs of Han characters stand alone, and letters of other words exclude Han. Written with intersections of sets: regex
# engines disagree about a bare ``\p{Han}`` (the script, or every character that the script uses).
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_SPLIT = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_RESERVED = 256
_KIMI_TYPES = ("kimi_k2", "kimi_k25", "kimi_k3")
_META = "\u2581"

# SentencePiece piece types (sentencepiece_model.proto).
_SP_CONTROL, _SP_USER, _SP_UNIGRAM, _SP_BPE = 3, 4, 1, 2


def build_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model. Raises ``TokenizerLoadError``."""
    builders: dict[str, Callable[[ModelFiles], Tokenizer]] = {
        QWEN2_BPE: _from_qwen2,
        TIKTOKEN: _from_tiktoken,
        SENTENCEPIECE: _from_sentencepiece,
    }
    try:
        tokenizer: Tokenizer = builders.get(files.kind, _from_tokenizer_json)(files)
    except TokenizerLoadError:
        raise
    except Exception as error:  # the libraries raise bare Exception for malformed files
        raise TokenizerLoadError(f"Cannot load tokenizer '{files.path}': {error}") from None
    # Padding and truncation settings stored with a checkpoint are for training; a prompt is never cut silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_tokenizer_json(files: ModelFiles) -> Tokenizer:
    return Tokenizer.from_file(str(files.path))


def is_kimi(files: ModelFiles) -> bool:
    """Whether a tiktoken directory follows Kimi's conventions."""
    mentions = "tokenization_kimi" in json.dumps(files.tokenizer_config.get("auto_map", ""))
    return mentions or files.config.get("model_type") in _KIMI_TYPES


def byte_alphabet() -> dict[int, str]:
    """Byte value -> the printable character that byte-level vocabularies spell it with: printable Latin-1 characters
    stand for themselves, the others are numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(0x100 + len(alphabet) - len(printable))
    return alphabet


def _byte_level(tokenizer: Tokenizer, split: str) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _declared_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """``added_tokens_decoder`` of ``tokenizer_config.json``: id -> token."""
    declared = {}
    for key, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        declared[int(key)] = AddedToken(entry["content"], **flags)
    return declared


def _from_qwen2(files: ModelFiles) -> Tokenizer:
    model = models.BPE.from_file(str(files.path), str(files.path.with_name("merges.txt")))
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    _byte_level(tokenizer, QWEN2_SPLIT)
    declared = _declared_tokens(files.tokenizer_config)
    _append_tokens(tokenizer, {token: declared[token] for token in sorted(declared)})
    return tokenizer


def _append_tokens(tokenizer: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    """Add tokens whose ids must come out as declared; the library numbers them from the vocabulary's end."""
    for token_id, token in added.items():
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        actual = tokenizer.token_to_id(token.content)
        if actual != token_id:
            raise TokenizerLoadError(
                f"Added token '{token.content}' has id {token_id}, but the next free one is {actual}"
            )


def read_ranks(path: Path) -> dict[bytes, int]:
    """A tiktoken file: one line ``base64 rank`` per token."""
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerLoadError(f"'{path}' line {number} is not 'base64 rank'") from None
    if not ranks:
        raise TokenizerLoadError(f"'{path}' holds no tokens")
    return ranks


def _ordered_merges(parts: Iterable[tuple[Any, Any]], rank: Mapping[Any, int]) -> list[tuple[Any, Any]]:
    """Merge rules in the order in which a rank-based encoder applies them: by the rank of the result, then by the ranks
    of the halves."""
    return sorted(parts, key=lambda pair: (rank[pair[0] + pair[1]], rank[pair[0]], rank[pair[1]]))


def _splits(rank: Mapping[Any, int]) -> Iterable[tuple[Any, Any]]:
    for token in rank:
        for cut in range(1, len(token)):
            if token[:cut] in rank and token[cut:] in rank:
                yield token[:cut], token[cut:]


def _from_tiktoken(files: ModelFiles) -> Tokenizer:
    ranks = read_ranks(files.path)
    alphabet = byte_alphabet()

    def spell(token: bytes) -> str:
        return "".join([alphabet[byte] for byte in token])

    added = _declared_tokens(files.tokenizer_config)
    kimi = is_kimi(files)
    if kimi:
        for token_id in range(len(ranks), len(ranks) + KIMI_RESERVED):
            added.setdefault(token_id, AddedToken(f"<|reserved_token_{token_id}|>", special=True, normalized=False))
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    merges = [(spell(left), spell(right)) for left, right in _ordered_merges(_splits(ranks), ranks)]
    # A token whose id is not the next free one keeps it only as an entry of the vocabulary itself.
    contiguous = sorted(added) == list(range(len(ranks), len(ranks) + len(added))) and max(ranks.values()) < len(ranks)
    if not contiguous:
        vocabulary |= {token.content: token_id for token_id, token in added.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    _byte_level(tokenizer, KIMI_SPLIT if kimi else CL100K_SPLIT)
    _append_tokens(tokenizer, {token: added[token] for token in sorted(added)})
    return tokenizer


def _from_sentencepiece(files: ModelFiles) -> Tokenizer:
    from sentencepiece import sentencepiece_model_pb2 as schema  # rarely needed

    proto = schema.ModelProto()
    proto.ParseFromString(files.path.read_bytes())
    pieces = list(proto.pieces)
    byte_fallback = bool(proto.trainer_spec.byte_fallback)
    unknown = proto.trainer_spec.unk_id
    if proto.trainer_spec.model_type == _SP_BPE:
        order = sorted(pieces, key=lambda piece: -piece.score)
        rank = {piece.piece: index for index, piece in enumerate(order)}
        merges = _ordered_merges(_splits(rank), rank)
        model: Any = models.BPE(
            vocab={piece.piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token=pieces[unknown].piece,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    elif proto.trainer_spec.model_type == _SP_UNIGRAM:
        model = models.Unigram([(piece.piece, piece.score) for piece in pieces], unknown, byte_fallback)
    else:
        raise TokenizerLoadError(f"'{files.path}': only SentencePiece models of type BPE and unigram can be read")
    tokenizer = Tokenizer(model)
    _sentencepiece_text_rules(tokenizer, proto.normalizer_spec)
    for piece in pieces:
        if piece.type == _SP_CONTROL:
            tokenizer.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == _SP_USER:
            tokenizer.add_tokens([AddedToken(piece.piece, normalized=False)])
    declared = _declared_tokens(files.tokenizer_config)
    _append_tokens(tokenizer, {token: declared[token] for token in sorted(declared)})
    return tokenizer


def _sentencepiece_text_rules(tokenizer: Tokenizer, spec: Any) -> None:
    """Normalizer and decoder of a SentencePiece model: spaces become U+2581, with one in front of the text where the
    model was trained with a dummy prefix."""
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_META))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _META)])
    rules: list[Any] = [decoders.Replace(_META, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        rules.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(rules)
