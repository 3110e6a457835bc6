"""Start-up validation. The first failing check stops start-up; policy checks run before port checks."""

from __future__ import annotations

import math
import os
import re
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from smg.flags import ConfigError
from smg.settings import Settings, flags

DEFAULT_PORTS = {"http": 80, "https": 443}
# Of one role. Far more than a machine has use for, and far less than what takes all its memory.
MAX_PROCS = 256
_NOT_NEGATIVE = (
    "queue_size",
    "queue_timeout_secs",
    "max_background_responses",
    "shutdown_grace_period_secs",
    "drain_delay_secs",
    "migration_limit",
    "header_read_timeout_secs",
    "idle_connection_timeout_secs",
    "history_memory_max_responses",
    "history_memory_max_items",
    "history_memory_retention_secs",
    "history_memory_max_bytes",
    "balance_abs_threshold",
    "max_idle_secs",
    "worker_startup_timeout_secs",
    "worker_startup_delay",
    "tokenizer_cache_l0_max_entries",
    "tokenizer_cache_l0_max_memory",
    "tokenizer_cache_l1_max_memory",
)
_HISTORY_SOURCES = {"sqlite": "history_sqlite_path", "postgres": "postgres_db_url", "redis": "redis_url"}
_HEADER_NAME = re.compile(r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")


def check(settings: Settings) -> None:
    """Raise ``ConfigError`` for the first value that must stop start-up."""
    for each in _CHECKS:
        each(settings)


def _invalid(field: str, value: object, reason: str) -> ConfigError:
    return ConfigError(f"Configuration error: Invalid value for field '{field}': {value} - {reason}")


def _failed(reason: str) -> ConfigError:
    return ConfigError(f"Configuration error: Validation failed: {reason}")


def _positive(settings: Settings, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(settings, name)
        if value <= 0:
            field = "load_monitor_interval_secs" if name == "load_monitor_interval" else name
            field = "worker_startup_check_interval_secs" if name == "worker_startup_check_interval" else field
            raise _invalid(field, value, "Must be > 0")


def _fraction(field: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise _invalid(field, f"{value:g}", "Must be between 0.0 and 1.0")


def _at_least_one(field: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 1.0):
        raise _invalid(field, f"{value:g}", "Must be finite and >= 1.0")


# Policies --------------------------------------------------------------------------------------------


def _check_parsers(settings: Settings) -> None:
    if settings.tool_call_parser is None and settings.reasoning_parser is None:
        return
    from smg.models.registry import ParserNames, check_flags

    try:
        check_flags(ParserNames(tool=settings.tool_call_parser or "", reasoning=settings.reasoning_parser or ""))
    except ValueError as error:
        raise ConfigError(f"Invalid configuration: {error}") from None


def _check_policies(settings: Settings) -> None:
    _fraction("cache_threshold", settings.cache_threshold)
    _at_least_one("balance_rel_threshold", settings.balance_rel_threshold)
    chosen = {settings.policy, settings.prefill_policy, settings.decode_policy}
    if "prefix_hash" in chosen:
        _at_least_one("load_factor", settings.prefix_hash_load_factor)
        if settings.prefix_token_count <= 0:
            raise _invalid("prefix_token_count", settings.prefix_token_count, "Must be > 0")
    if settings.policy == "power_of_two" and len(settings.worker_urls) == 1:
        raise ConfigError(
            "Configuration error: Incompatible configuration: Power-of-two policy requires at least 2 workers"
        )
    _positive(settings, ("block_size", "max_tree_size", "eviction_interval_secs"))
    if settings.kv_index not in ("positional", "chain"):
        raise _invalid("kv_index", settings.kv_index, "expected 'positional' or 'chain'")
    if settings.selection_policy != "cache-aware-default":
        reason = f"unknown selection policy '{settings.selection_policy}'; known: cache-aware-default"
        raise _invalid("selection_policy", settings.selection_policy, reason)
    usage = settings.worker_overload_token_usage
    if not 0.0 < usage <= 1.0:
        raise _invalid("worker_overload_token_usage", f"{usage:g}", "Must be a fraction in (0.0, 1.0]")
    temperature = settings.selection_temperature
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise _invalid("selection_temperature", f"{temperature:g}", "Must be finite and >= 0.0 (0.0 is argmax)")


# Workers, ports, limits --------------------------------------------------------------------------------


def _check_workers(settings: Settings) -> None:
    urls = [*settings.worker_urls, *settings.decode]
    urls += [url for url, _ in (*settings.prefill, *settings.encode)]
    count = settings.zmq_engine_count
    if count is not None and count < 0:
        raise _invalid("zmq_engine_count", count, "can't convert negative int to unsigned")
    if not urls:
        return
    from smg.router.urls import IPC, ZMQ_BACKENDS, check_worker_url, worker_url

    for url in urls:
        try:
            check_worker_url(worker_url(url), settings.detok_procs, count or 1)
        except ValueError as error:
            shown = re.sub("//.*@", "//***@", url)  # a password is not for the log
            raise _invalid("worker_url", shown if shown.isprintable() else ascii(shown), str(error)) from None
        if url.startswith(IPC) and settings.backend not in ZMQ_BACKENDS:
            reason = f"--backend {settings.backend} does not speak ZMQ; choose {' or '.join(ZMQ_BACKENDS)}"
            raise _invalid("worker_url", url, reason)


def _check_roles(settings: Settings) -> None:
    """Prefill and decode workers would take whole requests here: better not to start."""
    given = {"--pd-disaggregation": settings.pd_disaggregation, "--prefill": settings.prefill}
    given["--decode"] = settings.decode
    for option, value in given.items():
        if value:
            raise _failed(f"{option}: this gateway does not split prefill and decode; use --worker-urls")


def _check_ports(settings: Settings) -> None:
    if settings.port == 0:
        raise _invalid("port", 0, "Port must be > 0")
    if settings.prometheus_port == 0:
        raise _invalid("metrics.port", 0, "Port must be > 0 (0 would request an unstable OS-ephemeral port)")
    if settings.health_check_port == 0:
        raise _invalid("health_check_port", 0, "Port must be > 0")
    ports = {"port": settings.port, "metrics.port": settings.prometheus_port}
    ports["health_check_port"] = settings.health_check_port or 1
    for field, port in ports.items():
        if not 0 < port < 65536:
            raise _invalid(field, port, "Port must be at most 65535")
    if settings.health_check_port == settings.port:
        reason = f"--health-check-port and --port are both {settings.port}; each listener needs its own port"
        raise _invalid("health_check_port", settings.health_check_port, reason)


def _check_limits(settings: Settings) -> None:
    _positive(
        settings,
        (
            "load_monitor_interval",
            "worker_startup_check_interval",
            "request_timeout_secs",
            "max_payload_size",
            "tokenizer_procs",
            "detok_procs",
            "frontend_procs",
            "stream_buffer_bytes",
        ),
    )
    for name in ("tokenizer_procs", "detok_procs", "frontend_procs"):
        if getattr(settings, name) > MAX_PROCS:
            raise _invalid(name, getattr(settings, name), f"Must be at most {MAX_PROCS}")
    rate = settings.rate_limit_tokens_per_second
    if rate is not None and rate < 0:
        raise _invalid("rate_limit_tokens_per_second", rate, "Must be >= 0 when specified")
    for name in _NOT_NEGATIVE:
        if getattr(settings, name) < 0:
            raise _invalid(name, getattr(settings, name), "can't convert negative int to unsigned")
    _positive(settings, ("job_queue_capacity", "job_queue_concurrency"))


# Resilience ------------------------------------------------------------------------------------------


def _check_retries(settings: Settings) -> None:
    if settings.retry_max_retries < 1:
        reason = "Must be >= 1 (set to 1 to effectively disable retries)"
        raise _invalid("retry.max_retries", settings.retry_max_retries, reason)
    if settings.retry_initial_backoff_ms <= 0:
        raise _invalid("retry.initial_backoff_ms", settings.retry_initial_backoff_ms, "Must be > 0")
    if settings.retry_max_backoff_ms < settings.retry_initial_backoff_ms:
        raise _invalid("retry.max_backoff_ms", settings.retry_max_backoff_ms, "Must be >= initial_backoff_ms")
    _at_least_one("retry.backoff_multiplier", settings.retry_backoff_multiplier)
    _fraction("retry.jitter_factor", settings.retry_jitter_factor)


def _check_breaker_and_health(settings: Settings) -> None:
    why = {
        "health_failure_threshold": " (--health-failure-threshold 0 would fail a worker without a probe)",
        "health_success_threshold": " (--health-success-threshold 0 would admit a worker without a probe)",
        "health_check_timeout_secs": " (--health-check-timeout-secs 0 would time every probe out at once)",
        "health_check_interval_secs": " (--health-check-interval-secs 0 would probe every worker in a busy loop; "
        "--disable-health-check turns probing off)",
    }
    for name, field in (
        ("cb_failure_threshold", "circuit_breaker.failure_threshold"),
        ("cb_success_threshold", "circuit_breaker.success_threshold"),
        ("cb_timeout_duration_secs", "circuit_breaker.timeout_duration_secs"),
        ("cb_window_duration_secs", "circuit_breaker.window_duration_secs"),
        ("health_failure_threshold", "health_check.failure_threshold"),
        ("health_success_threshold", "health_check.success_threshold"),
        ("health_check_timeout_secs", "health_check.timeout_secs"),
        ("health_check_interval_secs", "health_check.check_interval_secs"),
    ):
        value = getattr(settings, name)
        if value < 1:
            raise _invalid(field, value, "Must be >= 1" + why.get(name, ""))


# Files -----------------------------------------------------------------------------------------------


def _check_files(settings: Settings) -> None:
    urls = [*settings.worker_urls, *settings.decode, *(url for url, _ in settings.prefill)]
    path = settings.model_path
    # A gRPC worker may bring its own tokenizer; a failed load is then only logged.
    if path and not any(url.startswith(("grpc://", "grpcs://")) for url in urls) and _looks_local(path):
        _must_exist("model_path", path)
    _check_tokenizer(settings, urls)
    _must_exist("chat_template", settings.chat_template)
    for name in ("tls_cert_path", "tls_key_path", "client_cert_path", "client_key_path"):
        _must_exist(name, getattr(settings, name))
    for path in settings.ca_cert_paths:
        _must_exist("ca_cert_paths", path)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
        except (ssl.SSLError, OSError) as error:
            raise _invalid("ca_cert_paths", path, f"cannot be read as certificates: {error}") from None
    if settings.log_dir:
        try:
            os.makedirs(settings.log_dir, exist_ok=True)
        except OSError as error:
            raise _invalid("log_dir", settings.log_dir, f"cannot be created: {error.strerror}") from None


def _check_tokenizer(settings: Settings, urls: list[str]) -> None:
    """ZMQ workers have no tokenizer to give: a directory without one serves no model."""
    source = settings.tokenizer_source
    if not source or settings.disable_tokenizer_autoload or not urls:
        return
    if not os.path.isdir(source) or not all(url.startswith("ipc://") for url in urls):
        return
    from smg.vocab.load import TOKENIZER_FILES, has_tokenizer

    if not has_tokenizer(Path(source)):
        field = "tokenizer_path" if settings.tokenizer_path else "model_path"
        raise _invalid(field, source, f"the directory has no tokenizer ({TOKENIZER_FILES})")


def _looks_local(path: str) -> bool:
    """Whether a tokenizer source can only be a path: hub ids are ``name`` or ``owner/name``."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1


def _must_exist(field: str, path: str | None) -> None:
    if path is not None and not os.path.exists(path):
        raise _invalid(field, path, "does not exist")


# Security --------------------------------------------------------------------------------------------


def _check_tls(settings: Settings) -> None:
    if bool(settings.tls_cert_path) != bool(settings.tls_key_path):
        raise _failed("Both --tls-cert-path and --tls-key-path must be specified together")
    if bool(settings.client_cert_path) != bool(settings.client_key_path):
        raise _failed("Both --client-cert-path and --client-key-path must be specified together")


def _check_keys(settings: Settings) -> None:
    if settings.api_key is not None and not settings.api_key.strip():
        reason = "an empty credential would switch authentication on with a key nothing can present"
        raise _invalid("api_key", settings.api_key, reason)
    seen: dict[str, str] = {settings.api_key: ""} if settings.api_key else {}
    for tenant, key in settings.tenant_api_keys:
        if not tenant.strip():
            raise _failed("tenant_api_keys entry must have a non-empty tenant_id")
        if not key.strip():
            raise _failed(f"tenant_api_keys entry for tenant_id '{tenant}' must have a non-empty key")
        if key in seen:
            other = f"tenant_id '{seen[key]}'" if seen[key] else "the shared api_key"
            raise _failed(
                f"duplicate API key value: tenant_id '{tenant}' uses the same credential as {other}. "
                "Every credential must name one caller: give each its own key."
            )
        seen[key] = tenant


def _check_refused(settings: Settings) -> None:
    """What would weaken security when ignored."""
    if bool(settings.jwt_issuer) != bool(settings.jwt_audience):
        raise ConfigError(
            "--jwt-issuer and --jwt-audience are required together: control-plane JWT authentication would otherwise "
            "be silently disabled"
        )
    defaults = Settings()
    for name, flag in flags().items():
        if flag.tier == "refused" and getattr(settings, name) != getattr(defaults, name):
            option = flag.option or "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is not supported by this version, and ignoring it would weaken security")


def _check_headers(settings: Settings) -> None:
    for name in settings.request_id_headers or ():
        if not _HEADER_NAME.match(name):
            raise _invalid("request_id_headers", name, "not a valid HTTP header name: it could never match a request")
    for name in settings.routing_key_headers or ():
        if not _HEADER_NAME.match(name):
            raise _invalid("routing_key_headers", name, "not a valid HTTP header name: it could never match a request")
    if settings.cors_allowed_origins == ["*"]:
        return
    for origin in settings.cors_allowed_origins:
        if origin == "*":
            raise _invalid("cors_allowed_origins", origin, "* must stand alone")
        if not _is_origin(origin):
            form = "lower-case scheme://host[:port], no userinfo, no default port, nothing after it"
            raise _invalid("cors_allowed_origins", origin, f"not exactly an origin ({form})")


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or "@" in parts.netloc or port == 0:
        return False
    if port is not None and port == DEFAULT_PORTS[parts.scheme]:
        return False
    return text == text.lower() and text == f"{parts.scheme}://{parts.netloc}" and not any(c.isspace() for c in text)


# Optional features --------------------------------------------------------------------------------------


def _check_backends(settings: Settings) -> None:
    if settings.backend in ("openai", "anthropic"):
        raise ConfigError(f"--backend {settings.backend} is not supported by this version")
    if settings.history_backend == "oracle" and not settings.oracle_username:
        raise ConfigError("Configuration error: Missing required field: oracle.username")
    if settings.history_backend == "oracle":
        raise ConfigError("--history-backend oracle is not supported by this version")
    for backend, field in _HISTORY_SOURCES.items():
        if settings.history_backend == backend and not getattr(settings, field):
            raise ConfigError(f"--history-backend {backend} needs --{field.replace('_', '-')}")
    if settings.history_backend == "redis" and settings.redis_retention_days == 0:
        raise _invalid("redis_retention_days", 0, "Must be > 0, or -1 to keep records")
    if settings.history_backend == "sqlite" and settings.history_sqlite_retention_days == 0:
        raise _invalid("history_sqlite_retention_days", 0, "Must be > 0, or -1 to keep records")
    for name in ("postgres_op_timeout_secs", "redis_op_timeout_secs", "postgres_pool_max", "redis_pool_max"):
        if settings.history_backend == name.split("_")[0]:
            _positive(settings, (name,))


def _check_features(settings: Settings) -> None:
    if settings.tenant_rate_limit_enabled and not settings.tenant_rate_limit_config:
        raise ConfigError("tenant_rate_limit_enabled is set but tenant_rate_limit_config is not")
    if settings.discovery_provider == "file" and not settings.discovery_file:
        raise ConfigError("discovery_provider='file' needs discovery_file")
    if settings.priority_scheduler_config:
        try:
            with open(settings.priority_scheduler_config, "rb"):
                pass
        except OSError as error:
            raise _invalid("priority_scheduler_config", settings.priority_scheduler_config, str(error)) from None


def _check_mcp(settings: Settings) -> None:
    if settings.mcp_config_path is not None:
        from smg.mcp.config import McpConfigError, load_config

        try:
            load_config(settings.mcp_config_path)
        except McpConfigError as error:
            raise _failed(str(error)) from None
    if settings.mcp_allowed_hosts:
        from smg.mcp.guard import Guard

        for entry in settings.mcp_allowed_hosts:
            try:
                Guard([entry], allow_private=False)
            except ValueError as error:
                raise _invalid("mcp_allowed_hosts", entry, str(error)) from None


_CHECKS: tuple[Callable[[Settings], None], ...] = (
    _check_parsers,
    _check_policies,
    _check_workers,
    _check_ports,
    _check_limits,
    _check_retries,
    _check_breaker_and_health,
    _check_tls,
    _check_keys,
    _check_refused,
    _check_headers,
    _check_files,
    _check_backends,
    _check_features,
    _check_mcp,
    _check_roles,
)
