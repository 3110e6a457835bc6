"""``smg serve``: engine replicas and a gateway in front of them, from one command line.

Three kinds of words share the line: the flags of ``ServeSettings``, gateway flags with the prefix ``--router-``
(``--router-policy random``), and everything else, which goes to the engine unchanged.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import click
import msgspec

from smg.argv import FlagCommand, FlagOption, given_values, normalise, options_of
from smg.engine_commands import (
    PACKAGES,
    EngineRequest,
    check_request,
    engine_model,
    make_replicas,
    missing_package,
)
from smg.flags import ConfigError, group
from smg.settings import Settings, check_settings
from smg.settings_build import build_settings
from smg.settings_check import MAX_PROCS
from smg.telemetry.logs import setup_logging

_serve = group("Serve")
_own = group("Serve", "own")

SHIPPED_MODEL = os.path.join(os.path.dirname(__file__), "simengine", "model")


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of ``smg serve`` itself."""

    backend: Annotated[str, _serve("engine to start", choices=("sim", *PACKAGES), env="SMG_DEFAULT_BACKEND")] = "sglang"
    connection_mode: Annotated[
        str | None,
        _serve("how the gateway talks to it; default grpc, zmq for tokenspeed", choices=("grpc", "http", "zmq")),
    ] = None
    servicer_impl: Annotated[str, _serve("gRPC servicer of vllm", choices=("python", "rust"))] = "python"
    host: Annotated[str, _serve("address of the gateway's listener")] = "127.0.0.1"
    port: Annotated[int, _serve("port of the gateway's listener")] = 8080
    data_parallel_size: Annotated[int, _serve("engine replicas", aliases=("--dp-size",))] = 1
    worker_host: Annotated[str, _serve("address the replicas listen on")] = "127.0.0.1"
    worker_base_port: Annotated[int, _serve("first port of the replicas")] = 31000
    worker_startup_timeout: Annotated[int, _serve("seconds until a replica must be healthy")] = 300
    enable_token_usage_details: Annotated[bool, _serve("ask the engine for cached-token counts")] = False
    engine_python: Annotated[str, _own("interpreter of the engine's environment")] = sys.executable


class ServeCommand(FlagCommand):
    """Splits the words into serve's own, the gateway's and the engine's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = [param for param in self.params if isinstance(param, FlagOption)]
        gateway = options_of(Settings)
        try:
            words, emptied, rest = normalise(own, args, abbreviations=False)
            gateway_words, gateway_emptied, tail = normalise(gateway, rest, abbreviations=False, prefix="--router-")
        except click.UsageError as error:
            error.ctx = ctx
            raise
        unknown = [word for word in tail if word.startswith("--router-")]
        if unknown:
            raise click.UsageError(f"unrecognized arguments: {' '.join(unknown)}", ctx)
        ctx.meta["smg.emptied"] = emptied
        ctx.meta["smg.tail"] = tail
        ctx.meta["smg.gateway"] = _gateway_values(ctx, gateway, gateway_words, gateway_emptied)
        return click.Command.parse_args(self, ctx, words)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[-h]", "[flags ...]", "[--router-FLAG ...]", "[engine flags ...]"]


def _gateway_values(
    parent: click.Context, options: list[FlagOption], words: list[str], emptied: list[str]
) -> dict[str, Any]:
    """Raw values of the ``--router-`` flags, by field."""
    command = click.Command("launch", params=[*options])
    ctx = click.Context(command, info_name="gateway")
    ctx.meta["smg.emptied"] = emptied
    try:
        command.parse_args(ctx, words)
    except click.UsageError as error:
        error.ctx = parent
        raise
    return given_values(ctx)


def gateway_settings(
    serve: ServeSettings, mode: str, urls: list[str], model: str | None, given: dict[str, Any]
) -> Settings:
    """The gateway's settings. With one replica there is nothing to choose, so selection, retries and breakers are off
    unless asked for. Raises ``ConfigError``."""
    values: dict[str, Any] = {}
    if model is not None:
        values["model_path"] = model
    if len(urls) == 1:
        values["policy"] = "passthrough"
        values["disable_retries"] = not any(name.startswith("retry_") for name in given)
        values["disable_circuit_breaker"] = not any(name.startswith("cb_") for name in given)
    if mode == "zmq":
        values["backend"] = serve.backend
    values |= given
    return build_settings(values | {"host": serve.host, "port": serve.port, "worker_urls": urls})


def _run(**_values: Any) -> int:
    ctx = click.get_current_context()
    serve = ServeSettings(**given_values(ctx))
    tail: list[str] = ctx.meta["smg.tail"]
    mode = serve.connection_mode or ("zmq" if serve.backend == "tokenspeed" else "grpc")
    request = EngineRequest(
        backend=serve.backend,
        mode=mode,
        replicas=serve.data_parallel_size,
        host=serve.worker_host,
        base_port=serve.worker_base_port,
        python=serve.engine_python,
        tail=tail,
        servicer=serve.servicer_impl,
        token_usage_details=serve.enable_token_usage_details,
    )
    problem = check_request(request) or missing_package(request)
    if problem is not None:
        raise click.UsageError(problem, ctx)
    if not 1 <= serve.data_parallel_size <= MAX_PROCS:
        raise ConfigError(f"--data-parallel-size must be between 1 and {MAX_PROCS}, got {serve.data_parallel_size}")
    replicas = make_replicas(request)
    model = engine_model(tail)[0] or (SHIPPED_MODEL if serve.backend == "sim" else None)
    settings = gateway_settings(serve, mode, [replica.url for replica in replicas], model, ctx.meta["smg.gateway"])
    check_settings(settings)
    setup_logging(settings, "serve")
    from smg.serve_run import Serve

    return Serve(replicas, settings, serve.worker_startup_timeout).run()


serve_command = ServeCommand(
    "serve",
    callback=_run,
    params=[*options_of(ServeSettings)],
    help="Start engine worker(s) and the gateway in front of them. Gateway flags take the prefix --router- (see "
    "smg launch --help); all other flags go to the engine.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
