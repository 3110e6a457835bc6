"""What a Responses request becomes: generations, tool choices, and the object that is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smg.api import responses
from smg.api.errors import ApiError
from smg.frontend.sessions.items import model_items, stored_input
from smg.frontend.sessions.job import Job, State, Usage, response_object
from smg.frontend.sessions.turns import (
    build_turn,
    first_choice,
    hosted_types,
    later_choice,
    server_requests,
    tool_names,
)
from smg.mcp.base import ServerTools, ToolInfo

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ADD_TOO = {"type": "function", "name": "add"}
NOTE = {"type": "custom", "name": "note"}
DESK = {"type": "namespace", "name": "desk", "description": "d", "tools": [{"type": "function", "name": "lamp"}]}
MATH = {
    "type": "mcp", "server_label": "math", "server_url": "https://math.example/mcp", "authorization": "s3cret",
    "headers": {"x-key": "s3cret"},
}  # fmt: skip
SEARCH = {"type": "web_search_preview"}
SERVERS = [
    ServerTools(
        label="math", tools=[ToolInfo(name="add", server_label="math"), ToolInfo(name="sub", server_label="math")]
    )
]


def job(*, harmony: bool = False, **fields: Any) -> Job:
    body = {"model": "m", "input": "hi", **fields}
    headers = {"content-type": "application/json"}
    parsed = responses.validate(responses.decode(json.dumps(body).encode(), headers))
    given = stored_input(body["input"])
    return Job("resp_1", parsed, "req-1", {}, "", 1000.5, 0.0, given, harmony=harmony)


def turn(made: Job, servers: list[ServerTools], choice: Any = None, room: int | None = None) -> responses.TurnRequest:
    return build_turn(made, tool_names(made.request, servers), model_items(made.given), choice, room)


def names_of(tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def test_a_turn_of_a_chat_model() -> None:
    made = job(instructions="Be brief.", tools=[LOOK, ADD_TOO, NOTE, DESK, MATH, SEARCH], max_output_tokens=9, top_k=3)
    one = turn(made, SERVERS, "auto", 7)
    assert one.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert names_of(one.tools) == ["look", "note", "desk.lamp", "add", "sub"]  # the server's "add" wins
    assert (one.sampling.max_tokens, one.sampling.top_k, one.sampling.temperature) == (7, 3, 1.0)
    assert one.items is None
    assert hosted_types(made.request) == ["web_search_preview"]
    [server] = server_requests(made.request)
    assert (server.label, server.authorization, server.headers) == ("math", "s3cret", {"x-key": "s3cret"})


@pytest.mark.parametrize(("kind", "text"), [("function_call", "arguments"), ("custom_tool_call", "input")])
def test_a_call_of_a_namespace_keeps_its_name(kind: str, text: str) -> None:
    called = {"type": kind, "call_id": "c", "namespace": "desk", "name": "lamp", text: "{}"}
    [message] = turn(job(input=[called], tools=[DESK]), []).messages
    assert message["tool_calls"][0]["function"]["name"] == "desk.lamp"


def test_tools_in_the_input_are_tools_of_the_request() -> None:
    given = {"type": "additional_tools", "role": "developer", "tools": [DESK]}
    made = job(input=[given, {"role": "user", "content": "hi"}], tools=[LOOK], tool_choice="auto")
    one = turn(made, [])
    assert names_of(one.tools) == ["look", "desk.lamp"]
    assert one.messages == [{"role": "user", "content": "hi"}]
    with pytest.raises(ApiError) as caught:
        job(input=[{"type": "additional_tools", "tools": [{"type": "nonsense"}]}, {"role": "user", "content": "hi"}])
    assert (caught.value.code, caught.value.param) == ("invalid_type", "input")


def test_a_turn_of_a_harmony_model() -> None:
    calls = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "custom_tool_call", "call_id": "c1", "name": "note", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        {"type": "mcp_call", "id": "mcp_1", "name": "add", "arguments": "{}", "server_label": "math", "output": "3"},
    ]
    made = job(harmony=True, instructions="Be brief.", tools=[LOOK, ADD_TOO, NOTE, DESK, MATH, SEARCH], input=calls)
    one = turn(made, SERVERS)
    assert one.messages == [{"role": "system", "content": "Be brief."}]
    assert one.items is not None
    assert [item["type"] for item in one.items] == [
        "reasoning", "function_call", "function_call_output", "function_call", "function_call_output",
    ]  # fmt: skip
    assert json.loads(one.items[1]["arguments"]) == {"input": "x"}
    assert one.instructions == "Be brief."
    assert [tool["type"] for tool in one.client_tools] == ["function", "web_search_preview"]
    assert names_of(one.mcp_tools) == ["note", "desk.lamp", "add", "sub"]


def test_parallel_calls_stay_one_message() -> None:
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
    ]
    one = turn(job(input=items, tools=[LOOK]), [])
    assert [message["role"] for message in one.messages] == ["user", "assistant", "tool", "tool"]
    assert len(one.messages[1]["tool_calls"]) == 2


def functions(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


CHOICES = [
    (None, None, None),
    ("auto", "auto", None),
    ("none", "none", "none"),
    ("required", "required", None),
    ({"type": "function", "name": "look"}, {"type": "function", "name": "look"}, None),
    ({"type": "mcp", "server_label": "math"}, functions("required", "add", "sub"), functions("auto", "add", "sub")),
    ({"type": "mcp", "server_label": "math", "name": "sub"}, functions("required", "sub"), functions("auto", "sub")),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "mcp", "server_label": "math"}, {"type": "function", "name": "look"}]},
        functions("auto", "add", "sub", "look"), functions("auto", "add", "sub", "look"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "first", "later"), CHOICES)
def test_tool_choices(given: Any, first: Any, later: Any) -> None:
    made = job(tools=[LOOK, MATH], **({"tool_choice": given} if given is not None else {}))
    names = tool_names(made.request, SERVERS)
    chosen = first_choice(made.request, made.parsed.choice, names)
    assert chosen == first
    assert later_choice(chosen) == later


def test_the_response_object() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    made = job(tools=[LOOK, MATH], conversation="conv_1", text={"format": form}, reasoning={"effort": "high"})
    shown = response_object(made, State("incomplete", 1002.7, None, "max_output_tokens", Usage(3, 4, 1, 2)), [])
    assert "s3cret" not in json.dumps(shown)
    assert shown["tools"][0] == LOOK
    assert shown["tools"][1]["headers"] == {"x-key": "<redacted>"}
    assert shown["text"] == {"format": form, "verbosity": "medium"}
    assert shown["conversation"] == {"id": "conv_1"}
    assert (shown["created_at"], shown["completed_at"]) == (1000, 1002)
    assert shown["incomplete_details"] == {"reason": "max_output_tokens"}
    assert shown["usage"] == {
        "input_tokens": 3, "output_tokens": 4, "total_tokens": 7, "input_tokens_details": {"cached_tokens": 1},
        "output_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip
    assert response_object(made, State(), []).keys() == shown.keys()
