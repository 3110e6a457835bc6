"""The HTTP/2 machine on streams cut anywhere, and on streams that are not HTTP/2."""

from __future__ import annotations

import base64
import zlib
from itertools import pairwise
from typing import Any

import hpack
from hypothesis import given, settings
from hypothesis import strategies as st

from smg.engines.base import EngineError
from smg.engines.grpc.h2 import frames
from smg.engines.grpc.h2.calls import Call
from smg.engines.grpc.h2.frames import ProtocolError, frame
from smg.engines.grpc.h2.headers import request_block
from smg.engines.grpc.h2.machine import MAX_HEADER_BLOCK, Machine

MAX_MESSAGE = 50_000
FEW = settings(max_examples=60, deadline=None)


class Recorder(Call):
    def __init__(self) -> None:
        super().__init__(request_block("http", "w", "/p.S/M"), b"ask")
        self.told: list[Any] = []

    def on_message(self, payload: bytes) -> None:
        self.told.append(payload)

    def ended(self) -> None:
        self.told.append("end")

    def failed(self, error: EngineError) -> None:
        self.told.append((error.code, error.message))


def run(chunks: list[bytes], calls: int) -> tuple[list[list[Any]], bytes, str]:
    """What each call is told, what the machine writes, and its protocol error ("" without)."""
    machine = Machine(MAX_MESSAGE)
    recorders = [Recorder() for _ in range(calls)]
    for recorder in recorders:
        machine.calls.submit(recorder)
    output, error = b"", ""
    for chunk in chunks:
        try:
            machine.receive(chunk)
        except ProtocolError as caught:
            error = str(caught)
        output += machine.take_output()
        check_bounds(machine, recorders)
        if error:
            break
    return [recorder.told for recorder in recorders], output, error


def check_bounds(machine: Machine, calls: list[Recorder]) -> None:
    assert len(machine._rest) < frames.FRAME_SIZE + 9
    assert len(machine._block) <= MAX_HEADER_BLOCK + frames.FRAME_SIZE
    for call in calls:
        assert len(call.buffer) < MAX_MESSAGE + frames.FRAME_SIZE
        assert sum(not isinstance(told, bytes) for told in call.told) <= 1
        assert all(isinstance(told, bytes) for told in call.told[:-1])
        assert not (call.open and call.told and not isinstance(call.told[-1], bytes))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[start:stop] for start, stop in pairwise(places)]


# What grpcio's server (C-core 1.85) sent for three calls: seven messages, one of them of 40,000 bytes; one message and
# INVALID_ARGUMENT; an unknown method.
RECORDED = zlib.decompress(
    base64.b85decode(
        "c-rmU&uY{_9Ki8k+}&E~9u$POATl2IAars6SOhN(mLC1{3S%;j!QGi*XBJwYpr?Z1O<&4)=nM1(#ALSk2LfJ%UcR5hZ}OWY^ZO;_78sGe"
        "z9fCgn>a{uOPb+FuQ|$^6Wf~$j@m@}*(TfGO2e1yuiu}3zPc27o3#sN>LMQ&&PHS7IG%fRUwgl(3mt1`pH(Yg<PY08)<t1_92;A>vbNQ3"
        "T{d^r@%%uQ=5(Q>IZ)N7+KUWRomBO1bRUgXlixjw?1{Wdm3#lY@TNpB1!qlHCsUCZ*`U23-${#ysN*_ha~Y;|X+qGI*?+G~<yUU$<4ZN2"
        "Oh&UqH9DS;ULAKWI_sL8i@Zyf2LF7_KRdZIo&DX)gV!d0aHX;?s#CYN<&&;z&(l|MGx;q)0{{R30000000000000000000000000x9QhL"
        "0K5tS0000000000000000000000000003^EJUU?`00000000000000TMDA_=Cbpr!&>@OE&IavFzEiDyF%D73b;u?%OzF~uperLk0X*f+oB"
    )
)
RECORDED_TOLD = [
    [*(b"token %d" % index for index in range(5)), b"x" * 40_000, b"last", "end"],
    [b"one", ("INVALID_ARGUMENT", "bad prompt: 100% ü")],
    [("UNIMPLEMENTED", "Method not found!")],
]


