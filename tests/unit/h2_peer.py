"""The other end of a machine under test: calls that keep what they are told, and the frames of a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hpack

from smg.engines.base import EngineError
from smg.engines.grpc.h2 import frames
from smg.engines.grpc.h2.calls import Call
from smg.engines.grpc.h2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SETTINGS,
    frame,
)
from smg.engines.grpc.h2.headers import request_block
from smg.engines.grpc.h2.machine import Machine

WORD = frames.WORD.pack
BLOCK = request_block("http", "worker:1", "/pkg.Service/Stream")
GOOD = {":status": "200", "content-type": "application/grpc"}
OK = {"grpc-status": "0", "grpc-message": ""}


class Recorder(Call):
    """A call that keeps what it is told; ``then`` runs at each message."""

    def __init__(self, request: bytes = b"ask", then: Callable[[], None] | None = None) -> None:
        super().__init__(BLOCK, request)
        self.told: list[Any] = []
        self.then = then

    def on_message(self, payload: bytes) -> None:
        assert type(payload) is bytes
        self.told.append(payload)
        if self.then is not None:
            self.then()

    def ended(self) -> None:
        self.told.append("end")

    def failed(self, error: EngineError) -> None:
        self.told.append((error.code, error.message))

    @property
    def code(self) -> str:
        """The status of a failed call that got no message."""
        ((code, _),) = self.told
        return str(code)


def sent(machine: Machine) -> list[tuple[int, int, int, bytes]]:
    return parsed(machine.take_output())


def parsed(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """Frames: kind, flags, stream, payload."""
    result = []
    while data:
        head, flags, stream_id = frames.FRAME.unpack_from(data)
        result.append((head & 0xFF, flags, stream_id, data[9 : 9 + (head >> 8)]))
        data = data[9 + (head >> 8) :]
    return result


def settings(**values: int) -> bytes:
    names = {"streams": 3, "window": 4, "size": 5}
    return frame(SETTINGS, 0, 0, b"".join(frames.SETTING.pack(names[name], value) for name, value in values.items()))


def block(fields: dict[str, str]) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode(list(fields.items())))


def headers(stream_id: int, fields: dict[str, str] = GOOD, flags: int = 0) -> bytes:
    return frame(HEADERS, END_HEADERS | flags, stream_id, block(fields))


def message(payload: bytes, compressed: int = 0) -> bytes:
    return frames.MESSAGE.pack(compressed, len(payload)) + payload


def data(stream_id: int, *payloads: bytes, flags: int = 0) -> bytes:
    return frame(DATA, flags, stream_id, b"".join(map(message, payloads)))


def trailers(stream_id: int, fields: dict[str, str] = OK) -> bytes:
    return headers(stream_id, fields, END_STREAM)


def connected(*calls: Call, max_message: int = 1000, **values: int) -> Machine:
    """A machine whose peer has said hello and whose output was read."""
    machine = Machine(max_message)
    for call in calls:
        machine.calls.submit(call)
    machine.receive(settings(**values))
    machine.take_output()
    return machine
