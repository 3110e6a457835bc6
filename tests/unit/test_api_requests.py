"""Recorded requests: which are accepted, and how the others are refused (status, type, code, param)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_context import MODEL, Gateway

from smg.api.errors import ApiError, render_error

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "conformance" / "api_requests.json").read_text())
GATEWAY = Gateway(vocab_size=0)
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def outcome(path: str, body: Any, content_type: str | None = "application/json") -> list[Any] | None:
    """None when the request is accepted, else ``[status, type, code, param]`` (all but the status None for plain
    text)."""
    headers = {} if content_type is None else {"content-type": content_type}
    try:
        GATEWAY.send(path, body, headers)
    except ApiError as error:
        status, answer_headers, answer = render_error(error, path, "req")
        if dict(answer_headers)["content-type"].startswith("text/plain"):
            return [status, None, None, None]
        inner = json.loads(answer)["error"]
        if isinstance(inner, str):
            return [status, None, None, None]
        return [status, inner["type"], inner.get("code"), inner.get("param")]
    return None


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_recorded_request(case: dict[str, Any]) -> None:
    body = case["raw"].encode() if "raw" in case else case["body"]
    assert outcome(case["path"], body, case.get("content_type", "application/json")) == case["expect"]


def refusal(code: str, param: str | None = None, status: int = 400) -> list[Any]:
    return [status, "invalid_request_error", code, param]


def prompt(text: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI, **more}


RESPONSES = "/v1/responses"


def response(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **more}


def file_part(**fields: Any) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": "hi"}, {"type": "input_file", **fields}]
    return {"type": "message", "role": "user", "content": parts}


def message(block: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": "hi"}, block]
    return {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": content}]}


TOOLS = [{"type": "function", "function": {"name": "f"}}]
NESTED_CHOICE = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
}


@pytest.mark.parametrize(
    ("path", "body", "expect"),
    [
        # Token-id prompts, one or a batch.
        ("/v1/completions", prompt([1, 2]), None),
        ("/v1/completions", prompt([[1, 2], [3]]), None),
        ("/v1/completions", prompt([[1], "a"]), refusal("invalid_type", "prompt")),
        ("/v1/completions", prompt([-1]), refusal("integer_below_min_value", "prompt")),
        ("/v1/completions", prompt([0x110000]), refusal("invalid_value", "prompt")),
        ("/v1/completions", prompt([[]]), refusal("prompt_empty", "prompt")),
        ("/v1/completions", prompt(""), refusal("prompt_empty", "prompt")),
        ("/v1/completions", prompt(["a"] * 1025), refusal("array_above_max_length", "prompt")),
        ("/v1/completions", prompt(["a"] * 100, n=41), refusal("integer_above_max_value", "n")),
        ("/v1/completions", prompt("a", best_of=1), None),
        ("/v1/completions", prompt("a", best_of=1, stream=True), None),
        ("/v1/completions", prompt("a", logit_bias={"a": 1}), refusal("logit_bias_invalid_key")),
        ("/v1/completions", prompt("a", logit_bias={"1114112": 1}), refusal("logit_bias_invalid_key")),
        ("/v1/completions", prompt("a", json_schema="no"), refusal("json_schema_schema_not_object", "json_schema")),
        ("/v1/completions", prompt("a", json_schema="[]"), refusal("json_schema_schema_not_object", "json_schema")),
        # The public API's own forms.
        (CHAT, chat(tools=TOOLS, tool_choice=NESTED_CHOICE), None),
        (CHAT, chat(logit_bias={"999999999": 1}), refusal("logit_bias_invalid_key")),
        (CHAT, chat(sampling_seed=2**64), refusal("invalid_type", "sampling_seed")),
        (
            CHAT,
            {"model": MODEL, "messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
            None,
        ),
        (CHAT, {"model": MODEL, "messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]}, None),
        # What agents and newer clients send along.
        (RESPONSES, response(client_metadata={"session_id": "s"}, prompt_cache_retention="in_memory"), None),
        (RESPONSES, response(prompt_cache_options={"mode": "explicit"}, background_options={}), None),
        (RESPONSES, response(image={}, access_programs={"cyber": "standard"}), None),
        (RESPONSES, response(moderation={"model": "m"}), refusal("unknown_parameter", "moderation")),
        (RESPONSES, response(tools=[{"type": "tool_search"}, {"type": "programmatic_tool_calling"}]), None),
        (RESPONSES, response(input=[file_part(file_id="f")]), None),
        (RESPONSES, response(input=[file_part(file_data="data:,a")]), refusal("multimodal_not_supported")),
        (RESPONSES, response(input=[file_part(file_url="http://a/b")]), refusal("multimodal_not_supported")),
        (
            "/v1/messages",
            message({"type": "text", "text": "a"}) | {"output_format": {"type": "json_schema", "schema": {}}},
            [400, "invalid_request_error", None, None],
        ),
        ("/v1/messages", message({"type": "container_upload", "file_id": "f"}), None),
        ("/v1/messages", message({"type": "compaction", "content": "so far"}), None),
        ("/v1/messages", message({"type": "tool_search_tool_result", "tool_use_id": "t", "content": {}}), None),
        # What an engine would not survive.
        ("/generate", {"model": MODEL, "text": ""}, refusal("resolve_input_failed", "text")),
        ("/generate", {"model": MODEL, "input_ids": [0x110000]}, refusal("resolve_input_failed", "input_ids")),
        (
            "/generate",
            {"model": MODEL, "text": "a", "sampling_params": {"temperature": -1}},
            refusal("build_request_failed", "sampling_params.temperature"),
        ),
        (
            "/generate",
            {"model": MODEL, "text": "a", "sampling_params": {"n": 0}},
            refusal("build_request_failed", "sampling_params.n"),
        ),
        (
            "/generate",
            {"model": MODEL, "text": "a", "sampling_params": {"min_new_tokens": 3, "max_new_tokens": 2}},
            refusal("build_request_failed", "sampling_params.min_new_tokens"),
        ),
        ("/generate", {"model": MODEL, "text": "a", "sampling_params": {"top_k": 0}}, None),
        ("/v1/embeddings", {"model": MODEL, "input": [[1, 2], [3]]}, None),
        ("/v1/embeddings", {"model": MODEL, "input": [1, 2]}, None),
        ("/v1/embeddings", {"model": MODEL, "input": [[]]}, refusal("empty_input")),
        (
            "/v1/embeddings",
            {"model": MODEL, "input": "a", "encoding_format": "x"},
            refusal("invalid_value", "encoding_format"),
        ),
        (
            "/v1/embeddings",
            {"model": MODEL, "input": "a", "dimensions": 0},
            refusal("integer_below_min_value", "dimensions"),
        ),
        ("/rerank", {"documents": []}, refusal("missing_required_parameter", "query")),
        ("/rerank", {"query": "a", "documents": []}, [501, None, None, None]),
    ],
)
def test_own_rule(path: str, body: dict[str, Any], expect: list[Any] | None) -> None:
    assert outcome(path, body) == expect


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(value, "cannot be empty") for value in ("", [], [""], ["a", ""], [[]], [[1], []])],
        *[(value, "expected a text") for value in (None, 3, {}, {"a": 1}, ["a", 1], [1, ""], [-1], [True], [[["a"]]])],
    ],
)
def test_embedding_inputs_that_are_refused(value: Any, text: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        GATEWAY.send("/v1/embeddings", {"model": MODEL, "input": value})
    assert (caught.value.status, caught.value.code) == (400, "empty_input")


def test_a_client_is_told_in_its_own_words_that_there_are_no_threads() -> None:
    body = message({"type": "text", "text": "a"}) | {"thread": {"type": "create"}}
    with pytest.raises(ApiError) as caught:
        GATEWAY.send("/v1/messages", body, {"content-type": "application/json"})
    error = json.loads(render_error(caught.value, "/v1/messages", "req")[2])["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_prompt_must_leave_room_for_a_token() -> None:
    gateway = Gateway(context_length=10)
    gateway.plan("/v1/completions", prompt("123456789"))
    gateway.plan("/v1/completions", prompt("1234567890", max_tokens=0))
    gateway.plan("/v1/embeddings", {"model": MODEL, "input": "123456789"})
    for path, body in (
        ("/v1/completions", prompt("1234567890")),
        ("/v1/completions", prompt("12345678901", max_tokens=0)),
        ("/generate", {"model": MODEL, "text": "1234567890"}),
        (CHAT, chat()),
        ("/v1/embeddings", {"model": MODEL, "input": "1234567890"}),
    ):
        with pytest.raises(ApiError) as caught:
            gateway.send(path, body)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_constraint_that_does_not_compile_is_refused() -> None:
    gateway = Gateway()
    gateway.broken_constraints["("] = "unbalanced"
    with pytest.raises(ApiError) as caught:
        gateway.send(CHAT, chat(regex="("))
    assert caught.value.code == "invalid_request_parameters"
    with pytest.raises(ApiError) as caught:
        gateway.send("/generate", {"model": MODEL, "text": "a", "sampling_params": {"regex": "("}})
    assert caught.value.code == "build_request_failed"


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (CHAT, chat(n=2), "invalid_request_parameters"),
        ("/generate", {"model": MODEL, "text": "a", "sampling_params": {"n": 2}}, "build_request_failed"),
        ("/v1/completions", prompt("a", best_of=2), "invalid_request_parameters"),
    ],
)
def test_what_the_only_engine_kind_cannot_do_is_refused(path: str, body: dict[str, Any], code: str) -> None:
    with pytest.raises(ApiError) as caught:
        Gateway(kinds=("mlx",)).send(path, body)
    assert (caught.value.status, caught.value.code) == (400, code)
    planned = Gateway(kinds=("mlx", "vllm")).plan(path, body)
    assert list(planned.parts[0].requests) == ["vllm"]


def test_embeddings_need_an_engine_that_embeds() -> None:
    with pytest.raises(ApiError) as caught:
        Gateway(kinds=("trtllm",)).send("/v1/embeddings", {"model": MODEL, "input": "a"})
    assert (caught.value.status, caught.value.code) == (501, "unsupported_backend")


def test_model_without_workers_or_tokenizer() -> None:
    with pytest.raises(ApiError) as caught:
        Gateway(kinds=()).send(CHAT, chat())
    assert (caught.value.status, caught.value.code) == (503, "no_available_workers")
    with pytest.raises(ApiError) as caught:
        Gateway(tokenizer="").send(CHAT, chat())
    assert (caught.value.status, caught.value.code) == (503, "tokenizer_load_failed")
