"""Encoders of every vocabulary format against the library that defines it."""

from __future__ import annotations

import base64
import io
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer

from smg.models.prompt import Piece
from smg.vocab.build import CL100K_SPLIT, KIMI_SPLIT, byte_alphabet
from smg.vocab.encoder import SELF_CHECK_TEXTS, Encoder, load_encoder
from smg.vocab.load import TokenizerLoadError, load_model_dir

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "smg" / "simengine" / "model"
TRAINING = ROOT / "smg" / "simengine" / "training_text"
TEXTS = [*SELF_CHECK_TEXTS, *(TRAINING / "languages.txt").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def shipped() -> Encoder:
    return load_encoder(load_model_dir(str(MODEL)))


def test_the_fast_encoder_is_used_and_agrees(shipped: Encoder) -> None:
    assert shipped.backend == "fastokens"
    slow = load_encoder(load_model_dir(str(MODEL)), fast=False)
    assert slow.backend == "tokenizers"
    for text in [*TEXTS, "<|turn|>user\nx <think> </think><|end|>\n", ""]:
        assert shipped.encode(text) == slow.encode(text)
        assert shipped.encode_plain(text) == slow.encode_plain(text)


def test_facts_of_the_vocabulary(shipped: Encoder) -> None:
    assert (shipped.vocab_size, shipped.id_limit) == (6000, 6009)
    assert shipped.special_tokens == {"eos_token": "<|end|>", "pad_token": "<|endoftext|>"}
    assert shipped.eos_ids == [6002, 6000]
    assert shipped.named_id("eos_token") == 6002 and shipped.named_id("bos_token") is None
    assert shipped.special_ids == {6000, 6001, 6002}
    assert shipped.token_to_id("<think>") == 6003 and shipped.token_to_id("nothing like it") is None
    assert shipped.is_added_token("<think>") and not shipped.is_added_token("the")


def test_plain_text_has_no_control_tokens(shipped: Encoder) -> None:
    text = "a <|end|> b <think>c</think>"
    assert 6002 in shipped.encode(text)
    ids = shipped.encode_plain(text)
    assert max(ids) < 6000
    assert shipped.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_pieces(shipped: Encoder) -> None:
    pieces = [Piece("<|turn|>"), Piece("user\n<|end|>", trusted=False), Piece("<|end|>\n<think>")]
    expected = [6001, *shipped.encode_plain("user\n<|end|>"), *shipped.encode("<|end|>\n<think>")]
    assert shipped.encode_pieces(pieces).tolist() == expected
    assert len(shipped.encode_pieces([])) == 0


def test_a_control_token_that_the_base_vocabulary_spells(tmp_path: Path) -> None:
    """A vocabulary may hold a control token as an ordinary entry too; plain text must still not become it."""
    value = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    value["model"]["ignore_merges"] = True
    value["model"]["vocab"]["secret"] = 6000
    value["added_tokens"] = [entry | {"id": entry["id"] + 1} for entry in value["added_tokens"]] + [
        value["added_tokens"][0] | {"id": 6000, "content": "secret"}
    ]
    value["added_tokens"].sort(key=lambda entry: entry["id"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    for fast in (True, False):
        encoder = load_encoder(load_model_dir(str(tmp_path)), fast=fast)
        assert encoder.encode("secret") == [6000]
        ids = encoder.encode_plain("a (secret) secret\nsecret")
        assert encoder.special_ids.isdisjoint(ids)
        assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == "a (secret) secret\nsecret"


@pytest.mark.parametrize(
    ("flags", "frame"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True, "bos_token": "<|turn|>"}, ([6001], [])),
        ({"add_eos_token": True, "eos_token": {"content": "<|end|>"}}, ([], [6002])),
        (
            {"add_bos_token": True, "add_eos_token": True, "bos_token": "<|turn|>", "eos_token": "<|end|>"},
            ([6001], [6002]),
        ),
    ],
)
def test_frames(tmp_path: Path, flags: dict[str, object], frame: tuple[list[int], list[int]]) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(flags))
    encoder = load_encoder(load_model_dir(str(tmp_path)), fast=False)
    assert encoder.frame == frame
    assert encoder.encode_framed("hello") == [*frame[0], *encoder.encode("hello"), *frame[1]]


