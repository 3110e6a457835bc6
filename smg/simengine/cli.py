"""``smg sim-engine``: an engine without a GPU, for trying and testing the gateway."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from pathlib import Path
from typing import Any

import click

from smg.engines.zmq.addresses import handshake_address, path_of
from smg.simengine.core import SimEngine, SimOptions
from smg.simengine.grpc.front import ADAPTERS, GrpcFront
from smg.simengine.script import Script, ScriptError, load_script
from smg.simengine.vocabulary import SHIPPED_MODEL, ModelError, Vocabulary
from smg.simengine.zmq.front import PROTOCOLS, ZmqFront

DEFAULT_MODEL_NAME = "smg-sim"
VANISHED = 70
STATUS_NAMES = (
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "UNKNOWN",
    "DATA_LOSS",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "NOT_FOUND",
    "UNIMPLEMENTED",
)


@click.command("sim-engine")
@click.option(
    "--kind", type=click.Choice(sorted(ADAPTERS)), default="sglang", show_default=True, help="worker protocol"
)
@click.option(
    "--zmq",
    metavar="ADDRESS",
    default=None,
    help="run headless over ZMQ for the gateway with this worker URL (ipc://...) or handshake address (tcp://...)",
)
@click.option("--zmq-lockstep", is_flag=True, help="ranks that must step together, as those of MoE models")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0 takes a free port")
@click.option(
    "--model-path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=SHIPPED_MODEL,
    help="directory with tokenizer.json and configuration files; default: the model that comes along",
)
@click.option("--model-name", default=DEFAULT_MODEL_NAME, show_default=True, help="name the model is served under")
@click.option("--seed", type=int, default=0, show_default=True, help="of requests that bring none")
@click.option("--step-ms", type=click.FloatRange(0), default=0.0, help="time of one step; 0: as fast as it goes")
@click.option("--prefill-ms", type=click.FloatRange(0), default=0.0, help="time before the first token")
@click.option("--tokens-per-step", type=click.IntRange(1), default=1, show_default=True)
@click.option("--max-concurrency", type=click.IntRange(1), default=256, show_default=True, help="others wait")
@click.option("--dp-size", type=click.IntRange(1, 1024), default=1, show_default=True, help="data-parallel ranks")
@click.option("--fail-at-token", type=click.IntRange(0), default=None, help="fail every request that gets this far")
@click.option("--fail-code", type=click.Choice(STATUS_NAMES), default="INTERNAL", show_default=True)
@click.option("--vanish-at-token", type=click.IntRange(0), default=None, help="die as soon as a request gets this far")
@click.option(
    "--script", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON list of outputs, as above"
)
def sim_engine_command(
    kind: str,
    zmq: str | None,
    zmq_lockstep: bool,
    host: str,
    port: int,
    model_path: Path,
    model_name: str,
    seed: int,
    step_ms: float,
    prefill_ms: float,
    tokens_per_step: int,
    max_concurrency: int,
    dp_size: int,
    fail_at_token: int | None,
    fail_code: str,
    vanish_at_token: int | None,
    script: Path | None,
) -> None:
    """Run an engine without a GPU that speaks one of the worker protocols.

    It answers with a few sentences around words of the prompt, under the request's constraint when it has one (that
    needs the package xgrammar), or with what --script says. Prints one line when it serves.

    A script is a JSON list; each entry is a reply's text or an object with "text" (or "reasoning", "content" and
    "tool_calls"), "finish_reason", "match" (only for prompts that contain it) and "error" ({"code", "message", "at"}).
    """
    options = SimOptions(
        seed=seed,
        step_ms=step_ms,
        prefill_ms=prefill_ms,
        tokens_per_step=1 if kind == "mlx" else tokens_per_step,
        max_concurrency=max_concurrency,
        dp_size=dp_size,
        fail_at=fail_at_token,
        fail_code=fail_code,
        vanish_at=vanish_at_token,
        on_vanish=lambda: os._exit(VANISHED),
    )
    try:
        vocabulary = Vocabulary.load(model_path)
        outputs = load_script(script) if script is not None else None
    except (ModelError, ScriptError) as error:
        raise click.ClickException(str(error)) from error
    try:
        if zmq is not None:
            status = asyncio.run(serve_zmq(vocabulary, options, outputs, kind, dial_address(kind, zmq), zmq_lockstep))
            raise SystemExit(status)
        asyncio.run(serve(vocabulary, options, outputs, kind, model_name, host, port))
    except OSError as error:
        raise click.ClickException(str(error)) from error


async def serve(
    vocabulary: Vocabulary, options: SimOptions, script: Script | None, kind: str, model_name: str, host: str, port: int
) -> None:
    """Serve until SIGTERM or SIGINT. Raises ``OSError`` when the address is taken."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = SimEngine(vocabulary, options, script)
    front = GrpcFront(engine, kind, model_name)
    bound = await front.start(host, port)
    steps = loop.create_task(engine.run())
    click.echo(f"sim-engine ready: kind={kind} model={model_name} url=grpc://{host}:{bound}")
    stopping = loop.create_task(stop.wait())
    await asyncio.wait({steps, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await front.stop(grace=0.5)
    if steps.done():
        steps.result()  # the loop ends only by an error
    steps.cancel()


def dial_address(kind: str, address: str) -> str:
    """Where a headless engine dials. Raises ``click.UsageError``."""
    if kind not in PROTOCOLS:
        raise click.UsageError(f"--kind {kind} does not speak ZMQ: choose {' or '.join(PROTOCOLS)}")
    try:
        return address if address.startswith("tcp://") else handshake_address(path_of(address))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


async def serve_zmq(
    vocabulary: Vocabulary, options: SimOptions, script: Script | None, kind: str, address: str, lockstep: bool
) -> int:
    """Serve the gateway at ``address`` until SIGTERM, SIGINT (status 0) or a request that no engine survives (1)."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ranks, options.dp_size = options.dp_size, 1  # every rank is an engine of its own
    fronts = []
    tasks: list[asyncio.Task[Any]] = [loop.create_task(stop.wait())]
    for rank in range(ranks):
        engine = SimEngine(vocabulary, options, script)
        ready = functools.partial(click.echo, f"sim-engine ready: kind={kind} rank={rank}")
        fronts.append(ZmqFront(engine, kind, address, rank=rank, ranks=ranks, lockstep=lockstep, on_ready=ready))
        tasks += [loop.create_task(engine.run()), loop.create_task(fronts[-1].ended.wait())]
    click.echo(f"sim-engine dials {address}: kind={kind} ranks={ranks}")
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for front in fronts:
        front.close()
    for task in tasks:
        task.cancel()
    return 0 if tasks[0] in done else 1
