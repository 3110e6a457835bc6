"""The gateway as a child of ``smg serve``: its settings come on stdin, so that no key shows in a process list."""

from __future__ import annotations

import sys

import msgspec

from smg.flags import ConfigError
from smg.launch import run_gateway
from smg.serve_run import end_with_parent
from smg.settings import Settings


def main() -> int:
    """Run the gateway of the settings on stdin; returns the exit status."""
    end_with_parent()
    settings = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Settings)
    try:
        return run_gateway(settings)
    except ConfigError as error:
        sys.stderr.write(f"Error starting router: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
