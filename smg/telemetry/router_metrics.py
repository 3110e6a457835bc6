"""What the router process counts: requests, workers, breakers, retries, policies, engine load."""

from __future__ import annotations

from collections.abc import Mapping

from smg.telemetry.series import BACKOFF_BUCKETS, RATIO_BUCKETS, Counters, Gauges, Histograms, worker_label

BREAKER_STATES = {"closed": 0, "open": 1, "half_open": 2}
WORKER_TYPES = ("regular", "prefill", "decode")
STAGES = ("selection", "dispatch", "pd_admission")
ENGINE_LOAD = {
    "running_requests": "Requests the engine runs",
    "waiting_requests": "Requests waiting in the engine",
    "token_usage": "Share of the KV cache in use",
    "gen_throughput": "Tokens generated per second",
    "cache_hit_rate": "Prefix cache hit rate",
}
POLICY_BRANCHES = {
    "cache_aware": "smg_cache_aware_policy_branch_total",
    "manual": "smg_manual_policy_branch_total",
    "consistent_hashing": "smg_consistent_hashing_policy_branch_total",
    "prefix_hash": "smg_prefix_hash_policy_branch_total",
}


class BreakerMetrics:
    """Circuit breakers, one per worker."""

    def __init__(self) -> None:
        self.state = Gauges("smg_worker_cb_state", "0 closed, 1 open, 2 half open", "worker")
        self.transitions = Counters(
            "smg_worker_cb_transitions_total", "State changes of a breaker", "worker", "from", "to"
        )
        self.outcomes = Counters("smg_worker_cb_outcomes_total", "Outcomes per request and worker", "worker", "outcome")
        self.failures = Gauges("smg_worker_cb_consecutive_failures", "Failures in a row", "worker")
        self.successes = Gauges("smg_worker_cb_consecutive_successes", "Successes in a row", "worker")
        self.readmissions = Counters(
            "smg_worker_cb_health_readmissions_total", "Breakers half opened because the prober saw health", "worker"
        )

    def registered(self, url: str) -> None:
        """Make the series of a new worker, at 0."""
        worker = worker_label(url)
        self.update(url, "closed", 0, 0)
        self.readmissions.child(worker)

    def update(self, url: str, state: str, failures: int, successes: int) -> None:
        """The breaker's state and run lengths."""
        worker = worker_label(url)
        self.state.set(BREAKER_STATES[state], worker)
        self.failures.set(failures, worker)
        self.successes.set(successes, worker)

    def outcome(self, url: str, *, success: bool) -> None:
        """One request ended on this worker."""
        self.outcomes.inc(worker_label(url), "success" if success else "failure")

    def succeeded(self, url: str, successes: int) -> None:
        """One more success of a worker whose breaker stays closed."""
        worker = worker_label(url)
        self.outcomes.inc(worker, "success")
        self.successes.set(successes, worker)

    def readmitted(self, url: str) -> None:
        """The prober's verdict half opened the breaker."""
        self.readmissions.inc(worker_label(url))

    def transition(self, url: str, old: str, new: str) -> None:
        """The breaker changed its state."""
        self.transitions.inc(worker_label(url), old, new)

    def removed(self, url: str) -> None:
        """The worker left the registry."""
        for family in (self.state, self.failures, self.successes):
            family.forget(worker_label(url))


class WorkerMetrics:
    """Registry, health, load and selection of workers."""

    def __init__(self) -> None:
        kind = ("worker_type", "connection_mode")
        self.pool_size = Gauges("smg_worker_pool_size", "Registered workers", *kind, "model")
        self.health = Gauges("smg_worker_health", "1 ready, 0 not", "worker")
        self.health_checks = Counters("smg_worker_health_checks_total", "Health probes", "worker_type", "result")
        self.active = Gauges("smg_worker_requests_active", "Requests in flight from this gateway", "worker")
        self.requests = Counters("smg_worker_requests_total", "Requests sent", "worker", "model")
        self.selections = Counters("smg_worker_selection_total", "Selections of a worker", *kind, "model", "policy")
        self.errors = Counters("smg_worker_errors_total", "Failed attempts by class", *kind, "error_type")
        self.retries = Counters("smg_worker_retries_total", "Retries after a first attempt", "worker_type", "endpoint")
        self.exhausted = Counters(
            "smg_worker_retries_exhausted_total", "Requests whose attempts all failed", "worker_type", "endpoint"
        )
        self.backoff = Histograms(
            "smg_worker_retry_backoff_seconds", "Delay before a retry", BACKOFF_BUCKETS, "attempt", limit=64
        )
        self.http2 = Gauges("smg_worker_http2", "1 when the worker is reached over HTTP/2", "worker")
        self.routing_keys = Gauges("smg_worker_routing_keys_active", "Sticky keys pinned to a worker", "worker")
        self.liveness_fallback = Counters(
            "smg_worker_liveness_fallback_total", "Every ready worker was vetoed, the least loaded was used", "stage"
        )
        self.overload_fallback = Counters(
            "smg_worker_overload_fallback_total", "Every worker was overloaded, the least loaded was used", "stage"
        )
        self.overload_shed = Counters(
            "smg_worker_overload_shed_total", "Requests refused because every worker was overloaded", "stage"
        )
        for stage in STAGES:
            for family in (self.liveness_fallback, self.overload_fallback, self.overload_shed):
                family.child(stage)
        for worker_type in WORKER_TYPES:
            for endpoint in ("chat", "completions", "generate", "messages", "responses"):
                self.retries.child(worker_type, endpoint)
                self.exhausted.child(worker_type, endpoint)

    def registered(self, url: str, *, http2: bool) -> None:
        """A worker joined; it counts as not ready until a probe says otherwise."""
        worker = worker_label(url)
        self.health.set(0, worker)
        self.active.set(0, worker)
        self.http2.set(1 if http2 else 0, worker)

    def removed(self, url: str) -> None:
        """A worker left: its gauges vanish, its counters stay."""
        for family in (self.health, self.active, self.http2, self.routing_keys):
            family.forget(worker_label(url))

    def probed(self, url: str, worker_type: str, *, success: bool, ready: bool) -> None:
        """A health probe ended; ``ready`` is the state after it."""
        self.health_checks.inc(worker_type, "success" if success else "failure")
        self.health.set(1 if ready else 0, worker_label(url))

    def sent(self, url: str, model: str, active: int) -> None:
        """A request went to the worker, which now has ``active`` in flight."""
        worker = worker_label(url)
        self.requests.inc(worker, model)
        self.active.set(active, worker)

    def left(self, url: str, active: int) -> None:
        """A request ended on the worker."""
        self.active.set(active, worker_label(url))

    def retried(self, worker_type: str, endpoint: str, attempt: int, delay: float) -> None:
        """Attempt ``attempt`` (the first retry is 1) starts after ``delay`` seconds."""
        self.retries.inc(worker_type, endpoint)
        self.backoff.observe(delay, str(attempt))


