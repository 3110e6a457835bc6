"""A request of a known shape gets the plan that it gets on its own."""

from __future__ import annotations

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from api_context import JSON, MODEL, Gateway

from smg.api import chat_shape
from smg.api.chat import ChatRequest
from smg.api.chat_shape import MAX_KEY_BYTES, MAX_MOLDS, MAX_SHAPES, open_envelope
from smg.api.errors import ApiError
from smg.messages import GenerationPlan

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
HISTORY = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "b"},
]
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "max_tokens": 7, "seed": 1, "stop": ["x", "y"], "stream": True},
    {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2},
    {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {"tools": [WEATHER], "tool_choice": "none"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
    {"chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": False},
    {"reasoning_effort": "none", "logit_bias": {"65": 2}, "n": 3, "return_token_ids": True},
    {"thinking": {"type": "enabled"}, "user": "u1", "metadata": {"a": "b"}},
]
MODELS = (
    MODEL,
    "qwen3-8b",
    "kimi-k2",
    "deepseek-v3.1",
    "deepseek-v4",
    "minimax-m2",
    "glm-4.7",
    "gpt-4o",
    "gpt-oss-20b",
)


def plans(gateway: Gateway, body: Any) -> Any:
    """The plan without its times, or the refusal."""
    try:
        planned = gateway.plan(CHAT, body)
    except ApiError as error:
        return (error.status, error.code, error.message, error.param)
    plan: GenerationPlan = msgspec.structs.replace(
        planned.plan(1, 0), response=msgspec.structs.replace(planned.response, created=0)
    )
    return plan, planned.route_parts, planned.routing_key, planned.endpoint


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_plans_are_equal(model: str, parameters: dict[str, Any]) -> None:
    kinds = ("vllm", "sglang")
    warm = Gateway(kinds=kinds, id=model, tokenizer=model, reasoning_parser="qwen3", tool_parser="qwen")
    conversations = [
        [{"role": "user", "content": "first"}],
        [{"role": "user", "content": [{"type": "text", "text": "second"}]}],
        HISTORY,
        HISTORY[:2],
        [{"role": "root", "content": "r"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [],
        [{"role": "system", "content": "s"}, *HISTORY, {"role": "user", "content": "json"}],
    ]
    for messages in conversations * 2:
        body = {"model": model, "messages": messages, "rid": "r_t1", **parameters}
        fresh = Gateway(kinds=kinds, id=model, tokenizer=model, reasoning_parser="qwen3", tool_parser="qwen")
        assert plans(warm, body) == plans(fresh, body)


def test_another_state_of_the_model_table() -> None:
    gateway = Gateway()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a" * 20}], "rid": "r"}
    gateway.plan(CHAT, body)
    gateway.info = msgspec.structs.replace(gateway.info, context_length=5)
    with pytest.raises(ApiError, match="maximum context length is 5 tokens"):
        gateway.plan(CHAT, body)


def test_what_is_read_of_a_body() -> None:
    def key(**members: Any) -> Any:
        opened = open_envelope(json.dumps({"model": "m", "messages": [], **members}).encode(), JSON)
        return None if opened is None else opened[1]

    assert key() == key(rid="a", user=["x"], metadata={"a": "b"}, unknown=1)
    assert key(temperature=1) == key(temperature=1.0) != key()
    assert key(reasoning_effort=1) != key(reasoning_effort=1.0)
    assert key(tools=[]) != key(tools=[1]) and key(stop="a") != key(stop=["a"])
    assert key(temperature="x") is None
    assert key(tools=["x" * MAX_KEY_BYTES]) is None
    assert open_envelope(b'{"model":"m","messages":[]', JSON) is None
    assert open_envelope(b'{"model":"m","model":"n","messages":[]}', JSON) is None
    assert open_envelope(b'{"model":"m","messages":[]}', {}) is None


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) in (types.UnionType, Union, Literal):
        return all(map(_is_plain, get_args(kind))) or get_origin(kind) is Literal
    if hasattr(kind, "__metadata__"):
        kind = kind.__origin__
    return kind in (str, int, float, bool, type(None))


def test_members_of_the_key_can_be_compared() -> None:
    kinds = {field.name: field.type for field in msgspec.structs.fields(ChatRequest)}
    assert all(_is_plain(kinds[name]) for name in chat_shape.PLAIN_MEMBERS)
    groups = [*chat_shape.PLAIN_MEMBERS, *chat_shape.RAW_MEMBERS, *chat_shape.PASSING_MEMBERS]
    assert sorted(groups) == sorted(kinds)


def test_shapes_and_molds_are_bounded() -> None:
    gateway = Gateway(id="kimi-k2", tokenizer="kimi-k2")
    message = {"role": "user", "content": "a"}
    for seed in range(MAX_SHAPES + 3):
        gateway.plan(CHAT, {"model": "kimi-k2", "messages": [message], "seed": seed})
    assert len(gateway.chat_shapes) == 3
    for count in range(MAX_MOLDS + 3):  # the number of calls so far is part of what these models' ids continue
        calls = [{"role": "assistant", "tool_calls": [CALL] * count}] if count else []
        results = [HISTORY[2]] * count
        gateway.plan(CHAT, {"model": "kimi-k2", "messages": [message, *calls, *results], "seed": 1})
    assert len(gateway.chat_shapes) == 4
