"""The registry: which workers there are, which models they serve, and what the other processes are told about it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from smg.messages import ModelInfo, ModelTable, TokenizerSource
from smg.models.registry import ParserNames, agree, check_override
from smg.router.breaker import NAMES, BreakerRules, CircuitBreaker
from smg.router.worker import DRAINING, READY, ModelCard, Worker
from smg.settings import Settings

log = logging.getLogger("smg.router.registry")

STATE_FILE = "workers.json"


class RegistrationError(Exception):
    """A worker description that cannot be registered. ``code`` is the error code of the workers API."""

    def __init__(self, message: str, code: str = "BAD_REQUEST") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Registry:
    """Workers by id, models by name. ``on_change`` is called after every change that others must hear of."""

    def __init__(self, settings: Settings, run_dir: Path, on_change: Callable[[], None]) -> None:
        self.settings = settings
        self.workers: dict[str, Worker] = {}
        self.by_model: dict[str, list[Worker]] = {}
        self.tokenizers: dict[str, TokenizerSource] = {}
        self.removed_tokenizers: set[str] = set()
        self.version = 0
        self._agreements: dict[tuple[str, tuple[ParserNames, ...]], ParserNames] = {}
        self._on_change = on_change
        self._state_file = run_dir / STATE_FILE
        self.rules = BreakerRules(
            settings.cb_failure_threshold,
            settings.cb_success_threshold,
            float(settings.cb_timeout_duration_secs),
            not settings.disable_circuit_breaker,
        )

    # Workers ---------------------------------------------------------------------------------------

    def new_worker(self, spec: dict[str, Any], on_breaker: Callable[[Worker, str, str], None]) -> Worker:
        """A pending worker from a registration body. Raises ``RegistrationError``."""
        url = spec.get("url")
        if not isinstance(url, str) or not url.startswith(("http://", "https://", "grpc://", "grpcs://", "ipc://")):
            raise RegistrationError(
                "URL must start with a lowercase http://, https://, grpc://, grpcs://, or ipc:// scheme"
            )
        if url.startswith(("http://", "https://")):
            raise RegistrationError(f"HTTP workers are not supported by this gateway: {url}")
        labels = {str(k): str(v) for k, v in (spec.get("labels") or {}).items()}
        worker: Worker
        breaker = CircuitBreaker(self.rules, lambda old, new: on_breaker(worker, NAMES[old], NAMES[new]))
        worker = Worker(url=url, spec=spec, breaker=breaker, labels=labels)
        worker.transport = "zmq" if url.startswith("ipc://") else "grpc"
        worker.worker_type = spec.get("worker_type") or "regular"
        worker.priority = int(spec.get("priority") or 50)
        worker.cost = float(spec.get("cost") or 1.0)
        kind = spec.get("runtime_type") or spec.get("runtime") or ""
        worker.kind = "" if kind in ("unspecified", "generic", "external") else kind
        worker.cards = [parse_card(card) for card in spec.get("models") or []]
        for card in worker.cards:
            names = ParserNames(tool=card.tool_parser, reasoning=card.reasoning_parser)
            check_override(url, card.id, names)
        return worker

    def find_url(self, url: str) -> list[Worker]:
        """All workers behind one URL (several with data-parallel ranks)."""
        return [worker for worker in self.workers.values() if worker.url == url]

    def add(self, worker: Worker) -> None:
        """Put a worker (still pending) into the list."""
        self.workers[worker.id] = worker
        self.changed()

    def remove(self, worker: Worker) -> None:
        self.workers.pop(worker.id, None)
        self.changed()

    def changed(self) -> None:
        """Rebuild the index, save the list, tell the others."""
        self.by_model = {}
        for worker in self.workers.values():
            for card in worker.cards:
                self.by_model.setdefault(card.id, []).append(worker)
        self.version += 1
        self._save()
        self._on_change()

    # What others are told --------------------------------------------------------------------------

    def table(self) -> ModelTable:
        """The broadcast of the current state."""
        regular = [worker for worker in self.workers.values() if worker.status != DRAINING]
        ready = sum(worker.status == READY for worker in regular)
        models = [self._model(name, workers) for name, workers in self.by_model.items() if _known(workers)]
        return ModelTable(self.version, models, list(self.tokenizers.values()), len(regular), ready)

    def _model(self, name: str, workers: list[Worker]) -> ModelInfo:
        known = [worker for worker in workers if worker.kind]
        cards = [card for worker in known for card in worker.cards if card.id == name]
        overrides = self._agreed(name, [_parsers(c, worker) for worker in known for c in worker.cards if c.id == name])
        first, card = known[0], cards[0]
        aliases = {alias for c in cards for alias in c.aliases}
        aliases.update(alias for alias, target in self.settings.model_aliases.items() if target == name)
        return ModelInfo(
            id=name,
            tokenizer=name
            if name in self.tokenizers or name in self.removed_tokenizers
            else self._shared_tokenizer(name),
            kinds=sorted({worker.kind for worker in known}),
            aliases=sorted(aliases),
            context_length=card.context_length or first.context_length,
            vocab_size=first.vocab_size,
            tool_parser=overrides.tool,
            reasoning_parser=overrides.reasoning,
            default_sampling=first.default_sampling,
            architectures=card.architectures,
            model_type=card.hf_model_type,
            display_name=card.display_name,
            ready_workers=sum(worker.status == READY for worker in known),
            supports_embedding=any(worker.supports_embedding for worker in known),
        )

    def _agreed(self, model: str, declared: list[ParserNames]) -> ParserNames:
        """One override per model; a disagreement is logged once, not at every broadcast."""
        key = (model, tuple(declared))
        if key not in self._agreements:
            self._agreements[key] = agree(model, declared)
        return self._agreements[key]

    def _shared_tokenizer(self, name: str) -> str:
        """The start-up tokenizer serves every model that has none of its own (single-router mode)."""
        source = self.settings.tokenizer_source
        if source is not None and not self.settings.enable_igw and source in self.tokenizers:
            return source
        return name

    # Persistence -----------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write the list where a restarted router finds it (atomically)."""
        specs = {worker.url: worker.spec for worker in self.workers.values() if worker.status != DRAINING}
        state = {
            "workers": list(specs.values()),
            "tokenizers": list(self.tokenizers.values()),
            "removed_tokenizers": sorted(self.removed_tokenizers),
        }
        temporary = self._state_file.with_suffix(".tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(state))
            os.chmod(temporary, 0o600)
            temporary.replace(self._state_file)
        except OSError as error:
            log.error("the worker list cannot be saved: %s", error)

    def saved(self) -> tuple[list[dict[str, Any]], list[TokenizerSource], list[str]] | None:
        """Registration bodies and tokenizers of the router that ran before, None at first start."""
        try:
            state = msgspec.json.decode(self._state_file.read_bytes())
            sources = msgspec.convert(state["tokenizers"], list[TokenizerSource])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            log.error("the saved worker list cannot be read: %s", error)
            return None
        return state["workers"], sources, state["removed_tokenizers"]


def _known(workers: Iterable[Worker]) -> bool:
    return any(worker.kind and worker.status != DRAINING for worker in workers)


def _parsers(card: ModelCard, worker: Worker) -> ParserNames:
    """A card keeps its own values; labels fill the fields it leaves empty."""
    return ParserNames(
        tool=card.tool_parser or worker.labels.get("tool_parser", ""),
        reasoning=card.reasoning_parser or worker.labels.get("reasoning_parser", ""),
    )


def parse_card(raw: Any) -> ModelCard:
    """A model card of a registration body. Raises ``RegistrationError``."""
    if not isinstance(raw, dict) or not isinstance(raw.get("id"), str) or not raw["id"]:
        raise RegistrationError("every entry of 'models' needs a non-empty 'id'")
    known = {
        name: raw[name] for name in ModelCard.__slots__ if name in raw and name != "extra" and raw[name] is not None
    }
    extra = {name: value for name, value in raw.items() if name not in ModelCard.__slots__}
    try:
        return ModelCard(**known, extra=extra)
    except TypeError as error:
        raise RegistrationError(f"bad model card: {error}") from error
