"""The control-plane routes that need the router: workers, tokenizers, loads, cache flush, profiling."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import orjson

from smg import __version__
from smg.engines.base import EngineError
from smg.engines.grpc.facts import LoadReport, Outcome
from smg.messages import AdminCall, Reply, TokenizerReport, TokenizerSource
from smg.router.lifecycle import AnyAdmin
from smg.router.registry import check_parsers, parsers_of
from smg.router.spec import RegistrationError, read_update
from smg.router.urls import worker_url
from smg.router.worker import DRAINING, PENDING, READY, ModelCard, Worker

if TYPE_CHECKING:
    from smg.router.process import RouterProcess

log = logging.getLogger("smg.router.admin")

JSON = ("content-type", "application/json")
MAX_BODY = 1 << 20
# Engines that take management calls over ZMQ.
CALLABLE_OVER_ZMQ = ("vllm",)

Answer = tuple[int, list[tuple[str, str]], bytes]


def answer(status: int, value: Any, *headers: tuple[str, str]) -> Answer:
    """A JSON answer."""
    return status, [JSON, *headers], orjson.dumps(value)


def worker_error(status: int, code: str, message: str) -> Answer:
    """An error of the workers API."""
    return answer(status, {"error": message, "code": code})


class Admin:
    """Dispatches ``AdminCall`` messages; every one is answered with exactly one ``Reply``."""

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self._tokenizer_ids: dict[str, str] = {}
        self._tokenizer_reports: dict[str, TokenizerReport] = {}

    def on_call(self, call: AdminCall) -> None:
        """A message from a frontend."""
        self.router.spawn(self._serve(call), f"admin {call.path}")

    async def _serve(self, call: AdminCall) -> None:
        try:
            status, headers, body = await self._route(call)
        except RegistrationError as error:
            status, headers, body = worker_error(400, error.code, error.message)
        except Exception:
            log.exception("control-plane call %s %s failed", call.method, call.path)
            status, headers, body = worker_error(500, "INTERNAL_ERROR", "the call failed, see the log")
        self.router.links.send("frontend", call.frontend, Reply(call.seq, status, headers, body))

    def _route(self, call: AdminCall) -> Coroutine[Any, Any, Answer]:
        path = call.path
        if path == "/workers" or path.startswith("/workers/"):
            return self._workers(call, path[len("/workers/") :])
        if path == "/v1/tokenizers" or path.startswith("/v1/tokenizers/"):
            return self._tokenizers(call, path[len("/v1/tokenizers/") :])
        if path in ("/loads", "/get_loads"):
            return self._loads()
        operation: Callable[[AnyAdmin], Awaitable[Outcome]]
        if path == "/flush_cache":
            operation, word = lambda admin: admin.flush_cache(), "workers_flushed"
        elif path == "/start_profile":
            operation, word = lambda admin: admin.start_profile(), "workers_profiled"
        else:
            operation, word = lambda admin: admin.stop_profile(), "workers_profiled"
        return self._on_all(operation, word)

    # Workers --------------------------------------------------------------------------------------

    async def _workers(self, call: AdminCall, worker_id: str) -> Answer:
        if not worker_id:
            if call.method == "POST":
                return self._create(json_object(call.body))
            return self._list(parse_qs(call.query).get("model", [None])[0])
        try:
            uuid.UUID(worker_id)
        except ValueError:
            return worker_error(400, "BAD_REQUEST", f"'{worker_id}' is not a worker id (expected a UUID)")
        worker = self.router.registry.workers.get(worker_id)
        if worker is None:
            return self._gone(call.method, worker_id)
        if call.method == "GET":
            return answer(200, worker_object(worker))
        if call.method == "DELETE":
            if worker.status != DRAINING:
                self.router.lifecycle.drain(worker)
            return answer(202, self._accepted(worker, "worker is draining"))
        if worker.status == DRAINING:
            return worker_error(409, "WORKER_DRAINING", f"Worker {worker_id} is being removed")
        if call.method == "PATCH":
            return self._patch(worker, json_object(call.body))
        return self._replace(worker, json_object(call.body))

    def _gone(self, method: str, worker_id: str) -> Answer:
        failed = self.router.failed_jobs.get(worker_id)
        if failed is None or method != "GET":
            return worker_error(404, "WORKER_NOT_FOUND", f"Worker {worker_id} not found")
        url, reason, when = failed
        job = {
            "job_type": "AddWorker", "worker_url": url, "status": "failed", "message": reason,
            "timestamp": int(when),
        }  # fmt: skip
        return answer(200, {"id": worker_id, "url": url, "status": "failed", "is_healthy": False, "job_status": job})

    def _create(self, spec: dict[str, Any]) -> Answer:
        registry = self.router.registry
        url = spec.get("url")
        existing = registry.find_url(worker_url(url)) if isinstance(url, str) else []
        if existing:
            creating = existing[0].status == PENDING
            code = "WORKER_CREATE_IN_PROGRESS" if creating else "WORKER_ALREADY_EXISTS"
            return worker_error(409, code, f"Worker {url} already exists")
        worker = self.router.registry.new_worker(spec, self.router.breaker_changed)
        if self.router.lifecycle.running >= self.router.settings.job_queue_capacity:
            return worker_error(503, "JOB_QUEUE_FULL", "too many registrations are running, try again later")
        self.router.lifecycle.register(worker)
        location = f"/workers/{worker.id}"
        return answer(202, self._accepted(worker, "worker is being registered"), ("location", location))

    def _accepted(self, worker: Worker, message: str) -> dict[str, Any]:
        return {
            "status": "accepted", "worker_id": worker.id, "url": worker.url, "location": f"/workers/{worker.id}",
            "message": message,
        }  # fmt: skip

    def _patch(self, worker: Worker, body: dict[str, Any]) -> Answer:
        update = read_update(body)
        labels = {**worker.labels, **(update.labels or {})}
        if labels.get("model_id") != worker.labels.get("model_id"):
            raise RegistrationError(
                "PATCH cannot change the label model_id: it names the model when PUT registers again"
            )
        try:
            check_parsers(worker.url, worker.cards, labels)
        except ValueError as error:
            # Updates are jobs: they are accepted, and one that cannot be done leaves the worker as it was.
            log.error("worker %s is not updated: %s", worker.name, error)
            worker.error, worker.failed_at = str(error), time.time()
            return answer(202, self._accepted(worker, f"worker is not updated: {error}"))
        if worker.status != PENDING:
            worker.error = ""
        spec = {**worker.spec, "labels": {**(worker.spec.get("labels") or {}), **(update.labels or {})}}
        spec.update({name: body[name] for name in ("priority", "cost", "api_key", "health") if name in body})
        worker.labels, worker.spec = labels, spec
        if update.priority is not None:
            worker.priority = update.priority
        if update.cost is not None:
            worker.cost = update.cost
        if update.health is not None:
            self.router.lifecycle.watch(worker.url)
        self.router.registry.changed()
        return answer(202, self._accepted(worker, "worker is updated"))

    def _replace(self, worker: Worker, spec: dict[str, Any]) -> Answer:
        url = spec.get("url")
        if not isinstance(url, str):
            return worker_error(400, "BAD_REQUEST", "a registration needs the worker's url")
        if worker_url(url) != worker.url:
            return worker_error(400, "BAD_REQUEST", "the URL of a worker cannot be changed")
        labels = spec.get("labels") or {}
        if isinstance(labels, dict):
            spec = {**spec, "labels": {**(worker.spec.get("labels") or {}), **labels}}
        renewed = self.router.registry.new_worker(spec, self.router.breaker_changed)
        cards = renewed.cards or [ModelCard(card.id) for card in worker.cards]  # what the engine will name again
        try:
            check_parsers(worker.url, cards, renewed.labels)
        except ValueError as error:
            raise RegistrationError(str(error)) from error
        self.router.lifecycle.replace(worker, renewed)
        return answer(202, self._accepted(renewed, "worker is being registered again"))

    def _list(self, model: str | None) -> Answer:
        workers = [
            worker
            for worker in self.router.registry.workers.values()
            if model is None or any(card.id == model for card in worker.cards)
        ]
        counts = {
            kind: sum(worker.worker_type == kind for worker in workers) for kind in ("prefill", "decode", "regular")
        }
        stats = {f"{kind}_count": count for kind, count in counts.items()}
        return answer(200, {"workers": [worker_object(w) for w in workers], "total": len(workers), "stats": stats})

    # Tokenizers -----------------------------------------------------------------------------------

    async def _tokenizers(self, call: AdminCall, name: str) -> Answer:
        registry = self.router.registry
        if not name:
            if call.method == "POST":
                return self._add_tokenizer(json_object(call.body))
            return answer(200, {"tokenizers": [self._tokenizer(source) for source in registry.tokenizers.values()]})
        wants_status = name.endswith("/status")
        source = self._find_tokenizer(name.removesuffix("/status"))
        if call.method == "DELETE":
            if source is None:
                return answer(404, {"success": False, "message": f"Tokenizer '{name}' not found"})
            del registry.tokenizers[source.name]
            registry.removed_tokenizers.add(source.name)
            registry.changed()
            return answer(200, {"success": True, "message": f"Tokenizer '{source.name}' removed"})
        if source is None:
            kind = "not_found" if wants_status else "tokenizer_not_found"
            return answer(404, {"error": {"message": f"Tokenizer '{name}' not found", "type": kind}})
        if wants_status:
            return answer(200, self._tokenizer_status(source))
        return answer(200, self._tokenizer(source))

    def on_tokenizer(self, report: TokenizerReport) -> None:
        """A process of the pool has loaded a tokenizer, or failed to."""
        self._tokenizer_reports[report.source.name] = report

    def _report_of(self, source: TokenizerSource) -> TokenizerReport | None:
        report = self._tokenizer_reports.get(source.name)
        return report if report is not None and report.source == source else None

    def _tokenizer_status(self, source: TokenizerSource) -> dict[str, Any]:
        report, shown = self._report_of(source), {"id": self._id_of(source)}
        if report is None:
            return {**shown, "status": "processing", "message": f"loading tokenizer '{source.name}'"}
        if report.failure:
            return {**shown, "status": "failed", "message": report.failure}
        return {**shown, "status": "completed", "message": "registered", "vocab_size": report.vocab_size}

    def _find_tokenizer(self, name: str) -> TokenizerSource | None:
        sources = self.router.registry.tokenizers
        if name in sources:
            return sources[name]
        return next((source for source in sources.values() if self._id_of(source) == name), None)

    def _add_tokenizer(self, body: dict[str, Any]) -> Answer:
        name, path = body.get("name"), body.get("source")
        if not isinstance(name, str) or not isinstance(path, str):
            return 422, [("content-type", "text/plain; charset=utf-8")], b"name and source must be strings"
        registry = self.router.registry
        if name in registry.tokenizers:
            found = self._id_of(registry.tokenizers[name])
            return answer(409, {"id": found, "status": "failed", "message": f"Tokenizer '{name}' already exists"})
        source = TokenizerSource(name, path, str(body.get("chat_template_path") or ""))
        registry.tokenizers[name] = source
        registry.removed_tokenizers.discard(name)
        registry.changed()
        return answer(202, {"id": self._id_of(source), "status": "pending", "message": f"loading tokenizer '{name}'"})

    def _id_of(self, source: TokenizerSource) -> str:
        return self._tokenizer_ids.setdefault(source.name, str(uuid.uuid5(uuid.NAMESPACE_URL, source.name)))

    def _tokenizer(self, source: TokenizerSource) -> dict[str, Any]:
        sizes = {model.tokenizer: model.vocab_size for model in self.router.registry.table().models}
        report = self._report_of(source)
        size = sizes.get(source.name) or (report.vocab_size if report is not None else 0) or None
        return {"id": self._id_of(source), "name": source.name, "source": source.path, "vocab_size": size}

    # All workers ----------------------------------------------------------------------------------

    def _one_per_url(self) -> list[Worker]:
        workers = {worker.url: worker for worker in self.router.registry.workers.values() if worker.status != PENDING}
        return list(workers.values())

    async def _loads(self) -> Answer:
        async def report(worker: Worker) -> tuple[Worker, LoadReport] | None:
            try:
                return worker, await self.router.lifecycle.admin(worker).loads()
            except EngineError:
                return None

        gathered = await asyncio.gather(*(report(worker) for worker in self._one_per_url()))
        loads = [
            {"worker": worker.url, "worker_type": worker.worker_type, **asdict(rank)}
            for worker, found in filter(None, gathered)
            for rank in found.loads
        ]
        count = len(loads) or 1
        aggregate = {
            "total_running_reqs": sum(load["num_running_reqs"] for load in loads),
            "total_waiting_reqs": sum(load["num_waiting_reqs"] for load in loads),
            "total_reqs": sum(load["num_total_reqs"] for load in loads),
            "avg_token_usage": sum(load["token_usage"] for load in loads) / count,
            "avg_throughput": sum(load["gen_throughput"] for load in loads) / count,
            "avg_utilization": sum(load["utilization"] for load in loads) / count,
        }
        body = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": f"smg-{__version__}",
            "dp_rank_count": len(loads),
            "loads": loads,
            "aggregate": aggregate,
        }
        return answer(200, body)

    async def _on_all(self, operation: Callable[[AnyAdmin], Awaitable[Outcome]], word: str) -> Answer:
        """Run one management call on every worker; 206 when some failed."""

        async def one(worker: Worker) -> tuple[str, str]:
            try:
                outcome = await operation(self.router.lifecycle.admin(worker))
            except EngineError as error:
                return worker.url, error.message or error.code
            return worker.url, "" if outcome.success else outcome.message or "the worker refused"

        workers = self._one_per_url()
        reachable = [worker for worker in workers if worker.transport == "grpc" or worker.kind in CALLABLE_OVER_ZMQ]
        results = await asyncio.gather(*(one(worker) for worker in reachable))
        successful = [url for url, error in results if not error]
        failed = [{"worker": url, "error": error} for url, error in results if error]
        body = {
            "status": "partial_success" if failed else "success",
            "message": f"{len(successful)} of {len(reachable)} workers done",
            word: len(successful),
            "total_http_workers": 0,
            "total_grpc_workers": sum(worker.transport == "grpc" for worker in reachable),
            "total_zmq_workers_skipped": len(workers) - len(reachable),
            "total_workers": len(workers),
            "successful": successful,
            "failed": failed,
        }
        return answer(206 if failed else 200, body)


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises ``RegistrationError``."""
    if len(body) > MAX_BODY:
        raise RegistrationError("the body is too large")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RegistrationError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RegistrationError("the body must be a JSON object")
    return value


