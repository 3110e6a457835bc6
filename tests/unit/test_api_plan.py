"""Plans: ids, sampling, stops, parsers, constraints, options, routing."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

import msgspec
import pytest
import xxhash
from api_context import JSON, MODEL, Gateway, parser_flags

from smg.api.blocks import block_hashes, token_bytes
from smg.api.context import Flags
from smg.api.entry import PATHS, sticky_id
from smg.api.errors import ApiError
from smg.api.ids import body_id, engine_ids, uuid7
from smg.messages import GenerationPlan

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
UUID7 = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, **more}


# Ids ----------------------------------------------------------------------------------------------


def test_uuid7_is_version_7_and_sorts_by_time() -> None:
    ids = [uuid7() for _ in range(100)]
    assert all(re.fullmatch(UUID7, value) for value in ids)
    assert len(set(ids)) == 100
    assert [value[:13] for value in ids] == sorted(value[:13] for value in ids)


def test_engine_and_body_ids() -> None:
    planned = Gateway().plan(CHAT, chat(), request_id="chatcmpl-x")
    assert re.fullmatch(f"chatcmpl-x-{UUID7}", planned.parts[0].engine_id)
    assert planned.response.body_id == planned.parts[0].engine_id
    planned = Gateway().plan(CHAT, chat(rid="mine"))
    assert (planned.parts[0].engine_id, planned.response.body_id) == ("mine", "mine")
    planned = Gateway().plan(COMPLETIONS, {"model": MODEL, "prompt": ["a", "b"]}, request_id="cmpl-x")
    assert [bool(re.fullmatch(f"cmpl-x-p{i}-{UUID7}", part.engine_id)) for i, part in enumerate(planned.parts)] == [
        True
    ] * 2
    assert planned.response.body_id == "cmpl-x"


def test_ids_of_a_batch_with_a_client_id_stay_distinct() -> None:
    ids = engine_ids("req", 2, "mine")
    assert [value.split("-")[:2] for value in ids] == [["mine", "p0"], ["mine", "p1"]]
    assert body_id("req", ids, "mine") == "mine"


@pytest.mark.parametrize(
    ("rid", "expect"),
    [
        ("conv_t1", "conv"),
        ("conv_t12_r3", "conv"),
        ("conv_r1_t2", "conv"),
        ("conv_tx", "conv_tx"),
        ("", ""),
        ("_t1", ""),
    ],
)
def test_sticky_ids(rid: str, expect: str) -> None:
    assert sticky_id(rid) == expect


def test_routing_headers_and_client_id() -> None:
    headers = {**JSON, "x-smg-routing-key": "k", "x-smg-target-worker": "2"}
    route = Gateway().plan(CHAT, chat(rid="a_t1"), headers).route(3, 1)
    assert (route.routing_key, route.target_worker, route.endpoint, route.model) == ("k", "2", "chat", MODEL)
    assert Gateway().plan(CHAT, chat(rid="a_t1")).route(3, 1).routing_key == "a"


def test_other_routing_key_headers() -> None:
    flags = Flags(routing_key_headers=("x-a", "x-b"))
    headers = {**JSON, "x-b": "second", "x-smg-routing-key": "k"}
    assert Gateway(flags=flags).plan(CHAT, chat(), headers).routing_key == "second"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_parser_header(path: str) -> None:
    body = chat(max_tokens=5)
    for value in ("legacy", "Symphony"):
        Gateway().plan(path, body, {**JSON, "x-smg-parser": value})
    for value in ("", "other"):
        with pytest.raises(ApiError) as caught:
            Gateway().send(path, {**body, "model": "none"}, {**JSON, "x-smg-parser": value})
        assert caught.value.code == "invalid_parser_header"
    with pytest.raises(ApiError) as caught:
        Gateway().send(path, {**body, "temperature": 9}, {**JSON, "x-smg-parser": "other"})
    assert caught.value.code != "invalid_parser_header"


# Routing ------------------------------------------------------------------------------------------


def test_plan_travels_as_bytes() -> None:
    planned = Gateway().plan(CHAT, chat(stream=True))
    route = planned.route(7, 2, 12.5)
    plan = msgspec.msgpack.decode(route.plan, type=GenerationPlan)
    assert plan == planned.plan(7, 2, 12.5)
    assert (route.seq, route.frontend, route.streaming, plan.deadline) == (7, 2, True, 12.5)
    assert route.parts[0].prompt_tokens == plan.parts[0].prompt_tokens


def test_block_hashes_chain() -> None:
    ids = list(range(100, 140))
    hashes = struct.unpack("<2Q", block_hashes(ids))
    first = xxhash.xxh3_64_intdigest(struct.pack("<16I", *ids[:16]), 0)
    assert hashes == (first, xxhash.xxh3_64_intdigest(struct.pack("<16I", *ids[16:32]), first))
    assert block_hashes([*ids[:31], 0])[:8] == block_hashes(ids)[:8]
    assert block_hashes([*ids[:31], 0])[8:] != block_hashes(ids)[8:]
    assert block_hashes([0, *ids[1:]])[8:] != block_hashes(ids)[8:]
    assert block_hashes(ids[:15]) == b""
    assert len(block_hashes(ids, 8)) == 40
    assert token_bytes([1, 2**32 - 1]) == b"\1\0\0\0\xff\xff\xff\xff"


# Sampling -----------------------------------------------------------------------------------------

WORKER = {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 9.0}


def sampling(path: str, body: dict[str, Any], **facts: Any) -> Any:
    gateway = Gateway(**facts)
    gateway.plan(path, {"model": MODEL, **body})
    return gateway.engine().sampling


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (COMPLETIONS, {"prompt": "a"}),
        (GENERATE, {"text": "a"}),
        (MESSAGES, {"messages": HI, "max_tokens": 5}),
    ],
)
def test_worker_defaults_fill_what_is_unset(path: str, body: dict[str, Any]) -> None:
    got = sampling(path, body, default_sampling=WORKER)
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0.6, 0.9, 20, 0.1, 1.1)
    assert type(got.top_k) is int
    assert got.max_tokens == body.get("max_tokens")


def test_neutral_request_values_win_over_worker_defaults() -> None:
    got = sampling(CHAT, {"messages": HI, "top_p": 1, "top_k": -1, "temperature": 0}, default_sampling=WORKER)
    assert (got.temperature, got.top_p, got.top_k) == (0, 1, -1)


def test_responses_temperature_ignores_the_worker() -> None:
    got = sampling(RESPONSES, {"input": "q"}, default_sampling=WORKER)
    assert (got.temperature, got.top_p, got.top_k) == (1.0, 0.9, 20)
    got = sampling(
        RESPONSES, {"input": "q", "temperature": 0.2, "stop": "x", "frequency_penalty": 1, "max_output_tokens": 3}
    )
    assert (got.temperature, list(got.stop), got.frequency_penalty, got.max_tokens) == (0.2, ["x"], 1, 3)


def test_chat_limits_and_biases_reach_the_engine() -> None:
    body = chat(max_tokens=5, max_completion_tokens=7, min_tokens=2, logit_bias={"+5": 1, "7": -2.5}, seed=-3)
    got = sampling(CHAT, body)
    assert (got.max_tokens, got.min_tokens, got.logit_bias, got.seed) == (7, 2, {5: 1.0, 7: -2.5}, -3)


def test_engines_always_decode_chat_without_special_tokens() -> None:
    gateway = Gateway()
    planned = gateway.plan(CHAT, chat(skip_special_tokens=False))
    assert gateway.engine().sampling.skip_special_tokens is True
    assert planned.response.skip_special_tokens is False
    gateway.plan(COMPLETIONS, {"model": MODEL, "prompt": "a", "skip_special_tokens": False})
    assert gateway.engine().sampling.skip_special_tokens is False


def test_messages_top_k_zero_is_off() -> None:
    assert sampling(MESSAGES, {"messages": HI, "max_tokens": 5, "top_k": 0}).top_k == -1


# Stops --------------------------------------------------------------------------------------------


def test_stop_plan() -> None:
    gateway = Gateway(kinds=("sglang", "vllm"))
    planned = gateway.plan(CHAT, chat(stop=["a", "bc"], stop_token_ids=[5], no_stop_trim=True))
    assert (planned.stop.strings, planned.stop.token_ids, planned.stop.eos_ids) == (["a", "bc"], [5], [0])
    assert planned.stop.keep is True
    assert gateway.engine("sglang").stop_encodings == {"a": [97], "bc": [98, 99]}
    assert set(planned.parts[0].requests) == {"sglang", "vllm"}
    assert Gateway().plan(CHAT, chat(ignore_eos=True)).stop.eos_ids == []


# Completions --------------------------------------------------------------------------------------


def test_best_of_ranks_candidates() -> None:
    gateway = Gateway()
    planned = gateway.plan(COMPLETIONS, {"model": MODEL, "prompt": "a", "n": 2, "best_of": 5})
    assert (planned.response.n, gateway.engine().sampling.n, planned.response.logprobs) == (5, 5, 0)
    assert planned.response.options == {"echo": False, "suffix": "", "keep": 2, "hide_logprobs": True}
    planned = gateway.plan(COMPLETIONS, {"model": MODEL, "prompt": "a", "best_of": 2, "logprobs": 3})
    assert (planned.response.options["keep"], planned.response.options["hide_logprobs"]) == (1, False)
    assert planned.response.logprobs == 3
    assert "keep" not in gateway.plan(COMPLETIONS, {"model": MODEL, "prompt": "a", "best_of": 1}).response.options


def test_echo_of_text_and_ids() -> None:
    gateway = Gateway()
    planned = gateway.plan(COMPLETIONS, {"model": MODEL, "prompt": [[104, 105], [97]], "echo": True, "logprobs": 2})
    assert [part.text for part in planned.parts] == ["hi", "a"]
    assert planned.parts[0].token_ids == token_bytes([104, 105])
    assert (gateway.engine().prompt_logprobs, gateway.engine().logprobs) == (2, 2)
    planned = gateway.plan(COMPLETIONS, {"model": MODEL, "prompt": "hi", "suffix": "!"})
    assert (planned.parts[0].text, planned.parts[0].token_ids) == (None, None)
    assert (gateway.engine().prompt_logprobs, planned.response.options["suffix"]) == (None, "!")


def test_stream_options() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = Gateway().plan(CHAT, chat(stream=True, stream_options=options)).response
    assert (response.stream, response.include_usage, response.continuous_usage) == (True, True, True)


def test_generate_logprobs() -> None:
    gateway = Gateway(kinds=("sglang",))
    body = {"model": MODEL, "text": "a", "top_logprobs_num": 3, "logprob_start_len": 0, "token_ids_logprob": [4]}
    assert gateway.plan(GENERATE, body).response.logprobs is None
    assert gateway.plan(GENERATE, {**body, "return_logprob": True}).response.logprobs == 3
    assert (gateway.engine("sglang").logprob_start_len, list(gateway.engine("sglang").token_ids_logprob)) == (0, [4])


# Parsers and constraints --------------------------------------------------------------------------


def test_parsers_of_a_chat_with_tools() -> None:
    gateway = Gateway(flags=parser_flags("qwen", "qwen3"))
    planned = gateway.plan(
        CHAT, chat(tools=[TOOL], parallel_tool_calls=False, chat_template_kwargs={"enable_thinking": True})
    )
    parser = planned.parser
    assert (parser.tool, parser.reasoning, parser.armed, parser.forced, parser.parallel) == (
        "qwen",
        "qwen3",
        True,
        "",
        False,
    )
    assert json.loads(parser.tools) == [TOOL]
    assert planned.response.skip_special_tokens is False
    assert gateway.engine().reasoning_on is True


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}])
def test_no_tool_parser_without_callable_tools(fields: dict[str, Any]) -> None:
    planned = Gateway(flags=parser_flags("qwen")).plan(CHAT, chat(**fields))
    assert (planned.parser.tool, planned.parser.tools, planned.response.skip_special_tokens) == (None, b"", True)


def test_reasoning_stays_in_content_when_asked() -> None:
    gateway = Gateway(flags=parser_flags("", "qwen3"))
    planned = gateway.plan(CHAT, chat(separate_reasoning=False, thinking={"type": "enabled"}))
    assert (planned.parser.reasoning, planned.parser.armed) == (None, False)
    assert gateway.engine().reasoning_on is True


@pytest.mark.parametrize(
    ("choice", "forced", "schema"),
    [
        ("required", "array", "array"),
        ({"type": "function", "function": {"name": "f"}}, "function:f", "object"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, "array", "array"),
    ],
)
def test_forced_calls_are_constrained(choice: Any, forced: str, schema: str) -> None:
    gateway = Gateway()
    planned = gateway.plan(CHAT, chat(tools=[TOOL], tool_choice=choice))
    assert (planned.parser.forced, planned.response.options) == (forced, {"forced": True})
    constraint = gateway.engine().constraint
    assert constraint is not None
    assert (constraint.kind, constraint.origin) == ("json_schema", "tool")
    assert json.loads(constraint.value)["type"] == schema


@pytest.mark.parametrize(("start", "closes"), [("", True), ("first_token", True), ("after_reasoning", False)])
def test_a_forced_call_behind_an_open_thought(start: str, closes: bool) -> None:
    gateway = Gateway(flags=parser_flags("glm47_moe", "glm45"), decoding_start=start)
    body = chat(tools=[TOOL], tool_choice="required", chat_template_kwargs={"enable_thinking": True})
    planned = gateway.plan(CHAT, body)
    constraint = gateway.engine().constraint
    assert constraint is not None
    assert ("</think>" in constraint.value) == closes
    assert gateway.engine().reasoning_on != closes
    assert planned.parser.forced == "tag"
    assert planned.parser.leads == (() if closes else ("<tool_call>",))


def test_forced_call_and_format_meet() -> None:
    gateway = Gateway(kinds=("vllm", "sglang"))
    gateway.plan(CHAT, chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}))
    origins = {kind: gateway.engine(kind).constraint.origin for kind in ("vllm", "sglang")}  # type: ignore[union-attr]
    assert origins == {"vllm": "tool", "sglang": "output"}


def test_schema_constraint_keeps_order_and_numbers() -> None:
    gateway = Gateway()
    schema = {"z": {"maximum": 2**64}, "a": "é"}
    gateway.plan(CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}))
    assert gateway.engine().constraint.value == '{"z":{"maximum":18446744073709551616},"a":"é"}'  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, chat(regex="a"), "regex"),
        (CHAT, chat(ebnf="a"), "ebnf"),
        (COMPLETIONS, {"prompt": "a", "json_schema": "{}"}, "json_schema"),
        (GENERATE, {"text": "a", "sampling_params": {"ebnf": "a"}}, "ebnf"),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_object"}}}, "json_schema"),
    ],
)
def test_output_constraints(path: str, body: dict[str, Any], kind: str) -> None:
    gateway = Gateway()
    gateway.plan(path, {"model": MODEL, **body})
    constraint = gateway.engine().constraint
    assert constraint is not None and (constraint.kind, constraint.origin) == (kind, "output")


def test_kimi_ids_count_the_calls_of_the_conversation() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [*HI, {"role": "assistant", "tool_calls": [call, {**call, "id": "b"}]}, *HI]
    gateway = Gateway(id="kimi-k2")
    parser = gateway.plan(CHAT, {"model": "kimi-k2", "messages": history, "tools": [TOOL]}).parser
    assert (parser.id_style, parser.id_offset) == ("kimi", 2)
    parser = Gateway().plan(CHAT, chat(messages=history, tools=[TOOL])).parser
    assert (parser.id_style, parser.id_offset) == ("call", 0)


def test_harmony_models() -> None:
    gateway = Gateway(id="gpt-oss-20b")
    planned = gateway.plan(
        CHAT, {"model": "gpt-oss-20b", "messages": HI, "stop": "x", "tools": [TOOL], "tool_choice": "required"}
    )
    request = gateway.engine()
    assert planned.parser.harmony is True
    assert planned.stop.keep is True
    assert request.keep_stop_token is True
    assert (request.text, list(request.sampling.stop), planned.stop.strings) == ("[harmony]", [], ["x"])
    assert set(request.sampling.stop_token_ids) == {200002, 200012}
    assert request.constraint is not None and request.constraint.kind == "structural_tag"


# Messages and turns -------------------------------------------------------------------------------


def test_messages_plan() -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 5, "stop_sequences": ["a"] * 6, "stream": True}
    planned = Gateway().plan(MESSAGES, body)
    assert (planned.response.api, planned.endpoint, planned.response.stream) == ("messages", "messages", True)
    assert planned.response.options == {"thinking": False, "input_tokens": planned.parts[0].prompt_tokens}
    assert len(planned.stop.strings) == 6


def test_zero_tokens_are_answered_at_once() -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 0}
    answer = Gateway().answer(MESSAGES, body)
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    stream = Gateway().send(MESSAGES, {**body, "stream": True})
    events = re.findall(rb"^event: (\w+)$", stream.body, re.MULTILINE)  # type: ignore[union-attr]
    assert events == [b"message_start", b"message_delta", b"message_stop"]


def test_count_tokens() -> None:
    gateway = Gateway()
    count = gateway.answer("/v1/messages/count_tokens", {"model": MODEL, "messages": HI, "system": "s"})
    assert count == {"input_tokens": len(json.dumps(gateway.render.messages))}


def test_turn_of_a_session() -> None:
    planned = Gateway().plan(RESPONSES, {"model": MODEL, "input": "q", "parallel_tool_calls": False})
    assert (planned.response.api, planned.endpoint, planned.response.stream) == ("events", "responses", False)
    assert Gateway().plan(RESPONSES, {"model": MODEL, "input": "q", "stream": True}).response.stream is True
    assert (planned.parts[0].engine_id, planned.parser.parallel) == ("turn-1", False)


# Answers without an engine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "expect"),
    [
        ("/v1/tokenize", {"model": MODEL, "prompt": "hé"}, {"tokens": [104, 233], "count": 2, "char_count": 2}),
        (
            "/v1/tokenize",
            {"model": "", "prompt": ["a", "bc"]},
            {"tokens": [[97], [98, 99]], "count": [1, 2], "char_count": [1, 2]},
        ),
        ("/v1/tokenize", {"model": "", "prompt": []}, {"tokens": [], "count": [], "char_count": []}),
        ("/v1/detokenize", {"model": MODEL, "tokens": [104, 105]}, {"text": "hi"}),
        ("/v1/detokenize", {"model": MODEL, "tokens": [[104], []]}, {"text": ["h", ""]}),
        ("/v1/detokenize", {"model": MODEL, "tokens": []}, {"text": ""}),
        (
            "/parse/reasoning",
            {"text": "<think>a</think>b", "reasoning_parser": "qwen3"},
            {"normal_text": "b", "reasoning_text": "a", "success": True},
        ),
        (
            "/parse/function_call",
            {
                "text": 'x<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
                "tool_call_parser": "qwen",
                "tools": [TOOL],
            },
            {
                "remaining_text": "x",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
                "success": True,
            },
        ),
    ],
)
def test_answers(path: str, body: dict[str, Any], expect: dict[str, Any]) -> None:
    got = Gateway().answer(path, body)
    if "tool_calls" in expect:
        got["tool_calls"][0]["function"]["arguments"] = json.dumps(
            json.loads(got["tool_calls"][0]["function"]["arguments"])
        )
    assert got == expect


@pytest.mark.parametrize(
    ("body", "count", "options"),
    [
        ({"input": "hi"}, 1, {"encoding_format": "float", "dimensions": 0}),
        (
            {"input": ["a", "b", "c"], "encoding_format": "base64", "dimensions": 4},
            3,
            {"encoding_format": "base64", "dimensions": 4},
        ),
        ({"input": [[1, 2], [3]]}, 2, {"encoding_format": "float", "dimensions": 0}),
    ],
)
def test_embeddings(body: dict[str, Any], count: int, options: dict[str, Any]) -> None:
    planned = Gateway(kinds=("vllm", "trtllm")).plan("/v1/embeddings", {"model": MODEL, **body})
    assert (planned.response.api, len(planned.parts), planned.response.options) == ("embeddings", count, options)
    assert all(set(part.requests) == {"vllm"} for part in planned.parts)


def test_embedding_text_gets_the_tokenizers_own_frame() -> None:
    planned = Gateway().plan("/v1/embeddings", {"model": MODEL, "input": "hi"})
    assert planned.parts[0].prompt_tokens == 3


def test_every_path_is_handled() -> None:
    assert {CHAT, COMPLETIONS, GENERATE, MESSAGES, "/v1/embeddings", "/v1/classify", "/v1/tokenize"} <= PATHS


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a"}, "stop_token_ids"),
        (GENERATE, {"text": "a"}, "sampling_params.stop_token_ids"),
    ],
)
def test_stop_tokens_that_are_masked_are_of_the_vocabulary(path: str, body: dict[str, Any], param: str) -> None:
    def plan(**sampling: Any) -> Any:
        given = {"sampling_params": sampling} if path == GENERATE else sampling
        return Gateway().plan(path, {"model": MODEL, **body, **given})

    least = "min_new_tokens" if path == GENERATE else "min_tokens"
    with pytest.raises(ApiError, match="outside the vocabulary") as refusal:
        plan(stop_token_ids=[5, 0x110000], **{least: 1})
    assert (refusal.value.status, refusal.value.param) == (400, param)
    assert plan(stop_token_ids=[5, 0x110000]).stop.token_ids == [5, 0x110000]
    assert plan(stop_token_ids=[5], **{least: 1}).stop.token_ids == [5]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "include_stop_str_in_output": True}),
        (COMPLETIONS, {"prompt": "a", "include_stop_str_in_output": True}),
        (GENERATE, {"text": "a", "sampling_params": {"include_stop_str_in_output": True}}),
    ],
)
def test_the_other_name_of_no_stop_trim(path: str, body: dict[str, Any]) -> None:
    assert Gateway().plan(path, {"model": MODEL, **body}).stop.keep
