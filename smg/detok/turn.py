"""A generation for a multi-turn session: the same run, its output goes to the frontend as events instead of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from smg.api.errors import ApiError
from smg.detok.choice import Choice
from smg.detok.host import Host
from smg.detok.logprobs import chat_entries
from smg.detok.render import Renderer
from smg.detok.run import Run
from smg.detok.usage import Usage
from smg.engines.base import TokenLogprobs
from smg.messages import Dispatch, GenerationPlan, LogprobsDelta, ParserEvent, TurnEnd, TurnEvent, TurnEvents
from smg.vocab.decode import DecodeTable

_encode = msgspec.msgpack.Encoder().encode


class TurnRenderer(Renderer):
    """Collects the events of a loop iteration; ``take`` gives them as one msgpack list."""

    streaming = True

    def __init__(self, alternatives: int, table: DecodeTable) -> None:
        self._alternatives = alternatives
        self._table = table
        self._events: list[TurnEvent] = []

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        self._events += events
        if choice.logprobs is not None:
            self._add_logprobs(choice, all_left=False)

    def _add_logprobs(self, choice: Choice, *, all_left: bool) -> None:
        tracker = choice.logprobs
        entries = [entry for entry in tracker.take(all_left=all_left) if entry.answer] if tracker is not None else ()
        if entries:
            self._events.append(LogprobsDelta(chat_entries(entries, self._table, self._alternatives)))

    def on_choice_end(self, choice: Choice) -> None:
        """What has no text is due too, unless a stop string took its text away."""
        if choice.logprobs is not None:
            self._add_logprobs(choice, all_left=not choice.stop_string_matched)

    def on_end(self, usage: Usage) -> None:
        """The turn's end is a message of its own."""

    def take(self) -> bytes:
        if not self._events:
            return b""
        data = _encode(self._events)
        self._events.clear()
        return data


class TurnRun(Run):
    """Sends ``TurnEvents`` while it runs and one ``TurnEnd``, also when it fails."""

    __slots__ = ("_turn",)

    def __init__(self, host: Host, dispatch: Dispatch, plan: GenerationPlan, table: DecodeTable) -> None:
        self._turn = TurnRenderer(plan.response.logprobs or 0, table)
        super().__init__(host, dispatch, plan, table, self._turn)

    def _send_collected(self) -> None:
        data = self._turn.take()
        if data:
            self.streaming = True
            self.out.to_frontend(self.frontend, TurnEvents(self.seq, data))

    def _answer(self) -> None:
        usage = self.usage()
        choice = self.choices[0]
        self._end(TurnEnd(self.seq, choice.finish_reason or "", usage.counts(), choice.matched_stop), abort=False)
        self.host.metrics.answered(self, usage)

    def _fail(self, error: ApiError) -> None:
        failure = (error.status, error.code, error.message)
        self._end(TurnEnd(self.seq, "error", self.usage().counts(), None, failure), abort=True)

    def _break_stream(self, message: str) -> None:
        failure = (500, "stream_error", f"Stream error: {message}")
        self._end(TurnEnd(self.seq, "error", self.usage().counts(), None, failure), abort=True)

    def _end(self, end: TurnEnd, *, abort: bool) -> None:
        self._send_collected()
        self.out.to_frontend(self.frontend, end)
        self._close(abort=abort)
