"""The official OpenAI client against Responses and Conversations. Every event is checked against the client's types,
and what the client adds up from a stream is the object that is stored."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

pytestmark = pytest.mark.timeout(60)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": name,
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in fields.items()},
            "required": list(fields),
            "additionalProperties": False,
        },
    }
    for name, fields in (("get_weather", {"city": "string", "days": "integer"}), ("get_time", {"zone": "string"}))
]


@pytest.fixture
def client(lenient_client: OpenAI) -> OpenAI:
    """The answers are validated here, because the client's types demand a count that no engine reports."""
    return lenient_client


def complete(value: Any) -> Any:
    """``value`` with the count of tokens written to a cache, which is not known here."""
    if isinstance(value, dict):
        if "cached_tokens" in value:
            return value | {"cache_write_tokens": 0}
        return {key: complete(member) for key, member in value.items()}
    return [complete(member) for member in value] if isinstance(value, list) else value


def checked(response: Response) -> Response:
    """The response, valid in its type."""
    Response.model_validate(complete(response.to_dict()))
    return response


def checked_events(stream: Iterable[Any]) -> list[Any]:
    """All events, valid in their types and numbered from 0."""
    events = list(stream)
    for number, event in enumerate(events):
        EVENT.validate_python(complete(event.to_dict()))
        assert event.sequence_number == number
    return events


def without_ids(items: Iterable[Any]) -> list[Any]:
    """Items without their ids and without what the client itself adds to them."""
    return [bare(item.to_dict()) for item in items]


def bare(value: Any) -> Any:
    if isinstance(value, dict):
        added = ("id", "call_id", "parsed", "parsed_arguments")
        return {key: bare(member) for key, member in value.items() if key not in added}
    return [bare(member) for member in value] if isinstance(value, list) else value


def test_create_and_stored(client: OpenAI, model: str) -> None:
    made = checked(client.responses.create(model=model, input="Say the alphabet", metadata={"a": "b"}))
    assert (made.status, made.output_text) == ("completed", "alpha beta gamma delta epsilon")
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    again = checked(client.responses.retrieve(made.id))
    assert again.to_dict() == made.to_dict()
    [item] = client.responses.input_items.list(made.id).data
    assert item.to_dict()["content"] == [{"type": "input_text", "text": "Say the alphabet"}]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_stream(client: OpenAI, model: str) -> None:
    events = checked_events(client.responses.create(model=model, input="Grüße", stream=True))
    last = events[-1].response
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.output_text == "Grüße aus Köln 🐋 — «ça va»?"
    assert client.responses.retrieve(last.id).to_dict() == last.to_dict()


def test_logprobs(client: OpenAI, model: str) -> None:
    events = checked_events(
        client.responses.create(
            model=model, input="Say the alphabet", stream=True, top_logprobs=2,
            include=["message.output_text.logprobs"],
        )
    )  # fmt: skip
    [part] = checked(events[-1].response).output[0].content
    assert len(part.logprobs) >= 5
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    found = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.logprob for entry in found] == [entry.logprob for entry in part.logprobs]


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_stream_helper_adds_up(client: OpenAI, model: str, tools: list[Any]) -> None:
    request: dict[str, Any] = {"model": model, "input": "Is it cold in Oslo?", "tools": tools}
    whole = checked(client.responses.create(**request))
    with client.responses.stream(**request) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    assert without_ids(streamed.output) == without_ids(whole.output)
    assert streamed.output[0].type == "reasoning"
    stored = client.responses.retrieve(streamed.id)
    assert without_ids(stored.output) == without_ids(streamed.output)


def test_two_step_function_loop(client: OpenAI, model: str) -> None:
    conversation: list[Any] = [{"role": "user", "content": "Is it cold in Oslo?"}]
    first = checked(client.responses.create(model=model, input=conversation, tools=TOOLS))
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.status) == ("get_weather", "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees and rain"}
    replayed = client.responses.create(model=model, input=[*conversation, *first.output, result], tools=TOOLS)
    chained = client.responses.create(model=model, input=[result], previous_response_id=first.id, tools=TOOLS)
    assert replayed.output_text == chained.output_text == "It is 4 degrees in Oslo, with rain."
    assert replayed.usage is not None
    assert chained.usage is not None
    assert replayed.usage.input_tokens == chained.usage.input_tokens


def test_parallel_calls(client: OpenAI, model: str) -> None:
    events = checked_events(client.responses.create(model=model, input="weather and time", tools=TOOLS, stream=True))
    items = events[-1].response.output
    assert [(item.type, getattr(item, "name", None)) for item in items] == [
        ("message", None), ("function_call", "get_weather"), ("function_call", "get_time"),
    ]  # fmt: skip
    assert len({item.call_id for item in items[1:]}) == 2
    added = {e.item.id for e in events if e.type == "response.output_item.added"}
    assert added == {item.id for item in items}


class Person(BaseModel):
    name: str
    age: int


def test_parse(client: OpenAI, model: str) -> None:
    pytest.importorskip("xgrammar", reason="the embedded engine follows a grammar only with xgrammar")
    parsed = client.responses.parse(model=model, input="Who is it?", text_format=Person, max_output_tokens=400)
    assert parsed.text.format.type == "json_schema"  # type: ignore[union-attr]
    if parsed.status == "completed":
        assert isinstance(parsed.output_parsed, Person)


def test_chain_and_conversation(client: OpenAI, model: str) -> None:
    conversation = client.conversations.create(metadata={"topic": "rain"})
    asked = client.responses.create(model=model, input="4 degrees and rain", conversation=conversation.id)
    assert asked.conversation is not None
    assert asked.conversation.id == conversation.id
    more = client.responses.create(model=model, input="Go on", conversation=conversation.id)
    assert more.output_text == asked.output_text == "It is 4 degrees in Oslo, with rain."
    chained = client.responses.create(model=model, input="Go on", previous_response_id=asked.id)
    assert chained.output_text == asked.output_text
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=3))
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant"]
    one = client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id)
    assert one.to_dict() == items[0].to_dict()
    added = client.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "bye"}]
    )
    client.conversations.items.delete(added.data[0].id, conversation_id=conversation.id)
    changed = client.conversations.update(conversation.id, metadata={"topic": "snow"})
    assert client.conversations.retrieve(conversation.id).metadata == changed.metadata == {"topic": "snow"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_background_and_cancel(client: OpenAI, model: str) -> None:
    queued = checked(client.responses.create(model=model, input="Say the alphabet", background=True))
    assert queued.status == "queued"
    limit = time.monotonic() + 30
    while (found := client.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < limit
    assert checked(found).output_text == "alpha beta gamma delta epsilon"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(queued.id)
    long = client.responses.create(model=model, input="What do whales eat?", background=True, max_output_tokens=3000)
    ended = checked(client.responses.cancel(long.id))
    assert ended.status in ("cancelled", "completed")


def test_background_stream_resumed(client: OpenAI, model: str) -> None:
    events = checked_events(client.responses.create(model=model, input="Grüße", background=True, stream=True))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    name = events[0].response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=4))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[5:]]


def test_errors(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="nobody", input="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(model=model, input="x", previous_response_id="resp_0")
    assert unknown.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as extra:
        client.responses.create(model=model, input="x", extra_body={"nonsense": 1})
    assert extra.value.code == "unknown_parameter"
    events = list(client.responses.create(model=model, input="Break later", stream=True))
    assert events[-1].type == "response.failed"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=model, input="Break down", stream=True)