def card_object(card: ModelCard, labels: dict[str, str]) -> dict[str, Any]:
    """A model card as the workers API shows it: with the parsers that ``labels`` give it, without empty fields."""
    parsers = parsers_of(card, labels)
    fields = {**asdict(card), "tool_parser": parsers.tool, "reasoning_parser": parsers.reasoning}
    return {**{name: value for name, value in fields.items() if value and name != "extra"}, **card.extra}


def worker_object(worker: Worker) -> dict[str, Any]:
    """A worker as the workers API shows it. Keys (``api_key``) are never echoed."""
    shown: dict[str, Any] = {
        "id": worker.id,
        "model_id": worker.cards[0].id if worker.cards else None,
        "url": worker.name,
        "models": [card_object(card, worker.labels) for card in worker.cards],
        "worker_type": worker.worker_type,
        "connection_mode": worker.transport,
        "runtime_type": worker.kind or "unspecified",
        "labels": worker.labels,
        "priority": worker.priority,
        "cost": worker.cost,
        "max_connection_attempts": worker.spec.get("max_connection_attempts") or 20,
        "is_healthy": worker.status == READY,
        "status": worker.status,
        "load": worker.inflight,
        "http2": worker.transport == "grpc",
    }
    for name in ("bootstrap_port", "kv_connector"):
        value = worker.spec.get(name) or worker.labels.get(name)
        if value:
            shown[name] = value
    if worker.dp_rank >= 0:
        shown["dp_rank"], shown["dp_size"] = worker.dp_rank, worker.dp_size
    if worker.report is not None:
        shown["engine_load"] = [asdict(rank) for rank in worker.report.loads]
    job = job_status(worker)
    if job is not None:
        shown["job_status"] = job
    return shown


def job_status(worker: Worker) -> dict[str, Any] | None:
    """The registration that is running, or the last change if it failed."""
    if worker.status == PENDING:
        kind, status, message, when = "AddWorker", "processing", worker.error or "connecting", time.time()
    elif worker.error:
        kind, status, message, when = "UpdateWorker", "failed", worker.error, worker.failed_at
    else:
        return None
    return {
        "job_type": kind, "worker_url": worker.url, "status": status, "message": message, "timestamp": int(when),
    }  # fmt: skip
