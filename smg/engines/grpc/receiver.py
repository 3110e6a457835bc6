"""Who is told of a server-streaming call.

A class and not three callbacks: each message costs one call through it and touches nothing else of the memory.
"""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from smg.engines.base import EngineError


@mypyc_attr(allow_interpreted_subclasses=True)
class Receiver:
    """Gets every message's bytes in order, then exactly one of ``on_end`` and ``on_error``. As it stands it takes no
    notice of anything."""

    def on_message(self, payload: bytes) -> None:
        """A message of the stream."""

    def on_end(self) -> None:
        """The stream ended with status OK."""

    def on_error(self, error: EngineError) -> None:
        """The stream ended otherwise."""
