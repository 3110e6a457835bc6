"""A headless vLLM engine core that costs next to nothing, to measure what a gateway costs per token over ZMQ.

``python tests/load/zmq_mock_engine.py ipc:///dir/name [--step-us 20000] [--max-model-len 40960] [--token 1234]``

All running requests get one token per step; a step takes ``--step-us`` (0: the next one follows when everything the
last one said has been written). Every answer is the same token until ``max_tokens``.
"""

from __future__ import annotations

import argparse
import struct
import time
from typing import Any

import msgspec
import zmq

from smg.engines.zmq.addresses import handshake_address, path_of

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
IDLE_MS = 1000
encode = msgspec.msgpack.encode
TAIL_RUNNING = b"\xc0" * 11 + b"\x00" + b"\xc0" * 4
TAIL_FINISHED = b"\xc0" * 3 + b"\x01" + b"\xc0" * 7 + b"\x00" + b"\xc0" * 4
STATS = encode({"num_running_reqs": 1, "num_waiting_reqs": 0, "step_counter": 0, "kv_cache_usage": 0.1})


class Head(msgspec.Struct, array_like=True):
    """The start of an ADD; element 11 is the client."""

    request_id: str
    prompt: msgspec.Raw
    features: Any
    sampling: dict[str, Any]
    e4: Any
    e5: Any
    e6: Any
    e7: Any
    e8: Any
    e9: Any
    e10: Any
    client: int


read_add = msgspec.msgpack.Decoder(Head).decode


class Engine:
    """Sockets and running requests: id -> [client, tokens left, encoded row head]."""

    def __init__(self, url: str, length: int, token: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = zmq.Poller()
        self.token = b"\x91" + encode(token)
        self.running: dict[str, list[Any]] = {}
        handshake = self._dealer(handshake_address(path_of(url)))
        handshake.send(encode({"status": "HELLO", "local": False, "headless": True}))
        addresses = msgspec.msgpack.decode(handshake.recv())["addresses"]
        self.outputs = [self.context.socket(zmq.PUSH) for _ in addresses["outputs"]]
        for socket, address in zip(self.outputs, addresses["outputs"], strict=True):
            socket.set(zmq.SNDHWM, 0)
            socket.connect(address)
        for address in addresses["inputs"]:
            socket = self._dealer(address)
            socket.send(encode({"max_model_len": length, "block_size": 16, "vllm_version": "mock"}))
            self.poller.register(socket, zmq.POLLIN)
        handshake.send(encode({"status": "READY", "local": False, "headless": True}))

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, b"\x00\x00")
        socket.set(zmq.RCVHWM, 0)
        socket.connect(address)
        return socket

    def receive(self, wait_ms: int) -> None:
        """Take everything that waits."""
        for socket, _ in self.poller.poll(wait_ms):
            while True:
                try:
                    kind, payload = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._handle(kind, payload)

    def _handle(self, kind: bytes, payload: bytes) -> None:
        if kind == ADD:
            add = read_add(payload)
            head = b"\xdc\x00\x12" + encode(add.request_id) + self.token
            self.running[add.request_id] = [add.client, add.sampling["max_tokens"], head]
        elif kind == ABORT:
            for name in msgspec.msgpack.decode(payload):
                self.running.pop(name, None)
        elif kind == UTILITY:
            client, call, *_ = msgspec.msgpack.decode(payload)
            self.outputs[client].send(encode([0, [], None, 0.0, [call, None, [None, False]], None, None, None, None]))

    def step(self) -> None:
        """One token for every request."""
        rows: list[list[bytes]] = [[] for _ in self.outputs]
        finished = []
        for name, state in self.running.items():
            state[1] -= 1
            rows[state[0]].append(state[2] + (TAIL_RUNNING if state[1] else TAIL_FINISHED))
            if not state[1]:
                finished.append(name)
        for name in finished:
            del self.running[name]
        now = b"\xcb" + struct.pack(">d", time.monotonic())
        for socket, batch in zip(self.outputs, rows, strict=True):
            if batch:
                head = b"\x99\x00\xdc" + len(batch).to_bytes(2, "big")
                socket.send(head + b"".join(batch) + STATS + now + b"\xc0" * 5, copy=False)

    def run(self, step_seconds: float) -> None:
        due = time.monotonic()
        while True:
            if not self.running:
                self.receive(IDLE_MS)
                due = time.monotonic()
                continue
            self.step()
            due = max(due + step_seconds, time.monotonic() - step_seconds)
            self.receive(max(0, round((due - time.monotonic()) * 1000)))
            while (left := due - time.monotonic()) > 0:
                self.receive(int(left * 1000) + 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--step-us", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=40960)
    parser.add_argument("--token", type=int, default=1234)
    args = parser.parse_args()
    Engine(args.url, args.max_model_len, args.token).run(args.step_us / 1e6)


if __name__ == "__main__":
    main()
