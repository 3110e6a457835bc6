"""Embedding and classification requests: one unary engine call per input, all at once, one answer."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import struct
import time
from typing import Any

import orjson

from smg.api.errors import ApiError, refused, render_error
from smg.api.grpc_status import breaker_outcome, http_status, is_retryable
from smg.api.paths import path_of_api
from smg.detok.host import Host
from smg.engines.base import EngineError
from smg.engines.grpc.facts import Embedding
from smg.messages import Dispatch, GenerationPlan, PromptPart, Redispatch, Reply, WorkerRef, WorkerReport

log = logging.getLogger("smg.detok.embedding")

DEFAULT_TIMEOUT_SECS = 300.0


class EmbeddingRun:
    """One request of ``/v1/embeddings`` or ``/v1/classify``; ends like a generation run, but never streams."""

    def __init__(self, host: Host, dispatch: Dispatch, plan: GenerationPlan) -> None:
        self.host = host
        self.plan = plan
        self.seq = dispatch.seq
        self.frontend = dispatch.frontend
        self.route = dispatch.route
        self.workers = dispatch.workers
        self.deadline = plan.deadline
        self.over = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the answer comes from a task."""
        self._task = self.host.spawn(self._run(), "embedding")

    async def _run(self) -> None:
        calls = (self._embed(w, p) for w, p in zip(self.workers, self.plan.parts, strict=True))
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = [failure(result) for result in results]
        failed = next(((w, e) for w, e in zip(self.workers, failures, strict=True) if e is not None), None)
        key = self.route.routing_key
        for worker, part, error in zip(self.workers, self.plan.parts, failures, strict=True):
            outcome = "success" if error is None else breaker_outcome(error.code)
            if failed is not None and error is failed[1] and self._goes_back(error):
                outcome = "neutral"  # the router judges it
            report = WorkerReport(worker.url, self.host.index, outcome, part.prompt_tokens, 0, worker.dp_rank, key)
            self.host.to_router(report)
        if self.over:
            return
        if failed is None:
            body = self._body([result for result in results if isinstance(result, Embedding)])
            headers = [("content-type", "application/json"), ("x-smg-routed-worker-id", self.workers[0].url)]
            self._end(Reply(self.seq, 200, headers, body))
        else:
            self._failed(*failed)

    async def _embed(self, worker: WorkerRef, part: PromptPart) -> Embedding:
        request = part.requests.get(worker.kind)
        if request is None:
            raise EngineError("UNIMPLEMENTED", f"{worker.kind} workers give no embeddings")
        timeout = self.deadline - time.time() if self.deadline else DEFAULT_TIMEOUT_SECS
        return await self.host.client(worker).embed(request, timeout)

    def _goes_back(self, error: EngineError) -> bool:
        return is_retryable(error.code) and not self.over

    def _failed(self, worker: WorkerRef, error: EngineError) -> None:
        if self._goes_back(error):
            self.host.to_router(Redispatch(self.route, worker.name, error.code, error.message, self.host.index))
            self._end(None)
            return
        message = f"Failed to start embedding: {error.message}"
        self._refuse(refused("start_embedding_failed", message, status=http_status(error.code)))

    def _refuse(self, error: ApiError) -> None:
        response = self.plan.response
        self._end(Reply(self.seq, *render_error(error, path_of_api(response.api), response.request_id)))

    def _end(self, reply: Reply | None) -> None:
        if self.over:
            return
        self.over = True
        if reply is not None:
            self.host.out.to_frontend(self.frontend, reply)
        self.host.finished(self)

    def timed_out(self) -> None:
        """The request's deadline passed."""
        self._refuse(refused("request_timeout", "the request took longer than the gateway allows", status=504))

    def abort(self) -> None:
        """The client is gone: the calls end by themselves, their result is dropped."""
        self._end(None)

    # Answers --------------------------------------------------------------------------------------

    def _body(self, results: list[Embedding]) -> bytes:
        tokens = sum(
            result.prompt_tokens or part.prompt_tokens for result, part in zip(results, self.plan.parts, strict=True)
        )
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        if self.plan.response.api == "classify":
            return self._classification(results[0].vector, usage)
        options = self.plan.response.options
        data = [
            {"object": "embedding", "embedding": encoded(result.vector, options), "index": index}
            for index, result in enumerate(results)
        ]
        return orjson.dumps({"object": "list", "data": data, "model": self.plan.response.model, "usage": usage})

    def _classification(self, scores: list[float], usage: dict[str, int]) -> bytes:
        response = self.plan.response
        probs = softmax(scores)
        best = max(range(len(probs)), key=probs.__getitem__) if probs else 0
        labels: dict[str, str] = response.options.get("labels") or {}
        entry = {
            "index": 0,
            "label": labels.get(str(best), f"LABEL_{best}"),
            "probs": probs,
            "num_classes": len(probs),
        }
        answer = {
            "id": response.body_id, "object": "list", "created": response.created, "model": response.model,
            "data": [entry], "usage": usage,
        }  # fmt: skip
        return orjson.dumps(answer)


def failure(result: object) -> EngineError | None:
    """The failure of a call, in the engine's terms; None for an answer."""
    if isinstance(result, EngineError) or not isinstance(result, BaseException):
        return result if isinstance(result, EngineError) else None
    log.error("embedding call failed", exc_info=result)
    return EngineError("INTERNAL", "the call failed, see the log")


def encoded(vector: list[float], options: dict[str, Any]) -> list[float] | str:
    """The vector as the client wants it: cut to ``dimensions`` (and normalised again, as a shortened embedding must
    be), as numbers or as base64 of little-endian float32."""
    dimensions = options.get("dimensions") or 0
    if dimensions and dimensions < len(vector):
        vector = vector[:dimensions]
        norm = math.sqrt(sum(value * value for value in vector))
        if norm:
            vector = [value / norm for value in vector]
    if options.get("encoding_format") == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector


def softmax(scores: list[float]) -> list[float]:
    """Probabilities of class scores."""
    if not scores:
        return []
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]
