"""One generation of a session on its way around the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from smg.api.errors import ApiError, refused
from smg.api.responses import TURN_PATH
from smg.frontend.exchange import DONE, STREAMING, WAITING, AwaitedExchange
from smg.messages import Reply, TurnEnd, TurnEvent, TurnEvents

_decode = msgspec.msgpack.Decoder(list[TurnEvent]).decode


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: str = "internal_error"
    type: str | None = None
    param: str | None = None


class _Envelope(msgspec.Struct):
    error: _ErrorBody


_decode_error = msgspec.json.Decoder(_Envelope).decode


class TurnExchange(AwaitedExchange):
    """The session's side of a generation. Events go to ``on_events`` from the inbox callback; ``done`` is set when
    ``outcome`` is there: the end of the generation, or the refusal of a request that no engine began.

    ``encode`` makes the body, with a fresh engine id for every submission."""

    __slots__ = ("_encode", "_on_events", "outcome")

    def __init__(
        self, request_id: str, headers: dict[str, str], received: float, deadline: float,
        encode: Callable[[], bytes], on_events: Callable[[Sequence[TurnEvent]], None],
    ) -> None:  # fmt: skip
        super().__init__(0, TURN_PATH, request_id, headers, encode(), None, 0, received, deadline)
        self._encode = encode
        self._on_events = on_events
        self.outcome: TurnEnd | ApiError | None = None

    def renew(self) -> None:
        self.body = self._encode()

    # From the ring -------------------------------------------------------------------------------

    def reply(self, message: Reply) -> None:
        if self.state == WAITING:
            self._end(_api_error(message))

    def events(self, message: TurnEvents) -> None:
        """Events of one tick."""
        if self.state == WAITING:
            self.state = STREAMING
            self.body = b""
        if self.state == STREAMING:
            self._on_events(_decode(message.events))

    def turn_end(self, message: TurnEnd) -> None:
        """The last message of the generation."""
        if self.state != DONE:
            self._end(message)

    def end(self, body: bytes, error_code: str) -> None:
        """The process that owned the stream died after it had begun."""
        if self.state != DONE:
            text = "Stream error: the process that served this stream ended"
            self._end(TurnEnd(self.seq, "error", {}, None, (500, "stream_error", text)))

    def keepalive(self, frame: bytes, now: float) -> None:
        """The session fills the silence of its client's stream itself."""

    def _end(self, outcome: TurnEnd | ApiError) -> None:
        self.outcome = outcome
        self.state = DONE
        self._finish()


def _api_error(message: Reply) -> ApiError:
    try:
        error = _decode_error(message.body).error
    except msgspec.DecodeError:
        return refused("internal_error", "the request could not be processed", status=500)
    kept = tuple((name, value) for name, value in message.headers if name == "retry-after")
    gateway = any(name == "x-smg-error-code" for name, _ in message.headers)
    return ApiError(message.status, error.code, error.message, error.param, error.type, gateway=gateway, headers=kept)
