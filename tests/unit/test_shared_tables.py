"""Decode tables in the run directory: built once, by an interpreter of its own, however many ask."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smg.messages import TokenizerSource
from smg.simengine.vocabulary import SHIPPED_MODEL
from smg.vocab.encoder import Encoder
from smg.vocab.load import TokenizerLoadError, load_model_dir
from smg.vocab.shared import share_decode_table, shared_decode_table, table_path


def test_all_who_ask_at_once_get_the_one_table(tmp_path: Path) -> None:
    source = TokenizerSource("m", str(SHIPPED_MODEL))
    encoder = Encoder(load_model_dir(source.path), fast=False)
    with ThreadPoolExecutor(4) as pool:
        tables = [pool.submit(shared_decode_table, source, tmp_path) for _ in range(3)]
        tables.append(pool.submit(share_decode_table, encoder, source, tmp_path))
    sizes = {table.result().size for table in tables}
    assert sizes == {tables[0].result().size} and min(sizes) > 0
    path = table_path(source, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([path, path.with_suffix(".lock")])


def test_a_directory_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerLoadError) as here:
        Encoder(load_model_dir(str(tmp_path)), fast=False)
    with pytest.raises(TokenizerLoadError) as elsewhere:
        shared_decode_table(TokenizerSource("m", str(tmp_path)), tmp_path)
    assert str(elsewhere.value) == str(here.value)
