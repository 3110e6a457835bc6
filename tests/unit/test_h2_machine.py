"""The HTTP/2 client machine, frame by frame."""

from __future__ import annotations

from typing import Any

import hpack
import pytest
from h2_peer import (
    GOOD,
    OK,
    WORD,
    Recorder,
    block,
    connected,
    data,
    headers,
    message,
    parsed,
    sent,
    settings,
    trailers,
)

from smg.engines.grpc.h2 import frames
from smg.engines.grpc.h2.frames import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_FIELDS,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ProtocolError,
    frame,
)
from smg.engines.grpc.h2.headers import request_block, timeout_field
from smg.engines.grpc.h2.machine import MAX_HEADER_BLOCK, WINDOW, Machine

# ---- opening


def test_hello_and_request() -> None:
    machine, call = Machine(), Recorder(b"x" * 300)
    machine.calls.submit(call)
    hello = machine.take_output()
    assert hello.startswith(PREFACE)
    (kind, _, _, values), update = parsed(hello.removeprefix(PREFACE))
    assert kind == SETTINGS
    assert dict(frames.SETTING.iter_unpack(values)) == {1: 0, 2: 0, 4: WINDOW, 6: MAX_HEADER_BLOCK}
    assert update == (WINDOW_UPDATE, 0, 0, WORD(WINDOW - 65535))
    machine.receive(settings())
    ack, head, body = sent(machine)
    assert ack == (SETTINGS, ACK, 0, b"")
    assert head[:3] == (HEADERS, END_HEADERS, 1)
    assert hpack.Decoder().decode(head[3]) == [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/pkg.Service/Stream"),
        (":authority", "worker:1"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-smg"),
    ]
    assert body == (DATA, END_STREAM, 1, message(b"x" * 300))
    later = Recorder(b"")
    machine.calls.submit(later)
    assert [(kind, stream) for kind, _, stream, _ in sent(machine)] == [(HEADERS, 3), (DATA, 3)]


@pytest.mark.parametrize(
    ("seconds", "value"),
    [(1.5, "1500m"), (0.0001, "1m"), (-3, "1m"), (1800, "1800000m"), (10**5 + 0.5, "100001S"), (1e12, "99999999S")],
)
def test_deadline_field(seconds: float, value: str) -> None:
    assert hpack.Decoder().decode(timeout_field(seconds)) == [("grpc-timeout", value)]


def test_long_paths_are_encoded() -> None:
    for length in (126, 127, 128, 254, 255, 16_000):
        fields = dict(hpack.Decoder().decode(request_block("https", "w", "/" + "p" * (length - 1))))
        assert len(fields[":path"]) == length
        assert fields[":scheme"] == "https"


def test_calls_above_the_limit_wait_their_turn() -> None:
    calls = [Recorder() for _ in range(4)]
    machine = connected(*calls, streams=2)
    machine.calls.cancel(calls[2])  # has not been opened
    assert sent(machine) == []
    machine.receive(headers(1) + trailers(1))
    assert [(kind, stream) for kind, _, stream, _ in sent(machine)] == [(HEADERS, 5), (DATA, 5)]
    machine.receive(headers(5) + trailers(5))
    assert [call.told for call in calls] == [["end"], [], [], ["end"]]
    later = Recorder()
    machine.calls.submit(later)
    machine.receive(settings(streams=0))
    waiting = Recorder()
    machine.calls.submit(waiting)
    machine.calls.cancel(calls[1])
    assert machine.calls.take_waiting() == [waiting]


# ---- answers


def test_messages_and_end() -> None:
    first, second = Recorder(), Recorder()
    machine = connected(first, second)
    machine.receive(headers(1) + headers(3) + data(3, b"a") + data(1, b"") + data(3, b"b", b"", b"c") + trailers(3))
    assert first.told == [b""]
    assert second.told == [b"a", b"b", b"", b"c", "end"]
    assert not machine.calls.idle
    machine.receive(data(1, b"x" * 1000) + trailers(1))
    assert first.told == [b"", b"x" * 1000, "end"]
    assert machine.calls.idle
    assert sent(machine) == []


def test_messages_over_several_frames() -> None:
    call = Recorder()
    machine = connected(call, max_message=40_000)
    wire = message(b"x" * 40_000) + message(b"y") + message(b"z" * 20)
    machine.receive(headers(1))
    for start in range(0, len(wire), 13_001):
        machine.receive(frame(DATA, 0, 1, wire[start : start + 13_001]))
    machine.receive(data(1, b"whole") + frame(DATA, 0, 1) + frame(DATA, 0, 1, b"\0") + frame(DATA, 0, 1, b"\0\0\0\1!"))
    machine.receive(trailers(1))
    assert call.told == [b"x" * 40_000, b"y", b"z" * 20, b"whole", b"!", "end"]


def test_padding_priority_continuation_and_unknown_frames() -> None:
    call = Recorder()
    machine = connected(call)
    good = block(GOOD)
    machine.receive(frame(0xBB, 0xFF, 77, b"unknown") + frame(PRIORITY, 0, 9, b"12345"))
    head = b"\x03" + b"prio!" + good[:4] + b"\0\0\0"
    machine.receive(frame(HEADERS, PADDED | PRIORITY_FIELDS, 1, head))
    machine.receive(frame(CONTINUATION, 0, 1, good[4:7]) + frame(CONTINUATION, END_HEADERS, 1, good[7:]))
    machine.receive(frame(DATA, PADDED, 1, b"\x02" + message(b"one") + b"\0\0") + frame(DATA, PADDED, 1, b"\0"))
    machine.receive(frame(DATA, 0, 1 | 1 << 31, message(b"two")))  # the reserved bit means nothing
    end = block(OK)
    machine.receive(frame(HEADERS, END_STREAM, 1, end[:1]) + frame(CONTINUATION, END_HEADERS, 1, end[1:]))
    assert call.told == [b"one", b"two", "end"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({**GOOD, **OK}, "end"),
        ({**GOOD, "grpc-status": "3", "grpc-message": "100%25 %e2%82%ac %zz"}, ("INVALID_ARGUMENT", "100% € %zz")),
        ({**GOOD, "grpc-status": "14"}, ("UNAVAILABLE", "")),
        ({**GOOD, "grpc-status": "99"}, ("UNKNOWN", "")),
        ({**GOOD, "grpc-status": "no"}, ("UNKNOWN", "")),
        ({":status": "503", "grpc-status": "8"}, ("RESOURCE_EXHAUSTED", "")),
        (GOOD, ("UNKNOWN", "the worker ended the stream without a status")),
        ({":status": "503"}, ("UNAVAILABLE", "the worker answered with HTTP status 503")),
        ({":status": "404", "content-type": "text"}, ("UNIMPLEMENTED", "the worker answered with HTTP status 404")),
        ({":status": "200", "content-type": "text/html"}, ("UNKNOWN", "the worker's answer is not gRPC")),
    ],
)
def test_answers_without_messages(fields: dict[str, str], told: Any) -> None:
    call = Recorder()
    machine = connected(call)
    machine.receive(trailers(1, fields))
    assert call.told == [told]
    assert machine.calls.idle


