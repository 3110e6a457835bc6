"""What differs between the engines on the wire: how a choice becomes a message, and how a step becomes deltas.

A step message holds the tokens of a whole batch. It is decoded once and handled in one pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from smg.engines.base import EngineError, TokenLogprobs
from smg.engines.zmq import tokenspeed, vllm
from smg.engines.zmq.calls import ABORTED_TEXT, Child, empty_logprobs
from smg.engines.zmq.request import INT32_MAX
from smg.engines.zmq.tensors import WireError, append_logprobs

if TYPE_CHECKING:
    from smg.engines.zmq.client import ZmqWorkerClient

_encode = msgspec.msgpack.Encoder().encode
_MAX_TOKENS, _MIN_TOKENS, _SEED = _encode("max_tokens"), _encode("min_tokens"), _encode("seed")
_decode_sampling = msgspec.msgpack.Decoder(tokenspeed.SamplingParams).decode


class Wire(Protocol):
    """The wire format of an ``engine`` for one client. ``utilities``: the engine takes UTILITY calls."""

    engine: str
    utilities: bool

    def add(self, child: Child, context: int) -> bytes:
        """The ADD payload of one choice; ``context`` is the engine's context length (0 = unknown)."""

    def abort(self, names: Sequence[str]) -> bytes:
        """An ABORT payload."""

    def on_message(self, frames: list[bytes]) -> None:
        """A message of the output socket."""


def wire_for(kind: str, client: ZmqWorkerClient) -> Wire:
    """The wire format of an engine kind. Raises ``ValueError`` for an unknown one."""
    if kind == "vllm-zmq":
        return VllmWire(client)
    if kind == "tokenspeed-zmq":
        return TokenspeedWire(client)
    raise ValueError(f"unknown engine kind '{kind}' over ZMQ")


