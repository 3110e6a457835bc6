"""The client of a ZMQ worker against a stand-in engine made of bare sockets: what engines may send, in any shape."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from sim_worker import Collector

from smg.engines.base import Constraint, EngineRequest, Sampling
from smg.engines.zmq.addresses import handshake_address, identity, input_path, output_path
from smg.engines.zmq.client import ZmqWorkerClient
from smg.engines.zmq.codecs import TokenspeedZmqCodec, VllmZmqCodec
from smg.engines.zmq.handshake import Addresses, HandshakeServer, Init
from smg.messages import EngineAttach, EngineCall, EngineLink, RingMessage

LIMIT = 20.0
ADD, ABORT, START_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT))


class Host:
    """What the client needs of a process; ``sent`` is what the router would get."""

    def __init__(self) -> None:
        self.index = 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sent: list[RingMessage] = []

    def to_router(self, message: RingMessage) -> None:
        self.sent.append(message)

    def links(self) -> list[tuple[int, bool]]:
        return [(m.rank, m.up) for m in self.sent if isinstance(m, EngineLink)]


class StandIn:
    """The engine's end: one rank's input and output."""

    def __init__(self, path: str, rank: int = 0) -> None:
        self.context = zmq.asyncio.Context()
        self.input = self.context.socket(zmq.DEALER)
        self.input.set(zmq.IDENTITY, identity(rank))
        self.input.connect(f"ipc://{input_path(path, 0, rank)}")
        self.output = self.context.socket(zmq.PUSH)
        self.output.connect(f"ipc://{output_path(path, 0)}")

    async def register(self, **fields: Any) -> None:
        await self.input.send(encode({"max_model_len": 2048} | fields))

    async def request(self) -> tuple[bytes, Any]:
        kind, payload = await self.input.recv_multipart()
        return kind, decode(payload)

    async def added(self) -> str:
        kind, payload = await self.request()
        assert kind == ADD
        return str(
            payload[0] if isinstance(payload[0], str) and payload[0] != "TokenizedGenerateReqInput" else payload[1]
        )

    async def say(
        self,
        *rows: list[Any],
        finished: list[str] | None = None,
        frames: tuple[bytes, ...] = (),
        running: int | None = None,
    ) -> None:
        stats = None if running is None else {"num_running_reqs": running}
        message = encode([0, list(rows), stats, 1.0, None, finished, None, None, None])
        await self.output.send_multipart([message, *frames])

    def close(self) -> None:
        self.context.destroy(0)


@asynccontextmanager
async def connected(
    kind: str = "vllm-zmq", ranks: int = 1, **facts: Any
) -> AsyncIterator[tuple[ZmqWorkerClient, list[StandIn], Host]]:
    directory = Path(tempfile.mkdtemp(prefix="smgz-"))
    path, host = f"{directory}/e", Host()
    client = ZmqWorkerClient(f"ipc://{path}", kind, host)
    client.attach(EngineAttach(client.url, kind, ranks, 0, **({"context_length": 2048, "vocab_size": 1000} | facts)))
    engines = [StandIn(path, rank) for rank in range(ranks)]
    try:
        for engine in engines:
            await engine.register()
        await until(lambda: all(rank.up for rank in client.ranks))
        yield client, engines, host
    finally:
        for engine in engines:
            engine.close()
        await client.close()
        host.context.term()
        assert list(directory.iterdir()) == []
        shutil.rmtree(directory)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def start(
    client: ZmqWorkerClient, name: str = "r", *, stream: bool = True, constrained: bool = False, **sampling: Any
) -> Collector:
    sink = Collector()
    codec = VllmZmqCodec() if client.kind == "vllm-zmq" else TokenspeedZmqCodec()
    fields = {"max_tokens": 50} | sampling
    request = EngineRequest(name, "chat", "", [1, 2, 3], stream, Sampling(**fields), eos_ids=(9, 8))
    if constrained:
        request.constraint = Constraint("regex", "a")
    sink.call = client.generate(name, codec.encode(request), sink, streaming=stream)  # type: ignore[attr-defined]
    return sink


def test_arrays_of_any_width_are_read() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], _):
            sink = start(client)
            name = await engine.added()
            await engine.output.send(encode([0, [[name, [5]]]]))
            await engine.output.send(
                encode([0, [[name, [6, 7], None, None, None, None, None, *[None] * 11, 7, "new"]]])
            )
            await engine.output.send(encode([0, []]))
            await engine.say([name, [9], None, None, None, 0, 9])
            await sink.closed.wait()
            assert (sink.ids(), sink.errors, sink.ends) == ([5, 6, 7, 9], [], 1)
            last = sink.deltas[-1]
            assert (last.finish_reason, last.matched_stop, last.completion_tokens) == ("stop", None, 4)

    run(test)


def test_counts_of_the_prompt_come_from_either_layout() -> None:
    async def test() -> None:
        stats = {"num_prompt_tokens": 3, "num_cached_tokens": 2}
        async with connected() as (client, [engine], _):
            for width, at in ((18, 11), (13, 10)):
                sink = start(client)
                row: list[Any] = [await engine.added(), [4], *[None] * (width - 2)]
                row[at], row[5] = stats, 1
                await engine.say(row)
                await sink.closed.wait()
                assert (sink.deltas[0].prompt_tokens, sink.deltas[0].cached_tokens) == (3, 2)

    run(test)


def test_large_arrays_come_as_frames_of_their_own() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], _):
            sink = start(client)
            name = await engine.added()
            ids = (5).to_bytes(4, "little") + (6).to_bytes(4, "little")
            values = bytes.fromhex("000000bf" + "000080bf")
            logprobs = [["<i4", [1, 2], 1], ["<f4", [1, 2], 2], ["<i8", [1], 1], None]
            await engine.say([name, [5], logprobs, None, None, 1], frames=(ids, values))
            await sink.closed.wait()
            found = sink.deltas[0].logprobs
            assert found is not None
            assert (found.token_ids, found.logprobs, found.top) == ([5], [-0.5], [[(5, -0.5)]])

    run(test)


@pytest.mark.parametrize("extension", [1, 2])
def test_pickles_are_never_opened(extension: int) -> None:
    async def test() -> None:
        async with connected() as (client, [engine], _):
            sink, other = start(client), start(client, "other")
            name, good = await engine.added(), await engine.added()
            await engine.say([name, [5], [["<i4", [1], msgspec.msgpack.Ext(extension, b"cos\nsystem\n")]]])
            await sink.closed.wait()
            assert [error.code for error in sink.errors] == ["INTERNAL"]
            await engine.say([good, [5], None, None, None, 1])
            await other.closed.wait()
            assert other.ends == 1

    run(test)


def test_one_unreadable_message_fails_its_requests_and_three_the_worker() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], host):
            first, second = start(client, "a"), start(client, "b")
            name = await engine.added()
            other = await engine.added()
            await engine.say([name, "no list"])
            await first.closed.wait()
            assert first.errors[0].code == "INTERNAL"
            await engine.say([other, [5]])
            await second.first.wait()
            for _ in range(3):
                await engine.output.send(b"\xc1 garbage")
            await second.closed.wait()
            assert second.errors[0].code == "UNAVAILABLE"
            assert host.links()[-1] == (0, False)

    run(test)


def test_late_tokens_of_an_aborted_request_are_dropped_and_strangers_are_aborted_once() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], _):
            sink = start(client)
            name = await engine.added()
            await engine.say([name, [5]])
            await sink.first.wait()
            sink.call.abort()  # type: ignore[attr-defined]
            assert await engine.request() == (ABORT, [name])
            await engine.say([name, [6]], ["stranger", [1]], running=2)
            assert await engine.request() == (ABORT, ["stranger"])
            assert client.ranks[0].running == 0, "this may be the engine's last step"
            await engine.say(["stranger", [2]], [name, [7]])
            other = start(client, "other")
            await engine.say([await engine.added(), [1], None, None, None, 1])
            await other.closed.wait()
            assert (sink.ids(), sink.ends, sink.errors) == ([5], 0, [])

    run(test)


def test_a_constrained_request_that_fails_before_its_first_token_has_a_bad_grammar() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], _):
            for tokens, constrained, outcome in (
                ([], True, ["INVALID_ARGUMENT"]), ([7], True, []), ([], False, []),
            ):  # fmt: skip
                sink = start(client, constrained=constrained)
                await engine.say([await engine.added(), tokens, None, None, None, 3])
                await sink.closed.wait()
                assert [error.code for error in sink.errors] == outcome

    run(test)


def test_a_request_that_is_listed_as_finished_without_a_result_has_failed() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], _):
            sink, aborted = start(client), start(client)
            name, other = await engine.added(), await engine.added()
            await engine.say(finished=[name])
            await sink.closed.wait()
            await engine.say([other, [], None, None, None, 2], finished=[other])
            await aborted.closed.wait()
            assert [error.code for error in (*sink.errors, *aborted.errors)] == ["UNAVAILABLE"] * 2

    run(test)


def test_names_on_the_wire_differ_whatever_clients_choose() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], _):
            ids = ["same", "same", "x" * 5000, "\ud800", "e\u0301\n"]
            for request_id in ids:
                start(client, request_id)
            names = [await engine.added() for _ in ids]
            assert len(set(names)) == len(names)
            assert all(name.isascii() and len(name) < 500 for name in names)

    run(test)


def test_choices_are_requests_of_their_own() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], _):
            sink = start(client, n=3, seed=7)
            adds = [(await engine.request())[1] for _ in range(3)]
            assert [add[3]["seed"] for add in adds] == [7, 8, 9]
            assert [add[0][-2:] for add in adds] == ["-0", "-1", "-2"]
            assert all(add[3]["max_tokens"] == 50 for add in adds)
            sink.call.abort_choice(1)  # type: ignore[attr-defined]
            assert await engine.request() == (ABORT, [adds[1][0]])
            await engine.say(*([add[0], [4], None, None, None, 1] for add in adds))
            await sink.closed.wait()
            assert sorted(delta.index for delta in sink.deltas) == [0, 2]

    run(test)


def test_tokens_nobody_waits_for_are_kept_until_the_end() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], _):
            sink = start(client, stream=False)
            name = await engine.added()
            for token in range(5):
                await engine.say([name, [token]])
            await engine.say([name, [9], None, None, None, 0])
            await sink.closed.wait()
            assert len(sink.deltas) == 1
            assert (sink.ids(), sink.deltas[0].completion_tokens) == ([0, 1, 2, 3, 4, 9], 6)

    run(test)


def test_limits_fit_the_context() -> None:
    async def test() -> None:
        async with connected(context_length=20) as (client, [engine], _):
            start(client, max_tokens=None)
            start(client, max_tokens=500, min_tokens=300)
            limits = [(await engine.request())[1][3] for _ in range(2)]
            assert [(params["max_tokens"], params["min_tokens"]) for params in limits] == [(17, 0), (17, 17)]
            too_long = EngineRequest("r", "chat", "", [1] * 20, True, Sampling())
            unknown = EngineRequest("r", "chat", "", [1000], True, Sampling())
            for request in (too_long, unknown):
                sink = Collector()
                client.generate("r", VllmZmqCodec().encode(request), sink, streaming=True)
                assert [error.code for error in sink.errors] == ["INVALID_ARGUMENT"]

    run(test)


def test_an_engine_that_takes_the_place_of_a_silent_one_ends_its_requests() -> None:
    async def test() -> None:
        async with connected() as (client, engines, host):
            sink = start(client)
            await engines[0].added()
            successor = StandIn(client.url.removeprefix("ipc://"))
            await successor.register()
            await sink.closed.wait()
            assert sink.errors[0].code == "UNAVAILABLE"
            engines[0].close()  # the old connection ends only now
            engines[0] = successor
            await until(lambda: client.ranks[0].up)
            later = start(client, "later")
            await successor.say([await successor.added(), [1], None, None, None, 1])
            await later.closed.wait()
            assert later.ends == 1
            assert host.links()[-1] == (0, True)

    run(test)


def test_the_end_of_a_connection_ends_requests_after_what_came_before() -> None:
    async def test() -> None:
        async with connected(ranks=2) as (client, engines, host):
            sinks = [start(client, f"r{number}") for number in range(2)]
            by_rank = {sink.call.rank.number: sink for sink in sinks}  # type: ignore[attr-defined]
            name = await engines[0].added()
            await engines[0].say([name, [5]])
            await by_rank[0].first.wait()
            engines[0].input.close(0)
            await by_rank[0].closed.wait()
            assert by_rank[0].errors[0].code == "UNAVAILABLE"
            assert not by_rank[1].closed.is_set()
            assert host.links()[-1] == (0, False)
            assert start(client, "next").call.rank.number == 1  # type: ignore[attr-defined]

    run(test)


def test_ranks_that_step_together_get_growing_waves() -> None:
    async def test() -> None:
        async with connected(ranks=2, lockstep=True) as (client, engines, _):
            waves: list[int] = []
            for number in range(3):
                start(client, str(number))
                rank = next(iter(client.children.values())).call.rank
                assert rank is not None
                for at, engine in enumerate(engines):
                    kind, payload = await engine.request()
                    if kind == ADD:
                        kind, payload = await engine.request()
                    assert kind == START_WAVE
                    if at == 0:
                        waves.append(payload[0])
            assert waves == sorted(set(waves))
            engines[1].input.close(0)
            await until(lambda: not client.ranks[1].up)
            sink = start(client, "none")
            assert [error.code for error in sink.errors] == ["UNAVAILABLE"]

    run(test)


def test_calls_are_answered_or_refused() -> None:
    async def test() -> None:
        async with connected() as (client, [engine], host):
            client.call(EngineCall(client.url, client.kind, 0, 77, "add_lora", encode([1])))
            kind, (number, call, method, arguments) = await engine.request()
            assert (kind, number, method, arguments) == (UTILITY, 0, "add_lora", [1])
            await engine.output.send(encode([0, [], None, 0.0, [call, "not enabled", None]]))
            await until(lambda: bool(host.sent) and getattr(host.sent[-1], "call_id", 0) == 77)
            assert host.sent[-1].failure == "not enabled"  # type: ignore[union-attr]
            client.call(EngineCall(client.url, client.kind, 5, 78, "is_sleeping"))
            assert host.sent[-1].failure == "the engine is not connected"  # type: ignore[union-attr]

    run(test)


def test_columns_of_tokenspeed() -> None:
    async def test() -> None:
        async with connected("tokenspeed-zmq") as (client, [engine], _):
            sink, odd = start(client), start(client, "odd")
            name, other = await engine.added(), await engine.added()

            async def say(names: list[str], ids: list[list[int]], reasons: list[str], totals: list[int]) -> None:
                empty: list[list[int]] = [[] for _ in names]
                rest = [[3] * len(names), totals, [1] * len(names), empty, empty]
                await engine.output.send(encode(["BatchTokenIDOutSlim", names, ids, reasons, *rest]))

            await say([name], [[5]], [""], [1])
            await say([name, "stranger"], [[6, 7], [1]], ["later", "stop"], [3, 1])
            await sink.closed.wait()
            assert (sink.ids(), sink.deltas[-1].finish_reason) == ([5, 6, 7], "stop")
            assert sink.deltas[0].cached_tokens == 1
            assert await engine.request() == (ABORT, ["stranger"])
            await say([other], [], [""], [1])  # columns of different length
            await odd.closed.wait()
            assert odd.errors[0].code == "INTERNAL"

    run(test)


# ---- handshake


def test_the_handshake_answers_whoever_belongs_to_it() -> None:
    async def test() -> None:
        directory = Path(tempfile.mkdtemp(prefix="smgz-"))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = handshake_address(f"{directory}/e")
        news: list[tuple[str, int]] = []
        init = Init(Addresses(["ipc:///in"], ["ipc:///out"]))
        server = HandshakeServer(
            context,
            address,
            lambda rank: init if rank < 2 else None,
            lambda rank: news.append(("hello", rank)),
            lambda rank: news.append(("ready", rank)),
        )
        with pytest.raises(zmq.ZMQError):
            HandshakeServer(context, address, lambda rank: None, lambda rank: None, lambda rank: None)
        engines = zmq.asyncio.Context()

        def dial(name: bytes) -> zmq.asyncio.Socket:
            socket = engines.socket(zmq.DEALER)
            socket.set(zmq.IDENTITY, name)
            socket.connect(address)
            return socket

        hello = encode({"status": "HELLO", "local": True, "headless": False, "later": 1})
        stranger, second = dial(b"\x07\x00"), dial(identity(1))
        await stranger.send(hello)
        await second.send(b"\xc1")
        await second.send_multipart([b"too", b"many"])
        await second.send(encode({"status": "WHAT"}))
        for _ in range(2):  # a second HELLO is a new engine
            await second.send(hello)
            assert decode(await second.recv())["addresses"]["inputs"] == ["ipc:///in"]
        await second.send(encode({"status": "READY"}))
        while ("ready", 1) not in news:
            await asyncio.sleep(0.002)
        assert news == [("hello", 1), ("hello", 1), ("ready", 1)]
        server.close()
        engines.destroy(0)
        context.term()
        shutil.rmtree(directory)

    run(test)
