"""Output of a Responses request: the events of a stream add up to the items of the whole answer, however it is cut."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smg.frontend.sessions.events import EventWriter
from smg.frontend.sessions.items import approved_requests, feedback, model_items, stored_input
from smg.frontend.sessions.output import MAX_BLANK, Output, ToolNames
from smg.frontend.sessions.results import bounded, call_error, model_text, output_text
from smg.mcp.base import ServerTools, ToolError, ToolInfo, ToolResult
from smg.messages import (
    ContentDelta,
    LogprobsDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

ADD = ToolInfo(name="add", server_label="math", description="Adds", input_schema={"type": "object"})
ASK = ToolInfo(name="ask", server_label="math", needs_approval=True)
SEEK = ToolInfo(name="seek", server_label="web", kind="web_search_call")
RUN = ToolInfo(name="run", server_label="box", kind="code_interpreter_call")
DRAW = ToolInfo(name="draw", server_label="art", kind="image_generation_call")
FIND = ToolInfo(name="find", server_label="files", kind="file_search_call")
HIDE = ToolInfo(name="hide", server_label="math", internal=True)
TOOLS = {tool.name: tool for tool in (ADD, ASK, SEEK, RUN, DRAW, FIND, HIDE)}
NAMES = ToolNames(TOOLS, frozenset(("note", "desk.pen")), {"desk.lamp": ("desk", "lamp"), "desk.pen": ("desk", "pen")})
SUM = ToolResult(content=[{"type": "text", "text": "3"}, {"type": "image", "data": "AA=="}])


def new(*, streaming: bool = True, most: int = 10) -> Output:
    return Output(EventWriter(streaming), NAMES, most)


def call(index: int, name: str, *fragments: str) -> list[ParserEvent]:
    arguments = [ToolCallArguments(index, fragment) for fragment in fragments]
    return [ToolCallStart(index, name), *arguments, ToolCallEnd(index)]


def events(frames: list[bytes]) -> list[dict[str, Any]]:
    found = []
    for frame in frames:
        head, data = frame.decode().removesuffix("\n\n").split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        found.append(event)
    return found


class Client:
    """Adds the events of a stream up, and checks every ``done`` event against what was added up before it."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.done: set[int] = set()
        self.next = 0

    def read(self, frames: list[bytes]) -> None:
        for event in events(frames):
            assert event["sequence_number"] == self.next
            self.next += 1
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        index, kind = event["output_index"], event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert index == len(self.items)
            self.items.append(event["item"])
            return
        item = self.items[index]
        assert index not in self.done
        if kind == "output_item.done":
            changed = {key for key, value in event["item"].items() if item.get(key) != value}
            assert changed <= {"status", "output", "error", "outputs", "result", "tools"}
            self.items[index] = event["item"]
            self.done.add(index)
            return
        assert event["item_id"] == item["id"]
        self._inside(item, kind, event)

    def _inside(self, item: dict[str, Any], kind: str, event: dict[str, Any]) -> None:
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][0]["text"] == event["text"]
        elif kind == "content_part.done":
            assert item["content"][0] == event["part"]
        elif kind in ("function_call_arguments.delta", "mcp_call_arguments.delta"):
            item["arguments"] += event["delta"]
        elif kind in ("function_call_arguments.done", "mcp_call_arguments.done"):
            assert item["arguments"] == event["arguments"]
        elif kind == "custom_tool_call_input.delta":
            item["input"] += event["delta"]
        elif kind == "custom_tool_call_input.done":
            assert item["input"] == event["input"]
        else:
            assert re.fullmatch(r"[a-z_]+\.(in_progress|searching|interpreting|generating|completed|failed)", kind)


def kinds(frames: list[bytes]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events(frames)]


def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what is random in them."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


TEXT = ["output_item.added", "content_part.added"]
TEXT_END = ["content_part.done", "output_item.done"]


