"""The detok process's connection to one ZMQ worker: its own data sockets, straight to the engines.

An engine is ``up`` when it has registered here, or when one that a gateway process before us had is found alive. It
is down the moment its connection ends; its generations fail at once. Names of requests on the wire are made here and
never come twice, whatever ids clients choose: an engine core does not survive a duplicate.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from typing import NoReturn, Protocol

import msgspec
import zmq

from smg.engines.base import EngineError, Sink
from smg.engines.zmq.addresses import input_path, output_path, path_of
from smg.engines.zmq.calls import Child, ZmqCall
from smg.engines.zmq.handshake import decode_ready
from smg.engines.zmq.request import ZmqRequest, decode_stored
from smg.engines.zmq.sockets import InputSocket, OutputSocket
from smg.engines.zmq.steps import VllmWire, wire_for
from smg.engines.zmq.tensors import WireError
from smg.engines.zmq.vllm import ABORT, ADD, START_WAVE, UTILITY
from smg.messages import EngineAnswer, EngineAttach, EngineCall, EngineLink, EngineLoad, RingMessage

log = logging.getLogger("smg.engines.zmq")

LOAD_REPORT_SECS = 0.25
ADOPTION_RETRY_SECS = 0.2
MAX_ID_LENGTH = 64
MAX_UNREADABLE = 3
MAX_REMEMBERED = 8192
# Waiting requests count several times while the KV cache fills up: they will not start soon.
WAITING_WEIGHT, KV_FREE_BELOW = 6.0, 0.5

_encode = msgspec.msgpack.Encoder().encode


class ZmqHost(Protocol):
    """What the client needs of its process."""

    index: int
    context: zmq.Context[zmq.Socket[bytes]]

    def to_router(self, message: RingMessage) -> None: ...


class Rank:
    """One engine of the worker, as this client sees it. ``ready`` is its registration, empty if not heard here."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.input: InputSocket | None = None
        self.up = False
        self.ready = b""
        self.calls: set[ZmqCall] = set()
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.reported: tuple[int, int, float] | None = None

    def score(self) -> float:
        """Load, for the choice of a rank."""
        pressure = max(0.0, self.kv_usage - KV_FREE_BELOW)
        return max(len(self.calls), self.running + self.waiting) + self.waiting * WAITING_WEIGHT * pressure


