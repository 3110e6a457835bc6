"""What every renderer is to the run that feeds it."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from smg.detok.choice import Choice
from smg.detok.usage import Usage
from smg.engines.base import TokenLogprobs
from smg.messages import ParserEvent

DONE = b"data: [DONE]\n\n"
json_bytes = orjson.dumps


class Renderer:
    """Renders one answer. A streaming renderer is emptied with ``take`` after every step, the other with ``body`` at
    the end.
    """

    streaming: bool = False

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        """New tokens of this choice and the events they gave; no tokens when only held-back text is released."""
        raise NotImplementedError

    def on_choice_end(self, choice: Choice) -> None:
        """The choice has its finish reason; all its events were given. Most have nothing to do before ``on_end`` or
        ``body``."""

    def on_end(self, usage: Usage) -> None:
        """Every choice ended (streaming only)."""
        raise TypeError("not a streamed answer")

    def take(self) -> bytes:
        """Bytes to send since the last call; none where nothing is streamed."""
        return b""

    def body(self, usage: Usage) -> bytes:
        """The complete answer (non-streaming only)."""
        raise TypeError("a streamed answer has no body")


class Output(Renderer):
    """The byte buffer of a streaming renderer, its base."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def take(self) -> bytes:
        """Bytes to send since the last call."""
        parts = self._parts
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        return data


def client_finish_reason(reason: str | None, *, has_calls: bool) -> str | None:
    """The reason a client sees: a complete answer with tool calls is ``tool_calls``; ``length`` stays."""
    if has_calls and reason != "length":
        return "tool_calls"
    return reason


def uint32_list(raw: bytes | None) -> list[int]:
    """Token ids from their little-endian uint32 bytes."""
    return list(memoryview(raw).cast("I")) if raw else []