@pytest.mark.parametrize(
    ("http", "code"),
    [(400, "INTERNAL"), (401, "UNAUTHENTICATED"), (403, "PERMISSION_DENIED"), (404, "UNIMPLEMENTED"),
     (429, "UNAVAILABLE"), (502, "UNAVAILABLE"), (504, "UNAVAILABLE"), (418, "UNKNOWN"), (301, "UNKNOWN")],
)  # fmt: skip
def test_bodies_that_are_no_grpc(http: int, code: str) -> None:
    call = Recorder()
    machine = connected(call)
    machine.receive(headers(1, {":status": str(http)}))
    assert call.code == code
    assert sent(machine) == [(RST_STREAM, 0, 1, WORD(CANCEL))]
    machine.receive(frame(DATA, END_STREAM, 1, b"<html>"))  # was on its way


def test_interim_responses_are_passed_over() -> None:
    call = Recorder()
    machine = connected(call)
    machine.receive(headers(1, {":status": "103"}) + headers(1) + data(1, b"a") + trailers(1))
    assert call.told == [b"a", "end"]


def test_trailers_with_an_error() -> None:
    call = Recorder()
    connected(call).receive(headers(1) + data(1, b"a") + trailers(1, {"grpc-status": "13", "grpc-message": "no%0Ago"}))
    assert call.told == [b"a", ("INTERNAL", "no\ngo")]


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (headers(1) + frame(DATA, END_STREAM, 1), "UNKNOWN"),
        (headers(1) + frame(DATA, 0, 1, b"\0\0\0\0\2x") + trailers(1), "INTERNAL"),
        (headers(1) + frame(DATA, 0, 1, b"\0\0") + trailers(1), "INTERNAL"),
        (headers(1) + headers(1, OK), "INTERNAL"),
        (data(1, b"early"), "INTERNAL"),
        (headers(1) + frame(DATA, 0, 1, message(b"zip", 1)), "INTERNAL"),
        (headers(1) + frame(DATA, 0, 1, message(b"x" * 1001)), "RESOURCE_EXHAUSTED"),
        (headers(1) + frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"), "RESOURCE_EXHAUSTED"),
    ],
)
def test_streams_that_end_badly(wire: bytes, code: str) -> None:
    call, other = Recorder(), Recorder()
    machine = connected(call, other)
    machine.receive(wire + headers(3) + data(3, b"well") + trailers(3))
    assert call.code == code
    assert other.told == [b"well", "end"]


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, "INTERNAL"), (1, "INTERNAL"), (2, "INTERNAL"), (8, "CANCELLED"),
     (11, "RESOURCE_EXHAUSTED"), (12, "PERMISSION_DENIED"), (13, "INTERNAL"), (999, "INTERNAL")],
)  # fmt: skip
def test_resets_of_the_peer(code: int, status: str) -> None:
    call = Recorder()
    machine = connected(call)
    reset = frame(RST_STREAM, 0, 1, WORD(code))
    machine.receive(reset + reset)
    assert call.code == status
    assert sent(machine) == []


