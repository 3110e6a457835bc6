"""The official OpenAI client against completions, models and embeddings."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

pytestmark = pytest.mark.timeout(60)


def texts_by_choice(client: OpenAI, **request: Any) -> list[str]:
    """The texts that a completion's stream adds up to, by choice."""
    found: dict[int, str] = {}
    for chunk in client.completions.create(stream=True, **request):
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return [found[index] for index in sorted(found)]


def test_completion(openai_client: OpenAI, lenient_client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "prompt": "Once upon a time", "max_tokens": 12, "seed": 1}
    whole = openai_client.completions.create(**request)
    assert whole.object == "text_completion"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert texts_by_choice(lenient_client, **request) == [whole.choices[0].text]


def test_list_of_prompts_and_choices(openai_client: OpenAI, lenient_client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {
        "model": model, "prompt": ["One day", "Two whales"], "n": 2, "max_tokens": 7, "echo": True, "seed": 1,
    }  # fmt: skip
    whole = openai_client.completions.create(**request)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    starts = ["One day", "One day", "Two whales", "Two whales"]
    assert all(choice.text.startswith(start) for choice, start in zip(whole.choices, starts, strict=True))
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 28
    assert texts_by_choice(lenient_client, **request) == [choice.text for choice in whole.choices]


def test_token_ids(openai_client: OpenAI, lenient_client: OpenAI, model: str) -> None:
    by_ids: dict[str, Any] = {"model": model, "prompt": [70, 71, 72], "max_tokens": 5, "seed": 1}
    whole = openai_client.completions.create(**by_ids)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 3
    assert texts_by_choice(lenient_client, **by_ids) == [whole.choices[0].text]
    several = openai_client.completions.create(model=model, prompt=[[70, 71], [72, 73, 74]], max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.usage is not None
    assert several.usage.prompt_tokens == 5


def test_logprobs(openai_client: OpenAI, lenient_client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "prompt": "Once", "max_tokens": 6, "logprobs": 2, "seed": 1}
    whole = openai_client.completions.create(**request)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == whole.choices[0].text
    assert len(logprobs.token_logprobs) == 6
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs or [{}])
    offsets = logprobs.text_offset or []
    assert [whole.choices[0].text[offset:].startswith(t) for offset, t in zip(offsets, logprobs.tokens, strict=True)]
    streamed: list[str] = []
    for chunk in lenient_client.completions.create(stream=True, **request):
        for choice in chunk.choices:
            streamed += (choice.logprobs.tokens or []) if choice.logprobs else []
    assert streamed == logprobs.tokens


@pytest.mark.parametrize("choices", [1, 2])
def test_logprobs_of_an_echoed_prompt(lenient_client: OpenAI, model: str, choices: int) -> None:
    request: dict[str, Any] = {
        "model": model, "prompt": "Grüße in winter", "max_tokens": 3, "logprobs": 2, "echo": True, "n": choices,
        "seed": 1,
    }  # fmt: skip
    # The clients' types do not know that the first token has no value.
    whole = lenient_client.completions.create(**request)
    assert whole.usage is not None
    for choice in whole.choices:
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
        assert len(logprobs.tokens) == whole.usage.prompt_tokens + 3
        assert logprobs.token_logprobs[0] is None
        assert all(value < 0 for value in logprobs.token_logprobs[1:])
        assert logprobs.top_logprobs is not None and logprobs.text_offset is not None
        assert logprobs.top_logprobs[0] is None
        assert all(len(top) == 2 for top in logprobs.top_logprobs[1:])
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text[offset:].startswith(token)
    streamed: dict[int, list[str]] = {}
    for chunk in lenient_client.completions.create(stream=True, **request):
        for choice in chunk.choices:
            streamed.setdefault(choice.index, []).extend((choice.logprobs.tokens or []) if choice.logprobs else [])
    assert streamed == {choice.index: choice.logprobs.tokens for choice in whole.choices if choice.logprobs}


def test_stop_and_usage_of_a_stream(openai_client: OpenAI, lenient_client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "prompt": "Say the alphabet", "stop": ["gamma"]}
    whole = openai_client.completions.create(**request)
    assert whole.choices[0].text == "alpha beta "
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(lenient_client.completions.create(stream=True, stream_options={"include_usage": True}, **request))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "alpha beta "
    assert chunks[-1].usage is not None


def test_models(openai_client: OpenAI) -> None:
    assert {entry.id for entry in openai_client.models.list()} == {"qwen3-vllm", "qwen3-sglang"}
    assert openai_client.models.retrieve("qwen3-vllm").id == "qwen3-vllm"
    with pytest.raises(openai.NotFoundError) as unknown:
        openai_client.models.retrieve("nobody")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings(lenient_client: OpenAI, model: str, encoding: Any) -> None:
    inputs = ["whales eat krill", "whales eat fish", "a tax form"]
    answer = lenient_client.embeddings.create(model=model, input=inputs, encoding_format=encoding)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    if encoding == "float":
        for entry in answer.data:
            assert math.isclose(sum(value * value for value in entry.embedding), 1.0, rel_tol=1e-3)


def test_embeddings_of_one_text_and_of_token_ids(lenient_client: OpenAI, model: str) -> None:
    one = lenient_client.embeddings.create(model=model, input="whales eat krill")  # the client asks for base64 itself
    many = lenient_client.embeddings.create(model=model, input=["whales eat krill", "other"])
    assert one.data[0].embedding == many.data[0].embedding
    ids = lenient_client.embeddings.create(model=model, input=[70, 71, 72])
    assert ids.usage.prompt_tokens == 3
    assert len(ids.data) == 1


def test_many_streams_at_once(url: str, model: str) -> None:
    async def one(client: AsyncOpenAI, number: int) -> None:
        words = f"number {number}"
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": words}], "seed": number}
        whole = await client.chat.completions.create(**body)
        async with client.chat.completions.stream(**body) as stream:
            text = (await stream.get_final_completion()).choices[0].message.content
        assert text == whole.choices[0].message.content

    async def all_of_them() -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30.0) as client:
            await asyncio.gather(*(one(client, number) for number in range(24)))

    asyncio.run(all_of_them())
