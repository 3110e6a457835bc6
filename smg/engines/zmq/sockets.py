"""The data sockets of one client of a ZMQ worker, and what they tell about the engines behind them.

Every socket is read by a callback of the event loop. ZMQ's descriptor is edge-triggered: a reader goes on until there
is nothing left, and sending on a socket may swallow the edge of an incoming message, so senders look for one.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from smg.engines.zmq.addresses import identity, remove_stale
from smg.engines.zmq.handshake import SOCKET_OPTIONS

_MESSAGES_PER_TURN = 64
_ZERO_COPY_BYTES = 65536
# How long the aborts that were sent last may take to leave.
LAST_WORD_MS = 300
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED

Context = zmq.Context[zmq.Socket[bytes]]


class OutputSocket:
    """PULL: the steps of all ranks for one client. ``on_message`` gets the frames of each."""

    def __init__(self, context: Context, name: str, on_message: Callable[[list[bytes]], None]) -> None:
        """Binds ``name`` (a file). Raises ``OSError`` or ``ValueError``."""
        self._name = name
        self._on_message = on_message
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        _bind(self._socket, name)
        self._loop = asyncio.get_running_loop()
        self._fd: int = self._socket.get(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if not self.drain():
            self._loop.call_soon(self._drain)

    def drain(self, limit: int = _MESSAGES_PER_TURN) -> bool:
        """Read what has arrived, at most ``limit`` messages; True when nothing is left."""
        receive, handle = self._socket.recv_multipart, self._on_message
        try:
            for _ in range(limit):
                if self._socket.closed:
                    return True
                handle(receive(zmq.NOBLOCK))
        except zmq.Again:
            return True
        return False

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(0)
            remove_stale(self._name)


class InputSocket:
    """ROUTER: requests to one rank, and its registration.

    ``on_message`` gets what the engine sends here (without its identity), ``on_connected`` is called when something
    connects, ``on_lost`` when the newest connection ends.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        rank: int,
        on_message: Callable[[list[bytes]], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        """Binds ``name`` (a file). Raises ``OSError`` or ``ValueError``."""
        self._name = name
        self._identity = identity(rank)
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._newest = -1
        self._socket = context.socket(zmq.ROUTER)
        for option, value in SOCKET_OPTIONS:
            self._socket.set(option, value)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        try:
            _bind(self._socket, name)
        except (OSError, ValueError):
            self._monitor.close(0)
            raise
        self._loop = asyncio.get_running_loop()
        self._fds: list[int] = [self._socket.get(zmq.FD), self._monitor.get(zmq.FD)]  # type: ignore[list-item]
        self._loop.add_reader(self._fds[0], self._drain)
        self._loop.add_reader(self._fds[1], self._watch)
        self._loop.call_soon(self._watch)
        self._loop.call_soon(self._drain)

    def send(self, kind: bytes, payload: bytes) -> bool:
        """Send one request to the engine; False when it is not connected."""
        frames: Sequence[bytes] = (self._identity, kind, payload)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=len(payload) < _ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN, errno.ENOTSOCK):
                raise
            return False
        events: int = self._socket.get(zmq.EVENTS)  # type: ignore[assignment]
        if events & zmq.POLLIN:
            self._loop.call_soon(self._drain)
        return True

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frames[0] == self._identity:
                self._on_message(frames[1:])

    def _watch(self) -> None:
        while not self._socket.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._newest = event["value"]
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._drain()
                self._on_connected()
            elif event["value"] == self._newest:
                # An older connection that ends only now was taken over before.
                self._newest = -1
                self._drain()
                self._on_lost()

    def close(self) -> None:
        if not self._socket.closed:
            for fd in self._fds:
                self._loop.remove_reader(fd)
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(LAST_WORD_MS)
            remove_stale(self._name)


def _bind(socket: zmq.Socket[bytes], name: str) -> None:
    try:
        remove_stale(name)
        socket.bind(f"ipc://{name}")
    except zmq.ZMQError as error:
        socket.close(0)
        raise OSError(error.errno, f"cannot bind {name}: {error.strerror}") from error
    except (OSError, ValueError):
        socket.close(0)
        raise
