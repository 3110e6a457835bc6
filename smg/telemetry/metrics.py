"""Every series of the gateway, grouped by the process that moves it.

Each process makes the one group of its role after it was forked. Methods are named after what happened, cost a few
microseconds at most, and are called per request, per stream or per tick, never per token.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from smg.messages import GenerationPlan, WorkerRef
from smg.telemetry.logs import dropped_lines
from smg.telemetry.series import (
    LOOP_DELAY_BUCKETS,
    Counters,
    Gauges,
    Histograms,
    duration_buckets,
    method_label,
)

AGE_BOUNDS = (30, 60, 180, 300, 600, 1200, 3600, 7200, 14400, 28800, 86400)
LOOP_SAMPLE_SECS = 0.5  # a process wakes up with cold caches for it


class FrontendMetrics:
    """What the HTTP processes count."""

    def __init__(self) -> None:
        durations = duration_buckets()
        self.requests = Counters("smg_http_requests_total", "Requests received", "method", "path")
        self.duration = Histograms(
            "smg_http_request_duration_seconds", "Time until the response head", durations, "method", "path"
        )
        self.responses = Counters(
            "smg_http_responses_total", "Responses by status and error code", "path", "status_code", "error_code"
        )
        self.connections_active = Gauges("smg_http_connections_active", "Open client connections").child()
        self.ages = Gauges("smg_http_inflight_request_age_count", "Requests in flight by age in seconds", "gt", "le")
        self.rate_limit = Counters("smg_http_rate_limit_total", "Admission decisions", "result")
        self.timeouts = Counters("smg_http_connection_timeouts_total", "Connections closed by a timeout", "kind")
        self.inflight = Gauges("smg_admission_inflight", "Admission slots held").child()
        self.queue_depth = Gauges("smg_admission_queue_depth", "Requests waiting for admission").child()
        self.queue_rejected = Counters(
            "smg_admission_queue_rejected_total", "Requests refused by or timed out in the queue", "reason"
        )
        self._allowed = self.rate_limit.child("allowed")
        self._rejected = self.rate_limit.child("rejected")
        bounds = ["0", *map(str, AGE_BOUNDS), "+Inf"]
        self._age_children = [self.ages.child(gt, le) for gt, le in itertools.pairwise(bounds)]

    def request_received(self, method: str, path: str) -> None:
        """A request head arrived. ``path`` is the route's template, ``other`` for an unknown one."""
        self.requests.inc(method_label(method), path)

    def head_ready(self, method: str, path: str, seconds: float) -> None:
        """The response head goes out ``seconds`` after the request's."""
        self.duration.observe(seconds, method_label(method), path)

    def request_finished(self, path: str, status: int, error_code: str) -> None:
        """The body went out, or the client went away (499, ``client_closed_request``)."""
        self.responses.inc(path, str(status), error_code)

    def connection_timeout(self, kind: str) -> None:
        """A connection was closed: "header_read" or "idle"."""
        self.timeouts.inc(kind)

    def admission_allowed(self, inflight: int, waiting: int) -> None:
        """A serving request holds a slot now."""
        self._allowed.inc()
        self.inflight.set(inflight)
        self.queue_depth.set(waiting)

    def admission_rejected(self, reason: str) -> None:
        """A serving request was refused: "full", "timeout", "rate" or "selection_timeout"."""
        self._rejected.inc()
        self.queue_rejected.inc(reason)

    def admission_left(self, inflight: int, waiting: int) -> None:
        """A slot was given back."""
        self.inflight.set(inflight)
        self.queue_depth.set(waiting)

    def inflight_ages(self, ages: Iterable[float]) -> None:
        """Ages in seconds of all requests in flight; called from time to time."""
        counts = [0] * len(self._age_children)
        for age in ages:
            counts[bisect_left(AGE_BOUNDS, age)] += 1
        for child, count in zip(self._age_children, counts, strict=True):
            child.set(count)