class ZmqWorkerClient:
    """``EngineClient`` of one ``ipc://`` worker. Does nothing before ``attach``."""

    def __init__(self, url: str, kind: str, host: ZmqHost) -> None:
        """Raises ``ValueError`` for an unknown kind."""
        self.url = url
        self.kind = kind
        self.number = 0
        self.ranks: list[Rank] = []
        self.children: dict[str, Child] = {}
        self.unheard = 0
        self.unreadable_in_a_row = 0
        self._wire = wire_for(kind, self)
        self._host = host
        self._outputs: list[OutputSocket] = []
        self._facts: EngineAttach | None = None
        self._adopting: set[int] = set()
        self._names = map("{:x}".format, itertools.count())
        self._nonce = os.urandom(4).hex()
        self._gone: dict[str, None] = {}
        self._utility_ids = itertools.count(1)
        self._utilities: dict[int, tuple[int, int | None]] = {}
        self._load_timer: asyncio.TimerHandle | None = None
        self._turn = 0
        self._loop = asyncio.get_running_loop()

    # Sockets --------------------------------------------------------------------------------------

    def attach(self, facts: EngineAttach) -> None:
        """Bind the data sockets, or take over what the router has learned since."""
        known, self._facts = self._facts, facts
        self.number = facts.client
        if known is not None:
            self.report()
            return
        path = path_of(self.url)
        self._adopting = set(range(facts.ranks)) if facts.adopt else set()
        try:
            for number in (self.number, *facts.orphans):
                name = output_path(path, number)
                self._outputs.append(OutputSocket(self._host.context, name, self._wire.on_message))
            for number in range(facts.ranks):
                rank = Rank(number)
                rank.input = self._open_input(path, rank)
                self.ranks.append(rank)
        except (OSError, ValueError) as error:
            log.error("worker %s: %s", self.url, error)
            self._close_sockets()
            self._facts = None

    def _open_input(self, path: str, rank: Rank) -> InputSocket:
        return InputSocket(
            self._host.context,
            input_path(path, self.number, rank.number),
            rank.number,
            lambda frames: self._registered(rank, frames),
            lambda: self._connected(rank),
            lambda: self._lost(rank, "the connection ended"),
        )

    def _registered(self, rank: Rank, frames: list[bytes]) -> None:
        """An engine's first message on its input."""
        try:
            decode_ready(frames[0], self._wire.engine)
        except ValueError as error:
            log.error("worker %s, rank %d: %s", self.url, rank.number, error)
            self._report(rank, str(error))
            return
        if rank.up:
            self._lost(rank, "another engine took its place")
        rank.ready = frames[0]
        self._rise(rank)

    def _connected(self, rank: Rank) -> None:
        """Something connected: perhaps an engine that has been running all along."""
        if rank.up or rank.number not in self._adopting or rank not in self.ranks or rank.input is None:
            return
        if self._wire.utilities:
            self._call_utility(rank, "is_sleeping", b"\x90", None)
        elif rank.input.send(ABORT, self._wire.abort(())):
            self._rise(rank)
            return
        self._loop.call_later(ADOPTION_RETRY_SECS, self._connected, rank)

    def _rise(self, rank: Rank) -> None:
        self._adopting.discard(rank.number)
        rank.up = True
        log.info("worker %s: engine %d is connected", self.url, rank.number)
        self._report(rank, "")

    def _lost(self, rank: Rank, reason: str) -> None:
        """The engine is gone. What it sent before comes first."""
        for output in self._outputs:
            output.drain()
        if not rank.up:
            return
        rank.up = False
        rank.ready = b""
        rank.running = rank.waiting = 0
        rank.kv_usage = 0.0
        log.warning("worker %s: engine %d is gone: %s", self.url, rank.number, reason)
        self._report(rank, reason)
        error = EngineError("UNAVAILABLE", f"the engine of worker {self.url} is gone: {reason}")
        for call in list(rank.calls):
            call.fail(error, abort=False)

    def report(self) -> None:
        """Tell a new router which engines are connected."""
        for rank in self.ranks:
            self._report(rank, "")

    def _report(self, rank: Rank, reason: str) -> None:
        self._host.to_router(EngineLink(self.url, self._host.index, rank.number, rank.up, rank.ready, reason))

    def died(self) -> None:
        """The engine's last word. With several ranks it does not say whose: their connections end right after."""
        if len(self.ranks) == 1:
            self._lost(self.ranks[0], "it reported a fatal error")

    def unreadable(self, names: Sequence[str], error: WireError) -> None:
        """A step message that cannot be read: the requests in it are lost."""
        self.unreadable_in_a_row += 1
        log.error("worker %s: %s", self.url, error)
        failure = EngineError("INTERNAL", "the worker sent a message that cannot be decoded")
        for name in names:
            child = self.children.get(name)
            if child is not None:
                child.call.fail(failure)
        if self.unreadable_in_a_row >= MAX_UNREADABLE:
            for rank in self.ranks:
                self._lost(rank, "its messages cannot be read")

    async def close(self) -> None:
        """Close the sockets; running calls end without a word to their sinks, and in the engine."""
        self.detach()

    def detach(self) -> None:
        """The same, at once."""
        for child in list(self.children.values()):
            child.call.abort()
        self._close_sockets()

    def _close_sockets(self) -> None:
        if self._load_timer is not None:
            self._load_timer.cancel()
        for rank in self.ranks:
            if rank.input is not None:
                rank.input.close()
        self.ranks.clear()
        for output in self._outputs:
            output.close()
        self._outputs.clear()

    # Generations ----------------------------------------------------------------------------------

    def generate(
        self,
        request_id: str,
        request: bytes,
        sink: Sink,
        *,
        streaming: bool,
        dp_rank: int = -1,
        timeout: float | None = None,
    ) -> ZmqCall:
        """Start a generation. Failures reach ``sink.on_error``. ``request`` comes from the codec of ``kind``."""
        stored = decode_stored(request)
        call = ZmqCall(self, request_id, stored, sink)
        refusal = self._refusal(stored)
        rank = self._choose(dp_rank) if refusal is None else None
        if refusal is not None or rank is None:
            error = refusal or EngineError("UNAVAILABLE", f"worker {self.url} has no engine connected")
            call.fail(error)
            return call
        call.rank = rank
        if timeout is not None:
            call.expire_in(timeout)
        self._send(call, rank)
        return call

    def _refusal(self, request: ZmqRequest) -> EngineError | None:
        """Why the engine would not survive the request."""
        facts = self._facts
        if facts is None:
            return EngineError("UNAVAILABLE", f"worker {self.url} is not attached")
        if facts.vocab_size and request.top_id >= facts.vocab_size:
            text = f"token id {request.top_id} is outside the vocabulary of {facts.vocab_size} tokens"
            return EngineError("INVALID_ARGUMENT", text)
        if facts.context_length and request.prompt_tokens >= facts.context_length:
            text = f"the prompt has {request.prompt_tokens} tokens, the context length is {facts.context_length}"
            return EngineError("INVALID_ARGUMENT", text)
        return None

    def _choose(self, pinned: int) -> Rank | None:
        """The rank for a request: the pinned one, else the least loaded. The search starts one further every time."""
        ranks = self.ranks
        if self._lockstep and not all(rank.up for rank in ranks):
            return None
        if pinned >= 0:
            return ranks[pinned] if pinned < len(ranks) and ranks[pinned].up else None
        if len(ranks) == 1:
            return ranks[0] if ranks[0].up else None
        self._turn = start = (self._turn + 1) % max(len(ranks), 1)
        rotated = [rank for rank in ranks[start:] + ranks[:start] if rank.up]
        return min(rotated, key=Rank.score, default=None)

    @property
    def _lockstep(self) -> bool:
        return self._facts is not None and self._facts.lockstep

    def _send(self, call: ZmqCall, rank: Rank) -> None:
        context = self._facts.context_length if self._facts is not None else 0
        base = f"{_plain(call.request_id)}-{self._nonce}{next(self._names)}"
        n = call.request.n
        rank.calls.add(call)
        call.children = [Child(call, base if n == 1 else f"{base}-{index}", index) for index in range(n)]
        self.unheard += n
        for child in call.children:
            self.children[child.name] = child
        assert rank.input is not None
        for child in list(call.children):
            if not rank.input.send(ADD, self._wire.add(child, context)):
                self._lost(rank, "it cannot be reached")
                return
        if self._lockstep:
            self.wake()

    def wake(self) -> None:
        """Get ranks that step together going."""
        if isinstance(self._wire, VllmWire):
            wave = self._wire.wake()
            for rank in self.ranks:
                if rank.up and rank.input is not None:
                    rank.input.send(START_WAVE, wave)

    def forget(self, child: Child) -> None:
        """The engine is through with this request."""
        if self.children.pop(child.name, None) is not None and not child.heard:
            self.unheard -= 1

    def settled(self, call: ZmqCall) -> None:
        """All of the call's requests have ended."""
        rank = call.rank
        if rank is not None:
            rank.calls.discard(call)
            if not rank.calls:
                # An engine that has nothing left to do after an abort makes no step that would say so.
                self.loaded(rank.number, 0, 0, rank.kv_usage)

    def drop(self, call: ZmqCall, children: Sequence[Child], *, abort: bool = True) -> None:
        """Stop requests; what still comes of them is thrown away."""
        running = [child for child in children if child.name in self.children]
        for child in running:
            self.forget(child)
        if not call.open:
            self.settled(call)
        rank = call.rank
        if abort and running and rank is not None:
            self._abort(rank, [child.name for child in running])

    def _abort(self, rank: Rank, names: Sequence[str]) -> None:
        if not rank.up or rank.input is None or not rank.input.send(ABORT, self._wire.abort(names)):
            return
        if len(self._gone) > MAX_REMEMBERED:
            self._gone.clear()  # a late token of an id forgotten here costs one more abort
        self._gone.update(dict.fromkeys(names))

    def stray(self, names: Sequence[str], engine: int) -> None:
        """Tokens for requests nobody here knows: late ones of aborted requests, or those of a process before us."""
        unknown = [name for name in names if name not in self._gone]
        if unknown and 0 <= engine < len(self.ranks):
            self._abort(self.ranks[engine], unknown)

    async def embed(self, request: bytes, timeout: float) -> NoReturn:
        """Headless engines are not asked for embeddings. Raises ``EngineError``."""
        raise EngineError("UNIMPLEMENTED", "workers over ZMQ give no embeddings")

    # Engine state ---------------------------------------------------------------------------------

    def loaded(self, engine: int, running: int, waiting: int, kv_usage: float, strays: int = 0) -> None:
        """An engine's load came with a step. The router hears of it a few times per second.

        ``strays`` are the running requests that nobody here knows: they are on their way out, and the step without
        them may never be made.
        """
        if not 0 <= engine < len(self.ranks):
            return
        rank = self.ranks[engine]
        rank.running, rank.waiting, rank.kv_usage = max(running - strays, 0), waiting, kv_usage
        if self._load_timer is None:
            self._load_timer = self._loop.call_later(LOAD_REPORT_SECS, self._report_loads)

    def _report_loads(self) -> None:
        self._load_timer = None
        for rank in self.ranks:
            load = (rank.running, rank.waiting, rank.kv_usage)
            if load != rank.reported:
                rank.reported = load
                self._host.to_router(EngineLoad(self.url, rank.number, *load))

    def call(self, message: EngineCall) -> None:
        """Call a method of an engine for the router."""
        rank = self.ranks[message.rank] if 0 <= message.rank < len(self.ranks) else None
        if not self._wire.utilities or rank is None or not rank.up:
            reason = "the engine takes no calls" if rank is not None and rank.up else "the engine is not connected"
            self._host.to_router(EngineAnswer(self.url, message.call_id, reason))
            return
        self._call_utility(rank, message.method, message.arguments, message.call_id)

    def _call_utility(self, rank: Rank, method: str, arguments: bytes, caller: int | None) -> None:
        number = next(self._utility_ids)
        self._utilities[number] = rank.number, caller
        payload = _encode((self.number, number, method, msgspec.Raw(arguments)))
        assert rank.input is not None
        if not rank.input.send(UTILITY, payload):
            self.answered(number, "the engine is not connected", None)

    def answered(self, number: int, failure: str | None, value: object) -> None:
        """An engine answered a call."""
        rank, caller = self._utilities.pop(number, (-1, None))
        if caller is not None:
            self._host.to_router(EngineAnswer(self.url, caller, failure or "", _encode(value)))
        elif rank in self._adopting and not failure:
            self._rise(self.ranks[rank])


def _plain(request_id: str) -> str:
    """The start of a client's id, as it may appear in engine logs."""
    return request_id[:MAX_ID_LENGTH].encode("ascii", "backslashreplace").decode()
