"""The official OpenAI client against Chat Completions."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from pydantic import BaseModel

pytestmark = pytest.mark.timeout(60)

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in fields.items()},
                "required": list(fields),
                "additionalProperties": False,
            },
        },
    }
    for name, fields in (("get_weather", {"city": "string", "days": "integer"}), ("get_time", {"zone": "string"}))
]
# The engine's script thinks only in its answer to the second.
RAIN = {False: "4 degrees and rain", True: "4 degrees, thoughtful rain"}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def essence(completion: ChatCompletion) -> dict[str, Any]:
    """What two answers to one request have in common: call ids are each answer's own, the second request finds
    its prompt in the engine's cache, and blanks between a thought and a call are content in a stream and none in a
    whole answer."""
    choices = []
    for choice in completion.choices:
        message = choice.message.model_dump()
        content = message["content"] or ""
        choices.append(
            {
                "index": choice.index,
                "finish_reason": choice.finish_reason,
                "content": content if content.strip() else None,
                "reasoning": message.get("reasoning_content"),
                "calls": [call["function"] | {"parsed_arguments": None} for call in message.get("tool_calls") or ()],
                "logprobs": choice.logprobs,
            }
        )
    usage = completion.usage
    assert usage is not None and usage.completion_tokens_details is not None
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens)
    return {"model": completion.model, "choices": choices, "usage": counts}


def both(client: OpenAI, **request: Any) -> tuple[ChatCompletion, ChatCompletion]:
    """The whole answer, and the one that the client's stream helper adds up."""
    whole = client.chat.completions.create(**request)
    with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    return whole, streamed


def test_plain(openai_client: OpenAI, model: str) -> None:
    request = {"model": model, "messages": user("What do whales eat?"), "max_completion_tokens": 12, "seed": 3}
    whole = openai_client.chat.completions.create(**request)
    assert whole.object == "chat.completion"
    assert whole.model == model
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    again = openai_client.chat.completions.create(**request)
    assert again.choices == whole.choices
    assert again.id != whole.id


