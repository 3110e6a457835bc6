"""Where the output of a session goes: one JSON answer, one event stream, or a log that streams can follow."""

from __future__ import annotations

import time
from typing import Protocol

from smg.api.errors import ApiError, refused, render_error
from smg.frontend.exchange import DONE, Exchange
from smg.messages import Reply, StreamStart

PATH = "/v1/responses"
JSON_HEADERS = [("content-type", "application/json")]
SSE_HEADERS = [
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("connection", "keep-alive"),
]
PING = b": ping\n\n"
MAX_LOG_BYTES = 16 << 20


class Outlet(Protocol):
    """``started``: the client has been told that its request is being answered, so a refusal is no longer possible."""

    @property
    def started(self) -> bool: ...

    def write(self, frames: list[bytes]) -> None:
        """Stream events."""

    def refuse(self, error: ApiError) -> None:
        """Nothing was written, and nothing will be."""

    def finish(self, body: bytes, error_code: str) -> None:
        """The response is complete: ``body`` is its object. ``error_code`` is "" for a good end."""


class WholeAnswer:
    """The response object as the body of the HTTP answer."""

    started = False

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def write(self, frames: list[bytes]) -> None:
        """Events are for streams."""

    def refuse(self, error: ApiError) -> None:
        self._exchange.reply(Reply(0, *render_error(error, PATH, self._exchange.request_id)))

    def finish(self, body: bytes, error_code: str) -> None:
        self._exchange.reply(Reply(0, 200, JSON_HEADERS, body))


class StreamAnswer:
    """The events as the body of the HTTP answer."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.started = False

    @property
    def over(self) -> bool:
        """The client is served or gone."""
        return self.exchange.state == DONE

    def write(self, frames: list[bytes]) -> None:
        if not frames:
            return
        data = b"".join(frames) if len(frames) > 1 else frames[0]
        if self.started:
            self.exchange.data(data, time.time())
        else:
            self.started = True
            self.exchange.start(StreamStart(0, SSE_HEADERS, data))

    def refuse(self, error: ApiError) -> None:
        self.exchange.reply(Reply(0, *render_error(error, PATH, self.exchange.request_id)))

    def finish(self, body: bytes, error_code: str) -> None:
        self.exchange.end(b"", error_code)

    def ping(self, now: float, silence: float) -> None:
        """Fill a silence of ``silence`` seconds."""
        if self.started and now - self.exchange.last_write >= silence:
            self.exchange.keepalive(PING, now)


class EventLog:
    """The events of a background response: kept so that streams can start anywhere, forwarded to those that follow.
    The position of a frame is its sequence number. A log that grows too large is dropped; followers are served on."""

    started = True

    def __init__(self) -> None:
        self.frames: list[bytes] | None = []
        self.over = False
        self._size = 0
        self._error_code = ""
        self._followers: list[StreamAnswer] = []

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._size

    def write(self, frames: list[bytes]) -> None:
        if self.frames is not None:
            self.frames += frames
            self._size += sum(map(len, frames))
            if self._size > MAX_LOG_BYTES:
                self.frames, self._size = None, 0
        self._followers = [follower for follower in self._followers if not follower.over]
        for follower in self._followers:
            follower.write(frames)

    def refuse(self, error: ApiError) -> None:
        """A background response that fails says so in its object; see ``started``."""
        raise AssertionError("a background response cannot be refused")

    def finish(self, body: bytes, error_code: str) -> None:
        self.over = True
        self._error_code = error_code
        for follower in self._followers:
            follower.finish(body, error_code)
        self._followers.clear()

    def follow(self, answer: StreamAnswer, after: int) -> None:
        """Stream the events with sequence numbers above ``after`` to ``answer``, those to come included. Raises
        ``ApiError`` when they are no longer there."""
        if self.frames is None:
            raise refused("stream_not_available", "The events of this response are no longer available")
        answer.write(self.frames[after + 1 :])
        if not self.over:
            self._followers.append(answer)
        elif answer.started:
            answer.finish(b"", self._error_code)
        else:
            answer.refuse(refused("stream_not_available", "There are no events after this one"))