def test_an_early_end_stops_the_request() -> None:
    call = Recorder(b"x" * 100_000)
    machine = connected(call)
    machine.receive(trailers(1, {**GOOD, "grpc-status": "8"}))
    assert call.code == "RESOURCE_EXHAUSTED"
    assert sent(machine) == [(RST_STREAM, 0, 1, WORD(0))]
    machine.receive(frame(WINDOW_UPDATE, 0, 0, WORD(200_000)))
    assert sent(machine) == []


def test_peers_that_use_the_default_header_table() -> None:
    encoder = hpack.Encoder()
    calls = [Recorder() for _ in range(6)]
    machine = connected(*calls)
    wire = b""
    for index in range(6):
        stream_id = 2 * index + 1
        status = {"grpc-status": str(index % 3), "grpc-message": f"m{index % 2}", "x": str(index)}
        wire += frame(HEADERS, END_HEADERS, stream_id, encoder.encode(list(GOOD.items())))
        wire += frame(HEADERS, END_HEADERS | END_STREAM, stream_id, encoder.encode(list(status.items())))
    machine.receive(wire)
    names = ["end", "CANCELLED", "UNKNOWN"]
    for index, call in enumerate(calls):
        assert call.told == [names[index % 3] if index % 3 == 0 else (names[index % 3], f"m{index % 2}")]


# ---- callbacks


def test_cancel() -> None:
    call = Recorder()
    machine = connected(call)
    machine.receive(headers(1) + data(1, b"a"))
    machine.calls.cancel(call)
    machine.calls.cancel(call)
    assert sent(machine) == [(RST_STREAM, 0, 1, WORD(CANCEL))]
    machine.receive(data(1, b"late") + frame(DATA, 0, 1, b"\0\0") + trailers(1))
    assert call.told == [b"a"]


@pytest.mark.parametrize("joined", [False, True])
def test_cancel_from_a_callback(joined: bool) -> None:
    call = Recorder()
    machine = connected(call)
    call.then = lambda: machine.calls.cancel(call)
    machine.receive(headers(1) + (data(1, b"a", b"b") if joined else data(1, b"a") + data(1, b"b")) + trailers(1))
    assert call.told == [b"a"]
    assert machine.calls.idle