@st.composite
def framed(draw: st.DrawFn) -> tuple[bytes, list[list[Any]]]:
    """A valid stream with every liberty a peer has, and what its calls are told."""
    encoder = hpack.Encoder()
    told: list[list[Any]] = [[], [], []]
    parts: list[list[bytes]] = []
    for index in range(3):
        stream_id, parts_here = 2 * index + 1, []
        messages = draw(st.lists(st.binary(max_size=40), max_size=5))
        told[index] = [*messages, "end"]
        body = b"".join(frames.MESSAGE.pack(0, len(message)) + message for message in messages)
        for piece in cut(body, draw(st.lists(st.integers(0, 300), max_size=6))):
            padding = draw(st.one_of(st.none(), st.integers(0, 9)))
            if padding is None:
                parts_here.append(frame(frames.DATA, 0, stream_id, piece))
            else:
                padded = bytes([padding]) + piece + bytes(padding)
                parts_here.append(frame(frames.DATA, frames.PADDED, stream_id, padded))
        parts.append(parts_here)
    wire = frame(frames.SETTINGS, 0, 0)
    noise = [
        b"", frame(frames.PING, 0, 0, b"12345678"), frame(0xEE, 0xFF, 8, b"?"), frame(frames.PRIORITY, 0, 1, bytes(5)),
        frame(frames.SETTINGS, 0, 0), frame(frames.WINDOW_UPDATE, 0, 0, frames.WORD.pack(9)),
    ]  # fmt: skip
    for index in range(3):
        head = bytes(encoder.encode([(":status", "200"), ("content-type", "application/grpc")]))
        wire += split_block(2 * index + 1, head, 0, draw(st.integers(0, 60)))
    while any(parts):
        index = draw(st.sampled_from([index for index in range(3) if parts[index]]))
        wire += draw(st.sampled_from(noise)) + parts[index].pop(0)
    for index in range(3):
        end = bytes(encoder.encode([("grpc-status", "0"), ("x-request", str(index))]))
        wire += split_block(2 * index + 1, end, frames.END_STREAM, draw(st.integers(0, 60)))
    return wire, told


def split_block(stream_id: int, block: bytes, flags: int, at: int) -> bytes:
    if not 0 < at < len(block):
        return frame(frames.HEADERS, flags | frames.END_HEADERS, stream_id, block)
    rest = frame(frames.CONTINUATION, frames.END_HEADERS, stream_id, block[at:])
    return frame(frames.HEADERS, flags, stream_id, block[:at]) + rest


@FEW
@given(st.lists(st.integers(0, 50_000), max_size=40))
def test_recorded_stream_cut_anywhere(cuts: list[int]) -> None:
    told, output, error = run(cut(RECORDED, cuts), 3)
    assert (told, error) == (RECORDED_TOLD, "")
    assert output == run([RECORDED], 3)[1]


def test_recorded_stream_in_single_bytes() -> None:
    told, _, error = run([RECORDED[index : index + 1] for index in range(len(RECORDED))], 3)
    assert (told, error) == (RECORDED_TOLD, "")


@FEW
@given(framed(), st.lists(st.integers(0, 1000), max_size=30))
def test_any_framing_cut_anywhere(stream: tuple[bytes, list[list[Any]]], cuts: list[int]) -> None:
    wire, expected = stream
    told, output, error = run(cut(wire, cuts), 3)
    assert (told, error) == (expected, "")
    assert output == run([wire], 3)[1]


@FEW
@given(st.lists(st.binary(max_size=200), max_size=20), st.booleans())
def test_noise(chunks: list[bytes], greeted: bool) -> None:
    run([frame(frames.SETTINGS, 0, 0)] * greeted + chunks, 3)


@FEW
@given(
    st.lists(
        st.builds(
            frame,
            st.integers(0, 11),
            st.integers(0, 255),
            st.sampled_from([0, 1, 1, 1, 3, 3, 5, 7, 2**31 - 1]),
            st.one_of(
                st.binary(max_size=20),
                st.just(b"\x88\x0f\x10\x10application/grpc"),
                st.just(b"\0\0\0\0\3abc"),
                st.integers(0, 2**32 - 1).map(frames.WORD.pack),
                st.binary(min_size=8, max_size=8),
            ),
        ),
        max_size=40,
    ),
    st.lists(st.integers(0, 2000), max_size=5),
)
def test_hostile_frames(wire: list[bytes], cuts: list[int]) -> None:
    whole = b"".join([frame(frames.SETTINGS, 0, 0), *wire])
    told, _, error = run([whole], 3)
    assert run(cut(whole, cuts), 3)[::2] == (told, error)


@FEW
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=4), st.data())
def test_damaged_streams(damage: list[tuple[int, int]], data: st.DataObject) -> None:
    wire = bytearray(RECORDED)
    for place, value in damage:
        wire[place % len(wire)] = value
    told, _, error = run([bytes(wire)], 3)
    assert run(cut(bytes(wire), data.draw(st.lists(st.integers(0, 50_000), max_size=8))), 3)[::2] == (told, error)


def test_endless_streams_stay_small() -> None:
    """Messages, blocks and frames that are announced and never end; ``run`` checks the machine's buffers."""
    head = frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x88\x0f\x10\x10application/grpc")
    hello = frame(frames.SETTINGS, 0, 0) + head
    piece = b"x" * 99
    large = frames.MESSAGE.pack(0, MAX_MESSAGE)
    endless = {
        "": frame(frames.DATA, 0, 1, large) + frame(frames.DATA, 0, 1, piece) * 400,
        "header block without an end": frame(frames.HEADERS, 0, 1, piece)
        + frame(frames.CONTINUATION, 0, 1, piece) * 999,
        "frame too large, or no HTTP/2 at all": frames.FRAME.pack(frames.FRAME_SIZE + 1 << 8, 0, 1) + piece * 999,
        "too many frames that want an answer": frame(frames.PING, 0, 0, bytes(8)) * 2000,
    }
    for expected, wire in endless.items():
        _, output, error = run([hello, *cut(wire, list(range(0, len(wire), 25_000)))], 1)
        assert error == expected
        assert len(output) < 20_000