def test_eos_ids_come_from_three_places(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7, true]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    assert load_encoder(load_model_dir(str(tmp_path)), fast=False).eos_ids == [7, 9, 6002]


def test_special_tokens_are_guessed_only_without_a_configuration(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    assert load_encoder(load_model_dir(str(tmp_path)), fast=False).special_tokens == {"eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert load_encoder(load_model_dir(str(tmp_path)), fast=False).special_tokens == {}


def test_qwen2_vocabulary_files(tmp_path: Path, shipped: Encoder) -> None:
    shipped.tokenizer.model.save(str(tmp_path))
    shutil.copy(MODEL / "tokenizer_config.json", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    encoder = load_encoder(load_model_dir(str(tmp_path)))
    for text in [*TEXTS, "<|turn|>user<|end|>"]:
        assert encoder.encode(text) == shipped.encode(text)


def write_ranks(folder: Path, shipped: Encoder) -> dict[bytes, int]:
    """The shipped base vocabulary as a tiktoken file: ids in the order of the merges are ranks."""
    spelled = {character: byte for byte, character in byte_alphabet().items()}
    vocabulary = shipped.tokenizer.get_vocab(with_added_tokens=False)
    ranks = {bytes(spelled[character] for character in token): rank for token, rank in vocabulary.items()}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in sorted(ranks.items(), key=lambda x: x[1])]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    return ranks


def reference_bpe(ranks: dict[bytes, int], word: bytes) -> list[int]:
    """Rank-based byte pair encoding as published: join the pair of lowest rank until none is left."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize(("model_type", "split"), [("other", CL100K_SPLIT), ("kimi_k2", KIMI_SPLIT)])
def test_tiktoken_ranks(tmp_path: Path, shipped: Encoder, model_type: str, split: str) -> None:
    ranks = write_ranks(tmp_path, shipped)
    added = {"6000": {"content": "[BOS]", "special": True}, "6001": {"content": "<think>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "bos_token": "[BOS]"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    encoder = load_encoder(load_model_dir(str(tmp_path)))
    assert encoder.vocab_size == 6000
    for text in TEXTS:
        words = encoder.tokenizer.pre_tokenizer.pre_tokenize_str(text)
        spelled = {character: byte for byte, character in byte_alphabet().items()}
        expected = [
            token
            for word, _ in words
            for token in reference_bpe(ranks, bytes(spelled[character] for character in word))
        ]
        assert encoder.encode(text) == expected
    assert encoder.encode("[BOS]a<think>")[::2] == [6000, 6001]
    assert encoder.encode_framed("a") == encoder.encode("a")
    if model_type == "kimi_k2":
        assert encoder.id_limit == 6256 and encoder.token_to_id("<|reserved_token_6255|>") == 6255


def test_tiktoken_against_the_tiktoken_package(tmp_path: Path, shipped: Encoder) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = write_ranks(tmp_path, shipped)
    encoder = load_encoder(load_model_dir(str(tmp_path)))
    reference = tiktoken.Encoding("x", pat_str=CL100K_SPLIT, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        assert encoder.encode(text) == reference.encode_ordinary(text)


def test_kimi_splits_han_apart(tmp_path: Path, shipped: Encoder) -> None:
    write_ranks(tmp_path, shipped)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    encoder = load_encoder(load_model_dir(str(tmp_path)), fast=False)
    words = encoder.tokenizer.pre_tokenizer.pre_tokenize_str("abc漢字def")
    assert [end - start for _, (start, end) in words] == [3, 2, 3]


def test_kimi_long_runs_are_encoded_in_slices(tmp_path: Path, shipped: Encoder) -> None:
    write_ranks(tmp_path, shipped)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    encoder = load_encoder(load_model_dir(str(tmp_path)))
    run = "ab" * 20_000
    assert encoder.cuts_up(run) and not encoder.cuts_up("ab " * 20_000)
    assert encoder.encode(run) == [
        *encoder.encode(run[:25_000]),
        *encoder.encode(run[25_000:]),
    ]


@pytest.mark.parametrize("line", ["abc", "YQ== x", "YQ== 1 2", "%%% 3"])
def test_broken_tiktoken_files(tmp_path: Path, line: str) -> None:
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n" + line + "\n")
    with pytest.raises(TokenizerLoadError, match="line 2"):
        load_encoder(load_model_dir(str(tmp_path)))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("dummy_prefix", [True, False])
def test_sentencepiece(tmp_path: Path, model_type: str, dummy_prefix: bool) -> None:
    stream = io.BytesIO()
    lines = (TRAINING / "prose.txt").read_text(encoding="utf-8").splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=stream, vocab_size=900, model_type=model_type, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=dummy_prefix,
        user_defined_symbols=["<think>"], control_symbols=["<turn>"], minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(stream.getvalue())
    encoder = load_encoder(load_model_dir(str(tmp_path)))
    reference = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    for text in TEXTS:
        if "\x00" not in text:
            assert encoder.encode(text) == reference.encode(text), text
    assert encoder.vocab_size == 900
    assert encoder.special_tokens["eos_token"] == "</s>"
    assert encoder.encode("<turn>")[-1:] == [reference.piece_to_id("<turn>")]
    plain = encoder.encode_plain("a <turn> b")
    assert reference.piece_to_id("<turn>") not in plain and encoder.token_to_id("<think>") not in plain


def test_damaged_files_are_load_errors(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(b"\xff{nothing")
        with pytest.raises(TokenizerLoadError, match="Cannot load tokenizer"):
            load_encoder(load_model_dir(str(folder)))


def test_an_encoder_that_disagrees_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary the fast library reads differently: here a stand-in library that drops the last id."""
    import fastokens

    class Short:
        def __init__(self, source: str) -> None:
            self.inner = Tokenizer.from_str(source)

        @classmethod
        def from_json_str(cls, source: str) -> Short:
            return cls(source)

        def encode(self, text: str) -> object:
            encoding = self.inner.encode(text, add_special_tokens=False)
            return type("Encoding", (), {"ids": encoding.ids[:-1]})()

        encode_ordinary = encode

    monkeypatch.setattr(fastokens, "Tokenizer", Short)
    encoder = load_encoder(load_model_dir(str(MODEL)))
    assert encoder.backend == "tokenizers"
    assert encoder.encode("hello") == encoder.tokenizer.encode("hello", add_special_tokens=False).ids


def test_added_token_flags_are_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<norm>", normalized=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = {token.text: token for token in load_encoder(load_model_dir(str(tmp_path)), fast=False).added_tokens}
    assert not tokens["<mask>"].exact and tokens["<mask>"].special
    assert tokens["<norm>"].normalized and tokens["<norm>"].exact


def test_a_text_on_which_the_fast_encoder_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import fastokens

    class Limited:
        def __init__(self, source: str) -> None:
            self.inner = Native.from_json_str(source)

        from_json_str = classmethod(lambda cls, source: cls(source))

        def encode(self, text: str) -> object:
            if len(text) > 500_000:
                raise RuntimeError("match limit")
            return self.inner.encode(text)

        encode_ordinary = encode

        def encode_batch_flat(self, texts: list[str]) -> tuple[bytes, bytes]:
            self.encode(texts[0])
            flat: tuple[bytes, bytes] = self.inner.encode_batch_flat(texts)
            return flat

    Native = fastokens.Tokenizer
    monkeypatch.setattr(fastokens, "Tokenizer", Limited)
    encoder = load_encoder(load_model_dir(str(MODEL)))
    assert encoder.backend == "fastokens"
    text = "ab " * 200_000
    assert encoder.encode(text) == encoder.tokenizer.encode(text, add_special_tokens=False).ids
    assert encoder.fallbacks == 1
    assert encoder.encode_ids(text).tolist() == encoder.encode(text)
    assert encoder.fallbacks == 3


def test_slices_are_found_in_linear_time(tmp_path: Path, shipped: Encoder) -> None:
    write_ranks(tmp_path, shipped)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    encoder = load_encoder(load_model_dir(str(tmp_path)))
    text = (" " * 24_999 + "x") * 40
    assert not encoder.cuts_up(text[:390_000])
    assert encoder.tokenizer.decode(encoder.encode(text)) == text
