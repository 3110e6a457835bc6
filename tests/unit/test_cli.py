"""The command line: argparse conventions, error texts, exit statuses, the split of serve's words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import click
import pytest

from smg.argv import FlagOption
from smg.cli import run
from smg.engine_commands import (
    EngineRequest,
    check_request,
    engine_model,
    free_ports,
    gpu_slice,
    handshake_port,
    make_replicas,
    tensor_parallel_size,
)
from smg.flags import ConfigError
from smg.launch import launch_command, settings_from_context
from smg.serve import ServeSettings, gateway_settings, serve_command
from smg.settings import Settings, flags


def settings_of(args: Sequence[str] | str) -> Settings:
    words = args.split() if isinstance(args, str) else list(args)
    return settings_from_context(launch_command.make_context("launch", words))


def error_of(args: Sequence[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    assert run(args) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.rstrip("\n").splitlines()[-1]


def test_options_agree_with_the_settings_table() -> None:
    options = {option.name: option for option in launch_command.params if isinstance(option, FlagOption)}
    assert set(options) == set(Settings.__struct_fields__)
    for field, flag in flags().items():
        option = options[field]
        assert option.opts == [flag.option or "--" + field.replace("_", "-"), *flag.aliases]
        assert option.envvar == (flag.env or None)
        assert flag.help in (option.help or "")


def test_no_flags_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in flags().values():
        if flag.env:
            monkeypatch.delenv(flag.env, raising=False)
    assert settings_of([]) == Settings()


def test_kinds_of_flags() -> None:
    settings = settings_of(
        "--host 127.0.0.1 --port=31000 --worker-urls grpc://a:1 grpc://b:1 --log-json --cache-threshold 0.5 "
        "--prometheus-duration-buckets 0.1 1 10 --cache-boundaries 16,32 --mm-allowed-media-domains a.org,b.org "
        "--rate-limit-tokens-per-second 5 --max-concurrent-requests -1 --no-remove-unhealthy-workers"
    )
    assert (settings.host, settings.port, settings.log_json) == ("127.0.0.1", 31000, True)
    assert settings.worker_urls == ["grpc://a:1", "grpc://b:1"]
    assert settings.cache_threshold == 0.5
    assert settings.prometheus_duration_buckets == [0.1, 1.0, 10.0]
    assert settings.cache_boundaries == [16, 32]
    assert settings.mm_allowed_media_domains == ["a.org", "b.org"]
    assert (settings.rate_limit_tokens_per_second, settings.max_concurrent_requests) == (5, -1)
    assert settings.remove_unhealthy_workers is False
    assert settings_of(["--worker-auto-recovery"]).remove_unhealthy_workers is True


def test_a_later_list_replaces_an_earlier_one() -> None:
    assert settings_of(["--worker-urls", "grpc://a:1", "--worker-urls", "grpc://b:1", "grpc://c:1"]).worker_urls == [
        "grpc://b:1",
        "grpc://c:1",
    ]
    assert settings_of(["--worker-urls", "grpc://a:1", "--worker-urls"]).worker_urls == []
    assert settings_of(["--request-id-headers", "--port", "1"]).request_id_headers == []


def test_repeatable_flags_append() -> None:
    settings = settings_of(
        "--prefill grpc://p:1 9000 --prefill grpc://q:1 none --prefill grpc://r:1 "
        "--decode grpc://d:1 --decode grpc://e:1 --model-alias a=b --model-alias c=d "
        "--tenant-api-key t:k --tenant-api-key u:l"
    )
    assert settings.prefill == [("grpc://p:1", 9000), ("grpc://q:1", None), ("grpc://r:1", None)]
    assert settings.decode == ["grpc://d:1", "grpc://e:1"]
    assert settings.model_aliases == {"a": "b", "c": "d"}
    assert settings.tenant_api_keys == [("t", "k"), ("u", "l")]


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--model", "m"], "model_path", "m"),
        (["--cache-match-threshold", "0.7"], "cache_threshold", 0.7),
        (["--spill-abs-threshold", "8"], "balance_abs_threshold", 8),
        (["--spill-rel-threshold", "2"], "balance_rel_threshold", 2.0),
        (["--sticky-key-idle-secs", "9"], "max_idle_secs", 9),
        (["--sticky-sessions"], "routing_key_override", True),
        (["--worker-url", "grpc://a:1"], "worker_urls", ["grpc://a:1"]),
        (["--prometheus-p", "29001"], "prometheus_port", 29001),
    ],
)
def test_aliases_and_abbreviations(args: list[str], field: str, value: object) -> None:
    assert getattr(settings_of(args), field) == value


def test_environment_is_the_default_of_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_POOL_MAX", "3")
    monkeypatch.setenv("SMG_API_KEY", "secret")
    monkeypatch.setenv("SMG_TENANT_API_KEYS", "a:1 b:2")
    monkeypatch.setenv("ATP_EXTERNAL_AUTH", "yes")
    settings = settings_of(["--api-key", "mine"])
    assert (settings.redis_pool_max, settings.api_key, settings.oracle_external_auth) == (3, "mine", True)
    assert settings.tenant_api_keys == [("a", "1"), ("b", "2")]
    monkeypatch.setenv("REDIS_POOL_MAX", "three")
    with pytest.raises(click.BadParameter):
        settings_of([])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--port abc", "argument --port: invalid int value: 'abc'"),
        ("--cache-threshold x", "argument --cache-threshold/--cache-match-threshold: invalid float value: 'x'"),
        ("--port", "argument --port: expected one argument"),
        ("--port --host x", "argument --port: expected one argument"),
        ("--prefill", "argument --prefill: expected at least one argument"),
        ("--log-json=1", "argument --log-json: ignored explicit argument '1'"),
        ("--foo bar baz", "unrecognized arguments: --foo bar baz"),
        ("extra", "unrecognized arguments: extra"),
        ("--sse-keepalive-secs -1", "argument --sse-keepalive-secs: expected a non-negative integer, got '-1'"),
        ("--cache-index x", "argument --cache-index: invalid choice: 'x' (choose from 'tree', 'hash')"),
        ("--tls- x", "ambiguous option: --tls- could match --tls-cert-path, --tls-key-path"),
        (
            "--service-discovery --discovery-provider file",
            "argument --discovery-provider: not allowed with argument --service-discovery",
        ),
    ],
)
def test_unreadable_command_lines(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(["launch", *words.split()], capsys) == f"smg: error: {reason}"


def test_unknown_parser_name(capsys: pytest.CaptureFixture[str]) -> None:
    text = error_of(["launch", "--tool-call-parser", "nope"], capsys)
    assert text.startswith("smg: error: argument --tool-call-parser: invalid choice: 'nope' (choose from 'cohere', ")


def test_usage_precedes_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("usage: smg launch [-h]")


def test_rejected_configuration_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--port", "0"]) == 1
    expected = "Error starting router: Configuration error: Invalid value for field 'port': 0 - Port must be > 0\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("args", [[], ["no-such-command"], ["no-such-command", "--flag"]])
def test_help_without_a_command(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 1
    captured = capsys.readouterr()
    assert "launch" in captured.out
    assert "sim-engine" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag]) == 0
    assert capsys.readouterr().out.split()[0] == "smg"


def test_version_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version-verbose"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.parametrize("args", [["--help"], ["launch", "--help"], ["launch", "-h"], ["serve", "--help"]])
def test_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == 0
    assert "--help" in capsys.readouterr().out


def test_the_command_line_loads_no_engine_code() -> None:
    heavy = "('grpc', 'zmq', 'tokenizers', 'uvicorn', 'prometheus_client')"
    code = f"import sys, smg.cli; smg.cli.run(['launch', '--help']); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


# serve -----------------------------------------------------------------------------------------------


def serve_context(words: str) -> click.Context:
    return serve_command.make_context("serve", words.split())


def test_serve_splits_the_words() -> None:
    ctx = serve_context(
        "--backend sim --step-ms 3 --port 9000 --router-policy random --router-worker-startup-delay 1 "
        "--seed=4 --dp-size 2"
    )
    assert ctx.params["backend"] == "sim"
    assert (ctx.params["port"], ctx.params["data_parallel_size"]) == (9000, 2)
    assert ctx.meta["smg.tail"] == ["--step-ms", "3", "--seed=4"]
    assert ctx.meta["smg.gateway"] == {"policy": "random", "worker_startup_delay": 1}


def test_serve_refuses_unknown_gateway_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--router-nonsense" in error_of(["serve", "--backend", "sim", "--router-nonsense", "1"], capsys)
    text = error_of(["serve", "--backend", "sim", "--router-policy", "x"], capsys)
    assert text.startswith("smg: error: argument --policy: invalid choice: 'x'")


def test_serve_names_a_missing_engine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    text = error_of(["serve", "--backend", "tokenspeed", "--model", "m"], capsys)
    assert text == "smg: error: tokenspeed is not installed. Install it with: pip install tokenspeed"


def test_one_replica_leaves_nothing_to_choose() -> None:
    serve = ServeSettings(backend="sim")
    alone = gateway_settings(serve, "grpc", ["grpc://a:1"], "m", {})
    assert (alone.policy, alone.max_attempts, alone.disable_circuit_breaker) == ("passthrough", 1, True)
    assert (alone.host, alone.port, alone.model_path) == ("127.0.0.1", 8080, "m")
    asked = gateway_settings(serve, "grpc", ["grpc://a:1"], "m", {"policy": "random", "retry_max_retries": 3})
    assert (asked.policy, asked.max_attempts) == ("random", 3)
    two = gateway_settings(serve, "grpc", ["grpc://a:1", "grpc://b:1"], None, {})
    assert (two.policy, two.disable_retries, two.model_path) == ("cache_aware", False, None)


def request(backend: str, mode: str = "grpc", **values: object) -> EngineRequest:
    base = {"replicas": 1, "host": "127.0.0.1", "base_port": 42000, "python": "py", "tail": []}
    return EngineRequest(backend=backend, mode=mode, **{**base, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (request("trtllm", "zmq"), "only supported for the vllm, tokenspeed and sglang backends, not trtllm"),
        (request("trtllm", "http"), "only supports connection-mode grpc"),
        (request("tokenspeed", "grpc"), "only supports connection-mode zmq"),
        (request("vllm", "zmq", servicer="rust"), "servicer-impl rust is only available"),
        (request("sglang", "zmq", replicas=2), "does not support data-parallel-size > 1"),
        (request("sim", "http"), "not supported for the sim backend"),
    ],
)
def test_impossible_engine_combinations(asked: EngineRequest, part: str) -> None:
    assert part in (check_request(asked) or "")


def test_engine_commands_carry_model_address_and_tail() -> None:
    vllm = make_replicas(request("vllm", tail=["--model", "M", "--max-model-len", "9"]))[0]
    port = vllm.url.rpartition(":")[2]
    assert vllm.command == [
        "py", "-m", "vllm.entrypoints.cli.main", "serve", "M", "--grpc", "--host", "127.0.0.1", "--port", port,
        "--max-model-len", "9",
    ]  # fmt: skip
    sglang = make_replicas(request("sglang", "http", tail=["--model-path=M"]))[0]
    assert sglang.url.startswith("http://127.0.0.1:")
    assert sglang.command[:5] == ["py", "-m", "sglang.launch_server", "--model-path", "M"]
    assert "--grpc-mode" not in sglang.command
    sim = make_replicas(request("sim", tail=["--step-ms", "1"]))[0]
    assert sim.command[-4:] == ["--model-name", "sim", "--step-ms", "1"]


def test_headless_engines_dial_the_port_of_their_socket(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMG_ZMQ_SOCKET_DIR", str(tmp_path))
    replica = make_replicas(request("vllm", "zmq", tail=["--model", "M"]))[0]
    path = replica.url.removeprefix("ipc://")
    assert path.startswith(str(tmp_path))
    assert str(handshake_port(path)) in replica.command
    assert "--headless" in replica.command


@pytest.mark.parametrize(
    ("path", "port"), [("/tmp/smg-zmq/engine-0", 22670), ("/run/gw/e0", 25542), ("/run/gw/engine-1", 26499)]
)
def test_handshake_port_vectors(path: str, port: int) -> None:
    assert handshake_port(path) == port


def test_engine_words() -> None:
    assert engine_model(["--a", "--model", "m", "b"]) == ("m", ["--a", "b"])
    assert engine_model(["--model-path=m"]) == ("m", [])
    assert engine_model(["--x"]) == (None, ["--x"])
    assert tensor_parallel_size(["--tp", "2"]) == 2
    assert tensor_parallel_size(["--tensor-parallel-size=4"]) == 4
    assert tensor_parallel_size([]) == 1


def test_gpu_slices() -> None:
    assert gpu_slice(1, 2, None) == "2,3"
    assert gpu_slice(1, 2, "4,5,6,7") == "6,7"
    with pytest.raises(ConfigError):
        gpu_slice(2, 2, "4,5,6,7")


def test_free_ports_are_distinct_and_ascending() -> None:
    ports = free_ports("127.0.0.1", 42000, 3)
    assert ports == sorted(set(ports))
    assert len(ports) == 3