def test_the_order_of_events() -> None:
    output = new()
    output.feed([ReasoningDelta("I "), ReasoningDelta("see."), ContentDelta("\n\n"), ContentDelta("Now")])
    output.feed([ContentDelta(" this:"), *call(0, "look", "{", '"a":1}'), *call(1, "desk.lamp", "{}")])
    assert output.end_turn(cut=False)
    assert kinds(output.writer.take()) == [
        *TEXT, "reasoning_text.delta", "reasoning_text.done", *TEXT_END,
        *TEXT, "output_text.delta", "output_text.delta", "output_text.done", *TEXT_END,
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    thought, said, look, lamp = output.items
    assert plain([thought]) == [
        {
            "type": "reasoning", "summary": [], "status": "completed",
            "content": [{"type": "reasoning_text", "text": "I see."}],
        }
    ]  # fmt: skip
    assert said["content"] == [{"type": "output_text", "text": "\n\nNow this:", "annotations": []}]
    assert (look["name"], look["arguments"], look["status"]) == ("look", '{"a":1}', "completed")
    assert (lamp["name"], lamp["namespace"]) == ("lamp", "desk")
    assert [item["id"].split("_")[0] for item in output.items] == ["rs", "msg", "fc", "fc"]
    assert look["call_id"].startswith("call_")


def test_a_tool_call_of_the_gateway() -> None:
    output = new()
    output.list_tools(ServerTools(label="math", tools=[ADD]))
    output.feed(call(0, "add", '{"a":', "1}"))
    [made] = output.end_turn(cut=False)
    assert (made.runs, made.arguments, made.identity) == (True, '{"a":1}', output.items[1]["id"])
    made.finish(SUM)
    frames = output.writer.take()
    assert kinds(frames) == [
        "output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done",
        "output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.delta",
        "mcp_call_arguments.done", "mcp_call.completed", "output_item.done",
    ]  # fmt: skip
    listed, ran = output.items
    assert listed["tools"] == [
        {
            "name": "add", "description": "Adds", "input_schema": {"type": "object"},
            "annotations": {"read_only": False},
        }
    ]  # fmt: skip
    assert (ran["output"], ran["error"], ran["status"], ran["server_label"]) == ("3", None, "completed", "math")
    client = Client()
    client.read(frames)
    assert client.items == output.items


FAILURES = [
    (ToolError(kind="tool", message="x"), [{"type": "text", "text": "no"}], "mcp_tool_execution_error", '"no"'),
    (ToolError(kind="protocol", message="bad", code=-32000), [], "mcp_protocol_error", '{"error":"bad"}'),
    (ToolError(kind="http", message="gone", code=502), [], "http_error", '{"error":"gone"}'),
    (ToolError(kind="denied", message="never"), [], "mcp_tool_execution_error", '{"error":"never"}'),
    (ToolError(kind="timeout", message="late"), [], "mcp_tool_execution_error", '{"error":"late"}'),
]


@pytest.mark.parametrize(("error", "content", "kind", "told"), FAILURES)
def test_a_tool_call_that_fails(error: ToolError, content: list[Any], kind: str, told: str) -> None:
    output = new()
    output.feed(call(0, "add", "{}"))
    [made] = output.end_turn(cut=False)
    result = ToolResult(content=content, error=error)
    made.finish(result)
    assert kinds(output.writer.take())[-2:] == ["mcp_call.failed", "output_item.done"]
    [item] = output.items
    assert (item["status"], item["output"], item["error"]["type"]) == ("failed", "", kind)
    assert told in model_text(result)
    if error.kind != "denied" and error.kind != "timeout":
        assert feedback(item) == model_text(result)


def test_a_call_that_needs_approval() -> None:
    output = new()
    output.feed(call(0, "ask", '{"q":', "1}"))
    [made] = output.end_turn(cut=False)
    assert not made.runs
    assert kinds(output.writer.take()) == ["output_item.added", "output_item.done"]
    [request] = output.items
    assert (request["type"], request["arguments"]) == ("mcp_approval_request", '{"q":1}')

    answer = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    assert approved_requests([request], [answer]) == [request]
    assert approved_requests([], [request, answer | {"approve": False}]) == []
    with pytest.raises(Exception, match="not part of this conversation"):
        approved_requests([], [answer])

    later = new()
    again = later.approved_call(request, ASK)
    again.finish(SUM)
    assert later.items[0]["approval_request_id"] == request["id"]
    shown = model_items([request, answer, *later.items])
    assert [item["type"] for item in shown] == ["function_call", "function_call_output"]
    denied = model_items([request, answer | {"approve": False, "reason": "too dear"}])
    assert "too dear" in denied[1]["output"]


HOSTED: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("seek", {"query": "whales"}, "searching", {"action": {"type": "search", "query": "whales"}}),
    ("find", {"query": "whales"}, "searching", {"queries": ["whales"]}),
    ("run", {"code": "1+2"}, "interpreting", {"outputs": [{"type": "logs", "logs": "3"}]}),
    ("draw", {}, "generating", {"result": "AA=="}),
]


@pytest.mark.parametrize(("name", "arguments", "step", "members"), HOSTED)
def test_hosted_tools(name: str, arguments: dict[str, Any], step: str, members: dict[str, Any]) -> None:
    output = new()
    output.feed(call(0, name, json.dumps(arguments)))
    [made] = output.end_turn(cut=False)
    made.finish(SUM)
    kind = TOOLS[name].kind
    steps = [f"{kind}.{word}" for word in ("in_progress", step, "completed")]
    assert kinds(output.writer.take()) == ["output_item.added", *steps, "output_item.done"]
    [item] = output.items
    assert item.items() >= ({"type": kind, "status": "completed"} | members).items()


def test_calls_over_the_limit_are_never_heard_of() -> None:
    output = new(most=1)
    output.feed([*call(0, "add", "{}"), *call(1, "add", "{}"), *call(2, "look", "{}")])
    calls = output.end_turn(cut=False)
    assert [made.runs for made in calls] == [True, False, False]
    assert output.over_limit
    assert [item["type"] for item in output.items] == ["mcp_call", "function_call"]


def test_internal_calls_run_unseen() -> None:
    output = new()
    output.feed(call(0, "hide", '{"a":1}'))
    [made] = output.end_turn(cut=False)
    made.finish(SUM)
    assert (made.runs, made.arguments, output.items, output.writer.take()) == (True, '{"a":1}', [], [])


