"""From the runs of a detok process to the frontends.

Everything of one loop iteration leaves together: runs that have something to send say so (``write``), and one flush at
the end of the iteration reads them and sends one frame per frontend.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smg.ipc import Outbox
from smg.messages import RingMessage

if TYPE_CHECKING:
    from smg.detok.run import Run


class Outlets:
    """The ways to all frontends, by their index. What is for one that is gone is dropped."""

    __slots__ = ("_dirty", "_due", "_frontends", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, frontends: dict[int, Outbox]) -> None:
        self._loop = loop
        self._frontends = frontends
        self._dirty: list[Run] = []
        self._due = False

    def to_frontend(self, frontend: int, message: RingMessage) -> None:
        """Send at the end of this loop iteration."""
        box = self._frontends.get(frontend)
        if box is not None:
            box.hold(message)
            self._flush_soon()

    def to_stream(self, frontend: int, seq: int, body: bytes) -> None:
        """Send bytes of a stream that has begun, at the end of this loop iteration."""
        box = self._frontends.get(frontend)
        if box is not None:
            box.hold_data(seq, body)
            self._flush_soon()

    def write(self, run: Run) -> None:
        """Call ``run.flush`` at the end of this loop iteration."""
        self._dirty.append(run)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        try:
            for run in dirty:
                run.flush()
        finally:
            self._due = bool(self._dirty)
            if self._due:
                self._loop.call_soon(self._flush)
            for box in self._frontends.values():
                box.flush()
