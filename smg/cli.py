"""The ``smg`` command. Everything heavy is imported by the command that needs it, so that ``smg --help`` is instant.

Exit statuses: 0 after a graceful end, 1 for a rejected configuration or no command, 2 for a command line that cannot be
read (usage on stderr, the last line is ``smg: error: <reason>``).
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import click

from smg import __version__
from smg.flags import ConfigError

PROGRAM = "smg"
# Command -> module, attribute, line in the list of commands.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "launch": ("smg.launch", "launch_command", "Start the gateway in front of running workers"),
    "serve": ("smg.serve", "serve_command", "Start engine worker(s) and the gateway in front of them"),
    "sim-engine": ("smg.simengine.cli", "sim_engine_command", "Start an engine without a GPU, for trials and tests"),
    "render": ("smg.render_tool", "render_command", "Show the prompt and plan the gateway makes of a request"),
    "parse": ("smg.parse_tool", "parse_command", "Run the output parsers on text from a file"),
}
LIBRARIES = ("uvloop", "pyzmq", "grpcio", "tokenizers", "jinja2", "minijinja", "msgspec", "orjson", "uvicorn", "mcp")


class LazyGroup(click.Group):
    """Commands are listed from ``COMMANDS`` and imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, attribute, _ = entry
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


def _version_text() -> str:
    lines = [f"{PROGRAM} {__version__}", f"python: {platform.python_version()} ({platform.python_compiler()})"]
    lines.append(f"platform: {platform.platform()}")
    hot = find_spec("smg.detok.choice")
    compiled = hot is not None and not (hot.origin or "").endswith(".py")
    lines.append(f"hot modules: {'compiled' if compiled else 'interpreted'}")
    for name in LIBRARIES:
        try:
            lines.append(f"{name}: {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name}: not installed")
    return "\n".join(lines)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option("-V", "--version", "short", is_flag=True, help="Print the version and exit.")
@click.option("--version-verbose", "verbose", is_flag=True, help="Print the version, build and libraries, and exit.")
@click.pass_context
def group(ctx: click.Context, short: bool, verbose: bool) -> None:
    """A gateway for large language models: OpenAI and Anthropic APIs in front of gRPC and ZMQ engines."""
    if short or verbose:
        click.echo(_version_text() if verbose else f"{PROGRAM} {__version__}")
        ctx.exit(0)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(1)


def run(args: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    words = list(args)
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        words = []
    try:
        result: Any = group.main(words, prog_name=PROGRAM, standalone_mode=False)
    except click.UsageError as error:
        print(_usage(error), file=sys.stderr)
        print(f"{PROGRAM}: error: {_reason(error)}", file=sys.stderr)
        return 2
    except click.ClickException as error:
        print(f"{PROGRAM}: error: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except ConfigError as error:
        print(f"Error starting router: {error}", file=sys.stderr)
        return 1
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        return 0
    return result if isinstance(result, int) else 0


def _usage(error: click.UsageError) -> str:
    ctx = error.ctx
    if ctx is None:
        return f"usage: {PROGRAM} [-h] COMMAND [flags ...]"
    pieces = " ".join(ctx.command.collect_usage_pieces(ctx))
    return f"usage: {ctx.command_path} {pieces}\n(see {ctx.command_path} --help)"


def _reason(error: click.UsageError) -> str:
    if isinstance(error, click.MissingParameter):
        return error.format_message()
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"argument {'/'.join(error.param.opts)}: {error.message}"
    if isinstance(error, click.NoSuchOption):
        return f"unrecognized arguments: {error.option_name}"
    return error.format_message()


def main() -> None:
    """Entry point of the console script and of ``python -m smg``."""
    sys.exit(run(sys.argv[1:]))