class SessionMetrics:
    """What multi-turn sessions count: tools of MCP servers, responses, history."""

    def __init__(self) -> None:
        self.tool_calls = Counters("smg_mcp_tool_calls_total", "Tool executions", "model", "tool_name", "result")
        self.tool_duration = Histograms(
            "smg_mcp_tool_duration_seconds", "Duration of a tool execution", duration_buckets(), "model", "tool_name"
        )
        self.tool_iterations = Counters(
            "smg_mcp_tool_iterations_total", "Engine turns of requests that carry MCP tools", "model"
        )
        self.servers_active = Gauges("smg_mcp_servers_active", "Connected static MCP servers").child()
        self.stream_failures = Counters(
            "smg_responses_stream_failures_total", "Streams that ended in response.failed", "model", "reason"
        )
        self.not_stored = Counters(
            "smg_responses_not_stored_total", "Responses that were delivered but not stored"
        ).child()
        self.history = Gauges("smg_history_memory_records", "Records of the memory history", "kind")

    def tool_called(self, model: str, tool: str, *, success: bool, seconds: float) -> None:
        """An MCP tool was executed."""
        self.tool_calls.inc(model, tool, "success" if success else "error")
        self.tool_duration.observe(seconds, model, tool)

    def history_records(self, responses: int, conversations: int, items: int) -> None:
        """Sizes of the memory history of this process."""
        for kind, count in (("responses", responses), ("conversations", conversations), ("items", items)):
            self.history.set(count, kind)


class PoolMetrics:
    """What the tokenizer processes count. Durations of ``smg_pool_duration_seconds`` are per request and stage."""

    def __init__(self) -> None:
        self.cache_lookups = Counters(
            "smg_tokenizer_cache_lookups_total", "Lookups in the encode caches", "layer", "result"
        )
        self.cache_reused = Counters("smg_tokenizer_cache_reused_bytes_total", "Bytes served from a cache", "layer")
        self.cache_evictions = Counters("smg_tokenizer_cache_evictions_total", "Entries dropped for room", "layer")
        self.encode_loads = Counters("smg_tokenizer_encode_path_loads_total", "Tokenizers loaded by encoder", "path")
        self.encode_fallbacks = Counters(
            "smg_tokenizer_encode_fallbacks_total", "Texts the fast encoder declined", "reason"
        )
        self.requests = Counters("smg_pool_requests_total", "Requests prepared by the tokenizer processes", "outcome")
        self.durations = Histograms(
            "smg_pool_duration_seconds", "Time a request spends in a tokenizer process", duration_buckets(), "stage"
        )
        self.prompt_tokens = Counters("smg_pool_prompt_tokens_total", "Prompt tokens produced").child()
        self.queue_depth = Gauges("smg_pool_queue_depth", "Requests waiting in the tokenizer processes").child()
        self._planned, self._refused = self.requests.child("planned"), self.requests.child("refused")
        self._total = self.durations.child("total")

    def planned(self, prompt_tokens: int, seconds: float) -> None:
        """A request became a generation plan."""
        self._planned.inc()
        self.prompt_tokens.inc(prompt_tokens)
        self._total.observe(seconds)

    def refused(self, seconds: float) -> None:
        """A request was answered with an error from here."""
        self._refused.inc()
        self._total.observe(seconds)

    def cache_lookup(self, layer: str, *, hit: bool, reused_bytes: int = 0) -> None:
        """An encode asked the cache "l0" or "l1"."""
        self.cache_lookups.inc(layer, "hit" if hit else "miss")
        if reused_bytes:
            self.cache_reused.add(reused_bytes, layer)


class AnsweredRun(Protocol):
    """What the metrics need of a finished generation; times are ``time.monotonic()``, 0 = did not happen."""

    plan: GenerationPlan
    workers: list[WorkerRef]
    dispatched: float
    first_token: float


class TokenCounts(Protocol):
    """Token totals of one answer."""

    prompt: int
    completion: int


class GenerationSeries:
    """The bound series of one (transport, model, endpoint)."""

    __slots__ = ("_duration", "_input", "_output", "_tpot", "_ttft", "_whole")

    def __init__(self, metrics: DetokMetrics, transport: str, backend_type: str, model: str, endpoint: str) -> None:
        router_type = "http" if transport == "http" else "grpc"
        labels = (router_type, backend_type, model, endpoint)
        self._ttft = metrics.ttft.child(*labels)
        self._tpot = metrics.tpot.child(*labels)
        self._whole = metrics.generation.child(*labels)
        self._input = metrics.tokens.child(*labels, "input")
        self._output = metrics.tokens.child(*labels, "output")
        self._duration = metrics.duration.child(router_type, backend_type, transport, model, endpoint)

    def finished(self, begun: float, first: float, end: float, counts: TokenCounts, *, streaming: bool) -> None:
        """An answer is complete. Non-streaming answers have no time to first token: the client sees the end only."""
        if streaming and first:
            self._ttft.observe(first - begun)
        if first and counts.completion > 1:
            self._tpot.observe((end - first) / (counts.completion - 1))
        self._whole.observe(end - begun)
        self._duration.observe((first if streaming and first else end) - begun)
        self._input.inc(counts.prompt)
        self._output.inc(counts.completion)


