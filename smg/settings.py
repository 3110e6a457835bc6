"""Typed settings: one table for flags, environment variables, defaults, help texts and tiers.

A field's name is its flag's name in snake_case; its annotation carries the ``Flag`` that the command line is built
from. Values are final after start-up; every process of the gateway reads the same struct.
"""

# ruff: noqa: RUF012 - msgspec copies an empty list or dict default for every instance

from __future__ import annotations

import functools
import ipaddress
import os
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from smg.flags import ConfigError, Flag, group
from smg.settings_later import LaterSettings

__all__ = ["ConfigError", "ControlPlaneKey", "Settings", "check_settings", "flag_of", "flags", "ignored_flags"]

POLICIES = (
    "random",
    "round_robin",
    "passthrough",
    "cache_aware",
    "power_of_two",
    "least_load",
    "manual",
    "consistent_hashing",
    "prefix_hash",
)
# fmt: off
REASONING_PARSERS = (
    "base", "cohere_cmd", "deepseek_r1", "deepseek_v31", "deepseek_v4", "deepseek_v41", "gemma4", "glm45", "hy_v4",
    "inkling", "kimi", "kimi_k25", "kimi_k3", "kimi_thinking", "minimax", "minimax_m3", "nano_v3", "passthrough",
    "qwen3", "qwen3_thinking", "step3",
)
TOOL_PARSERS = (
    "cohere", "deepseek", "deepseek31", "deepseek32", "deepseek_v4", "deepseek_v41", "gemma4", "glm45_moe", "glm47_moe",
    "hy_v4", "inkling", "json", "kimi_k3", "kimik2", "llama", "minimax_m2", "minimax_m3", "mistral", "nemotron",
    "passthrough", "pythonic", "qwen", "qwen_coder", "qwen_xml", "sarashina", "step3",
)
SYMPHONY_PARSERS = (
    "deepseek_v4.1", "dots3", "function_gemma", "gemma4", "glm", "glm4", "hf", "hy4", "inkling", "iquest", "json",
    "k2_horizon", "kimi_k3", "lfm2.5", "ling", "llama_nemotron", "minicpm5", "minimax_m2", "minimax_m3", "mistral_v13",
    "olmo3", "plain", "qwen2.5", "qwen3", "qwen3_tagged", "qwen3_tagged_direct", "seed_oss", "xlam",
)
# fmt: on