class EngineMetrics:
    """Load reports of the engines. Label ``dp_rank`` is "" for an engine without ranks."""

    def __init__(self) -> None:
        self.load = {
            name: Gauges(f"smg_engine_{name}", text, "worker", "model", "dp_rank") for name, text in ENGINE_LOAD.items()
        }
        self.polls = Counters("smg_engine_load_polls_total", "Ticks of the load monitor", "worker", "mode")
        self.kv_events_unavailable = Gauges(
            "smg_kv_events_unavailable", "1 when the worker has no KV event stream", "worker"
        )

    def reported(self, url: str, model: str, dp_rank: str, values: Mapping[str, float]) -> None:
        """A load report; ``values`` by the names of ``ENGINE_LOAD``, absent ones stay as they were."""
        worker = worker_label(url)
        for name, value in values.items():
            self.load[name].set(value, worker, model, dp_rank)

    def removed(self, url: str) -> None:
        """The worker left the registry."""
        worker = worker_label(url)
        for family in self.load.values():
            family.forget_where(0, worker)
        self.kv_events_unavailable.forget(worker)


class PolicyMetrics:
    """Decisions of the selection policies and sizes of their indexes."""

    def __init__(self) -> None:
        self.branches = {
            policy: Counters(name, f"Branches taken by {policy}", "branch", limit=32)
            for policy, name in POLICY_BRANCHES.items()
        }
        self.match_ratio = Histograms(
            "smg_cache_aware_match_ratio", "Matched share of the prompt per selection", RATIO_BUCKETS
        ).child()
        self.tree_tokens = Gauges("smg_cache_tree_tokens", "Tokens in the prefix index", "model")
        self.tree_tenants = Gauges("smg_cache_tree_tenants", "Workers in the prefix index", "model", "tree")
        self.manual_entries = Gauges("smg_manual_policy_cache_entries", "Sticky keys held").child()
        self.key_source = Counters("smg_routing_key_source_total", "Where sticky keys came from", "source")

    def branch(self, policy: str, branch: str) -> None:
        """A selection took this branch; policies without a series are ignored."""
        family = self.branches.get(policy)
        if family is not None:
            family.inc(branch)


class RouterMetrics:
    """The router's groups and its request series. One request is counted once, however many attempts it takes."""

    def __init__(self) -> None:
        common = ("router_type", "backend_type", "connection_mode", "model", "endpoint")
        self.requests = Counters("smg_router_requests_total", "Requests routed", *common, "streaming")
        self.errors = Counters("smg_router_request_errors_total", "Requests that failed", *common, "error_type")
        self.body_path = Counters(
            "smg_router_request_body_path_total", "How request bodies were handled", "path", "reason"
        )
        self.workers = WorkerMetrics()
        self.breakers = BreakerMetrics()
        self.engines = EngineMetrics()
        self.policies = PolicyMetrics()
        self._buffered = self.body_path.child("buffered", "grpc")

    def routed(self, backend_type: str, mode: str, model: str, endpoint: str, *, streaming: bool) -> None:
        """A request got its first worker. ``mode`` is grpc, http or zmq."""
        router_type = "http" if mode == "http" else "grpc"
        self.requests.inc(router_type, backend_type, mode, model, endpoint, "true" if streaming else "false")
        if mode != "http":
            self._buffered.inc()

    def failed(self, backend_type: str, mode: str, model: str, endpoint: str, error_type: str) -> None:
        """A request failed for good: no_workers, timeout, backend_error, internal_error, engine_error ..."""
        router_type = "http" if mode == "http" else "grpc"
        self.errors.inc(router_type, backend_type, mode, model, endpoint, error_type)

    def worker_registered(self, url: str, *, http2: bool) -> None:
        """A worker joined the registry."""
        self.workers.registered(url, http2=http2)
        self.breakers.registered(url)

    def worker_removed(self, url: str) -> None:
        """A worker left the registry."""
        self.workers.removed(url)
        self.breakers.removed(url)
        self.engines.removed(url)
