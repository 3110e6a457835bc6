"""The decode tables of a detok process: one per tokenizer, loaded off the loop, shared between processes through a
file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from smg.messages import TokenizerSource
from smg.vocab.decode import DecodeTable
from smg.vocab.load import TokenizerLoadError
from smg.vocab.shared import shared_decode_table


class VocabularyError(Exception):
    """The decode table of a tokenizer cannot be had."""


class Vocabularies:
    """Decode tables by tokenizer name. ``update`` starts loading what is new, ``load`` waits for one."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._sources: dict[str, TokenizerSource] = {}
        self._tables: dict[str, DecodeTable] = {}
        self._loading: dict[str, asyncio.Future[DecodeTable]] = {}

    def update(self, sources: Iterable[TokenizerSource]) -> None:
        """Take over the table of tokenizers; changed sources are loaded again."""
        for source in sources:
            known = self._sources.get(source.name)
            if known is not None and known.path == source.path:
                continue
            self._sources[source.name] = source
            self._tables.pop(source.name, None)
            self._loading.pop(source.name, None)
            self._begin(source)

    def get(self, name: str) -> DecodeTable | None:
        return self._tables.get(name)

    async def load(self, name: str) -> DecodeTable:
        """The table, once it is loaded. Raises ``VocabularyError``."""
        table = self._tables.get(name)
        if table is not None:
            return table
        source = self._sources.get(name)
        if source is None:
            raise VocabularyError(f"no tokenizer named '{name}'")
        try:
            return await asyncio.shield(self._loading.get(name) or self._begin(source))
        except (TokenizerLoadError, OSError) as error:
            self._loading.pop(name, None)
            raise VocabularyError(str(error)) from error

    def _begin(self, source: TokenizerSource) -> asyncio.Future[DecodeTable]:
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(None, shared_decode_table, source, self._run_dir)
        self._loading[source.name] = future
        future.add_done_callback(lambda done: self._loaded(source, done))
        return future

    def _loaded(self, source: TokenizerSource, done: asyncio.Future[DecodeTable]) -> None:
        if not done.cancelled() and done.exception() is None and self._sources.get(source.name) == source:
            self._tables[source.name] = done.result()
            self._loading.pop(source.name, None)
