"""A stream that reads several engine messages at once ends exactly at its stop string, tokens and usage included."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import zmq

from smg.detok.outlets import Outlets
from smg.detok.run import Run
from smg.engines.base import Delta
from smg.ipc import Inbox, Outbox, peer_address
from smg.messages import (
    Dispatch,
    GenerationPlan,
    ParserPlan,
    Peer,
    PromptPart,
    ResponsePlan,
    Route,
    StopPlan,
    StreamEnd,
    StreamStart,
    WorkerRef,
)
from smg.simengine.vocabulary import SHIPPED_MODEL
from smg.vocab.decode import DecodeTable
from smg.vocab.encoder import Encoder
from smg.vocab.load import load_model_dir

ENCODER = Encoder(load_model_dir(str(SHIPPED_MODEL)), fast=False)
TABLE = DecodeTable.build(ENCODER.tokenizer, ENCODER.special_ids)


class Engine:
    """Client and call in one: it never answers by itself."""

    aborted = False

    def generate(self, *_: Any, **__: Any) -> Engine:
        return self

    def abort(self) -> None:
        self.aborted = True


class Anything:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Frontend:
    """The frontend's end of the link: what the client gets until its stream ends."""

    def __init__(self, run_dir: Path) -> None:
        self.received: list[bytes] = []
        self.ended = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = peer_address(run_dir, "frontend", 0, 1)
        self._inbox = Inbox(self._context, address, {StreamStart: self._more, StreamEnd: self._end})
        self.outbox = Outbox(self._context, Peer("frontend", 0, 1, address))

    def _more(self, message: StreamStart | StreamEnd) -> None:
        self.received.append(message.body)

    def _end(self, message: StreamEnd) -> None:
        self._more(message)
        self.ended.set()

    def close(self) -> None:
        self.outbox.close()
        self._inbox.close()
        self._context.term()


class Host:
    """What a run needs of its process."""

    index = 0
    metrics = Anything()

    def __init__(self, frontend: Frontend) -> None:
        self.engine = Engine()
        self.out = Outlets(asyncio.get_running_loop(), {0: frontend.outbox})

    def client(self, worker: WorkerRef) -> Engine:
        return self.engine

    def to_router(self, message: Any) -> None: ...

    def finished(self, run: Run) -> None: ...


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_late_reader_shows_no_token_behind_the_stop_string(api: str, tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(late_reader(api, tmp_path), 30))


async def late_reader(api: str, run_dir: Path) -> None:
    part = PromptPart("e", 3, {"vllm": b""})
    response = ResponsePlan(api, "id", "id", "m", 0, True, include_usage=True, return_token_ids=True)
    plan = GenerationPlan(1, 0, "t", [part], StopPlan(strings=["STOP"]), ParserPlan(), response)
    frontend = Frontend(run_dir)
    host = Host(frontend)
    dispatch = Dispatch(1, 0, [WorkerRef("grpc://w", "vllm")], Route(1, 0, "m", [], b""))
    run = Run(host, dispatch, plan, TABLE)  # type: ignore[arg-type]
    run.start()
    answer = [*ENCODER.encode("Grüße "), *ENCODER.encode("STOP")]
    [sink] = run.sinks
    for count, token in enumerate([*answer, *ENCODER.encode(" and more")], 1):
        delta = Delta(0, [token])
        delta.completion_tokens = count
        sink.on_delta(delta)
    await frontend.ended.wait()
    frontend.close()

    events = [json.loads(line[6:]) for line in b"".join(frontend.received).splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids") or ()] == answer
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert events[-1]["usage"]["completion_tokens"] == len(answer)
    assert host.engine.aborted
