"""The handshake: an engine dials (HELLO), learns the data sockets (INIT), loads, registers there, and reports READY.

Payloads are msgpack maps. Unknown keys are skipped, missing ones have defaults. One process of the gateway owns the
handshake socket; holding it is also the claim to the worker's other socket names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from smg.engines.zmq.addresses import identity, rank_of
from smg.engines.zmq.tensors import UNREADABLE

log = logging.getLogger("smg.engines.zmq")

HELLO, READY = "HELLO", "READY"


class Hello(msgspec.Struct, gc=False):
    """HELLO and READY of an engine."""

    status: str = ""
    local: bool = False
    headless: bool = False
    parallel_config_hash: str | None = None


class Addresses(msgspec.Struct):
    """Data sockets. An engine registers on every input and answers a request on the output its client names."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class Init(msgspec.Struct):
    """The answer to HELLO."""

    addresses: Addresses
    parallel_config: dict[str, Any] = {}


class ReadyResponse(msgspec.Struct, omit_defaults=True):
    """What an engine says of itself when it registers. Only ``max_model_len`` is required."""

    max_model_len: int
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    prefix_granularity: int | None = None
    dtype: str | None = None
    vllm_version: str | None = None
    world_size: int | None = None
    data_parallel_size: int | None = None
    data_parallel_rank: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_size_tokens: int | None = None
    instance_id: str | None = None
    supports_lora: bool | None = None

    @property
    def lockstep(self) -> bool:
        """All ranks step together: a rank with work waits for the others."""
        return (self.data_parallel_size or 1) > 1

    @property
    def engine(self) -> str:
        """Name of the engine, as far as it can be told from its version and its fields; "" when it cannot."""
        name, dash, _ = (self.vllm_version or "").partition("-")
        if dash and name in ("tokenspeed", "sglang"):
            return name
        if self.prefix_granularity is not None and self.block_size is None:
            return "tokenspeed"
        return "vllm" if self.vllm_version else ""

    @property
    def tokens_per_block(self) -> int:
        """Block size of the KV cache, 0 when unknown."""
        return self.block_size or self.prefix_granularity or 0


_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_ready = msgspec.msgpack.Decoder(ReadyResponse).decode
encode_init = msgspec.msgpack.Encoder().encode


def decode_ready(payload: bytes, engine: str) -> ReadyResponse:
    """The registration of an engine that is to be ``engine``. Raises ``ValueError`` when it cannot be used: engines
    before vLLM 0.20 send an empty one, and what speaks another engine's protocol would die of the first request."""
    if not payload:
        raise ValueError("the engine registered without a word about itself (vLLM before 0.20 is not supported)")
    try:
        ready = _decode_ready(payload)
    except UNREADABLE as error:
        raise ValueError(f"the engine's registration cannot be read: {error}") from None
    if ready.max_model_len < 2:
        raise ValueError(f"the engine registered with a context of {ready.max_model_len} tokens")
    if ready.engine not in ("", engine):
        raise ValueError(f"the engine is {ready.engine}, this worker's backend is {engine} (--backend, runtime_type)")
    return ready


class HandshakeServer:
    """Answers the engines of one worker. ``init`` gives the INIT for a rank, None for a rank that is not expected;
    ``on_hello`` and ``on_ready`` are called with the rank."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        init: Callable[[int], Init | None],
        on_hello: Callable[[int], None],
        on_ready: Callable[[int], None],
    ) -> None:
        """Binds. Raises ``zmq.ZMQError`` when the address is taken."""
        self.address = address
        self._init = init
        self._on_hello = on_hello
        self._on_ready = on_ready
        self._socket = context.socket(zmq.ROUTER)
        for option, value in SOCKET_OPTIONS:
            self._socket.set(option, value)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close(0)
            raise
        self._loop = asyncio.get_running_loop()
        self._fd: int = self._socket.get(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._fd, self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)

    def _on_message(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            log.warning("handshake %s: a message of %d frames is ignored", self.address, len(frames))
            return
        rank = rank_of(frames[0])
        try:
            hello = _decode_hello(frames[1])
        except UNREADABLE as error:
            log.warning("handshake %s: a message of rank %d cannot be read: %s", self.address, rank, error)
            return
        if hello.status == HELLO:
            self.greet(rank)
        elif hello.status == READY:
            self._on_ready(rank)
        else:
            log.warning("handshake %s: rank %d says '%s'", self.address, rank, hello.status[:32])

    def greet(self, rank: int) -> None:
        """Send INIT to a rank that dialled."""
        init = self._init(rank)
        if init is None:
            log.error("handshake %s: rank %d is not expected (see --zmq-engine-count)", self.address, rank)
            return
        try:
            self._socket.send_multipart([identity(rank), encode_init(init)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("handshake %s: rank %d cannot be answered: %s", self.address, rank, error)
            return
        self._on_hello(rank)

    def close(self) -> None:
        """Give the address up."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(0)


SOCKET_OPTIONS = (
    (zmq.SNDHWM, 0),
    (zmq.RCVHWM, 0),
    (zmq.LINGER, 0),
    # A send to an engine that is gone fails, and an engine that comes back takes its identity over.
    (zmq.ROUTER_MANDATORY, 1),
    (zmq.ROUTER_HANDOVER, 1),
)
