"""Encode caches give the ids of a plain encode for every text, within their bounds."""

from __future__ import annotations

import io
from array import array
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from smg.tokenizer_pool.cache import ExactCache, PrefixCache
from smg.tokenizer_pool.model import TokenizerModel
from smg.vocab.controls import AddedToken as Token
from smg.vocab.encoder import Encoder, load_encoder
from smg.vocab.load import load_model_dir

MODEL = Path(__file__).parents[2] / "smg" / "simengine" / "model"
common = settings(max_examples=80, deadline=None)
fragments = st.sampled_from(
    ["<|turn|>", "<|end|>", "<|endoftext|>", "<think>", "<|end|><|turn|>", "<|tu", "user\n", "assistant\n", " ", "\n",
     "Hello", " world", "é", "早上好", "🚀", "e\u0301", "<mask>", "<|turn|>+", "a", "  "]
)  # fmt: skip
texts = st.lists(fragments, max_size=14).map("".join)


@cache
def shipped() -> Encoder:
    return load_encoder(load_model_dir(str(MODEL)))


@given(batch=st.lists(texts, min_size=1, max_size=6))
@common
def test_prefix_cache_is_exact(batch: list[str]) -> None:
    encoder = shipped()
    prefixes = PrefixCache(encoder.encode_ids, encoder.added_tokens, 1 << 20)
    for text in [*batch, *batch]:
        assert prefixes.encode(text).tolist() == encoder.encode(text)


