"""The official Anthropic client against Messages."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, beta_tool
from anthropic.types import Message, MessageParam, RawMessageStreamEvent, ToolResultBlockParam
from pydantic import TypeAdapter

pytestmark = pytest.mark.timeout(60)

TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
    {
        "name": "get_time",
        "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    },
]
# The engine's script thinks only in its answer to the second.
RAIN = {False: "4 degrees and rain", True: "4 degrees, thoughtful rain"}
THINKING = {"type": "enabled", "budget_tokens": 1024}


def user(text: str) -> list[MessageParam]:
    return [{"role": "user", "content": text}]


def both(client: Anthropic, **request: Any) -> tuple[Message, Message]:
    """The whole message, and the one that the client's stream helper adds up."""
    request = {"max_tokens": 2048} | request
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        for _ in stream:
            pass
        return whole, stream.get_final_message()


def shown(message: Message) -> dict[str, Any]:
    """What two answers to one request have in common. Ids are each answer's own."""
    fields = message.model_dump(include={"content", "role", "type", "model", "stop_reason", "stop_sequence", "usage"})
    for block in fields["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    usage = fields["usage"]
    fields["usage"] = (usage["input_tokens"], usage["output_tokens"])
    return fields


def test_create_and_stream(anthropic_client: Anthropic, model: str) -> None:
    whole, streamed = both(anthropic_client, model=model, messages=user("What do whales eat?"), system="Be brief.")
    assert whole.type == "message"
    assert whole.role == "assistant"
    assert whole.stop_reason == "end_turn"
    assert [block.type for block in whole.content] == ["text"]
    assert shown(streamed) == shown(whole)
    assert whole.usage.output_tokens > 5


def test_text_stream(anthropic_client: Anthropic, model: str) -> None:
    with anthropic_client.messages.stream(model=model, messages=user("Say the alphabet"), max_tokens=99) as stream:
        pieces = list(stream.text_stream)
    assert len(pieces) > 1
    assert "".join(pieces) == "alpha beta gamma delta epsilon"


def test_limits(anthropic_client: Anthropic, model: str) -> None:
    whole, streamed = both(anthropic_client, model=model, messages=user("Say the alphabet"), max_tokens=3)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 3
    assert shown(streamed) == shown(whole)
    whole, streamed = both(
        anthropic_client, model=model, messages=user("Say the alphabet"), stop_sequences=["gamma", "delta"]
    )
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "gamma")
    # A gateway that finds the stop string in a stream ends the engine's work; the whole answer had been paid for.
    assert shown(streamed) | {"usage": None} == shown(whole) | {"usage": None}


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_tool_loop(anthropic_client: Anthropic, model: str, streaming: bool, thinking: bool) -> None:
    messages = user("Is it cold in Oslo?")
    request: dict[str, Any] = {"model": model, "max_tokens": 2048, "tools": TOOLS}
    if thinking:
        request["thinking"] = THINKING

    def ask() -> Message:
        if not streaming:
            return anthropic_client.messages.create(messages=messages, **request)
        with anthropic_client.messages.stream(messages=messages, **request) as stream:
            return stream.get_final_message()

    first = ask()
    assert first.stop_reason == "tool_use"
    use = first.content[-1]
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("get_weather", {"city": "Oslo", "days": 2})
    if thinking:
        assert first.content[0].type == "thinking"
        assert first.content[0].thinking.strip() == "I should look it up."

    messages.append({"role": "assistant", "content": first.content})
    result: ToolResultBlockParam = {"type": "tool_result", "tool_use_id": use.id, "content": RAIN[thinking]}
    messages.append({"role": "user", "content": [result]})
    last = ask()
    assert last.stop_reason == "end_turn"
    assert last.content[-1].type == "text"
    assert last.content[-1].text.strip() == "It is 4 degrees in Oslo, with rain."


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_tool_runner(anthropic_client: Anthropic, model: str, streaming: bool, thinking: bool) -> None:
    calls: list[Any] = []

    @beta_tool
    def get_weather(city: str, days: int) -> str:
        """Weather of a city."""
        calls.append((city, days))
        return RAIN[thinking]

    request: dict[str, Any] = {"max_tokens": 2048, "messages": user("Is it cold in Oslo?"), "tools": [get_weather]}
    if thinking:
        request["thinking"] = THINKING
    runner: Any = anthropic_client.beta.messages.tool_runner(model=model, stream=streaming, **request)
    answers = [step.get_final_message() if streaming else step for step in runner]
    assert calls == [("Oslo", 2)]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
    assert answers[-1].content[-1].text.strip() == "It is 4 degrees in Oslo, with rain."
    assert [block.type for block in answers[0].content] == ["thinking", "tool_use"]


EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.mark.parametrize("text", ["Is it cold in Oslo?", "weather and time", "What do whales eat?"])
def test_every_event_is_of_the_client_s_types(anthropic_client: Anthropic, model: str, text: str) -> None:
    stream = anthropic_client.messages.create(
        model=model, messages=user(text), tools=TOOLS, thinking=THINKING, max_tokens=2048, stream=True
    )
    events = [event.to_dict() for event in stream]
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    within = 0
    for event in events:
        if event["type"] == "content_block_start":
            within += 1
        elif event["type"] == "content_block_stop":
            within -= 1
        elif event["type"] == "content_block_delta":
            assert within == 1
    assert within == 0


def test_text_and_two_uses(anthropic_client: Anthropic, model: str) -> None:
    whole, streamed = both(anthropic_client, model=model, messages=user("weather and time"), tools=TOOLS)
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert shown(streamed) == shown(whole)


def test_thinking(anthropic_client: Anthropic, model: str) -> None:
    whole, streamed = both(anthropic_client, model=model, messages=user("What do whales eat?"), thinking=THINKING)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].type == "thinking" and "think>" not in whole.content[0].thinking
    assert shown(streamed) == shown(whole)


def test_forced_use(anthropic_client: Anthropic, model: str) -> None:
    pytest.importorskip("xgrammar", reason="the embedded engine needs xgrammar to generate under a constraint")
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "get_time"}]
    for choice in choices:
        whole, streamed = both(
            anthropic_client, model=model, messages=user("Whatever"), tools=TOOLS, tool_choice=choice, max_tokens=300
        )
        uses = [block for block in whole.content if block.type == "tool_use"]
        assert uses
        assert all(set(use.input) in ({"city", "days"}, {"zone"}) for use in uses)
        assert choice["type"] == "any" or uses[0].name == "get_time"
        assert shown(streamed) == shown(whole)


def test_count_tokens(anthropic_client: Anthropic, model: str) -> None:
    request: dict[str, Any] = {"model": model, "messages": user("What do whales eat?"), "system": "Be brief."}
    counted = anthropic_client.messages.count_tokens(**request)
    whole = anthropic_client.messages.create(max_tokens=3, **request)
    assert counted.input_tokens == whole.usage.input_tokens
    with_tools = anthropic_client.messages.count_tokens(**request, tools=TOOLS)
    assert with_tools.input_tokens > counted.input_tokens


def test_errors(anthropic_client: Anthropic, model: str) -> None:
    create = anthropic_client.messages.create
    with pytest.raises(anthropic.NotFoundError) as unknown:
        create(model="nobody", messages=user("x"), max_tokens=5)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as bad:
        create(model=model, messages=user("x"), max_tokens=5, extra_body={"temperature": 1.5})
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        create(model=model, messages=[], max_tokens=5)
    with pytest.raises(anthropic.InternalServerError):
        create(model=model, messages=user("Break down"), max_tokens=5)


def test_an_error_in_the_stream_is_raised_by_the_client(anthropic_client: Anthropic, model: str) -> None:
    with (
        pytest.raises(anthropic.APIStatusError),
        anthropic_client.messages.stream(model=model, messages=user("Break later"), max_tokens=50) as stream,
    ):
        stream.get_final_message()
