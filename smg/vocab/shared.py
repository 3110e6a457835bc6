"""Decode tables shared between the processes of one gateway through files in its run directory.

Building one takes seconds of Python and tokenizer code that hold the interpreter's lock, so a process that carries
streams has it done by an interpreter of its own (``python -m smg.vocab.shared``). One process builds a table, the
others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from smg.messages import TokenizerSource
from smg.vocab.decode import DecodeTable
from smg.vocab.encoder import Encoder
from smg.vocab.load import TokenizerLoadError, load_model_dir

BUILD_SECS = 300.0


def table_path(source: TokenizerSource, run_dir: Path) -> Path:
    """The file that holds the decode table of ``source``."""
    key = hashlib.sha256(source.path.encode()).hexdigest()[:24]
    return run_dir / f"vocabulary-{key}.table"


def share_decode_table(encoder: Encoder, source: TokenizerSource, run_dir: Path) -> DecodeTable:
    """Write the table of a loaded tokenizer, unless another process has, and map it."""
    path = table_path(source, run_dir)
    with _builder(path) as needed:
        if needed:
            _build(encoder, path)
    return DecodeTable.open(path)


def shared_decode_table(source: TokenizerSource, run_dir: Path) -> DecodeTable:
    """The table of ``source``: mapped if a process has written it, else built from the tokenizer files first. Blocks,
    but leaves the interpreter free. Raises ``TokenizerLoadError``."""
    path = table_path(source, run_dir)
    with _builder(path) as needed:
        if needed:
            _build_elsewhere(source.path, path)
    return DecodeTable.open(path)


@contextlib.contextmanager
def _builder(path: Path) -> Iterator[bool]:
    """The right to build the table at ``path``; whether it has to be built."""
    if path.exists():
        yield False
        return
    with path.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the process, should it be killed
        yield not path.exists()


def _build(encoder: Encoder, path: Path) -> None:
    DecodeTable.build(encoder.tokenizer, encoder.special_ids).save(path)


def _build_elsewhere(model_dir: str, path: Path) -> None:
    command = [sys.executable, "-m", "smg.vocab.shared", model_dir, str(path)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=BUILD_SECS)  # noqa: S603 - the command is this interpreter
    except subprocess.TimeoutExpired:
        raise TokenizerLoadError(f"building the decode table of {model_dir} took more than {BUILD_SECS:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise TokenizerLoadError(lines[-1] if lines else f"the decode table of {model_dir} could not be built")


def main(model_dir: str, path: str) -> int:
    """Build one table; the last line on stderr says why it could not be done."""
    try:
        _build(Encoder(load_model_dir(model_dir), fast=False), Path(path))
    except (TokenizerLoadError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
