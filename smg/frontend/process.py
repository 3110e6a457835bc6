"""The frontend process: holds the clients, speaks HTTP, and knows nothing about chat formats.

It gives every request a ``seq``, passes the raw body to a tokenizer process, and copies answer bytes to the socket.
It keeps the body until the answer begins, so that the death of any other process costs a client nothing before its
first byte: the request is submitted again under a new ``seq``.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable

from smg.api.errors import ApiError, refused, render_error
from smg.api.stream_errors import stream_error_frames
from smg.frontend.admission import Admission
from smg.frontend.app import App
from smg.frontend.exchange import STREAMING, WAITING, Exchange, data_handler
from smg.frontend.server import HttpServer
from smg.frontend.sessions.manager import Sessions
from smg.frontend.sessions.turn import TurnExchange
from smg.listeners import inherited
from smg.messages import (
    Abort,
    ModelTable,
    Owner,
    Peer,
    Reply,
    RingMessage,
    StreamData,
    StreamEnd,
    StreamStart,
    Submit,
    TurnEnd,
    TurnEvents,
)  # fmt: skip
from smg.process import ChildProcess
from smg.telemetry.metrics import FrontendMetrics

log = logging.getLogger("smg.frontend")

MAX_SUBMISSIONS = 3
SWEEP_SECS = 0.25
DRAIN_LOOK_SECS = 0.02
AFFINITY_BYTES = 256


class FrontendProcess(ChildProcess):
    """One frontend. ``exchanges`` maps ``seq`` to the requests whose answers are not complete."""

    role = "frontend"
    talks_to = ("tokenizer", "router", "detok")

    async def start(self) -> str:
        self.exchanges: dict[int, Exchange] = {}
        self.models = ModelTable(0, [], [])
        self.waiting_for_pool: list[Exchange] = []
        self._tokenizers: list[Peer] = []
        self._seq = 0
        self._pool_load: dict[tuple[int, int], int] = {}
        self.handlers |= {
            Owner: self._on_owner, Reply: self._on_reply, StreamStart: self._on_start,
            StreamData: data_handler(self.exchanges, self.inbox), StreamEnd: self._on_end, ModelTable: self._on_models,
            TurnEvents: self._on_turn_events, TurnEnd: self._on_turn_end,
        }  # fmt: skip
        self.metrics = FrontendMetrics()
        self.admission = Admission(self.settings)
        app = App(self)
        self.sessions = Sessions(self)
        await self.sessions.start()
        app.add_sessions(self.sessions)
        self.server = HttpServer(app, self.settings, self.metrics)
        self.loop = asyncio.get_running_loop()
        self._sweep_timer = self.loop.call_later(SWEEP_SECS, self._sweep)
        await self.server.start(inherited().api[self.index])
        return f"http {self.settings.host}:{self.settings.port}"

    async def drain(self) -> None:
        if self.settings.drain_delay_secs:
            await asyncio.sleep(min(self.settings.drain_delay_secs, max(0.0, self.drain_deadline - time.monotonic())))
        self.server.stop_listening()
        while self.admission.inflight or self.exchanges:
            await asyncio.sleep(DRAIN_LOOK_SECS)
        await self.sessions.drained()

    async def stop(self) -> None:
        self._sweep_timer.cancel()
        await self.sessions.stop()
        self.server.close()

    # Out: to the ring ----------------------------------------------------------------------------

    def submit(self, exchange: Exchange) -> None:
        """Send the request to a tokenizer process, or keep it until there is one."""
        peers = self._tokenizers
        chosen = peers[0] if len(peers) == 1 else self._choose_tokenizer(exchange.body)
        if chosen is None:
            self.waiting_for_pool.append(exchange)
            return
        self._seq += 1
        exchange.seq = self._seq
        exchange.attempts += 1
        exchange.tokenizer = (chosen.index, chosen.generation)
        exchange.owner = -1
        self.exchanges[exchange.seq] = exchange
        self._pool_load[exchange.tokenizer] = self._pool_load.get(exchange.tokenizer, 0) + 1
        message = Submit(
            exchange.seq,
            self.index,
            exchange.path,
            exchange.request_id,
            exchange.headers,
            exchange.body,
            exchange.received,
        )
        self.links.send("tokenizer", chosen.index, message)

    def send_admin(self, exchange: Exchange, make: Callable[[int], RingMessage]) -> None:
        """Send a control-plane call to the router under a fresh ``seq``."""
        self._seq += 1
        exchange.seq = self._seq
        self.exchanges[exchange.seq] = exchange
        if not self.links.send("router", 0, make(exchange.seq)):
            self._resubmit(exchange)

    def forget(self, exchange: Exchange) -> None:
        """The coroutine is done with the exchange. If the ring still works on it, the work is aborted."""
        self.exchanges.pop(exchange.seq, None)
        if self.waiting_for_pool and exchange in self.waiting_for_pool:
            self.waiting_for_pool.remove(exchange)
        if exchange.gone:
            if exchange.owner >= 0:
                self.links.send("detok", exchange.owner, Abort(exchange.seq, self.index))
            else:
                self._left_pool(exchange)

    def _choose_tokenizer(self, body: bytes) -> Peer | None:
        """The process that has this conversation's prefix in its cache, unless it is clearly busier than the others."""
        peers = self._tokenizers
        if not peers:
            return None
        load = [self._pool_load.get((peer.index, peer.generation), 0) for peer in peers]
        home = zlib.crc32(body[:AFFINITY_BYTES]) % len(peers)
        if load[home] <= 2 + 1.25 * sum(load) / len(load):
            return peers[home]
        return peers[load.index(min(load))]

    def _left_pool(self, exchange: Exchange) -> None:
        count = self._pool_load.get(exchange.tokenizer, 0)
        if count > 1:
            self._pool_load[exchange.tokenizer] = count - 1
        else:
            self._pool_load.pop(exchange.tokenizer, None)

    # In: from the ring ---------------------------------------------------------------------------

    def _on_owner(self, message: Owner) -> None:
        exchange = self.exchanges.get(message.seq)
        if exchange is None:
            self.links.send("detok", message.detok, Abort(message.seq, self.index))
            return
        if exchange.owner < 0:
            self._left_pool(exchange)
        exchange.owner = message.detok

    def _on_reply(self, message: Reply) -> None:
        exchange = self.exchanges.get(message.seq)
        if exchange is not None:
            if exchange.owner < 0:
                self._left_pool(exchange)
            exchange.reply(message)

    def _on_start(self, message: StreamStart) -> None:
        exchange = self.exchanges.get(message.seq)
        if exchange is not None:
            exchange.start(message)

    def _on_end(self, message: StreamEnd) -> None:
        exchange = self.exchanges.get(message.seq)
        if exchange is not None:
            exchange.end(message.body, message.error_code)

    def _on_turn_events(self, message: TurnEvents) -> None:
        exchange = self.exchanges.get(message.seq)
        if isinstance(exchange, TurnExchange):
            exchange.events(message)

    def _on_turn_end(self, message: TurnEnd) -> None:
        exchange = self.exchanges.get(message.seq)
        if isinstance(exchange, TurnExchange):
            exchange.turn_end(message)

    def _on_models(self, message: ModelTable) -> None:
        self.models = message

    # Crashes of others ---------------------------------------------------------------------------

    def on_peers(self, appeared: list[Peer], vanished: list[Peer]) -> None:
        self._tokenizers = [box.peer for _, box in sorted(self.links.of("tokenizer").items())]
        for peer in vanished:
            if peer.role == "tokenizer":
                self._pool_load.pop((peer.index, peer.generation), None)
                self._lost(lambda e, p=peer: e.owner < 0 and e.tokenizer == (p.index, p.generation))  # type: ignore[misc]
            elif peer.role == "detok":
                # A plan may have been on its way there: what has no owner yet goes around again as well.
                self._lost(lambda e, p=peer: e.owner == p.index or (e.owner < 0 <= e.tokenizer[0]))  # type: ignore[misc]
            elif peer.role == "router":
                # Whether a plan was still in the router is not known here: all that have no owner go around again.
                self._lost(lambda e: e.owner < 0)
        if any(peer.role == "tokenizer" for peer in appeared):
            waiting, self.waiting_for_pool = self.waiting_for_pool, []
            for exchange in waiting:
                self.submit(exchange)

    def _lost(self, concerns: Callable[[Exchange], bool]) -> None:
        for exchange in [e for e in self.exchanges.values() if concerns(e)]:
            if exchange.state == WAITING:
                self._resubmit(exchange)
            else:
                log.warning("request %s lost its detokenizer after the answer began", exchange.request_id)
                frames = stream_error_frames(exchange.path, "the process that served this stream ended")
                exchange.end(frames, "stream_error")

    def _resubmit(self, exchange: Exchange) -> None:
        self.exchanges.pop(exchange.seq, None)
        if isinstance(exchange, TurnExchange):
            exchange.renew()
        if exchange.tokenizer[0] < 0:
            self._fail(exchange, refused("service_unavailable", "the control plane restarted, try again", status=503))
        elif exchange.attempts >= MAX_SUBMISSIONS:
            message = "the request could not be processed: the processes serving it ended repeatedly"
            self._fail(exchange, refused("internal_error", message, status=500))
        else:
            self.submit(exchange)

    def _fail(self, exchange: Exchange, error: ApiError) -> None:
        status, headers, body = render_error(error, exchange.path, exchange.request_id)
        exchange.reply(Reply(exchange.seq, status, headers, body))

    # Clock ---------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Keep-alive frames for silent streams, and the end of requests that no process ends in time."""
        now = time.time()
        silence = self.settings.sse_keepalive_secs
        for exchange in list(self.exchanges.values()):
            if exchange.deadline and now > exchange.deadline + SWEEP_SECS and exchange.state == WAITING:
                owner = exchange.owner
                message = "the request took longer than the gateway allows"
                self._fail(exchange, refused("request_timeout", message, status=504))
                if owner >= 0:
                    self.links.send("detok", owner, Abort(exchange.seq, self.index))
            elif silence and exchange.state == STREAMING and now - exchange.last_write >= silence:
                exchange.keepalive(keepalive_frame(exchange.path), now)
        self.metrics.inflight_ages(now - exchange.received for exchange in self.exchanges.values())
        self._sweep_timer = self.loop.call_later(SWEEP_SECS, self._sweep)


def keepalive_frame(path: str) -> bytes:
    """What fills the silence of a stream: a comment, or the ping event of the Messages API."""
    if path == "/v1/messages":
        return b'event: ping\ndata: {"type":"ping"}\n\n'
    return b": ping\n\n"
