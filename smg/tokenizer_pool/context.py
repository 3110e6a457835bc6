"""What request handling sees of its tokenizer process: the served models and their tokenizers, loaded off the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from smg.api.chat_shape import ChatShapes
from smg.api.context import Flags
from smg.api.errors import ApiError, refused
from smg.api.plan import Codec
from smg.engines.base import Constraint
from smg.engines.grpc.codecs import CODECS
from smg.engines.zmq.codecs import ZMQ_CODECS
from smg.messages import ModelInfo, ModelTable, TokenizerReport, TokenizerSource
from smg.models.grammar_check import GrammarChecker
from smg.models.registry import ParserNames
from smg.readiness import unserved
from smg.settings import Settings
from smg.telemetry.metrics import PoolMetrics
from smg.tokenizer_pool.model import TokenizerModel
from smg.vocab.load import TokenizerLoadError
from smg.vocab.shared import share_decode_table

log = logging.getLogger("smg.pool.models")


class PoolContext:
    """``smg.api.context.Context`` of one tokenizer process.

    ``informed`` turns True with the first table of models. ``on_loaded`` is called when a tokenizer has been loaded or
    has failed.
    """

    def __init__(self, settings: Settings, run_dir: Path, metrics: PoolMetrics, on_loaded: Callable[[], None]) -> None:
        self.flags = Flags(
            ParserNames(tool=settings.tool_call_parser or "", reasoning=settings.reasoning_parser or ""),
            settings.tool_constraint == "native",
            settings.block_size,
            tuple(name.lower() for name in settings.routing_key_headers or ()) or Flags().routing_key_headers,
        )
        self.codecs: dict[str, Codec] = {**CODECS, **ZMQ_CODECS}
        self.chat_shapes = ChatShapes()
        self._settings = settings
        self._run_dir = run_dir
        self._metrics = metrics
        self._on_loaded = on_loaded
        self._table = ModelTable(0, [], [])
        self.informed = False
        self._models: dict[str, ModelInfo] = {}
        self._sources: dict[str, TokenizerSource] = {}
        self._tokenizers: dict[str, TokenizerModel] = {}
        self._failures: dict[str, str] = {}
        self._loading: dict[str, TokenizerSource] = {}
        self._grammars = GrammarChecker()

    # Broadcasts of the router ---------------------------------------------------------------------

    def update(self, table: ModelTable) -> None:
        """Take over the table of models; new tokenizers begin to load, removed ones go."""
        self._table = table
        self.informed = True
        self._models = {alias: model for model in table.models for alias in model.aliases}
        self._models.update({model.id: model for model in table.models})
        sources = {source.name: source for source in table.tokenizers}
        for name in [name for name in self._sources if sources.get(name) != self._sources[name]]:
            self._tokenizers.pop(name, None)
            self._failures.pop(name, None)
        self._sources = sources
        for name, source in sources.items():
            if name not in self._tokenizers and name not in self._failures and self._loading.get(name) != source:
                self._load(source)

    def _load(self, source: TokenizerSource) -> None:
        self._loading[source.name] = source
        future = asyncio.get_running_loop().run_in_executor(None, self._load_now, source)
        future.add_done_callback(lambda done: self._finished(source, done))

    def _load_now(self, source: TokenizerSource) -> TokenizerModel:
        model = TokenizerModel.load(source, self._settings, self._metrics)
        model.table = share_decode_table(model.encoder, source, self._run_dir)
        return model

    def _finished(self, source: TokenizerSource, done: asyncio.Future[TokenizerModel]) -> None:
        if self._loading.get(source.name) == source:
            del self._loading[source.name]
        if done.cancelled() or self._sources.get(source.name) != source:
            return
        error = done.exception()
        if error is None:
            self._tokenizers[source.name] = model = done.result()
            log.info("tokenizer '%s' loaded (%s)", source.name, model.encoder.backend)
        else:
            self._failures[source.name] = str(error)
            expected = isinstance(error, TokenizerLoadError | OSError | ValueError)
            log.error("tokenizer '%s' cannot be loaded: %s", source.name, error, exc_info=None if expected else error)
        self._on_loaded()

    def reports(self) -> list[TokenizerReport]:
        """What became of the tokenizers that are not being loaded any more."""
        sources = self._sources
        loaded = [TokenizerReport(sources[name], model.vocab_size) for name, model in self._tokenizers.items()]
        return loaded + [TokenizerReport(sources[name], 0, text) for name, text in self._failures.items()]

    # What request handling asks -------------------------------------------------------------------

    def find_model(self, name: str) -> ModelInfo | None:
        return self._models.get(name)

    def unserved(self, name: str) -> ApiError:
        return unserved(self._table, name)

    def tokenizer(self, info: ModelInfo) -> TokenizerModel:
        name = info.tokenizer
        loaded = self._tokenizers.get(name)
        if loaded is not None:
            return loaded
        if name in self._loading:
            raise ApiError(503, "tokenizer_not_ready", f"Tokenizer for model '{info.id}' is being loaded", gateway=True)
        reason = self._failures.get(name, "no tokenizer is registered for it")
        message = f"Tokenizer for model '{info.id}' could not be loaded: {reason}"
        raise refused("tokenizer_load_failed", message, status=503)

    def named_tokenizer(self, name: str) -> TokenizerModel | None:
        if name in ("", "unknown"):
            name = next(iter(self._sources), "")
        model = self._models.get(name)
        if name not in self._sources and model is not None:
            name = model.tokenizer
        if name in self._loading:
            raise ApiError(503, "tokenizer_not_ready", f"Tokenizer '{name}' is being loaded", gateway=True)
        if name in self._failures:
            message = f"Tokenizer '{name}' could not be loaded: {self._failures[name]}"
            raise refused("tokenizer_load_failed", message, status=503)
        return self._tokenizers.get(name)

    def tokenizer_names(self) -> Sequence[str]:
        return [*self._sources, *(model.id for model in self._table.models if model.id not in self._sources)]

    def check_constraint(self, constraint: Constraint) -> str | None:
        return self._grammars.check(constraint)