def test_submit_from_a_callback() -> None:
    later = Recorder()
    first = Recorder(then=lambda: machine.calls.submit(later))
    machine = connected(first)
    machine.receive(headers(1) + data(1, b"a") + trailers(1))
    machine.receive(headers(3) + data(3, b"b") + trailers(3))
    assert (first.told, later.told) == ([b"a", "end"], [b"b", "end"])


@pytest.mark.parametrize("joined", [False, True])
def test_a_receiver_that_raises_loses_its_call_only(joined: bool, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("receiver")

    call, other = Recorder(then=broken), Recorder()
    machine = connected(call, other)
    wire = data(1, b"a", b"b") if joined else data(1, b"a") + data(1, b"b")
    machine.receive(headers(1) + headers(3) + wire + data(3, b"c") + trailers(3))
    assert call.told == [b"a", ("INTERNAL", "the gateway could not process the worker's message")]
    assert other.told == [b"c", "end"]
    assert "the receiver of a gRPC stream failed" in caplog.text


def test_fail_tells_every_call_once() -> None:
    calls = [Recorder() for _ in range(3)]
    machine = connected(*calls, streams=2)
    machine.calls.fail("UNAVAILABLE", "gone")
    assert [call.told for call in calls] == [[("UNAVAILABLE", "gone")]] * 3
    assert machine.calls.idle
    assert machine.calls.draining


# ---- windows


def test_bodies_wait_for_the_peers_windows() -> None:
    machine = connected(window=70_000, size=20_000)
    machine.calls.submit(Recorder(b"x" * 99_995))
    sizes = [len(payload) for kind, _, _, payload in sent(machine) if kind == DATA]
    assert sizes == [20_000, 20_000, 20_000, 5_535]  # the connection's window ends it
    machine.receive(frame(WINDOW_UPDATE, 0, 0, WORD(1_000_000)))
    assert [len(payload) for *_, payload in sent(machine)] == [4_465]  # the stream's window ends it
    machine.receive(settings(window=50_000))  # now 20,000 below zero
    machine.receive(frame(WINDOW_UPDATE, 0, 1, WORD(20_000)))
    assert [kind for kind, *_ in sent(machine)] == [SETTINGS]
    machine.receive(frame(WINDOW_UPDATE, 0, 1, WORD(10)))
    assert sent(machine) == [(DATA, 0, 1, b"x" * 10)]
    machine.receive(settings(window=2**31 - 1))
    rest = [(kind, flags, len(payload)) for kind, flags, _, payload in sent(machine)]
    assert rest == [(SETTINGS, ACK, 0), (DATA, 0, 20_000), (DATA, END_STREAM, 9_990)]


def test_small_requests_pass_a_stuck_one() -> None:
    big, small = Recorder(b"x" * 29_995), Recorder(b"y")
    machine = connected(big, window=1000)
    machine.calls.submit(small)
    assert [(kind, stream) for kind, _, stream, _ in sent(machine)] == [(HEADERS, 3), (DATA, 3)]
    machine.receive(headers(3) + trailers(3) + frame(WINDOW_UPDATE, 0, 1, WORD(2**31 - 1)))
    assert small.told == ["end"]
    assert [(flags, len(payload)) for _, flags, _, payload in sent(machine)] == [(0, 16_384), (END_STREAM, 12_616)]


def test_windows_are_given_back() -> None:
    busy, quiet = Recorder(), Recorder()
    machine = connected(busy, quiet, max_message=20_000)
    machine.receive(headers(1) + headers(3) + data(3, b"q"))
    plain, padded = data(1, b"x" * 16_000), frame(DATA, PADDED, 1, b"\x64" + message(b"y" * 16_000) + bytes(100))
    received, grants = 6, []
    while not grants:
        machine.receive(plain + padded)
        received += 16_005 + 16_106
        grants = sent(machine)
    assert WINDOW // 2 <= received < WINDOW // 2 + 40_000
    assert grants == [
        (WINDOW_UPDATE, 0, 0, WORD(received)),
        (WINDOW_UPDATE, 0, 1, WORD(received - 6)),
    ]
    machine.receive(plain)
    assert sent(machine) == []


def test_data_of_closed_streams_counts_for_the_connection() -> None:
    call = Recorder()
    machine = connected(call)
    machine.calls.cancel(call)
    sent(machine)
    late = frame(DATA, 0, 1, bytes(16_384))
    for _ in range(WINDOW // 2 // 16_384):
        machine.receive(late)
    assert sent(machine) == [(WINDOW_UPDATE, 0, 0, WORD(WINDOW // 2))]


# ---- the connection


def test_pings() -> None:
    machine = connected()
    machine.receive(frame(PING, 0, 0, b"01234567"))
    assert sent(machine) == [(PING, ACK, 0, b"01234567")]
    machine.ping()
    ((kind, flags, stream, payload),) = sent(machine)
    assert (kind, flags, stream, machine.ping_pending) == (PING, 0, 0, True)
    machine.receive(frame(PING, ACK, 0, b"unwanted"))
    assert machine.ping_pending
    machine.receive(frame(PING, ACK, 0, payload))
    assert not machine.ping_pending


@pytest.mark.parametrize("nag", [frame(PING, 0, 0, bytes(8)), frame(SETTINGS, 0, 0)])
def test_answers_to_write_are_bounded(nag: bytes) -> None:
    machine = connected()
    for _ in range(5):
        machine.receive(nag * 900)
        machine.take_output()
    with pytest.raises(ProtocolError) as caught:
        machine.receive(nag * 10_000)
    assert caught.value.code == ENHANCE_YOUR_CALM
    assert len(machine.take_output()) < 20_000


def test_goaway() -> None:
    calls = [Recorder() for _ in range(4)]
    machine = connected(*calls, streams=3)
    machine.receive(headers(1) + frame(GOAWAY, 0, 0, frames.GOAWAY_FIELDS.pack(3, 11) + b"too_many_pings"))
    assert machine.calls.draining
    assert machine.goaway == "HTTP/2 error 11: too_many_pings"
    assert machine.calls.take_waiting() == [calls[2], calls[3]]
    machine.receive(data(1, b"a") + trailers(1))
    assert calls[0].told == [b"a", "end"]
    assert not machine.calls.idle
    machine.receive(frame(GOAWAY, 0, 0, frames.GOAWAY_FIELDS.pack(1, 0)))
    assert machine.calls.take_waiting() == [calls[1]]
    assert machine.calls.idle
    elsewhere = connected(calls[1], calls[2], calls[3])
    elsewhere.receive(b"".join(headers(stream) + trailers(stream) for stream in (1, 3, 5)))
    assert [call.told for call in calls[1:]] == [["end"]] * 3


def test_goaway_after_an_answer() -> None:
    call = Recorder()
    machine = connected(call)
    machine.receive(headers(1) + data(1, b"a") + frame(GOAWAY, 0, 0, bytes(8)))
    assert call.told == [b"a", ("UNAVAILABLE", "the worker is closing the connection (HTTP/2 error 0)")]
    assert machine.calls.take_waiting() == []


def test_refused_streams_are_tried_again() -> None:
    call, other = Recorder(b"x" * 10), Recorder()
    machine = connected(call)
    for stream_id in (1, 3, 5, 7):
        machine.receive(frame(RST_STREAM, 0, stream_id, WORD(7)))
        machine.calls.submit(other)
        assert machine.calls.stalled
        assert sent(machine) == []
        machine.calls.cancel(other)
        machine.calls.resume()
        head, body = sent(machine)
        assert (head[2], body) == (stream_id + 2, (DATA, END_STREAM, stream_id + 2, message(b"x" * 10)))
    machine.receive(frame(RST_STREAM, 0, 9, WORD(7)))
    assert call.code == "UNAVAILABLE"
    answered = Recorder()
    machine = connected(answered)
    machine.receive(headers(1) + frame(RST_STREAM, 0, 1, WORD(7)))
    assert answered.code == "UNAVAILABLE"


def test_stream_ids_run_out() -> None:
    machine = connected()
    machine.calls._next_id = 2**31 - 3
    calls = [Recorder() for _ in range(3)]
    for call in calls:
        machine.calls.submit(call)
    assert machine.calls.draining
    assert [call.stream_id for call in calls[:2]] == [2**31 - 3, 2**31 - 1]
    assert machine.calls.take_waiting() == [calls[2]]


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", FRAME_SIZE_ERROR),
        (frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (frame(SETTINGS, ACK, 0), PROTOCOL_ERROR),
    ],
)
def test_bad_hellos(wire: bytes, code: int) -> None:
    machine = Machine()
    with pytest.raises(ProtocolError) as caught:
        machine.receive(wire)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (frame(DATA, 0, 1, bytes(16_385)), FRAME_SIZE_ERROR),
        (data(1, bytes(16_380)), FRAME_SIZE_ERROR),
        (frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
        (frame(DATA, 0, 3, b"x"), PROTOCOL_ERROR),
        (frame(DATA, 0, 2, b"x"), PROTOCOL_ERROR),
        (frame(DATA, PADDED, 1), PROTOCOL_ERROR),
        (frame(DATA, PADDED, 1, b"\x04abc"), PROTOCOL_ERROR),
        (headers(0), PROTOCOL_ERROR),
        (headers(9), PROTOCOL_ERROR),
        (frame(HEADERS, PADDED | END_HEADERS, 1, b"\x05a"), PROTOCOL_ERROR),
        (frame(HEADERS, PRIORITY_FIELDS | END_HEADERS, 1, b"abcd"), FRAME_SIZE_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
        (frame(HEADERS, END_HEADERS, 1, b"\x00\x7f"), COMPRESSION_ERROR),
        (frame(HEADERS, 0, 1, b"\x88") + data(1, b"x"), PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1, b"\x88") + frame(CONTINUATION, END_HEADERS, 3, b""), PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1, b"\x88") + frame(CONTINUATION, 0, 1, b""), ENHANCE_YOUR_CALM),
        (frame(HEADERS, 0, 1, bytes(16_384)) + frame(CONTINUATION, 0, 1, bytes(16_384)) * 2, ENHANCE_YOUR_CALM),
        (frame(CONTINUATION, END_HEADERS, 0, b"\x88"), PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 1, b"abc"), FRAME_SIZE_ERROR),
        (frame(RST_STREAM, 0, 5, WORD(0)), PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, b"12345"), FRAME_SIZE_ERROR),
        (frame(SETTINGS, ACK, 0, b"123456"), FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
        (settings(size=16_383), PROTOCOL_ERROR),
        (settings(size=1 << 24), PROTOCOL_ERROR),
        (settings(window=1 << 31), FLOW_CONTROL_ERROR),
        (frame(PUSH_PROMISE, END_HEADERS, 1, WORD(2)), PROTOCOL_ERROR),
        (frame(PING, 0, 0, b"1234567"), FRAME_SIZE_ERROR),
        (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 0, b"1234"), FRAME_SIZE_ERROR),
        (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, WORD(0)), FLOW_CONTROL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, WORD(2**31 - 1)), FLOW_CONTROL_ERROR),
        (frame(WINDOW_UPDATE, 0, 7, WORD(1)), PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, b"1"), FRAME_SIZE_ERROR),
    ],
)
def test_broken_connections(wire: bytes, code: int) -> None:
    call = Recorder()
    machine = connected(call)
    with pytest.raises(ProtocolError) as caught:
        machine.receive(wire)
    assert caught.value.code == code
    assert sent(machine)[-1] == (GOAWAY, 0, 0, frames.GOAWAY_FIELDS.pack(0, code))
    assert call.told == []  # for the owner to say


def test_impossible_windows_of_a_stream() -> None:
    for increment in (0, 2**31 - 1):
        call = Recorder(b"x" * 100_000)
        machine = connected(call)
        machine.receive(frame(WINDOW_UPDATE, 0, 1, WORD(increment)) * 2)
        assert call.code == "INTERNAL"
        assert sent(machine) == [(RST_STREAM, 0, 1, WORD(FLOW_CONTROL_ERROR))]
