"""The links of the ring: one-way ZMQ sockets, packed frames, no asyncio wrapper.

Rules:

* Every process has one ``Inbox`` (PULL, bound) and one ``Outbox`` (PUSH, connected) per peer it talks to. Sockets are
  one-way, so the edge-triggered ZMQ descriptor has only one thing to tell.
* A frame is a msgpack list of ``RingMessage``. What a process sends to one peer within one loop iteration travels in
  one frame: an idle hop costs the receiver about 40 microseconds whatever it carries.
* The inbox descriptor is watched by the loop and drained until EAGAIN; a long queue yields to the loop every few
  frames.
* Addresses carry the generation of the process (``d0.2``): a restarted process never reads what was meant for the
  dead one.
* Sockets are ``ipc://`` files in a private directory (0700). Linux limits their path to 107 bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from smg.messages import Peer, RingMessage, StreamData

_FRAMES_PER_TURN = 64
_ZERO_COPY_BYTES = 65536
_LAZY_SECS = 0.002
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[RingMessage]).decode


def peer_address(run_dir: Path, role: str, index: int, generation: int) -> str:
    """The inbox address of one process."""
    return f"ipc://{run_dir}/{role}{index}.{generation}"


# What a process does with a message, by its type. The messages of other types are dropped.
Handlers = dict[type, Callable[[Any], None]]


class Inbox:
    """Receives packed frames and hands every message to the handler of its type, in order, on the loop. ``more``:
    another frame waits behind the one whose messages are being handled."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, handlers: Handlers) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        self._path = address.removeprefix("ipc://")
        self._handlers = handlers
        self.more = False
        self._loop = asyncio.get_running_loop()
        self._fd: int = self._socket.get(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        socket, handlers = self._socket, self._handlers
        if socket.closed:
            return
        try:
            # Nearly always the descriptor tells of a frame. Whether there is another one is asked: the question costs a
            # third of what the exception of an empty socket does.
            frame = socket.recv(_NOBLOCK)
        except zmq.Again:
            return
        for turn in range(_FRAMES_PER_TURN):
            if turn:
                frame = socket.recv(_NOBLOCK)
            more = self.more = bool(socket.getsockopt(_EVENTS) & _POLLIN)  # type: ignore[operator]
            for message in _decode(frame):
                handler = handlers.get(type(message))
                if handler is not None:
                    handler(message)
            if not more:
                return
        # The descriptor is edge-triggered: frames may be left without another edge.
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop reading and remove the socket file."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._socket.close(0)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class Outbox:
    """Sends to one peer; messages of one loop iteration leave in one frame."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], peer: Peer) -> None:
        self.peer = peer
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.connect(peer.address)
        self._loop = asyncio.get_running_loop()
        self._batch: list[RingMessage] = []
        self._data: StreamData | None = None  # of the pending batch
        self._lazy = False  # the pending batch holds only messages that can wait

    def send(self, message: RingMessage) -> None:
        batch = self._batch
        if not batch or self._lazy:
            self._lazy = False
            self._loop.call_soon(self.flush)
        batch.append(message)

    def hold(self, message: RingMessage) -> None:
        """Send with the next ``flush``, which is the caller's business."""
        self._batch.append(message)

    def hold_data(self, seq: int, body: bytes) -> None:
        """``hold`` bytes of a stream: what comes for several streams in a row is one message."""
        batch, data = self._batch, self._data
        if data is None or batch[-1] is not data:
            data = self._data = StreamData([], [])
            batch.append(data)
        data.seqs.append(seq)
        data.bodies.append(body)

    def send_lazily(self, message: RingMessage) -> None:
        """Send with the next frame to this peer, at the latest after a few milliseconds: for news nobody waits for."""
        batch = self._batch
        if not batch:
            self._loop.call_later(_LAZY_SECS, self.flush)
            self._lazy = True
        batch.append(message)

    def flush(self) -> None:
        """Send what is pending now instead of at the end of the loop iteration."""
        batch = self._batch
        if not batch or self._socket.closed:
            return
        frame = _encode(batch)
        batch.clear()
        self._data = None
        self._lazy = False
        self._socket.send(frame, _NOBLOCK, copy=len(frame) < _ZERO_COPY_BYTES)

    def close(self, *, linger_ms: int = 0) -> None:
        if not self._socket.closed:
            self.flush()
            self._socket.close(linger_ms)


class Links:
    """The outboxes of one process, kept in step with the supervisor's table of live peers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], roles: Iterable[str]) -> None:
        self._context = context
        self._roles = frozenset(roles)
        self._boxes: dict[tuple[str, int], Outbox] = {}
        self._by_role: dict[str, dict[int, Outbox]] = {role: {} for role in self._roles}
        self._held: dict[tuple[str, int], list[RingMessage]] = {}

    def update(self, peers: Iterable[Peer]) -> tuple[list[Peer], list[Peer]]:
        """Connect to new peers, drop dead ones; returns (appeared, vanished)."""
        live = {(peer.role, peer.index): peer for peer in peers if peer.role in self._roles}
        vanished = [box.peer for key, box in self._boxes.items() if live.get(key) != box.peer]
        for peer in vanished:
            self._boxes.pop((peer.role, peer.index)).close()
            del self._by_role[peer.role][peer.index]
        appeared = [peer for key, peer in live.items() if key not in self._boxes]
        for peer in appeared:
            key = (peer.role, peer.index)
            box = self._boxes[key] = self._by_role[peer.role][peer.index] = Outbox(self._context, peer)
            for message in self._held.pop(key, ()):
                box.send(message)
        return appeared, vanished

    def get(self, role: str, index: int) -> Outbox | None:
        return self._boxes.get((role, index))

    def of(self, role: str) -> dict[int, Outbox]:
        """Outboxes of all live processes of a role, by index; not to be changed."""
        return self._by_role.get(role, {})

    def send(self, role: str, index: int, message: RingMessage) -> bool:
        """Send to one process; False if it is not alive (the message is dropped)."""
        box = self._boxes.get((role, index))
        if box is None:
            return False
        box.send(message)
        return True

    def send_lazily(self, role: str, index: int, message: RingMessage) -> None:
        """Send to one process without a hurry (``Outbox.send_lazily``); dropped if it is not alive."""
        box = self._boxes.get((role, index))
        if box is not None:
            box.send_lazily(message)

    def deliver(self, role: str, index: int, message: RingMessage) -> None:
        """Send to one process; while it is not alive the message waits for its successor."""
        if not self.send(role, index, message):
            self._held.setdefault((role, index), []).append(message)

    def close(self) -> None:
        for box in self._boxes.values():
            box.close(linger_ms=500)
        self._boxes.clear()
