"""Real frames of engine cores, read and written by the ZMQ wire formats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from smg.engines.base import Constraint, EngineRequest, Sampling
from smg.engines.zmq import tokenspeed, vllm
from smg.engines.zmq.addresses import identity, rank_of
from smg.engines.zmq.calls import empty_logprobs
from smg.engines.zmq.codecs import TokenspeedZmqCodec, VllmZmqCodec
from smg.engines.zmq.handshake import Hello, Init, decode_ready, encode_init
from smg.engines.zmq.request import decode_stored
from smg.engines.zmq.tensors import append_logprobs, read_logprobs

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "zmq_frames.json").read_text())["cases"]


def frames_of(case: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in case["frames_hex"]]


def select(start: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["id"].startswith(start)]


def shown(value: Any) -> Any:
    """A decoded value the way the cases write it."""
    if isinstance(value, msgspec.msgpack.Ext):
        return {"$ext": value.code, "hex": bytes(value.data).hex()}
    if isinstance(value, bytes):
        return {"$bin": value.hex()}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return {"$map": [[shown(key), shown(entry)] for key, entry in value.items()]}
        return {key: shown(entry) for key, entry in value.items()}
    return [shown(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", select(""))
def test_every_payload_is_read_and_written_back(case: dict[str, Any]) -> None:
    if case.get("payload_frame") is None:
        return
    payload = frames_of(case)[case["payload_frame"]]
    value = msgspec.msgpack.decode(payload)
    assert shown(value) == case["decoded"]
    written = msgspec.msgpack.encode(value)
    assert shown(msgspec.msgpack.decode(written)) == case["decoded"]
    narrow = case["id"].startswith("add_") and len(value) == 21  # recorded from a writer of 32-bit floats
    assert written == payload or narrow


# ---- handshake


@pytest.mark.parametrize("case", select("hs_"))
def test_handshake(case: dict[str, Any]) -> None:
    name, payload = frames_of(case)
    assert identity(rank_of(name)) == name
    if "init" in case["id"]:
        init = msgspec.msgpack.decode(payload, type=Init)
        assert init.addresses.inputs == case["decoded"]["addresses"]["inputs"]
        assert encode_init(init) == payload
    elif "register" in case["id"]:
        check_registration(case, payload)
    else:
        hello = msgspec.msgpack.decode(payload, type=Hello)
        assert (hello.status, hello.headless) == (case["decoded"]["status"], case["decoded"]["headless"])


def check_registration(case: dict[str, Any], payload: bytes) -> None:
    if not payload:
        with pytest.raises(ValueError, match="not supported"):
            decode_ready(payload, case["engine"])
        return
    ready = decode_ready(payload, case["engine"])
    for name, value in case["decoded"].items():
        if hasattr(ready, name):
            assert getattr(ready, name) == value
    expect = case.get("expect", {})
    for name in expect.keys() & {"max_model_len", "data_parallel_size", "lockstep", "vllm_version"}:
        assert getattr(ready, name) == expect[name]


def test_registration_of_tokenspeed() -> None:
    [case] = [case for case in CASES if case["id"] == "ts_register"]
    ready = decode_ready(frames_of(case)[1], "tokenspeed")
    assert (ready.tokens_per_block, ready.max_num_batched_tokens, ready.lockstep) == (64, -1, False)


@pytest.mark.parametrize(("name", "other"), [("ts_register", "vllm"), ("hs_register", "tokenspeed")])
def test_registration_of_another_engine_is_refused(name: str, other: str) -> None:
    case = next(case for case in CASES if case["id"].startswith(name) and frames_of(case)[1])
    with pytest.raises(ValueError, match=f"the engine is {case['engine']}, this worker's backend is {other}"):
        decode_ready(frames_of(case)[1], other)


# ---- outputs of vLLM


OUTPUTS = [case for case in select("out_") if case.values[0].get("payload_frame") is not None]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_of_vllm(case: dict[str, Any], first: bool) -> None:
    frames, expect = frames_of(case), case["expect"]
    step = vllm.decode_outputs(frames[0], first=first)
    assert step.engine_index == expect["engine_index"]
    load = step.stats and {
        "running": step.stats.num_running_reqs,
        "waiting": step.stats.num_waiting_reqs,
        "kv_cache_usage": step.stats.kv_cache_usage,
    }
    assert load == expect["load"]
    assert step.finished_requests == expect["finished_requests"]
    assert (step.wave_complete, step.start_wave) == (expect["wave_complete"], expect["start_wave"])
    if expect["utility"] is None:
        assert step.utility is None
    else:
        assert step.utility is not None
        assert vllm.utility_result(step.utility) == tuple(expect["utility"].values())
    for output, wanted in zip(step.outputs, expect["outputs"], strict=True):
        check_output(output, wanted, frames)
    assert vllm.salvage_ids(frames[0]) == [wanted["request_id"] for wanted in expect["outputs"]]


def check_output(output: vllm.Output, wanted: dict[str, Any], frames: list[bytes]) -> None:
    got = (output.request_id, output.new_token_ids, output.finish_reason, output.stop_reason)
    assert got == (wanted["request_id"], wanted["new_token_ids"], wanted["finish_reason"], wanted["stop_reason"])
    for name, value in (("logprobs", output.new_logprobs), ("prompt_logprobs", output.new_prompt_logprobs)):
        if wanted.get(name) is None:
            assert value is None
            continue
        rows, columns, ids, logprobs = read_logprobs(value, frames)
        flat = [(entry["token_id"], entry["logprob"]) for row in wanted[name] for entry in row]
        assert (rows, columns) == (len(wanted[name]), len(wanted[name][0]))
        assert list(zip(ids, logprobs, strict=True)) == flat
    if isinstance(output, vllm.FirstOutput) and "prompt_tokens" in wanted:
        stats = output.prefill_stats
        assert stats is not None
        counts = stats["num_prompt_tokens"], stats["num_cached_tokens"]
        assert counts == (wanted["prompt_tokens"], wanted["cached_tokens"])


def test_alternatives_start_with_the_sampled_token_and_name_it_once() -> None:
    [case] = [case for case in CASES if case["id"] == "out_logprobs2"]
    frames = frames_of(case)
    logprobs = empty_logprobs()
    append_logprobs(logprobs, vllm.decode_outputs(frames[0], first=True).outputs[0].new_logprobs, frames)
    assert logprobs.token_ids == [503]
    assert [token for token, _ in logprobs.top[0]] == [503, 47351]


@pytest.mark.parametrize("number", range(6))
def test_finish_reasons(number: int) -> None:
    output = vllm.Output("r", [], finish_reason=number, stop_reason="repetition_detected" if number == 4 else None)
    words = ["stop", "length", "abort", "error", "stop", "stop"]
    assert vllm.finish_reason(output) == (words[number], "repetition_detected" if number == 4 else None)


# ---- outputs of TokenSpeed


@pytest.mark.parametrize("case", select("ts_out"))
def test_outputs_of_tokenspeed(case: dict[str, Any]) -> None:
    step, expect = tokenspeed.decode_outputs(frames_of(case)[0]), case["expect"]
    assert step.engine_index == expect["engine_index"]
    load = step.kv_total_pages and {
        "running": step.num_running,
        "waiting": step.num_waiting,
        "kv_cache_usage": step.kv_active_pages / step.kv_total_pages,
    }
    assert (load or None) == expect["load"]
    for row, wanted in enumerate(expect["outputs"]):
        got = {
            "request_id": step.rids[row], "new_token_ids": step.output_ids[row],
            "finish": step.finished_reasons[row] or None, "prompt_tokens": step.prompt_tokens[row],
            "completion_tokens": step.completion_tokens[row], "cached_tokens": step.cached_tokens[row],
            "logprobs": step.logprobs[row],
        }  # fmt: skip
        assert got == wanted


# ---- requests


def request(**fields: Any) -> EngineRequest:
    sampling = Sampling(**fields.pop("sampling", {}))
    prompt = fields.pop("token_ids")
    eos = (151645, 151643)
    return EngineRequest("r", "chat", "", prompt, fields.pop("stream", False), sampling, eos_ids=eos, **fields)


def as_text(grammar: str | dict[str, Any]) -> str:
    """A grammar as the gateway carries it. The recordings hold schemas as objects; vLLM takes text as well."""
    return grammar if isinstance(grammar, str) else msgspec.json.encode(grammar).decode()


def neutral(case: dict[str, Any], params: dict[str, Any]) -> EngineRequest:
    """The engine-neutral form of a recorded request."""
    names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    sampling = {name: params[name] for name in names} | {"max_tokens": params["max_tokens"], "seed": params.get("seed")}
    sampling["ignore_eos"] = "_eos_token_id" not in params
    sampling["stop_token_ids"] = [token for token in params["stop_token_ids"] if token not in (151643, 151645)]
    constraint = None
    if "structured_outputs" in params:
        kinds = {"json": "json_schema", "grammar": "ebnf"}
        [name] = [name for name in params["structured_outputs"] if name != "_backend"]
        constraint = Constraint(kinds.get(name, name), as_text(params["structured_outputs"][name]))
    return request(
        token_ids=case["decoded"][1], sampling=sampling, constraint=constraint, logprobs=params.get("logprobs")
    )


RECORDED = [case for case in select("add_") if len(case.values[0]["decoded"]) == 21]


@pytest.mark.parametrize("case", [case for case in RECORDED if case.values[0]["decoded"][1]])
def test_requests_to_vllm_say_what_recorded_ones_say(case: dict[str, Any]) -> None:
    params = case["decoded"][3]
    stored = decode_stored(VllmZmqCodec().encode(neutral(case, params)))
    seed = stored.seed
    pieces = [vllm.map_header(stored.sampling[0] + 2 + (seed is not None)), stored.sampling[1:]]
    pieces.append(vllm.encode_pairs([("min_tokens", stored.min_tokens), ("max_tokens", stored.max_tokens)]))
    pieces.append(vllm.encode_pairs([("seed", seed)] if seed is not None else []))
    add = msgspec.msgpack.decode(vllm.encode_add("r", bytes(stored.prompt), pieces, 2, 1))
    assert (len(add), add[0], add[1], add[8], add[11]) == (12, "r", case["decoded"][1], 1, 2)
    assert [add[at] for at in (2, 4, 6, 7, 9, 10)] == [None] * 6
    assert isinstance(add[5], float)
    ours = add[3]
    structured = ours.pop("structured_outputs", None)
    if structured is not None:
        assert structured.pop("_backend") == "xgrammar"
        recorded = {name: as_text(value) for name, value in params["structured_outputs"].items() if name != "_backend"}
        assert structured == recorded
    # An end-of-sequence id that is sent as such need not be repeated as a stop token.
    ends = {*ours.pop("stop_token_ids"), *([ours["_eos_token_id"]] if "_eos_token_id" in ours else [])}
    assert ends == set(params["stop_token_ids"])
    assert set(ours.pop("_all_stop_token_ids")) == set(params["_all_stop_token_ids"])
    assert ours == {
        name: value
        for name, value in params.items()
        if name not in ("stop_token_ids", "_all_stop_token_ids", "structured_outputs")
    }


@pytest.mark.parametrize("case", select("ts_add"))
def test_requests_to_tokenspeed_are_read_and_written_back(case: dict[str, Any]) -> None:
    payload = frames_of(case)[2]
    typed = msgspec.msgpack.decode(payload, type=tokenspeed.Request)
    assert tokenspeed.encode_request(typed) == payload
    params = typed.sampling_params
    greedy = (params.temperature, params.top_k) == (1.0, 1)
    names = ("top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos")
    sampling: dict[str, Any] = {name: getattr(params, name) for name in names}
    sampling |= {"temperature": 0.0 if greedy else params.temperature, "top_k": 20 if greedy else params.top_k}
    sampling |= {"max_tokens": params.max_new_tokens, "stop_token_ids": params.stop_token_ids or ()}
    kinds = ("json_schema", "regex", "ebnf", "structural_tag")
    constraint = next((Constraint(kind, getattr(params, kind)) for kind in kinds if getattr(params, kind)), None)
    neutral = request(
        token_ids=case["decoded"][4],
        sampling=sampling,
        constraint=constraint,
        logprobs=0 if typed.return_logprob else None,
    )
    stored = decode_stored(TokenspeedZmqCodec().encode(neutral))
    ours = msgspec.msgpack.decode(stored.sampling, type=tokenspeed.SamplingParams)
    ours.max_new_tokens, ours.seed = stored.max_tokens, params.seed
    assert ours == params
    assert bytes(stored.prompt) == bytes(typed.input_ids)


@pytest.mark.parametrize("case", [*select("abort"), *select("ts_abort")])
def test_aborts(case: dict[str, Any]) -> None:
    assert vllm.encode_abort(case["decoded"]) == frames_of(case)[2] == tokenspeed.encode_abort(case["decoded"])


@pytest.mark.parametrize("case", [*select("utility_call"), *select("wave_start")])
def test_calls(case: dict[str, Any]) -> None:
    decoded, kind = case["decoded"], frames_of(case)[1]
    if kind == vllm.UTILITY:
        assert vllm.encode_utility(*decoded) == frames_of(case)[2]
    else:
        assert kind == vllm.START_WAVE
        assert vllm.encode_wave(decoded[0]) == frames_of(case)[2]


def test_prompt_logprobs_begin_without_a_value() -> None:
    logprobs = empty_logprobs([5])
    assert logprobs.token_ids == [5]
    assert math.isnan(logprobs.logprobs[0])