def awkward(folder: Path) -> Encoder:
    """The shipped vocabulary with tokens that are no boundaries, or hide one."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken("<mask>", lstrip=True), AddedToken("<right>", rstrip=True), AddedToken("<norm>", normalized=True)]
    )
    tokenizer.add_tokens([AddedToken("<|turn|>+", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_encoder(load_model_dir(str(folder)), fast=False)


def test_only_independent_tokens_are_boundaries(tmp_path: Path) -> None:
    encoder = awkward(tmp_path)
    prefixes = PrefixCache(encoder.encode_ids, encoder.added_tokens, 1 << 20)
    assert prefixes.boundaries == {"<|turn|>", "<|end|>", "<|endoftext|>"}
    for text in (
        "a<|turn|>+b<|end|>c",
        "x <mask> y<|end|>  <mask>z",
        "<|end|><right>  q",
        "<|turn|> <mask>",
        "<|turn|>+",
    ):
        for _ in range(2):
            assert prefixes.encode(text).tolist() == encoder.encode(text)


def test_a_vocabulary_that_prepends_a_space_has_no_boundaries(tmp_path: Path) -> None:
    stream = io.BytesIO()
    lines = (MODEL.parent / "training_text" / "prose.txt").read_text(encoding="utf-8").splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=stream, vocab_size=600, model_type="bpe", minloglevel=2,
        normalization_rule_name="identity", control_symbols=["<turn>"],
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(stream.getvalue())
    encoder = load_encoder(load_model_dir(str(tmp_path)))
    prefixes = PrefixCache(encoder.encode_ids, encoder.added_tokens, 1 << 20)
    for text in ("<turn>a b<turn> c", "<s>x</s>y z</s>"):
        for _ in range(2):
            assert prefixes.encode(text).tolist() == encoder.encode(text)


def test_prefix_cache_counts() -> None:
    encoder = shipped()
    prefixes = PrefixCache(encoder.encode_ids, encoder.added_tokens, 1 << 20)
    counters = prefixes.counters
    prefixes.encode("no boundary here")
    prefixes.encode("only at the end<|end|>")
    assert (counters.hits, counters.misses, len(prefixes)) == (0, 2, 0)
    system = "<|turn|>system\nBe é<|end|>\n"
    prefixes.encode(system + "<|turn|>user\none")
    assert (counters.hits, counters.misses, len(prefixes)) == (0, 3, 3)
    prefixes.encode(system + "<|turn|>user\ntwo")
    assert (counters.hits, counters.misses) == (1, 3)
    assert counters.reused_bytes == len((system + "<|turn|>").encode())


def test_a_new_system_prompt_is_stored_behind_a_known_beginning() -> None:
    """Every prompt starts with the same token; that hit must not keep longer prefixes from being stored."""
    encoder = shipped()
    prefixes = PrefixCache(encoder.encode_ids, encoder.added_tokens, 1 << 20)
    prefixes.encode("<|turn|>system\nfirst<|end|>\n<|turn|>user\na")
    second = "<|turn|>system\nsecond<|end|>\n<|turn|>user\n"
    prefixes.encode(second + "b")
    before = prefixes.counters.reused_bytes
    prefixes.encode(second + "c")
    assert prefixes.counters.reused_bytes - before == len("<|turn|>system\nsecond<|end|>\n<|turn|>")


def test_long_conversations_store_their_first_and_last_boundaries() -> None:
    encoder = shipped()
    prefixes = PrefixCache(encoder.encode_ids, encoder.added_tokens, 1 << 20)
    turns = "".join(f"<|turn|>user\nquestion {number}<|end|>\n" for number in range(50))
    assert prefixes.encode(turns).tolist() == encoder.encode(turns)
    assert len(prefixes) == 11
    longer = turns + "<|turn|>user\nmore"
    assert prefixes.encode(longer).tolist() == encoder.encode(longer)
    assert prefixes.counters.reused_bytes > len(turns) - 20


def test_bytes_are_bounded() -> None:
    encoder = shipped()
    prefixes = PrefixCache(encoder.encode_ids, encoder.added_tokens, 8000)
    for number in range(200):
        prefixes.encode(f"<|turn|>system {number}<|end|>\nx")
        assert prefixes.memory <= 8000
    assert prefixes.counters.evictions > 0
    huge = "<|turn|>" + "word " * 3000 + "<|end|>x"
    assert prefixes.encode(huge).tolist() == encoder.encode(huge)
    assert prefixes.memory <= 8000


def test_a_token_that_is_encoded_otherwise_is_no_boundary() -> None:
    tokens = [Token(7, "<a>", True), Token(8, "<b>", True)]

    def encode(text: str) -> array[int]:
        return array("I", [7 if part == "<a>" else 1 for part in text.replace("<a>", " <a> ").split()])

    assert PrefixCache(encode, tokens, 1000).boundaries == {"<a>"}


def test_exact_cache() -> None:
    texts_cache = ExactCache(max_entries=2, max_bytes=10_000)
    assert texts_cache.get("a") is None
    texts_cache.put("a", [1, 2])
    texts_cache.put("é", [3])
    first = texts_cache.get("a")
    assert first == array("I", [1, 2])
    first.append(9)
    assert texts_cache.get("a") == array("I", [1, 2])
    texts_cache.put("c", [4])
    assert texts_cache.get("é") is None and texts_cache.get("c") == array("I", [4])
    counters = texts_cache.counters
    assert (counters.hits, counters.misses, counters.evictions, counters.reused_bytes) == (3, 2, 1, 3)
    texts_cache.put("x" * 9000, [1])
    assert texts_cache.get("x" * 9000) is None and texts_cache.memory <= 10_000


class Options:
    trust_control_tokens = False
    tokenizer_procs = 2
    tokenizer_cache_enable_l0 = True
    tokenizer_cache_l0_max_entries = 100
    tokenizer_cache_l0_max_memory = 1 << 20
    tokenizer_cache_enable_l1 = True
    tokenizer_cache_l1_max_memory = 1 << 20


class Counter:
    def __init__(self) -> None:
        self.evicted: list[tuple[float, str]] = []

    def add(self, amount: float, *labels: str) -> None:
        self.evicted.append((amount, labels[0]))


class Metrics:
    def __init__(self) -> None:
        self.lookups: list[tuple[str, bool, int]] = []
        self.cache_evictions = Counter()

    def cache_lookup(self, layer: str, *, hit: bool, reused_bytes: int = 0) -> None:
        self.lookups.append((layer, hit, reused_bytes))


@pytest.mark.parametrize("l0", [True, False])
def test_the_layers_of_a_model(l0: bool) -> None:
    options, metrics = Options(), Metrics()
    options.tokenizer_cache_enable_l0 = l0
    made = TokenizerModel(load_model_dir(str(MODEL)), options, metrics)
    text = "<|turn|>user\nhi<|end|>\n"
    plain = made.encoder.encode(text)
    assert [made.encode(text).tolist() for _ in range(2)] == [plain, plain]
    assert list(made.encode_framed(text)) == plain
    if l0:
        assert metrics.lookups == [("l0", False, 0), ("l1", False, 0), ("l0", True, 23), ("l0", True, 23)]
    else:
        assert metrics.lookups == [("l1", False, 0), ("l1", True, 22), ("l1", True, 22)]


def test_evictions_are_counted() -> None:
    options, metrics = Options(), Metrics()
    options.tokenizer_cache_l0_max_entries = 4
    options.tokenizer_cache_enable_l1 = False
    made = TokenizerModel(load_model_dir(str(MODEL)), options, metrics)
    for text in "abcd":
        made.encode(text)
    assert metrics.cache_evictions.evicted == [(1, "l0"), (1, "l0")]
