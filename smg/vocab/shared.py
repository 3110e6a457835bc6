"""Decode tables shared between the processes of one gateway through files in its run directory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from smg.messages import TokenizerSource
from smg.vocab.decode import DecodeTable
from smg.vocab.encoder import Encoder
from smg.vocab.load import load_model_dir


def table_path(source: TokenizerSource, run_dir: Path) -> Path:
    """The file that holds the decode table of ``source``."""
    key = hashlib.sha256(source.path.encode()).hexdigest()[:24]
    return run_dir / f"vocabulary-{key}.table"


def share_decode_table(encoder: Encoder, source: TokenizerSource, run_dir: Path) -> DecodeTable:
    """Write the table of a loaded tokenizer, unless another process has, and map it."""
    path = table_path(source, run_dir)
    if not path.exists():
        DecodeTable.build(encoder.tokenizer, encoder.special_ids).save(path)
    return DecodeTable.open(path)


def shared_decode_table(source: TokenizerSource, run_dir: Path) -> DecodeTable:
    """The table of ``source``: mapped if a process has written it, else built from the tokenizer files. Raises
    ``TokenizerLoadError``."""
    path = table_path(source, run_dir)
    if path.exists():
        return DecodeTable.open(path)
    return share_decode_table(Encoder(load_model_dir(source.path), fast=False), source, run_dir)
