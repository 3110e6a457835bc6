"""Everything the pool holds of one model: files, encoder, caches, prompt renderer."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Protocol

from smg.messages import TokenizerSource
from smg.models.harmony import ResponsesConversation
from smg.models.prompt import Piece, PromptError, RenderedPrompt, RenderRequest
from smg.models.thinking import ThinkingSwitch
from smg.tokenizer_pool.cache import CacheCounters, ExactCache, PrefixCache
from smg.tokenizer_pool.renderer import PromptRenderer
from smg.vocab.decode import DecodeTable
from smg.vocab.encoder import Encoder, load_encoder
from smg.vocab.load import ModelFiles, load_model_dir


class ModelOptions(Protocol):
    """The settings that matter here. Byte and entry bounds of the caches are for all tokenizer processes together."""

    @property
    def trust_control_tokens(self) -> bool: ...
    @property
    def tokenizer_procs(self) -> int: ...
    @property
    def tokenizer_cache_enable_l0(self) -> bool: ...
    @property
    def tokenizer_cache_l0_max_entries(self) -> int: ...
    @property
    def tokenizer_cache_l0_max_memory(self) -> int: ...
    @property
    def tokenizer_cache_enable_l1(self) -> bool: ...
    @property
    def tokenizer_cache_l1_max_memory(self) -> int: ...


class EvictionCounter(Protocol):
    """Counts per cache layer."""

    def add(self, amount: float, *labels: str) -> None: ...


class CacheMetrics(Protocol):
    """Where cache activity is counted, per layer ("l0", "l1")."""

    @property
    def cache_evictions(self) -> EvictionCounter: ...

    def cache_lookup(self, layer: str, *, hit: bool, reused_bytes: int = 0) -> None: ...


class _Meter:
    """Passes on to the metrics what a cache has counted since the last time."""

    def __init__(self, layer: str, counters: CacheCounters, metrics: CacheMetrics) -> None:
        self._layer, self._counters, self._metrics = layer, counters, metrics
        self._hits = self._misses = self._evictions = self._bytes = 0

    def report(self) -> None:
        """One encode has asked the cache at most once."""
        counters = self._counters
        if counters.hits > self._hits:
            reused = counters.reused_bytes - self._bytes
            self._metrics.cache_lookup(self._layer, hit=True, reused_bytes=reused)
        elif counters.misses > self._misses:
            self._metrics.cache_lookup(self._layer, hit=False)
        if counters.evictions > self._evictions:
            self._metrics.cache_evictions.add(counters.evictions - self._evictions, self._layer)
        self._hits, self._misses = counters.hits, counters.misses
        self._evictions, self._bytes = counters.evictions, counters.reused_bytes


class TokenizerModel:
    """One model's tokenizer and prompt renderer. Not for concurrent use."""

    def __init__(
        self,
        files: ModelFiles,
        options: ModelOptions | None = None,
        metrics: CacheMetrics | None = None,
        *,
        fast: bool = True,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises ``TokenizerLoadError``. ``fast`` False keeps to the reference encoder and template engine."""
        self.files = files
        self.encoder: Encoder = load_encoder(files, fast=fast)
        self.renderer = PromptRenderer(
            files,
            self.encoder.special_tokens,
            self.encoder.added_tokens,
            trust_control_tokens=options is not None and options.trust_control_tokens,
            fast=fast,
            now=now,
        )
        self.l0: ExactCache | None = None
        self.l1: PrefixCache | None = None
        self._meters: list[_Meter] = []
        if options is not None:
            self._make_caches(options, metrics)

    @classmethod
    def load(
        cls, source: TokenizerSource, options: ModelOptions | None = None, metrics: CacheMetrics | None = None
    ) -> TokenizerModel:
        """Load the model of a source. Takes seconds and may download. Raises ``TokenizerLoadError``."""
        return cls(load_model_dir(source.path, source.chat_template), options, metrics)

    @cached_property
    def table(self) -> DecodeTable:
        """The decode table. A process that has a shared one assigns it; else it is built on first use."""
        return DecodeTable.build(self.encoder.tokenizer, self.encoder.special_ids)

    @property
    def eos_ids(self) -> Sequence[int]:
        """Ids that end a generation."""
        return self.encoder.eos_ids

    @property
    def vocab_size(self) -> int:
        """Ids below this exist, added tokens included."""
        return self.encoder.id_limit

    @property
    def switch(self) -> ThinkingSwitch:
        """The thinking switch of the prompt."""
        return self.renderer.switch

    @property
    def keeps_tools(self) -> bool:
        """The renderer applies ``tool_choice`` itself and takes the client's tool list."""
        return self.renderer.keeps_tools

    def prepare(self, request: RenderRequest) -> tuple[RenderedPrompt, array[int]]:
        """The rendered prompt and its ids. Raises ``PromptError``."""
        rendered = self.renderer.render(request)
        return rendered, self.encode_pieces(rendered.pieces)

    def prepare_responses(self, conversation: ResponsesConversation) -> tuple[RenderedPrompt, array[int]]:
        """The same for a Responses conversation of a model that speaks Harmony. Raises ``PromptError``."""
        rendered = self.renderer.render_responses(conversation)
        return rendered, self.encode_pieces(rendered.pieces)

    def encode_pieces(self, pieces: Sequence[Piece]) -> array[int]:
        """The ids of a prompt in pieces. Where no untrusted piece holds control-token text, and none follows another
        directly, the pieces mean the same as their text, which the caches may know. Raises ``PromptError`` for text
        that is no Unicode."""
        try:
            if self._is_plain(pieces):
                return self.encode("".join([piece.text for piece in pieces]))
            return self.encoder.encode_pieces(pieces)
        except (UnicodeEncodeError, TypeError):  # each encoder has its own way to refuse a lone surrogate
            raise PromptError("The conversation contains text that is not valid Unicode") from None

    def encode(self, text: str) -> array[int]:
        """Ids of a text with control tokens recognised and nothing added; from the caches where they are on."""
        ids = self.l0.get(text) if self.l0 is not None else None
        if ids is None:
            by_prefix = self.l1 is not None and not self.encoder.cuts_up(text)
            ids = self.l1.encode(text) if self.l1 is not None and by_prefix else self.encoder.encode_ids(text)
            if self.l0 is not None:
                self.l0.put(text, ids)
        for meter in self._meters:
            meter.report()
        return ids

    def encode_framed(self, text: str) -> list[int]:
        """Ids of a text with the special tokens that the tokenizer itself puts around a sequence."""
        frame = self.encoder.frame
        if frame is None:
            return self.encoder.encode_framed(text)
        return [*frame[0], *self.encode(text), *frame[1]]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids outside the vocabulary give nothing."""
        return self.table.decode(token_ids, skip_special_tokens)

    def _is_plain(self, pieces: Sequence[Piece]) -> bool:
        """Whether encoding the text of all pieces at once gives the ids of the pieces."""
        if len(pieces) == 1:
            return pieces[0].trusted
        before_trusted = True
        for text, trusted in pieces:
            if trusted:
                if not self.encoder.is_added_token(text):
                    return False
            elif not before_trusted or self.encoder.finder.search(text):
                return False
            before_trusted = trusted
        return True

    def _make_caches(self, options: ModelOptions, metrics: CacheMetrics | None) -> None:
        """The caches that are on. Every tokenizer process has its own: each takes its share of the bounds."""
        share = max(options.tokenizer_procs, 1)
        if options.tokenizer_cache_enable_l0:
            entries = max(options.tokenizer_cache_l0_max_entries // share, 1)
            self.l0 = ExactCache(entries, options.tokenizer_cache_l0_max_memory // share)
        if options.tokenizer_cache_enable_l1:
            memory = options.tokenizer_cache_l1_max_memory // share
            self.l1 = PrefixCache(self.encoder.encode_ids, self.encoder.added_tokens, memory)
        if metrics is not None:
            caches = (("l0", self.l0), ("l1", self.l1))
            self._meters = [_Meter(layer, cache.counters, metrics) for layer, cache in caches if cache is not None]
