"""Requests for engines over ZMQ: what is refused and bounded, how a broken one continues; messages that are none."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smg.engines.base import BuildError, Constraint, EngineRequest, Sampling
from smg.engines.zmq import tokenspeed, vllm
from smg.engines.zmq.addresses import (
    check_paths,
    handshake_address,
    handshake_port,
    input_path,
    output_path,
    path_of,
    prepare_directory,
    remove_stale,
)
from smg.engines.zmq.calls import empty_logprobs
from smg.engines.zmq.codecs import TokenspeedZmqCodec, VllmZmqCodec
from smg.engines.zmq.handshake import decode_ready
from smg.engines.zmq.request import ZmqRequest, decode_stored
from smg.engines.zmq.tensors import WireError, append_logprobs, read_array

CODEC = VllmZmqCodec()


def request(ids: tuple[int, ...] = (1, 2, 3), **fields: Any) -> EngineRequest:
    sampling = Sampling(**fields.pop("sampling", {}))
    return EngineRequest("r", fields.pop("api", "chat"), "", ids, True, sampling, eos_ids=(9, 8), **fields)


def stored(codec: Any = CODEC, **fields: Any) -> ZmqRequest:
    return decode_stored(codec.encode(request(**fields)))


def params(request: ZmqRequest) -> dict[str, Any]:
    """The sampling map as far as it is encoded already."""
    value = msgspec.msgpack.decode(vllm.map_header(request.sampling[0]) + request.sampling[1:], strict=False)
    assert isinstance(value, dict)
    return value


FATAL: list[dict[str, Any]] = [
    {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
    {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": float("nan")}, {"top_k": -2}, {"min_p": -0.1}, {"min_p": 1.1},
    {"presence_penalty": 2.5}, {"frequency_penalty": -2.5}, {"repetition_penalty": 0.0},
    {"repetition_penalty": float("inf")}, {"max_tokens": 0}, {"min_tokens": -1}, {"min_tokens": 5, "max_tokens": 4},
    {"logit_bias": {-1: 1.0}}, {"logit_bias": {2**40: 1.0}}, {"logit_bias": {1: float("nan")}},
]  # fmt: skip


@pytest.mark.parametrize("codec", [VllmZmqCodec(), TokenspeedZmqCodec()], ids=["vllm", "tokenspeed"])
@pytest.mark.parametrize("sampling", FATAL, ids=str)
def test_values_an_engine_does_not_survive_are_refused(codec: Any, sampling: dict[str, Any]) -> None:
    with pytest.raises(BuildError):
        codec.encode(request(sampling=sampling))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BuildError):
        CODEC.encode(request(()))


def test_the_highest_id_counts_what_indexes_the_vocabulary() -> None:
    assert stored(ids=(5, 3)).top_id == 5
    assert stored(sampling={"logit_bias": {70: 1.0}}).top_id == 70
    assert stored(sampling={"stop_token_ids": [70]}).top_id == 3
    assert stored(sampling={"stop_token_ids": [70, -4], "min_tokens": 1}).top_id == 70


def test_limits() -> None:
    assert stored(sampling={"max_tokens": 50, "min_tokens": 4}).limits(0) == (50, 4)
    assert stored(sampling={"min_tokens": 40}).limits(20) == (17, 17)
    assert stored().limits(0) == (None, 0)


@pytest.mark.parametrize(("seed", "first"), [(5, 5), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (2**64 + 3, 3)])
def test_seeds_stay_in_range(seed: int, first: int) -> None:
    found = stored(sampling={"seed": seed, "n": 3})
    seeds = [found.seed_of(index) for index in range(3)]
    assert seeds[0] == first
    assert all(value is not None and 0 <= value < 2**63 for value in seeds)
    assert len(set(seeds)) == 3


def test_tokenspeed_takes_its_own_name_for_the_seed_first() -> None:
    both = {"seed": 5, "sampling_seed": 6}
    assert stored(TokenspeedZmqCodec(), sampling=both).seed == 6
    assert stored(TokenspeedZmqCodec(), sampling={"seed": 5}).seed == 5
    assert stored(sampling=both).seed == 5


def test_ends() -> None:
    found = params(stored(sampling={"stop_token_ids": [7]}))
    assert (found["_eos_token_id"], found["stop_token_ids"], found["_all_stop_token_ids"]) == (9, [7, 8], [7, 8, 9])
    found = params(stored(sampling={"stop_token_ids": [7], "ignore_eos": True}))
    assert "_eos_token_id" not in found
    assert (found["stop_token_ids"], found["_all_stop_token_ids"]) == ([7], [7, 9, 8])


@pytest.mark.parametrize(
    ("kind", "name"),
    [("json_schema", "json"), ("regex", "regex"), ("ebnf", "grammar"), ("structural_tag", "structural_tag")],
)
def test_constraints_name_the_backend(kind: str, name: str) -> None:
    found = stored(constraint=Constraint(kind, "x"))
    assert params(found)["structured_outputs"] == {name: "x", "_backend": "xgrammar"}
    assert found.constrained
    ours = msgspec.msgpack.decode(
        stored(TokenspeedZmqCodec(), constraint=Constraint(kind, "x")).sampling, type=tokenspeed.SamplingParams
    )
    assert getattr(ours, kind) == "x"


def test_what_tokenspeed_cannot_do_is_refused() -> None:
    codec = TokenspeedZmqCodec()
    for fields in ({"logprobs": 2}, {"prompt_logprobs": 1}, {"sampling": {"top_k": 128}}):
        with pytest.raises(BuildError):
            codec.encode(request(**fields))
    assert codec.encode(request(logprobs=1, sampling={"top_k": 127}))


def test_a_continuation_has_the_tokens_in_its_prompt_and_lower_limits() -> None:
    data = CODEC.encode(request(sampling={"max_tokens": 10, "min_tokens": 3, "seed": 4}))
    found = decode_stored(CODEC.extend(data, [50, 60]))
    assert msgspec.msgpack.decode(found.prompt) == [1, 2, 3, 50, 60]
    assert (found.prompt_tokens, found.top_id, found.max_tokens, found.min_tokens) == (5, 60, 8, 1)
    assert found.sampling == decode_stored(data).sampling
    unlimited = decode_stored(CODEC.extend(CODEC.encode(request()), [50]))
    assert unlimited.max_tokens is None


@pytest.mark.parametrize(
    "fields",
    [{"sampling": {"n": 2}}, {"constraint": Constraint("regex", "a")}, {"sampling": {"max_tokens": 2}}],
    ids=["choices", "grammar", "no token left"],
)
def test_continuations_that_cannot_be_right_are_refused(fields: dict[str, Any]) -> None:
    data = CODEC.encode(request(**fields))
    with pytest.raises(BuildError):
        CODEC.extend(data, [4, 5])


# ---- addresses


def test_addresses() -> None:
    assert [handshake_port(path) for path in ("/tmp/smg-zmq/engine-0", "/run/gw/e0")] == [22670, 25542]
    assert handshake_address("/run/gw/engine-1") == "tcp://127.0.0.1:26499"
    assert (input_path("/a", 0, 0), output_path("/a", 0)) == ("/a-in.sock", "/a-out.sock")
    names = [input_path("/a", client, rank) for client in range(20) for rank in range(20)]
    names += [output_path("/a", client) for client in range(20)]
    assert len(set(names)) == len(names)
    for url in ("ipc://", "ipc://relative", "grpc://x", "ipc:///dir/"):
        with pytest.raises(ValueError, match="ipc://<path>"):
            path_of(url)
    with pytest.raises(ValueError, match="tcp://"):
        handshake_address("/a", "ipc:///a")
    with pytest.raises(ValueError, match="107 bytes"):
        check_paths("/" + "x" * 98, 1, 1)
    check_paths("/" + "x" * 90, 1, 1)


def test_only_sockets_are_removed(tmp_path: Path) -> None:
    remove_stale(str(tmp_path / "nothing"))
    (tmp_path / "file").write_text("keep")
    with pytest.raises(ValueError, match="not a socket"):
        remove_stale(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "keep"


def test_the_directory_is_private(tmp_path: Path) -> None:
    prepare_directory(str(tmp_path / "new" / "e"))
    assert os.stat(tmp_path / "new").st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(ValueError, match="not a directory"):
        prepare_directory(str(tmp_path / "link" / "e"))


# ---- garbage


@pytest.mark.parametrize(
    "value",
    [None, [], ["<i4", [2], b"1234"], ["<x4", [1], b"1234"], ["<i4", [1], 7], [3, [1], b"1234"], ["<i4", [1], b"12"]],
    ids=str,
)
def test_arrays_that_are_none(value: Any) -> None:
    with pytest.raises(WireError):
        read_array(value, [b"payload"])


def test_big_endian_arrays() -> None:
    assert list(read_array([">i4", [2], bytes([0, 0, 0, 1, 0, 0, 1, 0])], [])[1]) == [1, 256]


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=25,
)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | msgpack_values.map(msgspec.msgpack.encode))
def test_no_message_of_an_engine_raises_anything_but_a_wire_error(payload: bytes) -> None:
    for first in (True, False):
        with contextlib.suppress(WireError):
            step = vllm.decode_outputs(payload, first=first)
            for output in step.outputs:
                if output.new_logprobs is not None:
                    append_logprobs(empty_logprobs(), output.new_logprobs, [payload])
    with contextlib.suppress(WireError):
        tokenspeed.decode_outputs(payload)
    assert isinstance(vllm.salvage_ids(payload), list)
    assert isinstance(tokenspeed.salvage_ids(payload), list)
    with contextlib.suppress(ValueError):
        decode_ready(payload, "vllm")
