"""What becomes of each engine kind's messages."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from smg.engines.base import BuildError, Delta
from smg.engines.grpc.codecs import CODECS, codec_for
from smg.engines.grpc.pb import mlx_engine_pb2 as mlx
from smg.engines.grpc.pb import sglang_scheduler_pb2 as sglang
from smg.engines.grpc.pb import tokenspeed_scheduler_pb2 as tokenspeed
from smg.engines.grpc.pb import trtllm_service_pb2 as trtllm
from smg.engines.grpc.pb import vllm_engine_pb2 as vllm

MODULES: dict[str, Any] = {"vllm": vllm, "sglang": sglang, "tokenspeed": tokenspeed, "trtllm": trtllm, "mlx": mlx}
KINDS = tuple(MODULES)


def chunk(kind: str, **fields: Any) -> bytes:
    pb = MODULES[kind]
    if kind == "trtllm" and "index" in fields:
        fields["sequence_index"] = fields.pop("index")
    data: bytes = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(**fields)).SerializeToString()
    return data


def complete(kind: str, **fields: Any) -> bytes:
    pb = MODULES[kind]
    if kind == "trtllm":
        renamed = {"index": "sequence_index", "output_ids": "output_token_ids"}
        fields = {renamed.get(name, name): value for name, value in fields.items()}
    if kind == "mlx" and "matched_token_id" in fields:
        fields["matched_stop_token_id"] = fields.pop("matched_token_id")
    data: bytes = pb.GenerateResponse(complete=pb.GenerateComplete(**fields)).SerializeToString()
    return data


def decode(kind: str, messages: list[bytes], *, streaming: bool) -> list[Delta]:
    decoder = codec_for(kind).decoder(streaming=streaming)
    return [delta for payload in messages if (delta := decoder.decode(payload)) is not None]


def counts(delta: Delta) -> tuple[int, int, int]:
    return delta.prompt_tokens, delta.completion_tokens, delta.cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_stream_of_two_choices(kind: str) -> None:
    """Text comes from the chunks, counts are totals whatever the engine counts, the last message's ids are ignored."""
    per_message = kind == "vllm"
    base = {"prompt_tokens": 7, "cached_tokens": 4}
    messages = [
        chunk(kind, token_ids=[1, 2], completion_tokens=2, index=0, **base),
        chunk(kind, token_ids=[9], completion_tokens=1, index=1, **base),
        chunk(kind, token_ids=[3], completion_tokens=1 if per_message else 3, index=0, **base),
        complete(
            kind, output_ids=[3], completion_tokens=1 if per_message else 3, index=0, finish_reason="stop", **base
        ),
        complete(kind, output_ids=[9], completion_tokens=1, index=1, finish_reason="length", **base),
    ]
    deltas = decode(kind, messages, streaming=True)
    assert [(d.index, d.token_ids, d.finish_reason) for d in deltas] == [
        (0, [1, 2], None),
        (1, [9], None),
        (0, [3], None),
        (0, [], "stop"),
        (1, [], "length"),
    ]
    assert [counts(d) for d in deltas] == [(7, 2, 4), (7, 1, 4), (7, 3, 4), (7, 3, 4), (7, 1, 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_answer_without_streaming(kind: str) -> None:
    """Only the final messages count; chunks that an engine sends all the same are ignored."""
    messages = [
        chunk(kind, token_ids=[1], completion_tokens=1),
        complete(kind, output_ids=[1, 2, 3], completion_tokens=3, prompt_tokens=5, finish_reason="stop"),
    ]
    (delta,) = decode(kind, messages, streaming=False)
    assert (delta.index, delta.token_ids, delta.finish_reason) == (0, [1, 2, 3], "stop")
    assert counts(delta) == (5, 3, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_finish_reasons_pass_through(kind: str) -> None:
    for reason in ("stop", "length", "abort", "error"):
        (delta,) = decode(kind, [complete(kind, finish_reason=reason)], streaming=True)
        assert delta.finish_reason == reason
    (delta,) = decode(kind, [complete(kind)], streaming=True)
    assert delta.finish_reason == "stop"  # a final message ends its choice, with or without a word


def test_trtllm_stop_word_is_a_stop() -> None:
    (delta,) = decode("trtllm", [complete("trtllm", finish_reason="stop_word")], streaming=True)
    assert delta.finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_matched_stop(kind: str) -> None:
    (delta,) = decode(kind, [complete(kind, matched_token_id=0)], streaming=True)
    assert delta.matched_stop == 0
    (delta,) = decode(kind, [complete(kind)], streaming=True)
    assert delta.matched_stop is None
    if kind != "mlx":
        (delta,) = decode(kind, [complete(kind, matched_stop_str="END")], streaming=False)
        assert delta.matched_stop == "END"


def logprobs_of(kind: str) -> dict[str, Any]:
    """Logprobs of the ids 1 and 2, the first with two alternatives."""
    pb = MODULES[kind]
    if kind == "trtllm":
        return {
            "logprobs": [
                pb.TokenLogprob(
                    token_id=1,
                    logprob=-0.5,
                    top_logprobs=[pb.TopLogprob(token_id=1, logprob=-0.5), pb.TopLogprob(token_id=8, logprob=-1.0)],
                ),
                pb.TokenLogprob(token_id=2, logprob=-0.25),
            ]
        }
    return {
        "output_logprobs": pb.OutputLogProbs(
            token_logprobs=[-0.5, -0.25],
            token_ids=[1, 2],
            top_logprobs=[pb.TopLogProbs(values=[-0.5, -1.0], token_ids=[1, 8]), pb.TopLogProbs()],
        )
    }


@pytest.mark.parametrize("kind", KINDS)
def test_output_logprobs(kind: str) -> None:
    logprobs = logprobs_of(kind)
    streamed = decode(kind, [chunk(kind, token_ids=[1, 2], **logprobs), complete(kind, **logprobs)], streaming=True)
    whole = decode(kind, [complete(kind, output_ids=[1, 2], **logprobs)], streaming=False)
    assert streamed[1].logprobs is None  # said already
    for delta in (streamed[0], whole[0]):
        assert delta.logprobs is not None
        assert list(delta.logprobs.token_ids) == [1, 2]
        assert list(delta.logprobs.logprobs) == [-0.5, -0.25]
        assert [list(row) for row in delta.logprobs.top] == [[(1, -0.5), (8, -1.0)], []]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_prompt_logprobs(kind: str) -> None:
    pb = MODULES[kind]
    entries = [pb.InputTokenLogProb(), pb.InputTokenLogProb(value=-0.5)]
    logprobs = pb.InputLogProbs(token_logprobs=entries, token_ids=[5, 6], top_logprobs=[pb.TopLogProbs()] * 2)
    first = chunk(kind, token_ids=[1], input_logprobs=logprobs)
    streamed = decode(kind, [first, chunk(kind, token_ids=[2])], streaming=True)
    whole = decode(kind, [complete(kind, output_ids=[1], input_logprobs=logprobs)], streaming=False)
    assert streamed[1].prompt_logprobs is None
    for delta in (streamed[0], whole[0]):
        assert delta.prompt_logprobs is not None
        assert list(delta.prompt_logprobs.token_ids) == [5, 6]
        first_value, second_value = delta.prompt_logprobs.logprobs
        assert math.isnan(first_value)
        assert second_value == -0.5


def test_the_first_token_of_a_prompt_has_no_logprob_on_trtllm_either() -> None:
    entry = MODULES["trtllm"].TokenLogprob
    entries = [entry(token_id=5, logprob=-9.0), entry(token_id=6, logprob=-0.5)]
    (delta,) = decode("trtllm", [complete("trtllm", prompt_logprobs=entries)], streaming=True)
    assert delta.prompt_logprobs is not None and math.isnan(delta.prompt_logprobs.logprobs[0])
    assert (list(delta.prompt_logprobs.token_ids), delta.prompt_logprobs.logprobs[1]) == ([5, 6], -0.5)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "tokenspeed", "trtllm"])
def test_speculation_counts(kind: str) -> None:
    (delta,) = decode(kind, [complete(kind, spec_accepted_tokens=3, spec_draft_tokens=5)], streaming=True)
    assert (delta.spec_accepted, delta.spec_draft) == (3, 5)


def test_sglang_reasoning_tokens_and_hidden_states() -> None:
    states = [sglang.HiddenStates(values=[0.5, 1.0]), sglang.HiddenStates(values=[2.0])]
    (delta,) = decode("sglang", [complete("sglang", reasoning_tokens=4, all_hidden_states=states)], streaming=False)
    assert delta.reasoning_tokens == 4
    assert delta.hidden_states == [[0.5, 1.0], [2.0]]
    (delta,) = decode("sglang", [complete("sglang")], streaming=False)
    assert delta.reasoning_tokens == -1  # not counted by the engine
    assert delta.hidden_states is None


@pytest.mark.parametrize("kind", KINDS)
def test_empty_and_broken_messages(kind: str) -> None:
    decoder = codec_for(kind).decoder(streaming=True)
    assert decoder.decode(b"") is None
    with pytest.raises(DecodeError):
        decoder.decode(b"\xff\xff\xff")


@pytest.mark.parametrize("kind", KINDS)
def test_health(kind: str) -> None:
    pb, codec = MODULES[kind], codec_for(kind)
    good = {"status": "OK"} if kind == "trtllm" else {"healthy": True, "message": "fine"}
    bad = {"status": "out of memory"} if kind == "trtllm" else {"healthy": False, "message": "out of memory"}
    assert codec.parse_health(pb.HealthCheckResponse(**good).SerializeToString()).healthy
    health = codec.parse_health(pb.HealthCheckResponse(**bad).SerializeToString())
    assert (health.healthy, health.message) == (False, "out of memory")


def test_vllm_facts() -> None:
    model = vllm.GetModelInfoResponse(
        model_path="/m",
        tokenizer_path="/t",
        served_model_name="name",
        is_generation=True,
        max_context_length=4096,
        vocab_size=100,
        eos_token_ids=[1, 2],
        architectures=["A"],
        default_sampling_params_json='{"top_k":20}',
    )
    server = vllm.GetServerInfoResponse(data_parallel_size=2, block_size=16, kv_connector="NixlConnector")
    facts = codec_for("vllm").facts(model.SerializeToString(), server.SerializeToString())
    assert (facts.kind, facts.model_id, facts.context_length, facts.vocab_size) == ("vllm", "name", 4096, 100)
    assert (facts.eos_token_ids, facts.dp_size, facts.block_size) == ([1, 2], 2, 16)
    assert facts.default_sampling_params == '{"top_k":20}'
    assert facts.labels == {
        "model_path": "/m",
        "tokenizer_path": "/t",
        "served_model_name": "name",
        "is_generation": "true",
        "supports_vision": "false",
        "max_context_length": "4096",
        "vocab_size": "100",
        "eos_token_ids": "[1,2]",
        "architectures": '["A"]',
        "default_sampling_params_json": '{"top_k":20}',
        "dp_size": "2",
        "page_size": "16",
        "kv_connector": "NixlConnector",
        "mm_device_do_normalize": "false",
    }


@pytest.mark.parametrize("kind", ["sglang", "tokenspeed"])
def test_scheduler_facts(kind: str) -> None:
    pb = MODULES[kind]
    model = pb.GetModelInfoResponse(model_path="/m", max_context_length=64, vocab_size=10)
    server = pb.GetServerInfoResponse(**{f"{kind}_version": "9.9"})
    server.server_args.update({"dp_size": 4, "tp_size": 2, "model_path": "/elsewhere", "max_running_requests": "many"})
    facts = codec_for(kind).facts(model.SerializeToString(), server.SerializeToString())
    assert (facts.model_id, facts.dp_size, facts.context_length) == ("/m", 4, 64)
    assert facts.labels["dp_size"] == "4"
    assert facts.labels["tp_size"] == "2"
    assert facts.labels["version"] == "9.9"
    assert facts.labels["model_path"] == "/m"
    assert "max_running_requests" not in facts.labels  # not a number
    assert codec_for(kind).facts(b"", b"").dp_size == 1


def test_trtllm_facts() -> None:
    model = trtllm.GetModelInfoResponse(model_id="engine", max_seq_len=128, vocab_size=10, supported_features=["lora"])
    server = trtllm.GetServerInfoResponse(version="1", tensor_parallel_size=2)
    facts = codec_for("trtllm").facts(model.SerializeToString(), server.SerializeToString())
    assert (facts.model_id, facts.context_length, facts.tokenizer_path) == ("engine", 128, "")
    assert facts.labels == {
        "model_id": "engine",
        "max_seq_len": "128",
        "vocab_size": "10",
        "supported_features": '["lora"]',
        "version": "1",
        "tp_size": "2",
    }


@pytest.mark.parametrize("kind", ["vllm", "sglang", "tokenspeed"])
def test_loads(kind: str) -> None:
    pb, codec = MODULES[kind], codec_for(kind)
    query = pb.GetLoadsRequest.FromString(codec.loads_request(["core"], 0))
    assert (list(query.include), query.HasField("dp_rank"), query.dp_rank) == (["core"], True, 0)
    row = pb.SchedulerLoad(dp_rank=1, num_running_reqs=3, num_waiting_uncached_tokens=40, token_usage=0.5)
    report = codec.parse_loads(
        pb.GetLoadsResponse(timestamp="now", version="1", dp_rank_count=2, loads=[row]).SerializeToString()
    )
    assert (report.timestamp, report.version, report.dp_rank_count) == ("now", "1", 2)
    (load,) = report.loads
    assert (load.dp_rank, load.num_running_reqs, load.num_waiting_uncached_tokens, load.token_usage) == (1, 3, 40, 0.5)


def test_embeddings() -> None:
    for kind, codec in CODECS.items():
        if not codec.supports_embedding:
            with pytest.raises(BuildError):
                codec.embed_request("id", "text", [1])
            continue
        pb = MODULES[kind]
        message = pb.EmbedRequest.FromString(codec.embed_request("id", "text", [1, 2]))
        assert (message.request_id, message.tokenized.original_text) == ("id", "text")
        assert list(message.tokenized.input_ids) == [1, 2]
        answer = codec.parse_embed(pb.EmbedResponse(embedding=[0.5, 0.25], prompt_tokens=2).SerializeToString())
        assert (answer.vector, answer.prompt_tokens) == ([0.5, 0.25], 2)


def test_chunks_that_look_alike() -> None:
    """Messages with equal counts are read without parsing them whole; what they say is the same."""
    draw = random.Random(7)
    decoder = codec_for("vllm").decoder(streaming=True)
    totals: dict[int, int] = {}
    for _ in range(4):
        fields = {"prompt_tokens": draw.choice((9, 7, 300_000)), "cached_tokens": draw.choice((0, 5)), "index": 1}
        for _ in range(40):
            ids = [draw.choice((0, 127, 128, 46933, 151_935, 2**32 - 1)) for _ in range(draw.choice((1, 1, 1, 3, 30)))]
            delta = decoder.decode(chunk("vllm", token_ids=ids, completion_tokens=1, **fields))
            assert delta is not None
            totals[1] = totals.get(1, 0) + len(ids)
            assert [*delta.token_ids] == ids
            assert counts(delta) == (fields["prompt_tokens"], totals[1], fields["cached_tokens"])
            assert (delta.index, delta.finish_reason) == (1, None)


def test_ids_that_are_cut_off() -> None:
    decoder = codec_for("vllm").decoder(streaming=True)
    good = chunk("vllm", token_ids=[46933], prompt_tokens=9, completion_tokens=1)
    for _ in range(3):
        assert decoder.decode(good) is not None
    for at in (1, 3, 6):
        with pytest.raises(DecodeError):
            decoder.decode(good[:at] + bytes((good[at] | 0x80,)) + good[at + 1 :])
    assert decoder.decode(good) is not None
