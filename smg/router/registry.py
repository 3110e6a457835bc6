"""The registry: which workers there are, which models they serve, and what the other processes are told about it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from smg.messages import ModelInfo, ModelTable, TokenizerSource
from smg.models.registry import ParserNames, agree, check_override
from smg.router.breaker import NAMES, BreakerRules, CircuitBreaker
from smg.router.spec import RegistrationError, model_card, read_worker
from smg.router.worker import DRAINING, PENDING, READY, ModelCard, Worker
from smg.settings import Settings

log = logging.getLogger("smg.router.registry")

STATE_FILE = "workers.json"


class Registry:
    """Workers by id, models by name. ``on_change`` is called after every change that others must hear of."""

    def __init__(self, settings: Settings, run_dir: Path, on_change: Callable[[], None]) -> None:
        self.settings = settings
        self.workers: dict[str, Worker] = {}
        self.by_model: dict[str, list[Worker]] = {}
        self.by_address: dict[tuple[str, int], Worker] = {}
        self.by_name: dict[str, Worker] = {}
        self.known_ids: dict[str, str] = {}
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

    def new_worker(
        self, spec: dict[str, Any], on_breaker: Callable[[Worker, str, str], None], dp_rank: int = -1
    ) -> Worker:
        """A pending worker from a registration body. Raises ``RegistrationError``."""
        checked = read_worker(spec, self.settings.detok_procs, self.settings.zmq_engine_count or 1)
        worker: Worker
        breaker = CircuitBreaker(self.rules, lambda old, new: on_breaker(worker, NAMES[old], NAMES[new]))
        worker = Worker(url=checked.url, spec=spec, breaker=breaker, labels=dict(checked.labels or {}))
        worker.dp_rank = dp_rank
        first_rank = f"{worker.name}@0"  # what it was called when its ranks were told apart
        worker.id = self.known_ids.get(worker.name) or self.known_ids.get(first_rank) or worker.id
        worker.transport = "zmq" if worker.url.startswith("ipc://") else "grpc"
        worker.worker_type = checked.worker_type or "regular"
        worker.priority = 50 if checked.priority is None else checked.priority
        worker.cost = 1.0 if checked.cost is None else checked.cost
        worker.kind = checked.kind
        worker.cards = [model_card(card) for card in spec.get("models") or []]
        try:
            check_parsers(worker.url, worker.cards, {})  # those of labels when the worker has told its model
        except ValueError as error:
            raise RegistrationError(str(error)) from error
        return worker

    def find_url(self, url: str) -> list[Worker]:
        """All workers behind one URL (several with data-parallel ranks)."""
        return [worker for worker in self.workers.values() if worker.url == url]

    def at(self, url: str, dp_rank: int) -> Worker | None:
        """The worker with this address."""
        return self.by_address.get((url, dp_rank))

    def add(self, worker: Worker) -> None:
        """Put a worker into the list, in the place of an older entry with its id."""
        self.workers[worker.id] = worker
        self.changed()

    def remove(self, worker: Worker) -> None:
        self.workers.pop(worker.id, None)
        self.known_ids.pop(worker.name, None)
        self.changed()

    def changed(self) -> None:
        """Rebuild the index, save the list, tell the others."""
        self.by_model = {}
        self.by_address = {}
        self.by_name = {}
        for worker in self.workers.values():
            self.by_name[worker.name] = worker
            self.by_address[(worker.url, worker.dp_rank)] = worker
            for name in dict.fromkeys(card.id for card in worker.cards):
                self.by_model.setdefault(name, []).append(worker)
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
        known = [worker for worker in workers if _is_known(worker)]
        cards = [card for worker in known for card in worker.cards if card.id == name]
        overrides = self._agreed(
            name, [parsers_of(c, worker.labels) for worker in known for c in worker.cards if c.id == name]
        )
        first, card = known[0], cards[0]
        aliases = {alias for c in cards for alias in c.aliases}
        aliases.update(alias for alias, target in self.settings.model_aliases.items() if target == name)
        return ModelInfo(
            id=name,
            tokenizer=name
            if name in self.tokenizers or name in self.removed_tokenizers
            else self._shared_tokenizer(name),
            kinds=sorted({worker.wire_kind for worker in known}),
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
            prefix_routed=len(known) > 1,
            decoding_start=_decoding_start(known),
            class_labels=class_labels(card.extra.get("id2label") or first.labels.get("id2label_json")),
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
        kept = [worker for worker in self.workers.values() if worker.status != DRAINING]
        state = {
            "workers": list({worker.url: worker.spec for worker in kept}.values()),
            "ids": {worker.name: worker.id for worker in kept},
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
        """Registration bodies and tokenizers of the router that ran before, None at first start. Its workers keep their
        ids."""
        try:
            state = msgspec.json.decode(self._state_file.read_bytes())
            sources = msgspec.convert(state["tokenizers"], list[TokenizerSource])
            self.known_ids = dict(state["ids"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            log.error("the saved worker list cannot be read: %s", error)
            return None
        return state["workers"], sources, state["removed_tokenizers"]


def _is_known(worker: Worker) -> bool:
    """Whether the engine has described itself: a pending worker serves nothing yet."""
    return worker.status not in (PENDING, DRAINING) and bool(worker.kind)


def _known(workers: Iterable[Worker]) -> bool:
    return any(map(_is_known, workers))


def _decoding_start(workers: Sequence[Worker]) -> str:
    """The label ``constrained_decoding_start`` if the workers agree on it."""
    said = {worker.labels.get("constrained_decoding_start", "") for worker in workers}
    return said.pop() if len(said) == 1 else ""


def class_labels(value: Any) -> dict[str, str]:
    """Names of a classifier's classes by index, from a card's ``id2label`` or the JSON text of a worker's; {} for
    anything that is none."""
    try:
        if isinstance(value, str):
            return msgspec.json.decode(value, type=dict[str, str])
        return msgspec.convert(value or {}, dict[str, str])
    except msgspec.MsgspecError:
        return {}


def parsers_of(card: ModelCard, labels: dict[str, str]) -> ParserNames:
    """A card keeps its own values; labels fill the fields it leaves empty."""
    return ParserNames(
        tool=card.tool_parser or labels.get("tool_parser", ""),
        reasoning=card.reasoning_parser or labels.get("reasoning_parser", ""),
    )


def check_parsers(url: str, cards: Iterable[ModelCard], labels: dict[str, str]) -> None:
    """Raises ``ValueError`` if ``cards`` or ``labels`` of the worker at ``url`` name an unknown parser."""
    for card in cards:
        check_override(url, card.id, parsers_of(card, labels))