def test_stream_chunks(openai_client: OpenAI, model: str) -> None:
    messages = user("What do whales eat in winter?")
    whole = openai_client.chat.completions.create(model=model, messages=messages, seed=5)
    chunks = list(
        openai_client.chat.completions.create(
            model=model, messages=messages, seed=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 5
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    last, total = chunks[-1].usage, whole.usage
    assert last is not None and total is not None
    assert (last.prompt_tokens, last.completion_tokens) == (total.prompt_tokens, total.completion_tokens)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["stop"]


def test_running_usage(openai_client: OpenAI) -> None:
    stream = openai_client.chat.completions.create(
        model="qwen3-vllm", messages=user("Say the alphabet"), stream=True,
        stream_options={"include_usage": True}, extra_body={"stream_options": {"continuous_usage_stats": True}},
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert len(counts) > 1
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("text", ["What do whales eat?", "Grüße", "Say the alphabet"])
def test_stream_helper_adds_up_to_the_whole_answer(openai_client: OpenAI, model: str, text: str) -> None:
    whole, streamed = both(openai_client, model=model, messages=user(text), seed=1)
    assert essence(streamed) == essence(whole)


def test_several_choices(openai_client: OpenAI, model: str) -> None:
    whole, streamed = both(openai_client, model=model, messages=user("Tell me of whales"), n=2, seed=4)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert essence(streamed) == essence(whole)


def test_logprobs(openai_client: OpenAI, model: str) -> None:
    whole, streamed = both(openai_client, model=model, messages=user("Say the alphabet"), logprobs=True, top_logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) > 4
    assert "".join(entry.token for entry in logprobs.content) == whole.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert all(bytes(entry.bytes or ()).decode() == entry.token for entry in logprobs.content)
    assert essence(streamed) == essence(whole)


@pytest.mark.parametrize("stop", ["gamma", ["delta", "gamma"], ["ma de"]])
def test_stop(openai_client: OpenAI, model: str, stop: Any) -> None:
    whole, streamed = both(openai_client, model=model, messages=user("Say the alphabet"), stop=stop)
    assert whole.choices[0].finish_reason == "stop"
    content = whole.choices[0].message.content
    assert content == ("alpha beta gam" if stop == ["ma de"] else "alpha beta ")
    assert essence(streamed)["choices"] == essence(whole)["choices"]


def test_characters_of_several_tokens(openai_client: OpenAI, model: str) -> None:
    whole = openai_client.chat.completions.create(model=model, messages=user("Grüße"))
    assert whole.choices[0].message.content == "Grüße aus Köln 🐋 — «ça va»?"


# ---- tools and reasoning


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_tool_loop(openai_client: OpenAI, model: str, streaming: bool, thinking: bool) -> None:
    messages = user("Is it cold in Oslo?")
    request: dict[str, Any] = {"model": model, "tools": TOOLS, "extra_body": THINKING if thinking else None}

    def ask() -> ChatCompletion:
        if not streaming:
            return openai_client.chat.completions.create(messages=messages, **request)
        with openai_client.chat.completions.stream(messages=messages, **request) as stream:
            return stream.get_final_completion()

    first = ask().choices[0]
    assert first.finish_reason == "tool_calls"
    assert not (first.message.content or "").strip()
    assert (getattr(first.message, "reasoning_content", None) or "").strip() == "I should look it up."
    calls = first.message.tool_calls
    assert calls is not None and len(calls) == 1
    assert calls[0].type == "function"
    assert calls[0].function.name == "get_weather"
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo", "days": 2}

    messages.append(first.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": RAIN[thinking]})
    last = ask().choices[0]
    assert last.finish_reason == "stop"
    assert (last.message.content or "").strip() == "It is 4 degrees in Oslo, with rain."
    assert not last.message.tool_calls


def test_text_and_two_calls(openai_client: OpenAI, model: str) -> None:
    whole, streamed = both(openai_client, model=model, messages=user("weather and time"), tools=TOOLS)
    message = whole.choices[0].message
    assert message.content is not None and message.content.strip() == "Two things to look up."
    assert [call.function.name for call in message.tool_calls or ()] == ["get_weather", "get_time"]
    assert len({call.id for call in message.tool_calls or ()}) == 2
    assert essence(streamed) == essence(whole)
    one = openai_client.chat.completions.create(
        model=model, messages=user("weather and time"), tools=TOOLS, parallel_tool_calls=False
    )
    assert [call.function.name for call in one.choices[0].message.tool_calls or ()] == ["get_weather"]


def test_reasoning(openai_client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {
        "model": model, "messages": user("What do whales eat?"), "seed": 2, "extra_body": THINKING,
    }  # fmt: skip
    whole, streamed = both(openai_client, **request)
    shown = whole.choices[0].message
    assert shown.reasoning_content and shown.content
    assert "think>" not in shown.content + shown.reasoning_content
    assert essence(streamed) == essence(whole)
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert (whole.usage.completion_tokens_details.reasoning_tokens or 0) > 0


# ---- structured outputs: the engine generates under the request's grammar


class Step(BaseModel):
    explanation: str
    done: bool


class Plan(BaseModel):
    title: str
    kind: Literal["short", "long"]
    steps: list[Step]


@pytest.fixture(scope="module")
def grammar() -> None:
    pytest.importorskip("xgrammar", reason="the embedded engine needs xgrammar to generate under a constraint")


@pytest.mark.usefixtures("grammar")
def test_parse_helper(openai_client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {
        "model": model, "messages": user("Plan a trip"), "response_format": Plan, "seed": 7,
    }  # fmt: skip
    parsed = openai_client.chat.completions.parse(**request)
    plan = parsed.choices[0].message.parsed
    assert isinstance(plan, Plan)
    with openai_client.chat.completions.stream(**request) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == plan


@pytest.mark.usefixtures("grammar")
def test_json_object(openai_client: OpenAI, model: str) -> None:
    whole = openai_client.chat.completions.create(
        model=model, messages=user("Give me JSON"), response_format={"type": "json_object"}, seed=1, max_tokens=400
    )
    assert isinstance(json.loads(whole.choices[0].message.content or ""), dict)


@pytest.mark.usefixtures("grammar")
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=["required", "named"]
)
def test_forced_calls(openai_client: OpenAI, model: str, choice: Any) -> None:
    request: dict[str, Any] = {
        "model": model, "messages": user("Whatever"), "tools": TOOLS, "tool_choice": choice, "seed": 3,
        "max_tokens": 300,
    }  # fmt: skip
    whole, streamed = both(openai_client, **request)
    calls = whole.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.function.name in ("get_weather", "get_time")
        assert set(json.loads(call.function.arguments)) in ({"city", "days"}, {"zone"})
    assert essence(streamed) == essence(whole)
    if choice != "required":
        assert calls[0].function.name == "get_time"


# ---- errors


def test_errors(openai_client: OpenAI, url: str) -> None:
    create = openai_client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="nobody", messages=user("x"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="qwen3-vllm", messages=user("x"), temperature=3)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.BadRequestError) as empty:
        create(model="qwen3-vllm", messages=[])
    assert empty.value.code == "empty_array"
    with pytest.raises(openai.InternalServerError):
        create(model="qwen3-vllm", messages=user("Break down"))
    with pytest.raises(openai.NotFoundError):
        OpenAI(base_url=f"{url}/nowhere", api_key="x", max_retries=0).models.list()


def test_an_error_in_the_stream_is_raised_by_the_client(openai_client: OpenAI, model: str) -> None:
    stream = openai_client.chat.completions.create(model=model, messages=user("Break later"), stream=True)
    with pytest.raises(openai.APIError):
        list(stream)