_worker = group("Worker Configuration")
_procs = group("Processes", "own")
_policy = group("Routing Policy")
_pd = group("PD/EPD Disaggregation")
_jobs = group("Jobs, load monitor, multimodal")
_logging = group("Logging")
_prometheus = group("Prometheus Metrics")
_request = group("Request Handling")
_rate = group("Rate Limiting")
_retry = group("Retry Configuration")
_breaker = group("Circuit Breaker")
_health = group("Health Checks")
_tokenizer = group("Tokenizer")
_parsers = group("Parsers")
_mcp = group("Parsers", "own")
_backend = group("Backend")
_postgres = group("PostgreSQL Database")
_redis = group("Redis Database")
_tls = group("TLS/mTLS Security")
_auth = group("Control Plane Authentication")
_tenants = group("Data Plane Authentication")


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _share_of_cores(divisor: int, most: int) -> int:
    return max(1, min(most, cores() // divisor))


class ControlPlaneKey(msgspec.Struct, frozen=True):
    """One entry of ``--control-plane-api-keys``: ``id:name:role:key``."""

    id: str
    name: str
    role: Literal["admin", "user"]
    key: str


class Settings(LaterSettings, frozen=True, kw_only=True):
    """Everything the gateway was told at start. Durations are seconds unless the name says otherwise."""

    host: Annotated[str, _worker("bind address of the API listener")] = "0.0.0.0"  # noqa: S104
    port: Annotated[int, _worker("API port")] = 30000
    worker_urls: Annotated[list[str], _worker("workers to register at start (http, https, grpc, grpcs, ipc)")] = []
    health_check_port: Annotated[int | None, _worker("extra listener with only the health routes")] = None

    tokenizer_procs: Annotated[int, _procs("tokenizer and template processes; default by cores")] = msgspec.field(
        default_factory=functools.partial(_share_of_cores, 4, 8)
    )
    detok_procs: Annotated[int, _procs("processes that own engine streams; default by cores")] = msgspec.field(
        default_factory=functools.partial(_share_of_cores, 4, 16)
    )
    frontend_procs: Annotated[int, _procs("HTTP processes; default by cores")] = msgspec.field(
        default_factory=functools.partial(_share_of_cores, 8, 4)
    )
    drain_delay_secs: Annotated[float, _procs("time between the end of readiness and the closing of the listener")] = (
        0.0
    )
    grpc_transport: Annotated[str, _procs("gRPC client towards workers", choices=("grpcio", "lean"))] = "lean"
    tool_constraint: Annotated[
        str,
        _procs(
            "grammar of forced tool calls: by model and parser, or always its own format", choices=("auto", "native")
        ),
    ] = "auto"
    trust_control_tokens: Annotated[bool, _procs("let message text spell the model's control tokens")] = False
    migration_limit: Annotated[
        int, group("Processes", "later")("times a started stream may move to another worker; 0 = never")
    ] = 3
    stream_buffer_bytes: Annotated[int, _procs("bytes that may wait for one slow client")] = 8 * 1024 * 1024
    run_dir: Annotated[str | None, _procs("directory for the gateway's private socket directory")] = None

    policy: Annotated[str, _policy("worker selection policy", choices=POLICIES)] = "cache_aware"
    prefill_policy: Annotated[
        str | None, _policy("policy for prefill workers; default --policy", choices=(*POLICIES, "bucket"))
    ] = None
    decode_policy: Annotated[str | None, _policy("policy for decode workers; default --policy", choices=POLICIES)] = (
        None
    )
    cache_threshold: Annotated[
        float, _policy("prompt share a worker must hold for affinity", aliases=("--cache-match-threshold",))
    ] = 0.3
    prefix_token_count: Annotated[int, _policy("prefix_hash: leading tokens that are hashed")] = 256
    prefix_hash_load_factor: Annotated[float, _policy("prefix_hash: relative overload margin")] = 1.25
    prefix_hash_balance_abs_threshold: Annotated[int, _policy("prefix_hash: absolute overload margin (requests)")] = 10
    least_load_kv_pressure_weight: Annotated[float, _policy("least_load: seconds charged for KV pressure")] = 0.15
    least_load_default_throughput: Annotated[float, _policy("least_load: tokens/s of a silent worker")] = 2000.0
    least_load_mean_prefill_tokens: Annotated[int, _policy("least_load: tokens of a request of unknown size")] = 1024
    least_load_max_waiting_requests: Annotated[
        int, _policy("least_load: skip workers with this many queued requests; 0 = off")
    ] = 0
    power_of_two_load_metric: Annotated[
        str, _policy("what sampled workers are compared on", choices=("expected_wait", "requests", "least_requests"))
    ] = "expected_wait"
    balance_abs_threshold: Annotated[
        int, _policy("spill gate: requests above the mean", aliases=("--spill-abs-threshold",))
    ] = 64
    balance_rel_threshold: Annotated[
        float, _policy("spill gate: multiple of the mean", aliases=("--spill-rel-threshold",))
    ] = 1.5
    eviction_interval_secs: Annotated[int, _policy("period of tree and sticky-key eviction")] = 60
    max_tree_size: Annotated[int, _policy("bound per model on the approximate prefix index (tokens)")] = 67108864
    block_size: Annotated[int, _policy("tokens per block of the prefix index")] = 16
    max_idle_secs: Annotated[int, _policy("idle lifetime of a sticky key", aliases=("--sticky-key-idle-secs",))] = 14400
    assignment_mode: Annotated[
        str | None,
        _policy("how a new sticky key gets its worker", choices=("random", "min_load", "min_group", "delegate")),
    ] = None
    max_payload_size: Annotated[int, _policy("request body limit in bytes")] = 536870912
    sse_keepalive_secs: Annotated[int, _policy("silence before a keep-alive frame; 0 = none", non_negative=True)] = 15
    dp_aware: Annotated[bool, _policy("register one worker per data-parallel rank")] = False
    routing_key_override: Annotated[bool, _policy("sticky sessions on any policy", aliases=("--sticky-sessions",))] = (
        False
    )
    routing_key_headers: Annotated[list[str] | None, _policy("header names that carry the sticky key")] = None
    enable_igw: Annotated[bool, _policy("multi-model gateway mode")] = False

    pd_disaggregation: Annotated[bool, _pd("prefill/decode mode")] = False
    prefill: Annotated[list[tuple[str, int | None]], _pd("prefill URL [bootstrap port or none]", form="words")] = []
    decode: Annotated[list[str], _pd("decode URL", form="repeat")] = []
    worker_startup_timeout_secs: Annotated[int, _pd("how long a registration retries an unreachable worker")] = 1800
    worker_startup_delay: Annotated[int, _pd("grace before the first registration probe")] = 0
    worker_startup_check_interval: Annotated[int, _pd("pause between registration probes")] = 30

    job_queue_capacity: Annotated[int, _jobs("pending control-plane jobs")] = 1000
    job_queue_concurrency: Annotated[int, _jobs("control-plane jobs run at once")] = 200
    load_monitor_interval: Annotated[int, _jobs("seconds between load polls")] = 10
    disable_load_monitoring: Annotated[bool, _jobs("poll only when a policy needs it")] = False

    log_dir: Annotated[str | None, _logging("also write log files here")] = None
    log_level: Annotated[
        str, _logging("log level (SMG_LOG replaces the filter)", choices=("debug", "info", "warn", "error"))
    ] = "info"
    log_json: Annotated[bool, _logging("JSON log lines")] = False

    prometheus_port: Annotated[int, _prometheus("metrics listener port")] = 29000
    prometheus_host: Annotated[str | None, _prometheus("metrics listener address; default by --host's family")] = None
    prometheus_duration_buckets: Annotated[
        list[float] | None, _prometheus("buckets of duration histograms", at_least_one=True)
    ] = None

    request_id_headers: Annotated[list[str] | None, _request("header names searched for the request id")] = None
    request_timeout_secs: Annotated[int, _request("overall timeout of a request")] = 1800
    shutdown_grace_period_secs: Annotated[int, _request("total time for graceful shutdown")] = 180
    header_read_timeout_secs: Annotated[int, _request("close a connection without a complete head; 0 = off")] = 30
    idle_connection_timeout_secs: Annotated[int, _request("close an idle keep-alive connection; 0 = off")] = 90
    cors_allowed_origins: Annotated[list[str], _request("exact origins, or * alone; empty = no CORS")] = []

    max_concurrent_requests: Annotated[int, _rate("requests in flight; -1 = by cores, 0 = unlimited")] = -1
    queue_size: Annotated[int, _rate("admission queue; 0 = refuse at once")] = 100
    queue_timeout_secs: Annotated[int, _rate("longest wait in the queue")] = 60
    rate_limit_tokens_per_second: Annotated[int | None, _rate("sustained admissions per second; 0 = off")] = None
    max_background_responses: Annotated[int, _rate("background responses in flight; 0 = foreground")] = 1024

    retry_max_retries: Annotated[int, _retry("total attempts per request")] = 5
    retry_initial_backoff_ms: Annotated[int, _retry("first backoff")] = 50
    retry_max_backoff_ms: Annotated[int, _retry("backoff ceiling")] = 30000
    retry_backoff_multiplier: Annotated[float, _retry("growth per attempt")] = 1.5
    retry_jitter_factor: Annotated[float, _retry("share of the delay that is random")] = 0.2
    disable_retries: Annotated[bool, _retry("one attempt only")] = False

    cb_failure_threshold: Annotated[int, _breaker("consecutive failures that open a breaker")] = 10
    cb_success_threshold: Annotated[int, _breaker("half-open successes that close it")] = 3
    cb_timeout_duration_secs: Annotated[int, _breaker("open time before half-open")] = 60
    cb_window_duration_secs: Annotated[int, _breaker("failure window")] = 120
    disable_circuit_breaker: Annotated[bool, _breaker("never open")] = False

    health_failure_threshold: Annotated[int, _health("failed probes until not ready")] = 3
    health_success_threshold: Annotated[int, _health("good probes until ready")] = 2
    health_check_timeout_secs: Annotated[int, _health("probe timeout")] = 5
    health_check_interval_secs: Annotated[int, _health("probe period")] = 60
    health_check_endpoint: Annotated[str, _health("path probed on HTTP workers")] = "/health"
    disable_health_check: Annotated[bool, _health("no probing")] = False

    model_path: Annotated[str | None, _tokenizer("tokenizer source: directory or hub id", aliases=("--model",))] = None
    tokenizer_path: Annotated[str | None, _tokenizer("tokenizer source instead of --model-path")] = None
    chat_template: Annotated[str | None, _tokenizer("Jinja template file")] = None
    disable_tokenizer_autoload: Annotated[bool, _tokenizer("load no tokenizer at start")] = False
    tokenizer_cache_enable_l0: Annotated[bool, _tokenizer("whole-text encode cache")] = False
    tokenizer_cache_l0_max_entries: Annotated[int, _tokenizer("its entry bound")] = 10000
    tokenizer_cache_enable_l1: Annotated[bool, _tokenizer("prefix encode cache")] = False
    tokenizer_cache_l0_max_memory: Annotated[int, _tokenizer("byte bound of L0")] = 268435456
    tokenizer_cache_l1_max_memory: Annotated[int, _tokenizer("byte bound of L1")] = 52428800

    reasoning_parser: Annotated[
        str | None,
        _parsers(
            "parser for every model without an override", choices=tuple(sorted({*REASONING_PARSERS, *SYMPHONY_PARSERS}))
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _parsers("the same for tool calls", choices=tuple(sorted({*TOOL_PARSERS, *SYMPHONY_PARSERS}))),
    ] = None
    mcp_config_path: Annotated[str | None, _parsers("YAML of MCP servers")] = None
    mcp_allowed_hosts: Annotated[
        list[str] | None,
        _mcp("hosts of MCP servers that requests may name: names, *.suffix, addresses, networks; default all public"),
    ] = None
    mcp_allow_private_hosts: Annotated[
        bool, _mcp("let requests name MCP servers on private and loopback addresses")
    ] = False

    backend: Annotated[
        str,
        _backend(
            "router kind; over ZMQ the engine wire", choices=("sglang", "openai", "anthropic", "vllm", "tokenspeed")
        ),
    ] = "sglang"
    zmq_engine_count: Annotated[int | None, _backend("data-parallel engines per ipc:// worker")] = None
    history_backend: Annotated[
        str,
        _backend(
            "where responses and conversations live",
            choices=("memory", "none", "oracle", "postgres", "redis", "sqlite"),
        ),
    ] = "memory"
    history_memory_max_responses: Annotated[int, _backend("memory backend: responses kept")] = 10000
    history_memory_max_items: Annotated[int, _backend("memory backend: items kept")] = 100000
    history_memory_retention_secs: Annotated[int, _backend("memory backend: record lifetime; 0 = no limit")] = 86400
    history_memory_max_bytes: Annotated[
        int, _backend("memory backend: bytes of content kept; 0 = no limit", tier="own")
    ] = 1 << 30
    history_sqlite_path: Annotated[str | None, _backend("sqlite backend: database file", tier="own")] = None
    history_sqlite_retention_days: Annotated[
        int, _backend("sqlite backend: record lifetime; -1 = keep", tier="own")
    ] = 30

    postgres_db_url: Annotated[str | None, _postgres("connection URL", env="POSTGRES_DB_URL", secret=True)] = None
    postgres_pool_max: Annotated[int, _postgres("largest pool", env="POSTGRES_POOL_MAX")] = 16
    postgres_op_timeout_secs: Annotated[int, _postgres("bound on one call", env="POSTGRES_OP_TIMEOUT_SECS")] = 5
    redis_url: Annotated[str | None, _redis("connection URL", env="REDIS_URL", secret=True)] = None
    redis_pool_max: Annotated[int, _redis("largest pool", env="REDIS_POOL_MAX")] = 16
    redis_retention_days: Annotated[int, _redis("record lifetime; -1 = keep", env="REDIS_RETENTION_DAYS")] = 30
    redis_op_timeout_secs: Annotated[int, _redis("bound on one call", env="REDIS_OP_TIMEOUT_SECS")] = 5

    client_cert_path: Annotated[str | None, _tls("client certificate towards workers")] = None
    client_key_path: Annotated[str | None, _tls("its key")] = None
    ca_cert_paths: Annotated[list[str], _tls("CAs of worker certificates")] = []
    tls_cert_path: Annotated[str | None, _tls("server certificate")] = None
    tls_key_path: Annotated[str | None, _tls("server key")] = None

    api_key: Annotated[str | None, _auth("shared key for serving and admin routes", env="SMG_API_KEY", secret=True)] = (
        None
    )
    control_plane_api_keys: Annotated[
        list[ControlPlaneKey],
        _auth("id:name:role:key, role admin or user", env="SMG_CONTROL_PLANE_API_KEYS", secret=True),
    ] = []
    tenant_api_keys: Annotated[
        list[tuple[str, str]],
        _tenants(
            "tenant:key, serving routes only",
            option="--tenant-api-key",
            env="SMG_TENANT_API_KEYS",
            form="repeat",
            secret=True,
        ),
    ] = []
    model_aliases: Annotated[
        dict[str, str],
        group("Service Discovery (Kubernetes)")("alias=canonical", option="--model-alias", form="repeat"),
    ] = {}

    @property
    def metrics_host(self) -> str:
        """Bind address of the metrics listener: as given, else the unspecified address of ``host``'s family."""
        if self.prometheus_host is not None:
            return self.prometheus_host
        try:
            return "::" if ipaddress.ip_address(self.host.strip("[]")).version == 6 else "0.0.0.0"  # noqa: S104
        except ValueError:
            return "0.0.0.0"  # noqa: S104

    @property
    def inflight_limit(self) -> int:
        """Most requests in flight at once over all frontend processes; 0 = unlimited."""
        if self.max_concurrent_requests < 0:
            return max(4096, 1024 * cores())
        return self.max_concurrent_requests

    @property
    def max_attempts(self) -> int:
        """Attempts per request, the first included."""
        return 1 if self.disable_retries else self.retry_max_retries

    @property
    def mode(self) -> str:
        """The routing mode as the start-up line names it."""
        if self.pd_disaggregation:
            return "PD Disaggregated"
        return "IGW" if self.enable_igw else "Regular"

    @property
    def tokenizer_source(self) -> str | None:
        """Directory or hub id the start-up tokenizer comes from."""
        return self.tokenizer_path or self.model_path

    def validate(self) -> None:
        """Raise ``ConfigError`` for the first value that must stop start-up."""
        check_settings(self)


@functools.cache
def flags() -> dict[str, Flag]:
    """The flag of every field, in help order."""
    return {name: flag_of(hint) for name, hint in get_type_hints(Settings, include_extras=True).items()}


def flag_of(hint: Any) -> Flag:
    """The ``Flag`` inside one field's annotation. Raises ``TypeError`` if there is none."""
    for extra in get_args(hint)[1:]:
        if isinstance(extra, Flag):
            return extra
    raise TypeError(f"no flag in {hint!r}")


def ignored_flags(settings: Settings) -> list[str]:
    """Option names that were set, but have no effect in this version."""
    defaults = Settings()
    return [
        flag.option or "--" + name.replace("_", "-")
        for name, flag in flags().items()
        if flag.tier == "later" and getattr(settings, name) != getattr(defaults, name)
    ]


def check_settings(settings: Settings) -> None:
    """Raise ``ConfigError`` for the first value that must stop start-up (see ``smg.settings_check``)."""
    from smg.settings_check import check

    check(settings)