class VllmWire:
    """vLLM's engine core."""

    engine = "vllm"
    utilities = True

    def __init__(self, client: ZmqWorkerClient) -> None:
        self._client = client

    def add(self, child: Child, context: int) -> bytes:
        call = child.call
        request = call.request
        maximum, minimum = request.limits(context)
        limit = _encode(INT32_MAX if maximum is None else maximum)  # the engine refuses a request without
        pieces = [b"", request.sampling[1:], _MIN_TOKENS, _encode(minimum), _MAX_TOKENS, limit]
        count = request.sampling[0] + 2
        seed = request.seed_of(child.index)
        if seed is not None:
            pieces += (_SEED, _encode(seed))
            count += 1
        pieces[0] = vllm.map_header(count)
        rank = call.rank.number if call.rank is not None else None
        return vllm.encode_add(child.name, bytes(request.prompt), pieces, self._client.number, rank)

    def abort(self, names: Sequence[str]) -> bytes:
        return vllm.encode_abort(names)

    def wake(self) -> bytes:
        """Start a wave on ranks that step together. Waves must grow across all clients of the group, which know
        nothing of each other but share a clock."""
        return vllm.encode_wave(time.monotonic_ns() // 1000)

    def on_message(self, frames: list[bytes]) -> None:
        client = self._client
        payload = frames[0]
        if payload == vllm.DEAD:
            client.died()
            return
        try:
            step = vllm.decode_outputs(payload, first=client.unheard > 0)
        except WireError as error:
            client.unreadable(vllm.salvage_ids(payload), error)
            return
        client.unreadable_in_a_row = 0
        find = client.children.get
        strays: list[str] = []
        for output in step.outputs:
            child = find(output.request_id)
            if child is None:
                strays.append(output.request_id)
                continue
            logprobs = None
            if not child.heard or output.new_logprobs is not None or output.new_prompt_logprobs is not None:
                try:
                    logprobs = self._details(child, output, frames)
                except WireError as error:
                    child.call.fail(EngineError("INTERNAL", str(error)))
                    continue
            if output.finish_reason is not None:
                self._finish(child, output, logprobs, step.finished_requests)
            elif output.new_token_ids:
                child.deliver(output.new_token_ids, logprobs)
        if step.stats is not None:
            stats = step.stats
            client.loaded(
                step.engine_index, stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage, len(strays)
            )
        self._rest(step, strays)

    def _details(self, child: Child, output: vllm.Output, frames: list[bytes]) -> TokenLogprobs | None:
        """What few outputs hold: the counts of the prompt, and logprobs."""
        if not child.heard:
            child.heard = True
            self._client.unheard -= 1
            stats = output.prefill_stats if isinstance(output, vllm.FirstOutput) else None
            if stats is not None:
                child.cached = int(stats.get("num_cached_tokens") or 0)
        if child.call.request.prompt_logprobs:
            if child.prompt_logprobs is None:  # the engine says nothing of the first token, which depends on nothing
                prompt = msgspec.msgpack.decode(child.call.request.prompt, type=list[int])
                child.prompt_logprobs = empty_logprobs(prompt[:1])
            if output.new_prompt_logprobs is not None:
                append_logprobs(child.prompt_logprobs, output.new_prompt_logprobs, frames)
        if output.new_logprobs is None:
            return None
        logprobs = empty_logprobs()
        append_logprobs(logprobs, output.new_logprobs, frames)
        return logprobs

    def _finish(
        self, child: Child, output: vllm.Output, logprobs: TokenLogprobs | None, finished: list[str] | None
    ) -> None:
        reason, matched = vllm.finish_reason(output)
        if reason == "abort" and finished is not None and output.request_id in finished:
            # Nobody here asked for it: the engine is being stopped.
            child.call.lost(child, EngineError("UNAVAILABLE", ABORTED_TEXT))
            return
        if reason == "error" and not output.new_token_ids and child.grammar_refused():
            return
        child.finish(output.new_token_ids, logprobs, reason, matched)

    def _rest(self, step: vllm.Envelope | vllm.FirstEnvelope, strays: list[str]) -> None:
        client = self._client
        if strays:
            client.stray(strays, step.engine_index)
        if step.utility is not None:
            try:
                client.answered(*vllm.utility_result(step.utility))
            except WireError as error:
                client.unreadable((), error)
        if step.start_wave is not None:
            client.wake()
        for name in step.finished_requests or ():
            child = client.children.get(name)
            if child is not None:
                child.call.lost(child, EngineError("UNAVAILABLE", "the engine closed the request without a result"))


class TokenspeedWire:
    """TokenSpeed."""

    engine = "tokenspeed"
    utilities = False

    def __init__(self, client: ZmqWorkerClient) -> None:
        self._client = client

    def add(self, child: Child, context: int) -> bytes:
        stored = child.call.request
        params = _decode_sampling(stored.sampling)
        params.max_new_tokens, params.min_new_tokens = stored.limits(context)
        params.seed = stored.seed_of(child.index)
        request = tokenspeed.Request(
            child.name, None, None, stored.prompt, params, stored.logprobs is not None, stream=stored.stream
        )
        return tokenspeed.encode_request(request)

    def abort(self, names: Sequence[str]) -> bytes:
        return tokenspeed.encode_abort(names)

    def on_message(self, frames: list[bytes]) -> None:
        client = self._client
        payload = frames[0]
        if payload == tokenspeed.DEAD:
            client.died()
            return
        try:
            step = tokenspeed.decode_outputs(payload)
        except WireError as error:
            client.unreadable(tokenspeed.salvage_ids(payload), error)
            return
        client.unreadable_in_a_row = 0
        strays: list[str] = []
        for row, name in enumerate(step.rids):
            child = client.children.get(name)
            if child is None:
                strays.append(name)
            else:
                self._deliver(child, step, row)
        if step.kv_total_pages:
            usage = step.kv_active_pages / step.kv_total_pages
            client.loaded(step.engine_index, step.num_running, step.num_waiting, usage, len(strays))
        if strays:
            client.stray(strays, step.engine_index)

    def _deliver(self, child: Child, step: tokenspeed.Outputs, row: int) -> None:
        token_ids: list[int] = step.output_ids[row]
        if not child.heard:
            child.heard = True
            self._client.unheard -= 1
            child.cached = step.cached_tokens[row]
        logprobs = None
        if child.call.request.logprobs is not None and step.logprobs[row]:
            logprobs = _sampled(step.logprob_ids[row], step.logprobs[row], child.call.request.logprobs)
        reason = step.finished_reasons[row]
        if reason:
            self._finish(child, token_ids, logprobs, reason)
        elif token_ids:
            child.deliver(token_ids, logprobs)

    def _finish(self, child: Child, token_ids: list[int], logprobs: TokenLogprobs | None, reason: str) -> None:
        if reason != "abort":
            child.finish(token_ids, logprobs, reason if reason in ("stop", "length", "error") else "stop", None)
        elif token_ids or not child.grammar_refused():
            # Nobody here asked for it: what this process ended is no longer known here.
            child.call.lost(child, EngineError("UNAVAILABLE", ABORTED_TEXT))


def _sampled(token_ids: list[int], values: list[float], alternatives: int) -> TokenLogprobs:
    """Logprobs of sampled tokens; the token itself is the only alternative there is."""
    tops: list[Any] = [
        ((token, value),) if alternatives else () for token, value in zip(token_ids, values, strict=False)
    ]
    return TokenLogprobs(token_ids, values, tops)
