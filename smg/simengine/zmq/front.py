"""The sockets of the embedded engine as a headless engine core: it dials, registers, serves, and dies like one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from smg.engines.zmq.addresses import identity
from smg.simengine.core import Choice, Generation, RefusalError, SimEngine, SimRequest
from smg.simengine.zmq.checks import FatalRequestError
from smg.simengine.zmq.tokenspeed import TokenspeedProtocol
from smg.simengine.zmq.vllm import RefusedRequestError, VllmProtocol

log = logging.getLogger("smg.simengine.zmq")

PROTOCOLS: dict[str, type[VllmProtocol] | type[TokenspeedProtocol]] = {
    "vllm": VllmProtocol, "tokenspeed": TokenspeedProtocol,
}  # fmt: skip
ADD, ABORT, START_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
DEAD = b"ENGINE_CORE_DEAD"
# How long closing waits for what was sent last.
LAST_WORD_MS = 200

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class ZmqFront:
    """One engine (rank) of a ZMQ worker. ``fatal`` keeps the requests a real engine would not have survived, ``adds``
    counts the ones that were taken; ``ended`` is set when the engine is dead."""

    def __init__(
        self,
        engine: SimEngine,
        kind: str,
        address: str,
        *,
        rank: int = 0,
        ranks: int = 1,
        lockstep: bool = False,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """``address`` is the gateway's handshake address."""
        self.engine = engine
        self.fatal: list[str] = []
        self.adds = 0
        self.ended = asyncio.Event()
        self.ready = asyncio.Event()
        self._protocol = PROTOCOLS[kind](engine, rank, ranks, lockstep=lockstep)
        self._on_ready = on_ready
        self._lockstep = lockstep
        self._identity = identity(rank)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._readers: dict[int, Callable[[], None]] = {}
        self._inputs: list[zmq.Socket[bytes]] = []
        self._outputs: list[zmq.Socket[bytes]] = []
        self._clients: dict[str, int] = {}
        self._rows: dict[int, list[list[Any]]] = {}
        self._aux: dict[int, list[bytes]] = {}
        self._finished: dict[int, list[str]] = {}
        self._wave = 0
        self._awake = not lockstep
        self._held: list[tuple[SimRequest, int]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshake = self._socket(zmq.DEALER)
        self._handshake.connect(address)
        self._watch(self._handshake, self._on_init)
        self._handshake.send(_encode(self._status("HELLO")))

    def _status(self, word: str) -> dict[str, Any]:
        local = self._protocol.hello_local
        return {"status": word, "local": local, "headless": not local}

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.set(option, 0)
        if kind == zmq.DEALER:
            socket.set(zmq.IDENTITY, self._identity)
        return socket

    def _watch(self, socket: zmq.Socket[bytes], handle: Callable[[list[bytes]], None]) -> None:
        fd: int = socket.get(zmq.FD)  # type: ignore[assignment]

        def drain() -> None:
            while not socket.closed:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                handle(frames)

        self._readers[fd] = drain
        self._loop.add_reader(fd, drain)
        self._loop.call_soon(drain)

    def freeze(self) -> None:
        """Read nothing any more, as a stopped process does."""
        for fd in self._readers:
            self._loop.remove_reader(fd)

    def thaw(self) -> None:
        """Go on."""
        for fd, drain in self._readers.items():
            self._loop.add_reader(fd, drain)
            drain()

    def _on_init(self, frames: list[bytes]) -> None:
        if self._inputs:
            return  # an engine reads one INIT
        addresses = _decode(frames[-1])["addresses"]
        inputs, outputs = addresses["inputs"], addresses["outputs"]
        if isinstance(self._protocol, TokenspeedProtocol):
            inputs, outputs = inputs[:1], outputs[:1]
        for address in outputs:
            socket = self._socket(zmq.PUSH)
            socket.set(zmq.LINGER, LAST_WORD_MS)
            socket.connect(address)
            self._outputs.append(socket)
        for address in inputs:
            socket = self._socket(zmq.DEALER)
            socket.connect(address)
            socket.send(_encode(self._protocol.registration()))
            self._inputs.append(socket)
            self._watch(socket, self._on_input)
        self._handshake.send(_encode(self._status("READY")))
        self.ready.set()
        self._on_ready()

    # Requests -------------------------------------------------------------------------------------

    def _on_input(self, frames: list[bytes]) -> None:
        kind, payload = frames[0], frames[1] if len(frames) > 1 else b""
        try:
            if kind == ADD:
                self._add(payload)
            elif kind == ABORT:
                for name in _decode(payload):
                    self._abort(name)
            elif kind == UTILITY and isinstance(self._protocol, VllmProtocol):
                client, answer = self._protocol.utility(payload)
                self._outputs[client].send_multipart(answer)
            elif kind == START_WAVE and isinstance(self._protocol, VllmProtocol):
                self._start_wave(*_decode(payload))
            else:
                raise FatalRequestError(f"a message of type {kind.hex()}", deaf=True)
        except FatalRequestError as error:
            self.fatal.append(str(error))
            log.error("the engine does not survive this: %s", error)
            self.crash(sentinel=not error.deaf)

    def _add(self, payload: bytes) -> None:
        try:
            request, client = self._protocol.read_add(payload, self._clients.keys(), len(self._outputs))
        except RefusedRequestError as refusal:
            self._emit(refusal.client, self._protocol.failed(refusal.request_id), refusal.request_id)
            return
        self.adds += 1
        self._clients[request.request_id] = client
        if self._awake:
            self._begin(request, client)
        else:
            self._held.append((request, client))

    def _begin(self, request: SimRequest, client: int) -> None:
        task = self._loop.create_task(self._run(request, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request: SimRequest, client: int) -> None:
        name = request.request_id
        try:
            generation = await self.engine.prepare(request)
            if name not in self._clients:
                return
            generation.deliver = self._on_step
            generation.failed = lambda _: self._fail(name, client)
            self.engine.submit(generation)
        except RefusalError:
            self._fail(name, client)

    def _fail(self, name: str, client: int) -> None:
        if self._clients.pop(name, None) is not None:
            self._emit(client, self._protocol.failed(name), name)

    def _abort(self, name: str) -> None:
        if self._clients.pop(name, None) is not None:
            self.engine.abort(name)
            self._rest()

    def _start_wave(self, wave: int, _excluded: int | None) -> None:
        if wave < self._wave:
            return
        self._wave, self._awake = wave, True
        held, self._held = self._held, []
        for request, client in held:
            self._begin(request, client)

    # Steps ----------------------------------------------------------------------------------------

    def _on_step(self, generation: Generation, choice: Choice, ids: list[int]) -> None:
        name = generation.request.request_id
        client = self._clients.get(name)
        if client is None:
            return
        if choice.done:
            del self._clients[name]
        if generation.request.stream or choice.done:
            shown = ids if generation.request.stream else choice.plan
            self._emit(client, self._protocol.row(generation, choice, shown, self._aux.setdefault(client, [])), None)

    def _emit(self, client: int, row: list[Any], finished: str | None) -> None:
        """Add to the message of this step; it leaves at the end of the loop iteration."""
        if not self._rows:
            self._loop.call_soon(self._flush)
        self._rows.setdefault(client, []).append(row)
        if finished is not None:
            self._finished.setdefault(client, []).append(finished)

    def _flush(self) -> None:
        rows, self._rows = self._rows, {}
        aux, self._aux = self._aux, {}
        finished, self._finished = self._finished, {}
        if self.ended.is_set():
            return
        for client, batch in rows.items():
            self._outputs[client].send_multipart(
                self._protocol.step(batch, aux.get(client, []), finished.get(client)), copy=True
            )
        self._rest()

    def _rest(self) -> None:
        """The last request has ended: a final load report, and the end of a wave."""
        if self._clients or self.ended.is_set() or not self._outputs:
            return
        self._outputs[0].send_multipart(self._protocol.step([], [], None))
        if self._lockstep and self._awake and isinstance(self._protocol, VllmProtocol):
            self._outputs[0].send_multipart(self._protocol.wave_complete(self._wave))
            self._awake = False
            self._wave += 1

    # End ------------------------------------------------------------------------------------------

    def crash(self, *, sentinel: bool) -> None:
        """Die of a fatal error: a last word on every output, or only the input ends."""
        if self.ended.is_set():
            return
        if sentinel:
            for socket in self._outputs:
                socket.send(DEAD)
        self.close()

    def close(self) -> None:
        """Drop all connections."""
        if self.ended.is_set():
            return
        self.ended.set()
        for name in list(self._clients):
            self.engine.abort(name)
        self._clients.clear()
        for fd in self._readers:
            self._loop.remove_reader(fd)
        for socket in (self._handshake, *self._inputs, *self._outputs):
            socket.close()
        for task in self._tasks:
            task.cancel()
        self._context.term()