def test_what_was_cut_is_incomplete() -> None:
    output = new()
    output.feed([ContentDelta("half a")])
    output.end_turn(cut=True)
    output.feed([ToolCallStart(0, "look"), ToolCallArguments(0, '{"a')])
    output.end_turn(cut=True)
    output.feed([*call(0, "add", "{}"), ToolCallStart(1, "add"), ToolCallArguments(1, "{")])
    for made in output.end_turn(cut=True):
        made.abandon()
    assert [item["status"] for item in output.items] == ["incomplete"] * 4
    client = Client()
    client.read(output.writer.take())
    assert client.items == output.items
    assert client.done == {0, 1, 2, 3}


def test_white_space_around_calls_is_no_message() -> None:
    output = new()
    output.feed([ContentDelta("\n"), *call(0, "look", "{}"), ContentDelta("\n\n"), *call(1, "look", "{}")])
    output.feed([ContentDelta("\n")])
    output.end_turn(cut=False)
    assert [item["type"] for item in output.items] == ["function_call", "function_call"]
    alone = new()
    alone.feed([ContentDelta(" \n")])
    alone.end_turn(cut=False)
    assert alone.items[0]["content"][0]["text"] == " \n"


def test_endless_white_space_is_let_through() -> None:
    output = new()
    for _ in range(MAX_BLANK + 10):
        output.feed([ContentDelta("\n")])
    assert output.items[0]["type"] == "message"


def test_logprobs_travel_with_their_text() -> None:
    one, two, three = ({"token": word, "logprob": -1.0, "bytes": [], "top_logprobs": []} for word in "abc")
    output = Output(EventWriter(True), NAMES, 10, logprobs=True)
    output.feed([LogprobsDelta([one])])
    output.feed([ContentDelta("ab"), LogprobsDelta([two])])
    output.feed([ContentDelta("c")])
    output.feed([LogprobsDelta([three])])
    output.end_turn(cut=False)
    output.feed(call(0, "look", "{}"))
    output.end_turn(cut=False)
    found = events(output.writer.take())
    deltas = [(e["delta"], e["logprobs"]) for e in found if e["type"] == "response.output_text.delta"]
    assert deltas == [("ab", [one, two]), ("c", []), ("", [three])]
    [done] = [event for event in found if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == output.items[0]["content"][0]["logprobs"] == [one, two, three]


def test_stored_input() -> None:
    [message] = stored_input("hi")
    assert message["id"].startswith("msg_")
    assert plain([message]) == [
        {
            "type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}],
            "status": "completed",
        }
    ]  # fmt: skip
    [answer, thought] = stored_input([{"role": "assistant", "content": "x"}, {"type": "reasoning", "id": "rs_1"}])
    assert answer["content"] == [{"type": "output_text", "text": "x", "annotations": []}]
    assert thought == {"type": "reasoning", "id": "rs_1"}


def test_what_a_model_is_shown() -> None:
    ran = {"type": "mcp_call", "id": "mcp_1", "name": "add", "arguments": "", "output": "3", "error": None}
    spaced = {"type": "function_call", "call_id": "c", "name": "lamp", "namespace": "desk", "arguments": "{}"}
    shown = model_items([{"type": "mcp_list_tools", "id": "x"}, ran, spaced])
    assert [item["type"] for item in shown] == ["function_call", "function_call_output", "function_call"]
    assert shown[0]["arguments"] == "{}"
    assert shown[1]["output"] == '[{"type":"text","text":"3"}]' == model_text(ToolResult(content=SUM.content[:1]))
    assert shown[2]["name"] == "desk.lamp"


def test_results() -> None:
    assert output_text(ToolResult()) == "[]"
    assert output_text(SUM) == "3"
    assert call_error(SUM) is None
    large = bounded(SUM, 10)
    assert large.error is not None
    assert "too large" in large.error.message
    assert bounded(SUM, 1000) is SUM


PIECES = st.one_of(
    st.builds(ReasoningDelta, st.text(max_size=4)),
    st.builds(ContentDelta, st.text(max_size=4)),
    st.sampled_from([[name] for name in ("look", "note", "desk.pen", "desk.lamp", *TOOLS)]),
)


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), data=st.data())
def test_streams_add_up(pieces: list[Any], data: st.DataObject) -> None:
    made: list[ParserEvent] = []
    calls = 0
    for piece in pieces:
        if isinstance(piece, list):
            made += call(calls, piece[0], '{"input":', '"é\n"', "}")
            calls += 1
        else:
            made.append(piece)
    whole, streamed = new(streaming=False), new()
    client = Client()
    whole.feed(made)
    while made:
        size = data.draw(st.integers(1, len(made)))
        streamed.feed(made[:size])
        client.read(streamed.writer.take())
        made = made[size:]
    for output in (whole, streamed):
        for one in output.end_turn(cut=False):
            if one.runs:
                one.finish(SUM)
    client.read(streamed.writer.take())
    assert whole.writer.take() == []
    assert client.items == streamed.items
    assert plain(streamed.items) == plain(whole.items)
    assert client.done == set(range(len(streamed.items)))
    assert orjson.dumps(streamed.items)
