"""Server-sent events of a Responses stream, numbered from 0."""

from __future__ import annotations

from typing import Any

import orjson


class DeltaFrame:
    """The fixed bytes around the text of one item's delta events."""

    __slots__ = ("after", "before", "middle")

    def __init__(self, kind: str, place: dict[str, Any], extra: dict[str, Any]) -> None:
        self.before = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'.encode()
        self.middle = b"," + orjson.dumps(place)[1:-1] + b',"delta":'
        self.after = (b"," + orjson.dumps(extra)[1:-1] if extra else b"") + b"}\n\n"


class EventWriter:
    """Collects the frames of a stream; with ``streaming`` False it writes nothing and costs nothing."""

    __slots__ = ("_frames", "_sequence", "streaming")

    def __init__(self, streaming: bool) -> None:
        self.streaming = streaming
        self._sequence = 0
        self._frames: list[bytes] = []

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """One event; ``fields`` is its payload beyond ``type`` and ``sequence_number``."""
        if self.streaming:
            data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
            self._sequence += 1
            self._frames.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def delta(self, frame: DeltaFrame, text: str) -> None:
        """One delta event."""
        if self.streaming:
            self._frames.append(
                b"%b%d%b%b%b" % (frame.before, self._sequence, frame.middle, orjson.dumps(text), frame.after)
            )
            self._sequence += 1

    def take(self) -> list[bytes]:
        """The frames since the last call, one per event."""
        frames, self._frames = self._frames, []
        return frames
