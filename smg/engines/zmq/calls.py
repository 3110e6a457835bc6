"""Running generations over ZMQ: a ``ZmqCall`` per engine call of the gateway, a ``Child`` per request on the wire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from smg.engines.base import Delta, EngineError, Sink, TokenLogprobs
from smg.engines.zmq.request import ZmqRequest

if TYPE_CHECKING:
    from smg.engines.zmq.client import Rank, ZmqWorkerClient

log = logging.getLogger("smg.engines.zmq")

ERROR_TEXT = "engine finished the request with an error (see engine logs)"
ABORTED_TEXT = "the engine aborted the request"
GRAMMAR_TEXT = "the engine refused the request: its grammar is not valid, or the engine cannot compile it"


class Child:
    """One request on the wire: one choice. ``tokens`` counts what came; ``held`` keeps it where nobody needs it yet.
    ``name`` is its id on the wire; ``heard``: the engine has answered; ``delta`` carries its tokens to the sink, None
    before the first; messages with log-probabilities have one of their own."""

    __slots__ = (
        "cached", "call", "delta", "heard", "held", "held_logprobs", "index", "name", "prompt_logprobs", "tokens",
    )  # fmt: skip

    def __init__(self, call: ZmqCall, name: str, index: int) -> None:
        self.call = call
        self.name = name
        self.index = index
        self.heard = False
        self.delta: Delta | None = None
        self.tokens = 0
        self.cached = 0
        self.held: list[int] | None = [] if call.request.hold else None
        self.held_logprobs: TokenLogprobs | None = None
        self.prompt_logprobs: TokenLogprobs | None = None

    def deliver(self, token_ids: list[int], logprobs: TokenLogprobs | None) -> None:
        """New tokens of a request that goes on."""
        self.tokens += len(token_ids)
        if self.held is not None:
            self._hold(token_ids, logprobs)
            return
        delta = self.delta
        if delta is None or logprobs is not None or delta.logprobs is not None:
            delta = self._new_delta(token_ids)
            delta.logprobs = logprobs
        else:
            delta.token_ids = token_ids
        delta.completion_tokens = self.tokens
        self.call.give(delta)

    def _new_delta(self, token_ids: list[int]) -> Delta:
        """A delta; the first one tells of the prompt."""
        delta = Delta(self.index, token_ids)
        if self.delta is None:
            delta.prompt_tokens = self.call.request.prompt_tokens
            delta.cached_tokens = self.cached
            delta.prompt_logprobs = self.prompt_logprobs
        self.delta = delta
        return delta

    def _hold(self, token_ids: list[int], logprobs: TokenLogprobs | None) -> None:
        assert self.held is not None
        self.held += token_ids
        if logprobs is not None:
            self.held_logprobs = joined(self.held_logprobs, logprobs)

    def grammar_refused(self) -> bool:
        """Fail the call when the engine gave up a constrained request before its first token. It gives no reason, but
        everything else of a request is checked before it is sent."""
        if self.tokens or not self.call.request.constrained:
            return False
        self.call.lost(self, EngineError("INVALID_ARGUMENT", GRAMMAR_TEXT))
        return True

    def finish(
        self, token_ids: list[int], logprobs: TokenLogprobs | None, reason: str, matched: str | int | None
    ) -> None:
        """The last tokens of a request and why it ended."""
        self.tokens += len(token_ids)
        if self.held is not None:
            self._hold(token_ids, logprobs)
            token_ids, logprobs = self.held, self.held_logprobs
        delta = self._new_delta(token_ids)
        delta.completion_tokens = self.tokens
        delta.logprobs = logprobs
        delta.finish_reason = reason
        delta.matched_stop = None if matched in self.call.request.eos_ids else matched
        self.call.finished(self, delta)


class ZmqCall:
    """One running generation (``Call``). Belongs to one rank once it is sent."""

    __slots__ = ("_client", "_sink", "_timer", "children", "open", "rank", "request", "request_id")

    def __init__(self, client: ZmqWorkerClient, request_id: str, request: ZmqRequest, sink: Sink) -> None:
        self._client = client
        self._sink = sink
        self._timer: asyncio.TimerHandle | None = None
        self.request_id = request_id
        self.request = request
        self.children: list[Child] = []
        self.rank: Rank | None = None
        self.open = True

    def expire_in(self, timeout: float) -> None:
        """End the call with DEADLINE_EXCEEDED after ``timeout`` seconds."""
        self._timer = asyncio.get_running_loop().call_later(timeout, self._expired)

    def _expired(self) -> None:
        self.fail(EngineError("DEADLINE_EXCEEDED", "the engine did not finish in time"))

    def abort(self) -> None:
        """Stop the generation in the engine at once; the sink is not called again. Idempotent."""
        if self.open:
            self._close()
            self._client.drop(self, self.children)

    def abort_choice(self, index: int) -> None:
        """Stop one choice that needs no more tokens; the others go on. The sink gets no more deltas of it."""
        child = next((child for child in self.children if child.index == index), None)
        if self.open and child is not None:
            self._client.drop(self, [child])
            self._ended(child)

    def give(self, delta: Delta) -> None:
        """Hand a delta to the sink."""
        if not self.open:
            return
        try:
            self._sink.on_delta(delta)
        except Exception:
            log.exception("reading the stream of request %s failed", self.request_id)
            self.fail(EngineError("INTERNAL", "the gateway could not process the engine's output"))

    def finished(self, child: Child, delta: Delta) -> None:
        """Hand over the last delta of one choice."""
        self._client.forget(child)
        self.give(delta)
        self._ended(child)

    def lost(self, child: Child, error: EngineError) -> None:
        """Fail because the engine no longer works on one choice."""
        self._client.forget(child)
        self.fail(error)

    def _ended(self, child: Child) -> None:
        if child in self.children:
            self.children.remove(child)
        if self.open and not self.children:
            self._close()
            self._client.settled(self)
            self._sink.on_end()

    def fail(self, error: EngineError, *, abort: bool = True) -> None:
        """End the call with an error. ``abort``: the engine may still work on it."""
        if not self.open:
            return
        self._close()
        self._client.drop(self, self.children, abort=abort)
        self._sink.on_error(error)

    def _close(self) -> None:
        self.open = False
        if self._timer is not None:
            self._timer.cancel()


def joined(first: TokenLogprobs | None, second: TokenLogprobs) -> TokenLogprobs:
    """``first`` with ``second`` behind it; the lists of ``first`` grow."""
    if first is None:
        return second
    for target, source in ((first.token_ids, second.token_ids), (first.logprobs, second.logprobs)):
        assert isinstance(target, list)
        target += source
    assert isinstance(first.top, list)
    first.top += second.top
    return first


def empty_logprobs(token_ids: Sequence[int] = ()) -> TokenLogprobs:
    """Logprobs to append to; ``token_ids`` are tokens without a value."""
    return TokenLogprobs(list(token_ids), [float("nan")] * len(token_ids), [()] * len(token_ids))
