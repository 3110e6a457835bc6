"""Decoding equals the reference for every text and every list of ids, however the ids arrive."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from smg.vocab.build import build_tokenizer
from smg.vocab.decode import DecodeTable, IncrementalDecoder
from smg.vocab.load import TokenizerLoadError, load_model_dir

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "smg" / "simengine" / "model"
PROSE = ROOT / "smg" / "simengine" / "training_text" / "prose.txt"
CORPUS = os.environ.get("SMG_TEST_CORPUS")

texts = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\t.,'é早🚀\u200d<|end|>ab0")), max_size=60)
common = settings(max_examples=80, deadline=None)


def byte_level() -> Tokenizer:
    return build_tokenizer(load_model_dir(str(MODEL)))


def metaspace() -> Tokenizer:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE.read_text(encoding="utf-8").splitlines()), model_writer=stream, vocab_size=700,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        path.write_bytes(stream.getvalue())
        return build_tokenizer(load_model_dir(str(path)))


def trained(decoder: object, pre: object) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoder
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train([str(PROSE)], trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    return trained(decoders.WordPiece(cleanup=True), pre_tokenizers.BertPreTokenizer())


def plain_metaspace() -> Tokenizer:
    tokenizer = metaspace()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "plain_metaspace": plain_metaspace,
    "wordpiece": wordpiece,
}


@cache
def case(kind: str) -> tuple[Tokenizer, DecodeTable]:
    tokenizer = KINDS[kind]()
    special = [token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special]
    return tokenizer, DecodeTable.build(tokenizer, special)


def pieces(table: DecodeTable, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    decoder = IncrementalDecoder(table, skip)
    found = []
    start = 0
    for cut in [*sorted(cuts), len(ids)]:
        found.append(decoder.feed(ids[start:cut]))
        start = max(cut, start)
    return [*found, decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@common
def test_any_text_in_any_chunks(kind: str, data: st.DataObject) -> None:
    tokenizer, table = case(kind)
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=False).ids
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)))
    for skip in (True, False):
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert table.decode(ids, skip) == expected
        assert "".join(pieces(table, ids, cuts, skip)) == expected


@given(ids=st.lists(st.integers(0, 6010), max_size=25), skip=st.booleans())
@common
def test_any_ids_of_a_byte_level_vocabulary(ids: list[int], skip: bool) -> None:
    tokenizer, table = case("byte_level")
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert table.decode(ids, skip) == expected
    assert "".join(pieces(table, ids, list(range(len(ids))), skip)) == expected


@given(text=texts)
@common
def test_no_replacement_character_while_more_may_come(text: str) -> None:
    tokenizer, table = case("byte_level")
    if "\ufffd" in text:
        return
    decoder = IncrementalDecoder(table)
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        assert "\ufffd" not in decoder.feed([token])


def test_bytes_of_a_character_come_out_together() -> None:
    tokenizer, table = case("metaspace")
    ids = tokenizer.encode("a🚀b", add_special_tokens=False).ids
    decoder = IncrementalDecoder(table)
    assert [text for text in map(decoder.feed, ([token] for token in ids)) if text] == ["a", "🚀", "b"]
    cut = IncrementalDecoder(table)
    assert cut.feed(ids[:4]) == "a" and cut.finish() == "\ufffd" * 3


def test_tokens_alone() -> None:
    _, table = case("byte_level")
    tokenizer = byte_level()
    space, rocket = tokenizer.token_to_id("Ġthe"), tokenizer.encode("🚀", add_special_tokens=False).ids
    assert table.token_text(space) == " the" and table.token_bytes(space) == b" the"
    assert b"".join(table.token_bytes(token) for token in rocket) == "🚀".encode()
    assert table.token_text(rocket[0]).endswith("\ufffd")
    assert table.token_text(6001) == "<|turn|>" and table.token_text(99999) == ""


def test_ids_outside_the_vocabulary_are_skipped() -> None:
    tokenizer, table = case("byte_level")
    ids = tokenizer.encode("hello", add_special_tokens=False).ids
    decoder = IncrementalDecoder(table)
    assert decoder.feed([-1, *ids, 10**6]) + decoder.feed([2**31]) + decoder.finish() == "hello"
    assert 10**6 not in table.visible


def test_special_tokens_are_kept_on_request() -> None:
    tokenizer, table = case("byte_level")
    ids = tokenizer.encode("<think>a<|end|>", add_special_tokens=False).ids
    assert table.decode(ids) == "<think>a"
    assert table.decode(ids, skip_special_tokens=False) == "<think>a<|end|>"


def test_words_without_a_decoder() -> None:
    tokenizer = wordpiece()
    tokenizer.decoder = None  # type: ignore[assignment]
    table = DecodeTable.build(tokenizer, [])
    ids = [5, 6, 7]
    assert table.decode(ids) == " ".join(tokenizer.id_to_token(token) for token in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_the_same_through_a_file(kind: str, tmp_path: Path) -> None:
    tokenizer, table = case(kind)
    table.save(tmp_path / "table")
    shared = DecodeTable.open(tmp_path / "table")
    assert (shared.size, shared.kind, shared.special_ids) == (table.size, table.kind, table.special_ids)
    ids = tokenizer.encode(PROSE.read_text(encoding="utf-8")[:3000], add_special_tokens=False).ids
    assert shared.decode(ids) == table.decode(ids)
    assert [entry.name for entry in tmp_path.iterdir()] == ["table"]


@pytest.mark.parametrize("content", [b"", b"x" * 40, b"SMGDEC01" + b"\xff" * 40])
def test_other_files_are_no_tables(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(content)
    with pytest.raises(TokenizerLoadError, match="is not a decode table"):
        DecodeTable.open(tmp_path / "table")


def test_unknown_decoders_are_refused() -> None:
    tokenizer = wordpiece()
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(TokenizerLoadError, match="CTC"):
        DecodeTable.build(tokenizer, [])


@pytest.mark.skipif(CORPUS is None, reason="SMG_TEST_CORPUS is not set")
def test_tokenizers_of_the_corpus() -> None:
    assert CORPUS is not None
    found = sorted(Path(CORPUS).glob("**/tokenizer.json"))
    if not found:
        pytest.skip("no tokenizer.json in SMG_TEST_CORPUS")
    for path in found:
        tokenizer = build_tokenizer(load_model_dir(str(path)))
        table = DecodeTable.build(tokenizer, [i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special])
        for text in PROSE.with_name("languages.txt").read_text(encoding="utf-8").splitlines():
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert "".join(pieces(table, ids, list(range(len(ids))), True)) == tokenizer.decode(ids)
