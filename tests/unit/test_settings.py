"""The settings table, start-up validation, and the way from raw flag values to settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from smg.argv import WORD_SEPARATOR
from smg.flags import ConfigError
from smg.settings import POLICIES, ControlPlaneKey, Settings, check_settings, flag_of, flags, ignored_flags
from smg.settings_build import build_settings


def reason_of(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_settings(Settings(**values))
    return str(caught.value)


def invalid(field: str, value: object, reason: str) -> str:
    return f"Configuration error: Invalid value for field '{field}': {value} - {reason}"


def test_every_setting_has_a_flag_with_help_and_group() -> None:
    hints = get_type_hints(Settings, include_extras=True)
    assert set(hints) == set(Settings.__struct_fields__)
    for name, hint in hints.items():
        flag = flag_of(hint)
        assert flag.help, name
        assert flag.group, name


def test_option_names_and_aliases_are_unique() -> None:
    names: list[str] = []
    for field, flag in flags().items():
        names += [flag.option or "--" + field.replace("_", "-"), *flag.aliases]
    assert len(names) == len(set(names))


def test_choice_defaults_are_choices() -> None:
    defaults = Settings()
    for name, flag in flags().items():
        value = getattr(defaults, name)
        if flag.choices and value is not None:
            assert value in flag.choices, name


def test_defaults_are_valid_and_as_documented() -> None:
    settings = Settings()
    check_settings(settings)
    assert (settings.host, settings.port, settings.prometheus_port) == ("0.0.0.0", 30000, 29000)
    assert (settings.policy, settings.cache_threshold, settings.block_size) == ("cache_aware", 0.3, 16)
    assert (settings.balance_abs_threshold, settings.balance_rel_threshold) == (64, 1.5)
    assert (settings.max_payload_size, settings.request_timeout_secs) == (512 * 1024 * 1024, 1800)
    assert (settings.retry_max_retries, settings.retry_initial_backoff_ms) == (5, 50)
    assert (settings.cb_failure_threshold, settings.cb_timeout_duration_secs) == (10, 60)
    assert (settings.health_failure_threshold, settings.health_check_interval_secs) == (3, 60)
    assert (settings.queue_size, settings.queue_timeout_secs) == (100, 60)
    assert settings.stream_buffer_bytes == 8 * 1024 * 1024
    assert min(settings.tokenizer_procs, settings.detok_procs, settings.frontend_procs) >= 1


def test_settings_survive_the_way_to_another_process() -> None:
    settings = Settings(
        worker_urls=["grpc://a:1"],
        prefill=[("grpc://p:1", 9000), ("grpc://q:1", None)],
        control_plane_api_keys=[ControlPlaneKey("i", "n", "admin", "k")],
        tenant_api_keys=[("t", "k2")],
        model_aliases={"a": "b"},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=Settings) == settings


def test_list_defaults_are_not_shared() -> None:
    first = Settings()
    first.worker_urls.append("grpc://a:1")
    assert Settings().worker_urls == []


def test_derived_values() -> None:
    assert Settings(max_concurrent_requests=0).inflight_limit == 0
    assert Settings(max_concurrent_requests=7).inflight_limit == 7
    assert Settings().inflight_limit >= 4096
    assert Settings(disable_retries=True).max_attempts == 1
    assert Settings(host="::1").metrics_host == "::"
    assert Settings(host="127.0.0.1").metrics_host == "0.0.0.0"
    assert Settings(prometheus_host="10.0.0.1").metrics_host == "10.0.0.1"
    assert [Settings().mode, Settings(enable_igw=True).mode] == ["Regular", "IGW"]
    assert Settings(pd_disaggregation=True).mode == "PD Disaggregated"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"port": 0}, invalid("port", 0, "Port must be > 0")),
        (
            {"prometheus_port": 0},
            invalid("metrics.port", 0, "Port must be > 0 (0 would request an unstable OS-ephemeral port)"),
        ),
        ({"cache_threshold": 2.0}, invalid("cache_threshold", 2, "Must be between 0.0 and 1.0")),
        ({"balance_rel_threshold": 0.5}, invalid("balance_rel_threshold", 0.5, "Must be finite and >= 1.0")),
        ({"block_size": 0}, invalid("block_size", 0, "Must be > 0")),
        ({"max_tree_size": 0}, invalid("max_tree_size", 0, "Must be > 0")),
        ({"eviction_interval_secs": 0}, invalid("eviction_interval_secs", 0, "Must be > 0")),
        ({"load_monitor_interval": 0}, invalid("load_monitor_interval_secs", 0, "Must be > 0")),
        ({"worker_startup_check_interval": 0}, invalid("worker_startup_check_interval_secs", 0, "Must be > 0")),
        ({"request_timeout_secs": 0}, invalid("request_timeout_secs", 0, "Must be > 0")),
        ({"max_payload_size": 0}, invalid("max_payload_size", 0, "Must be > 0")),
        ({"detok_procs": 100000}, invalid("detok_procs", 100000, "Must be at most 256")),
        ({"kv_index": "x"}, invalid("kv_index", "x", "expected 'positional' or 'chain'")),
        (
            {"selection_policy": "x"},
            invalid("selection_policy", "x", "unknown selection policy 'x'; known: cache-aware-default"),
        ),
        (
            {"worker_overload_token_usage": 0.0},
            invalid("worker_overload_token_usage", 0, "Must be a fraction in (0.0, 1.0]"),
        ),
        (
            {"selection_temperature": -1.0},
            invalid("selection_temperature", -1, "Must be finite and >= 0.0 (0.0 is argmax)"),
        ),
        (
            {"retry_max_retries": 0},
            invalid("retry.max_retries", 0, "Must be >= 1 (set to 1 to effectively disable retries)"),
        ),
        ({"retry_backoff_multiplier": 0.5}, invalid("retry.backoff_multiplier", 0.5, "Must be finite and >= 1.0")),
        (
            {"retry_backoff_multiplier": float("inf")},
            invalid("retry.backoff_multiplier", "inf", "Must be finite and >= 1.0"),
        ),
        ({"retry_jitter_factor": 2.0}, invalid("retry.jitter_factor", 2, "Must be between 0.0 and 1.0")),
        ({"retry_max_backoff_ms": 1}, invalid("retry.max_backoff_ms", 1, "Must be >= initial_backoff_ms")),
        (
            {"rate_limit_tokens_per_second": -1},
            invalid("rate_limit_tokens_per_second", -1, "Must be >= 0 when specified"),
        ),
        (
            {"worker_urls": ["HTTP://x"]},
            invalid(
                "worker_url",
                "HTTP://x",
                "URL must start with a lowercase http://, https://, grpc://, grpcs://, or ipc:// scheme",
            ),
        ),
        ({"chat_template": "/no/such.jinja"}, invalid("chat_template", "/no/such.jinja", "does not exist")),
        ({"model_path": "/no/such"}, invalid("model_path", "/no/such", "does not exist")),
        (
            {"policy": "power_of_two", "worker_urls": ["grpc://a:1"]},
            "Configuration error: Incompatible configuration: Power-of-two policy requires at least 2 workers",
        ),
        (
            {"tls_cert_path": "x"},
            "Configuration error: Validation failed: "
            "Both --tls-cert-path and --tls-key-path must be specified together",
        ),
        ({"history_backend": "oracle"}, "Configuration error: Missing required field: oracle.username"),
        ({"tenant_rate_limit_enabled": True}, "tenant_rate_limit_enabled is set but tenant_rate_limit_config is not"),
        ({"discovery_provider": "file"}, "discovery_provider='file' needs discovery_file"),
        ({"tool_call_parser": "qwen3_tagged"}, "Invalid configuration: unknown tool-call parser 'qwen3_tagged'"),
        ({"reasoning_parser": "nope"}, "Invalid configuration: unknown reasoning parser 'nope'"),
    ],
)  # fmt: skip
def test_rejected_values(values: dict[str, Any], expected: str) -> None:
    assert reason_of(**values) == expected


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"health_check_port": 30000}, "'health_check_port': 30000"),
        ({"cb_failure_threshold": 0}, "'circuit_breaker.failure_threshold': 0"),
        ({"cb_success_threshold": 0}, "'circuit_breaker.success_threshold': 0"),
        ({"health_failure_threshold": 0}, "'health_check.failure_threshold': 0"),
        ({"health_check_interval_secs": 0}, "--health-check-interval-secs 0"),
        ({"queue_size": -1}, "can't convert negative int to unsigned"),
        ({"max_background_responses": -1}, "can't convert negative int to unsigned"),
        ({"api_key": ""}, "empty credential"),
        ({"cors_allowed_origins": ["*", "http://a"]}, "cors_allowed_origins"),
        ({"cors_allowed_origins": ["http://a:80"]}, "not exactly an origin"),
        ({"cors_allowed_origins": ["http://A"]}, "not exactly an origin"),
        ({"cors_allowed_origins": ["http://a/"]}, "not exactly an origin"),
        ({"request_id_headers": ["a(b"]}, "not a valid HTTP header name"),
        ({"jwt_issuer": "x"}, "required together"),
        ({"port": 70000}, "'port': 70000"),
        ({"backend": "openai"}, "--backend openai"),
        ({"pd_disaggregation": True}, "--pd-disaggregation"),
        ({"prefill": [("grpc://p:1", None)]}, "--prefill"),
        ({"decode": ["grpc://d:1"]}, "--decode"),
        ({"history_backend": "redis"}, "--history-backend redis"),
        ({"worker_urls": ["grpc://h:99999"]}, "'worker_url': grpc://h:99999 - Port out of range"),
        ({"worker_urls": ["grpc://a:1", "grpc://h h:1"]}, "white space"),
        ({"worker_urls": ["grpc://me:secret@h:1"]}, "'worker_url': grpc://***@h:1 - a user name"),
        ({"worker_urls": ["ipc:///tmp/e"]}, "--backend sglang does not speak ZMQ"),
        ({"worker_urls": ["ipc:///" + "x" * 95], "backend": "vllm", "detok_procs": 101}, "exceeds 107 bytes"),
        ({"zmq_engine_count": -3}, "can't convert negative int to unsigned"),
        ({"model_path": str(Path(__file__).parent), "worker_urls": ["ipc:///e"], "backend": "vllm"}, "no tokenizer"),
    ],
)
def test_rejected_values_name_the_field(values: dict[str, Any], part: str) -> None:
    assert part in reason_of(**values)


def test_values_of_unselected_policies_are_not_checked() -> None:
    check_settings(Settings(prefix_hash_load_factor=0.1, prefix_token_count=0))
    assert "'load_factor': 0.1" in reason_of(policy="prefix_hash", prefix_hash_load_factor=0.1)
    assert "'prefix_token_count': 0" in reason_of(policy="prefix_hash", prefix_token_count=0)


def test_policy_checks_come_before_port_checks() -> None:
    assert "cache_threshold" in reason_of(cache_threshold=2.0, port=0)


@pytest.mark.parametrize(
    "values",
    [
        {"max_concurrent_requests": -5},
        {"max_idle_secs": 0},
        {"least_load_default_throughput": 0.0},
        {"shutdown_grace_period_secs": 0},
        {"zmq_engine_count": 0},
        {"worker_urls": ["grpc://a:1", "grpc://a:1", "http://b:1"]},
        {"cors_allowed_origins": ["*"]},
        {"cors_allowed_origins": ["https://a.example:8443", "http://[::1]:3000"]},
        {"model_path": "/no/such", "worker_urls": ["grpc://a:1"]},
        {"model_path": "owner/model"},
        {"worker_urls": ["grpc://a:1/", "grpcs://[::1]", "ipc:///tmp/e"], "backend": "tokenspeed"},
        {"worker_urls": ["ipc:///" + "x" * 95], "backend": "vllm", "detok_procs": 1},
        {"model_path": str(Path(__file__).parent), "worker_urls": ["grpc://a:1"]},
        *[{"policy": policy} for policy in POLICIES],
    ],
)
def test_accepted_values(values: dict[str, Any]) -> None:
    check_settings(Settings(**values))


def test_one_secret_for_two_callers() -> None:
    text = reason_of(tenant_api_keys=[("a", "k"), ("b", "k")])
    assert text.startswith(
        "Configuration error: Validation failed: duplicate API key value: tenant_id 'b' uses the same credential as "
        "tenant_id 'a'."
    )
    assert "as the shared api_key." in reason_of(api_key="k", tenant_api_keys=[("a", "k")])


@pytest.mark.parametrize(
    "values",
    [
        {"jwt_issuer": "https://issuer", "jwt_audience": "smg"},
        {"jwt_role_mapping": ["a=admin"]},
        {"mesh_tls_cert": "c", "mesh_tls_key": "k"},
        {"storage_hook_wasm_path": "hook.wasm"},
    ],
)
def test_flags_that_would_weaken_security_stop_startup(values: dict[str, Any]) -> None:
    assert "would weaken security" in reason_of(**values)


def test_flags_without_effect_are_named_once() -> None:
    settings = Settings(enable_mesh=True, cache_ttl_secs=180, cache_index="hash", port=1234)
    assert ignored_flags(settings) == ["--cache-index", "--enable-mesh"]


def test_log_dir_that_cannot_be_made(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert "'log_dir'" in reason_of(log_dir=str(blocker / "logs"))


def test_raw_values_become_typed_settings() -> None:
    settings = build_settings(
        {
            "prefill": (f"grpc://p:1{WORD_SEPARATOR}9000", f"grpc://q:1{WORD_SEPARATOR}none", "grpc://r:1"),
            "decode": ("grpc://d:1",),
            "tenant_api_keys": ("t:key:with:colons",),
            "control_plane_api_keys": ("id:name:admin:sec:ret",),
            "model_aliases": ("a=b=c", "a = b=c"),
            "worker_urls": (),
        }
    )
    assert settings.prefill == [("grpc://p:1", 9000), ("grpc://q:1", None), ("grpc://r:1", None)]
    assert settings.decode == ["grpc://d:1"]
    assert settings.tenant_api_keys == [("t", "key:with:colons")]
    assert settings.control_plane_api_keys == [ControlPlaneKey("id", "name", "admin", "sec:ret")]
    assert settings.model_aliases == {"a": "b=c"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_aliases": ("foo",)}, "Invalid model alias 'foo'. Expected format: <alias>=<canonical>"),
        ({"model_aliases": ("a=b", "a=c")}, "--model-alias: 'a' stands for both 'b' and 'c'"),
        (
            {"tenant_api_keys": ("a",)},
            "Invalid --tenant-api-key value: expected 'tenant_id:key' (missing ':' separator)",
        ),
        (
            {"control_plane_api_keys": ("a",)},
            "Invalid control-plane API key entry: expected 'id:name:role:key'",
        ),
        (
            {"control_plane_api_keys": ("a:b:c:d",)},
            "Invalid control-plane API key role: must be 'admin' or 'user'",
        ),
        (
            {"prefill": (f"grpc://a:1{WORD_SEPARATOR}foo",)},
            "Invalid bootstrap port: foo. Must be a number or 'none'",
        ),
    ],
)
def test_raw_values_that_cannot_be_read(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_settings(values)
    assert str(caught.value) == expected


def test_certificates_of_workers_must_be_readable(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"ca_cert_paths.*cannot be read as certificates"):
        check_settings(build_settings({"ca_cert_paths": [str(file)]}))
