"""The OpenAI Agents SDK: its runner drives a loop of two steps through both of its model classes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ItemHelpers,
    MessageOutputItem,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
)
from agents.result import RunResultBase
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

pytestmark = pytest.mark.timeout(60)

Api = Literal["chat", "responses"]
Build = Callable[[AsyncOpenAI], Agent[Any]]
CLASSES: dict[str, Any] = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
# The engine's script thinks only in its answer to the second.
RAIN = {False: "4 degrees and rain", True: "4 degrees, thoughtful rain"}
ANSWER = "It is 4 degrees in Oslo, with rain."
CONFIG = RunConfig(tracing_disabled=True)  # traces would leave for the vendor's service


@pytest.fixture(params=["chat", "responses"])
def api(request: pytest.FixtureRequest) -> Api:
    chosen: Api = request.param
    return chosen


def agent(client: AsyncOpenAI, api: Api, model: str, calls: list[Any], *, thinking: bool) -> Agent[Any]:
    @function_tool
    def get_weather(city: str, days: int) -> str:
        """Weather of a city."""
        calls.append((city, days))
        return RAIN[thinking]

    settings = ModelSettings(include_usage=True, reasoning=Reasoning(effort="high") if thinking else None)
    return Agent(
        name="weather", instructions="Look it up.", model=CLASSES[api](model, client), tools=[get_weather],
        model_settings=settings,
    )  # fmt: skip


def run(url: str, build: Build, question: Any, *, streaming: bool, **more: Any) -> tuple[RunResultBase, list[Any]]:
    """The result of a run, and the events of a streamed one."""

    async def go() -> tuple[RunResultBase, list[Any]]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=30.0) as client:
            if not streaming:
                return await Runner.run(build(client), question, run_config=CONFIG, **more), []
            streamed = Runner.run_streamed(build(client), question, run_config=CONFIG, **more)
            return streamed, [event async for event in streamed.stream_events()]

    return asyncio.run(go())


def kinds(result: RunResultBase) -> list[str]:
    """Types of the items. A chat stream shows the blanks between a thought and a call, a whole answer does not."""
    blanks = (
        isinstance(item, MessageOutputItem) and not ItemHelpers.text_message_output(item).strip()
        for item in result.new_items
    )
    return [item.type for item, blank in zip(result.new_items, blanks, strict=True) if not blank]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_tool_loop(url: str, model: str, api: Api, streaming: bool, thinking: bool) -> None:
    calls: list[Any] = []
    result, events = run(
        url,
        lambda client: agent(client, api, model, calls, thinking=thinking),
        "Is it cold in Oslo?",
        streaming=streaming,
    )
    assert calls == [("Oslo", 2)]
    assert result.final_output.strip() == ANSWER
    assert [kind for kind in kinds(result) if kind != "reasoning_item"] == [
        "tool_call_item", "tool_call_output_item", "message_output_item",
    ]  # fmt: skip
    assert kinds(result).count("reasoning_item") == 1 + thinking
    assert len(result.raw_responses) == 2
    assert all(response.usage.total_tokens > 0 for response in result.raw_responses)
    if streaming:
        raw = [event.data for event in events if event.type == "raw_response_event"]
        assert "".join(event.delta for event in raw if event.type == "response.output_text.delta").strip() == ANSWER
        assert [event.type for event in raw].count("response.completed") == 2


def blank(item: dict[str, Any]) -> bool:
    return item.get("type") == "message" and not "".join(part["text"] for part in item["content"]).strip()


def test_streamed_and_whole_runs_have_the_same_items(url: str, model: str, api: Api) -> None:
    def texts(streaming: bool) -> list[Any]:
        result, _ = run(
            url, lambda client: agent(client, api, model, [], thinking=True), "Is it cold in Oslo?", streaming=streaming
        )
        ids = ("id", "call_id", "provider_data", "response_id")
        return [
            {key: value for key, value in item.items() if key not in ids and value is not None}
            for item in map(dict, result.to_input_list())
            if item.get("type") != "reasoning" and not blank(item)
        ]

    assert texts(True) == texts(False)


def test_a_chain_by_previous_response(url: str, model: str) -> None:
    calls: list[Any] = []

    def build(client: AsyncOpenAI) -> Agent[Any]:
        return agent(client, "responses", model, calls, thinking=False)

    first, _ = run(url, build, "Is it cold in Oslo?", streaming=False, auto_previous_response_id=True)
    assert first.final_output.strip() == ANSWER
    more, _ = run(url, build, "Sure?", streaming=True, previous_response_id=first.last_response_id)
    assert more.final_output.strip() == ANSWER  # the engine's script found the tool's result in the prompt
    assert calls == [("Oslo", 2)]


def test_a_session_replays_what_was_answered(url: str, model: str, api: Api) -> None:
    calls: list[Any] = []

    def build(client: AsyncOpenAI) -> Agent[Any]:
        return agent(client, api, model, calls, thinking=True)

    session = SQLiteSession("memory")
    for question in ("Is it cold in Oslo?", "Sure?"):
        result, _ = run(url, build, question, streaming=True, session=session)
        assert result.final_output.strip() == ANSWER
    assert calls == [("Oslo", 2)]


class Place(BaseModel):
    city: str
    cold: bool


@pytest.mark.parametrize("streaming", [True, False])
def test_a_typed_answer(url: str, model: str, api: Api, streaming: bool) -> None:
    pytest.importorskip("xgrammar", reason="the embedded engine needs xgrammar to generate under a constraint")

    def build(client: AsyncOpenAI) -> Agent[Any]:
        return Agent(
            name="typed", model=CLASSES[api](model, client), output_type=Place,
            model_settings=ModelSettings(max_tokens=400),
        )  # fmt: skip

    result, _ = run(url, build, "Where is it?", streaming=streaming)
    assert isinstance(result.final_output, Place)