class DetokMetrics:
    """What the processes that own engine streams count."""

    def __init__(self) -> None:
        durations = duration_buckets()
        labels = ("router_type", "backend_type", "model", "endpoint")
        self.ttft = Histograms("smg_router_ttft_seconds", "Dispatch to first token of a stream", durations, *labels)
        self.tpot = Histograms("smg_router_tpot_seconds", "Mean time per output token", durations, *labels)
        self.generation = Histograms(
            "smg_router_generation_duration_seconds", "Dispatch to the last token", durations, *labels
        )
        self.tokens = Counters("smg_router_tokens_total", "Tokens by the engine's usage", *labels, "token_type")
        self.duration = Histograms(
            "smg_router_request_duration_seconds", "Dispatch to the response head", durations,
            "router_type", "backend_type", "connection_mode", "model", "endpoint",
        )  # fmt: skip
        self.prefix_mismatch = Counters(
            "smg_detokenize_prefix_mismatch_total", "Incremental decodes that rewrote earlier text", "kind"
        )
        for kind in ("byte_run", "decoder"):
            self.prefix_mismatch.child(kind)
        self.streams_active = Gauges("smg_detok_streams_active", "Generations that run in the detok processes").child()
        self.failures = Counters("smg_detok_failures_total", "Generations that ended without an answer", "reason")
        self.migrations = Counters(
            "smg_detok_migrations_total", "Started streams that moved to another worker", "outcome"
        )
        self._series: dict[tuple[str, str, str, str], GenerationSeries] = {}

    def series(self, transport: str, backend_type: str, model: str, endpoint: str) -> GenerationSeries:
        """The bound series; ``transport`` is grpc, http or zmq, ``backend_type`` regular or pd."""
        key = (transport, backend_type, model, endpoint)
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = GenerationSeries(self, *key)
        return found

    def answered(self, run: AnsweredRun, usage: TokenCounts, backend_type: str = "regular") -> None:
        """A generation was answered completely."""
        response = run.plan.response
        endpoint = "responses" if response.api == "events" else response.api
        series = self.series(run.workers[0].transport, backend_type, response.model, endpoint)
        series.finished(run.dispatched, run.first_token, time.monotonic(), usage, streaming=response.stream)


class ProxyMetrics:
    """What the proxy of HTTP workers counts, in whichever process it runs."""

    def __init__(self) -> None:
        self.responses = Counters(
            "smg_router_upstream_responses_total", "Answers of HTTP workers", "router_type", "status_code", "error_code"
        )
        self.send_retries = Counters("smg_router_upstream_send_retries_total", "Reconnects to HTTP workers").child()
        self.released_early = Counters(
            "smg_router_request_buffers_released_early_bytes_total", "Request bytes released before the answer"
        ).child()


class ProcessMetrics:
    """What every process measures of itself."""

    def __init__(self, role: str) -> None:
        self.loop_delay = Histograms(
            "smg_process_loop_delay_seconds", "How late a timer of the event loop fires", LOOP_DELAY_BUCKETS, "role"
        ).child(role)
        self.log_dropped = Gauges("smg_log_dropped_lines", "Log lines dropped because stderr was full").child()

    async def watch_loop(self) -> None:
        """Measure the loop's delay until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            await asyncio.sleep(LOOP_SAMPLE_SECS)
            self.loop_delay.observe(max(0.0, loop.time() - begun - LOOP_SAMPLE_SECS))
            if (dropped := dropped_lines()) != 0:
                self.log_dropped.set(dropped)


class SupervisorMetrics:
    """What the supervisor counts of its children."""

    def __init__(self, roles: Sequence[str]) -> None:
        self.restarts = Counters("smg_process_restarts_total", "Processes that ended and were started again", "role")
        self.running = Gauges("smg_process_running", "Processes that are ready", "role")
        for role in roles:
            self.restarts.child(role)
            self.running.child(role)
