"""Whatever a client sends, the answer is a plan, an answer, or a refusal."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from api_context import JSON, MODEL, Gateway

from smg.api import responses
from smg.api.decode import nesting_exceeds
from smg.api.entry import PATHS
from smg.api.errors import ApiError, render_error

GATEWAY = Gateway(kinds=("vllm", "sglang"), context_length=4096)
BODIES = [*sorted(PATHS - {responses.TURN_PATH}), "/v1/responses"]
FUZZ = settings(max_examples=100, deadline=None)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS: dict[str, list[Any]] = {
    "model": [MODEL, "gpt-4o", "kimi-k3", "glm-5.3", "deepseek-v4-flash", "minimax-m2"],
    "messages": [
        [{"role": "user", "content": "hi"}],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}],
            }
        ],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    ],
    "prompt": ["a", ["a", "b"], [1, 2]],
    "input": ["a", ["a"], [{"role": "user", "content": "x"}]],
    "text": ["a", {"format": {"type": "json_object"}}],
    "tools": [
        [{"type": "function", "function": {"name": "f"}}],
        [{"type": "function", "name": "f"}],
        [{"name": "f", "input_schema": {"type": "object"}}],
    ],
    "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "f"}}, {"type": "any"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}],
    "sampling_params": [{}, {"n": 2}],
    "max_tokens": [5],
    "tokens": [[1], [[1]]],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}],
    "reasoning": [{"effort": "low"}],
    "stream": [True],
    "n": [2],
    "best_of": [3],
    "logit_bias": [{"1": 2}],
    "stop": ["a", ["a"]],
    "query": ["q"],
    "documents": [["d"]],
    "reasoning_parser": ["qwen3"],
    "tool_call_parser": ["qwen"],
}


def check(path: str, body: bytes, headers: dict[str, str] = JSON) -> None:
    """The request is handled, or refused with an error that can be rendered."""
    try:
        GATEWAY.send(path, body, headers)
    except ApiError as error:
        status, _, answer = render_error(error, path, "req")
        assert 400 <= status < 600
        assert answer
        assert error.status != 500


@FUZZ
@given(st.sampled_from(BODIES), st.binary(max_size=60))
def test_bytes(path: str, body: bytes) -> None:
    check(path, body)
    check(path, body, {})


@FUZZ
@given(st.sampled_from(BODIES), values)
def test_json(path: str, value: Any) -> None:
    with contextlib.suppress(ValueError):
        check(path, json.dumps(value).encode())


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(BODIES),
    st.fixed_dictionaries({}, optional={name: st.sampled_from(good) | values for name, good in FIELDS.items()}),
)
def test_nearly_right_bodies(path: str, body: dict[str, Any]) -> None:
    body.setdefault("model", MODEL)
    body.setdefault("messages", FIELDS["messages"][0])
    check(path, json.dumps(body).encode())


@FUZZ
@given(st.sampled_from(BODIES), st.data())
def test_truncated_bodies(path: str, data: st.DataObject) -> None:
    body = json.dumps({name: good[0] for name, good in FIELDS.items()}).encode()
    check(path, body[: data.draw(st.integers(0, len(body)))])


brackets = st.recursive(
    st.sampled_from(["", '"', "\\", '\\"', "{", "[", "}", "]", '{"', "\\\\", 1, None]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", '{"', "\\", "]"]), inner, max_size=3)
    ),
    max_leaves=30,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@FUZZ
@given(brackets)
def test_nesting_is_measured_exactly(value: Any) -> None:
    value = [value, [[]] * 40]
    depth = depth_of(value)
    body = json.dumps(value).encode()
    assert nesting_exceeds(body, depth - 1)
    assert not nesting_exceeds(body, depth)
