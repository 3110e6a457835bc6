"""What each engine kind is sent for a request, per endpoint."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format

from smg.engines.base import BuildError, Constraint, EngineRequest, Sampling
from smg.engines.grpc.codecs import CODECS, codec_for

KINDS = tuple(CODECS)
APIS = ("chat", "completions", "generate", "messages", "responses")
PROMPT = [5, 6, 7, 70000]


def request(api: str = "chat", *, stream: bool = False, sampling: Sampling | None = None, **more: Any) -> EngineRequest:
    return EngineRequest("id-1", api, "the prompt", PROMPT, stream, sampling or Sampling(), **more)


def sent(kind: str, engine_request: EngineRequest) -> dict[str, Any]:
    """The fields on the wire; 64-bit integers and map keys come back as text, as protobuf's JSON has them."""
    codec = codec_for(kind)
    message = codec.request_class.FromString(codec.encode(engine_request))
    result: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return result


def params(kind: str, engine_request: EngineRequest) -> dict[str, Any]:
    result: dict[str, Any] = sent(kind, engine_request)["sampling_config" if kind == "trtllm" else "sampling_params"]
    return result


VLLM = {
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "n": 1,
}
SGLANG = {**VLLM, "temperature": 1.0, "top_k": -1}
TOKENSPEED = {**SGLANG, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
MLX = {"top_p": 1.0, "repetition_penalty": 1.0}
WARM = {"temperature": 1.0}
ALWAYS: dict[tuple[str, str], dict[str, Any]] = {
    **{("vllm", api): {**VLLM, **({} if api in ("chat", "completions") else WARM)} for api in APIS},
    **{("sglang", api): SGLANG for api in APIS},
    **{("tokenspeed", api): SGLANG if api == "generate" else TOKENSPEED for api in APIS},
    **{("mlx", api): {**MLX, **({} if api in ("chat", "completions") else WARM)} for api in APIS},
    **{
        ("trtllm", api): {
            "beam_width": 1,
            "num_return_sequences": 1,
            "top_p": 1.0,
            "temperature": 1.0,
            "repetition_penalty": 1.0,
        }
        for api in APIS
    },
}


@pytest.mark.parametrize(("kind", "api"), ALWAYS)
def test_sampling_that_is_always_sent(kind: str, api: str) -> None:
    assert params(kind, request(api)) == ALWAYS[kind, api]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_id_and_stream_flag(kind: str, stream: bool) -> None:
    fields = sent(kind, request(stream=stream))
    ids = "input_token_ids" if kind == "trtllm" else "input_ids"
    assert fields["request_id"] == "id-1"
    assert fields["tokenized"] == {"original_text": "the prompt", ids: PROMPT}
    assert fields.get("streaming" if kind == "trtllm" else "stream", False) is stream


@pytest.mark.parametrize("api", APIS)
def test_top_level_defaults(api: str) -> None:
    top: dict[str, dict[str, Any]] = {
        kind: {
            name: value
            for name, value in sent(kind, request(api)).items()
            if name not in ("request_id", "tokenized", "sampling_params", "sampling_config")
        }
        for kind in KINDS
    }
    assert top["vllm"] == {} == top["mlx"]
    assert top["sglang"] == {"logprob_start_len": -1, **({"log_metrics": True} if api == "generate" else {})}
    assert top["tokenspeed"] == ({} if api == "messages" else {"logprob_start_len": -1})
    assert top["trtllm"] == {
        "output_config": {"exclude_input_from_output": True},
        "max_tokens": 16 if api == "completions" else 2048,
    }


SET = Sampling(
    temperature=0.5,
    top_p=0.25,
    top_k=5,
    min_p=0.125,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    repetition_penalty=1.5,
    max_tokens=9,
    min_tokens=2,
    seed=3,
    stop_token_ids=[9],
    ignore_eos=True,
    logit_bias={42: -5.0},
)
COMMON = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 5,
    "min_p": 0.125,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.5,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api", APIS)
def test_sampling_values_reach_their_fields(kind: str, api: str) -> None:
    fields = params(kind, request(api, sampling=SET))
    assert {name: fields[name] for name in COMMON} == COMMON
    top = sent(kind, request(api, sampling=SET))
    limit, least, seed = {
        "vllm": ("max_tokens", "min_tokens", "seed"),
        "sglang": ("max_new_tokens", "min_new_tokens", None),
        "tokenspeed": ("max_new_tokens", "min_new_tokens", "sampling_seed"),
        "mlx": ("max_tokens", None, "seed"),
        "trtllm": (None, "min_tokens", "seed"),
    }[kind]
    assert (fields[limit] if limit else top["max_tokens"]) == 9
    assert least is None or fields[least] == 2
    assert seed is None or int(fields[seed]) == 3
    place = top if kind == "trtllm" else fields
    assert place["stop_token_ids"] == [9]
    assert place["ignore_eos"] is True
    assert kind == "trtllm" or fields["logit_bias"] == {"42": -5.0}


def test_temperature_zero_is_a_value() -> None:
    cold = Sampling(temperature=0.0)
    assert params("vllm", request(sampling=cold))["temperature"] == 0.0
    assert params("trtllm", request(sampling=cold))["temperature"] == 0.0
    assert params("tokenspeed", request(sampling=cold))["temperature"] == 0.0
    assert "temperature" not in params("sglang", request(sampling=cold))  # proto3 zero, absent on the wire


def test_all_tokens_is_spelled_per_engine() -> None:
    everything = Sampling(top_k=-1)
    assert "top_k" not in params("vllm", request(sampling=everything))
    assert "top_k" not in params("mlx", request(sampling=everything))
    assert params("sglang", request(sampling=everything))["top_k"] == -1
    assert params("tokenspeed", request(sampling=everything))["top_k"] == -1
    assert params("trtllm", request(sampling=everything))["top_k"] == 0


def test_zero_max_tokens() -> None:
    none = Sampling(max_tokens=0)
    assert params("vllm", request("completions", sampling=none))["max_tokens"] == 0
    assert params("sglang", request("completions", sampling=none))["max_new_tokens"] == 0
    assert params("tokenspeed", request("completions", sampling=none))["max_new_tokens"] == 0
    assert params("mlx", request("completions", sampling=none))["max_tokens"] == 0
    assert "max_tokens" not in sent("trtllm", request("completions", sampling=none))


def test_stop_strings() -> None:
    stop = Sampling(stop=["END", "a long one"], stop_token_ids=[8])
    encodings = {"END": [77], "a long one": [1, 2]}
    assert params("vllm", request(sampling=stop))["stop"] == ["END", "a long one"]
    assert params("tokenspeed", request(sampling=stop))["stop"] == ["END", "a long one"]
    assert sent("trtllm", request(sampling=stop))["stop"] == ["END", "a long one"]
    fields = params("sglang", request(sampling=stop, stop_encodings=encodings))
    assert fields["stop_token_ids"] == [8, 77]
    assert "stop" not in fields
    with pytest.raises(BuildError, match="MLX backend does not support string stop sequences"):
        codec_for("mlx").encode(request(sampling=stop))


@pytest.mark.parametrize("api", APIS)
def test_stop_trim(api: str) -> None:
    keep = Sampling(no_stop_trim=True)
    raw = api == "completions"
    assert params("vllm", request(api, sampling=keep)).get("include_stop_str_in_output", False) is raw
    assert params("sglang", request(api, sampling=keep))["no_stop_trim"] is True
    assert params("tokenspeed", request(api, sampling=keep))["no_stop_trim"] is True
    assert sent("trtllm", request(api, sampling=keep)).get("include_stop_token_in_output", False) is raw
    with_token = Sampling(no_stop_trim=True, stop_token_ids=[4])
    assert sent("trtllm", request(api, sampling=with_token))["include_stop_token_in_output"] is True
    assert sent("trtllm", request(api, keep_stop_token=True))["include_stop_token_in_output"] is True


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", ["vllm", "sglang", "tokenspeed"])
def test_special_tokens_are_skipped_where_the_gateway_reads_them(kind: str, api: str) -> None:
    fields = params(kind, request(api, sampling=Sampling(skip_special_tokens=False)))
    assert fields.get("skip_special_tokens", False) is (api in ("chat", "messages"))


def test_seeds() -> None:
    assert params("vllm", request(sampling=Sampling(seed=2**40)))["seed"] == 2**31 - 1
    assert params("vllm", request(sampling=Sampling(seed=-(2**40))))["seed"] == -(2**31)
    assert params("trtllm", request(sampling=Sampling(seed=-1)))["seed"] == str(2**64 - 1)
    assert params("tokenspeed", request("generate", sampling=Sampling(sampling_seed=4)))["sampling_seed"] == "4"
    both = Sampling(seed=-1, sampling_seed=4)
    assert params("tokenspeed", request(sampling=both))["sampling_seed"] == "4"
    assert params("vllm", request(sampling=both))["seed"] == -1
    with pytest.raises(BuildError, match="sampling seed must be an unsigned integer"):
        codec_for("tokenspeed").encode(request(sampling=Sampling(seed=-1)))


def test_several_choices() -> None:
    two = Sampling(n=2)
    assert params("vllm", request(sampling=two))["n"] == 2
    assert params("sglang", request(sampling=two))["n"] == 2
    assert params("tokenspeed", request(sampling=two))["n"] == 2
    assert params("trtllm", request(sampling=two))["num_return_sequences"] == 2
    with pytest.raises(BuildError, match=r"MLX backend does not support n > 1 \(parallel samples\)"):
        codec_for("mlx").encode(request(sampling=two))


@pytest.mark.parametrize(("api", "asked", "vllm"), [("chat", 0, 1), ("chat", 4, 4), ("completions", 0, 0)])
def test_logprobs(api: str, asked: int, vllm: int) -> None:
    wanted = request(api, logprobs=asked)
    assert params("vllm", wanted)["logprobs"] == vllm
    assert params("mlx", wanted)["logprobs"] == vllm
    assert sent("trtllm", wanted)["output_config"]["logprobs"] == asked
    for kind in ("sglang", "tokenspeed"):
        fields = sent(kind, wanted)
        assert fields["return_logprob"] is True
        assert fields.get("top_logprobs_num", 0) == asked


def test_generate_logprob_fields() -> None:
    wanted = request("generate", logprobs=2, logprob_start_len=0, token_ids_logprob=[3, 4])
    for kind in ("sglang", "tokenspeed"):
        fields = sent(kind, wanted)
        assert fields.get("logprob_start_len", 0) == 0
        assert fields["token_ids_logprob"] == [3, 4]


def test_prompt_logprobs() -> None:
    wanted = request("completions", prompt_logprobs=2)
    assert params("vllm", wanted)["prompt_logprobs"] == 2
    assert sent("trtllm", wanted)["output_config"]["prompt_logprobs"] == 2
    fields = sent("sglang", wanted)
    assert (fields["return_logprob"], fields["top_logprobs_num"]) == (True, 2)
    assert "logprob_start_len" not in fields  # 0: from the start


def test_sglang_flags() -> None:
    assert sent("sglang", request("chat", reasoning_on=True))["require_reasoning"] is True
    assert "require_reasoning" not in sent("sglang", request("completions", reasoning_on=True))
    assert sent("sglang", request(return_hidden_states=True))["return_hidden_states"] is True
    assert "log_metrics" not in sent("sglang", request("generate", log_metrics=False))


CONSTRAINT_FIELDS = {
    "vllm": {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"},
    "sglang": {
        "json_schema": "json_schema",
        "regex": "regex",
        "ebnf": "ebnf_grammar",
        "structural_tag": "structural_tag",
    },
}
CONSTRAINT_FIELDS["tokenspeed"] = CONSTRAINT_FIELDS["sglang"]


@pytest.mark.parametrize("constraint", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_constraint_field(constraint: str) -> None:
    for kind, names in CONSTRAINT_FIELDS.items():
        assert params(kind, request(constraint=Constraint(constraint, "{}")))[names[constraint]] == "{}"
    guide = sent("trtllm", request(constraint=Constraint(constraint, "{}")))["guided_decoding"]
    suffix = {"ebnf": "EBNF_GRAMMAR"}.get(constraint, constraint.upper())
    assert guide == {"guide_type": f"GUIDE_TYPE_{suffix}", "guide": "{}"}


@pytest.mark.parametrize(
    ("api", "kind", "origin", "message"),
    [
        ("chat", "json_schema", "output", "MLX backend does not support response_format (structured outputs)"),
        ("responses", "json_schema", "output", "MLX backend does not support response_format (structured outputs)"),
        ("chat", "json_schema", "tool", "MLX backend does not support structured output constraint: json_schema"),
        ("chat", "structural_tag", "tool", "MLX backend does not support structured output constraint: structural_tag"),
        ("chat", "regex", "output", "MLX backend does not support structured output constraint: regex"),
        ("completions", "json_schema", "output", "MLX backend does not support structured output constraints"),
        ("generate", "regex", "output", "MLX backend does not support structured output constraints"),
    ],
)
def test_mlx_refuses_constraints(api: str, kind: str, origin: str, message: str) -> None:
    with pytest.raises(BuildError) as caught:
        codec_for("mlx").encode(request(api, constraint=Constraint(kind, "{}", origin)))
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", KINDS)
def test_values_outside_a_field_are_build_errors(kind: str) -> None:
    with pytest.raises(BuildError):
        codec_for(kind).encode(request(sampling=Sampling(max_tokens=2**40)))
    with pytest.raises(BuildError):
        codec_for(kind).encode(EngineRequest("x", "chat", "", [-1], False, Sampling()))


@pytest.mark.parametrize("kind", KINDS)
def test_rank_is_pinned_only_where_there_are_ranks(kind: str) -> None:
    codec = codec_for(kind)
    plain = codec.encode(request())
    assert codec.pin_rank(plain, -1) == plain
    for rank in (0, 3):
        message = codec.request_class.FromString(codec.pin_rank(plain, rank))
        if kind in ("trtllm", "mlx"):
            assert message.SerializeToString() == plain
        else:
            assert message.HasField("data_parallel_rank")
            assert message.data_parallel_rank == rank
            message.ClearField("data_parallel_rank")
            assert message.SerializeToString() == plain


@pytest.mark.parametrize("kind", KINDS)
def test_continuation(kind: str) -> None:
    codec = codec_for(kind)
    first = codec.encode(request(stream=True, sampling=Sampling(max_tokens=10, min_tokens=2, temperature=0.5)))
    wanted = EngineRequest(
        "id-1", "chat", "the prompt", [*PROMPT, 1, 2, 3], True, Sampling(max_tokens=7, min_tokens=0, temperature=0.5)
    )
    got = codec.request_class.FromString(codec.extend(first, [1, 2, 3]))
    expected = codec.request_class.FromString(codec.encode(wanted))
    if kind == "trtllm":  # a field with presence keeps its 0 there
        got.sampling_config.ClearField("min_tokens")
        expected.sampling_config.ClearField("min_tokens")
    assert got == expected


@pytest.mark.parametrize("kind", KINDS)
def test_continuation_without_limits_or_past_them(kind: str) -> None:
    codec = codec_for(kind)
    with pytest.raises(BuildError, match="no token is left"):
        codec.extend(codec.encode(request(sampling=Sampling(max_tokens=2))), [1, 2])
    if kind != "trtllm":  # which always has a limit
        longer = codec.extend(codec.encode(request()), [1, 2])
        assert longer == codec.encode(EngineRequest("id-1", "chat", "the prompt", [*PROMPT, 1, 2], False, Sampling()))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mlx"])
def test_what_cannot_be_continued(kind: str) -> None:
    codec = codec_for(kind)
    for other in (request(sampling=Sampling(n=2)), request(constraint=Constraint("regex", "a"))):
        with pytest.raises(BuildError, match="cannot be continued"):
            codec.extend(codec.encode(other), [1])


def test_abort_requests() -> None:
    for kind in KINDS:
        codec = codec_for(kind)
        module = __import__(type(codec).__module__, fromlist=["pb"]).pb
        message = module.AbortRequest.FromString(codec.abort_request("id-9", "why"))
        if kind in ("vllm", "mlx"):
            assert list(message.request_ids) == ["id-9"]
        else:
            assert message.request_id == "id-9"
        assert getattr(message, "reason", "why") == "why"
