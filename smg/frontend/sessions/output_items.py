"""One output item while it grows: its JSON object, and the events that tell a client of it.

Every class emits ``response.output_item.added`` when it is made and ``response.output_item.done`` when it is closed or
finished; what lies between is the item type's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from smg.frontend.sessions.events import DeltaFrame, EventWriter
from smg.frontend.sessions.items import Item, call_id, item_id
from smg.frontend.sessions.results import call_error, output_text
from smg.mcp.base import ToolInfo, ToolResult


class OpenItem:
    """Base: the place of the item in the output and its first and last event."""

    def __init__(self, writer: EventWriter, index: int, item: Item) -> None:
        self.writer = writer
        self.item = item
        self.index = index
        self.place: dict[str, Any] = {"output_index": index, "item_id": item["id"]}

    def added(self) -> None:
        self.writer.event("response.output_item.added", {"output_index": self.index, "item": self.item})

    def done(self) -> None:
        self.writer.event("response.output_item.done", {"output_index": self.index, "item": self.item})


# Text --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextKind:
    """What distinguishes an answer's text from a thought: the name of its events and of its content part, and members
    of the part."""

    event: str
    part: str
    members: dict[str, Any]


MESSAGE = TextKind("response.output_text", "output_text", {"annotations": []})
REASONING = TextKind("response.reasoning_text", "reasoning_text", {})


class TextItem(OpenItem):
    """A message or a reasoning item with its one content part. ``logprobs``: the part carries log-probabilities."""

    def __init__(self, writer: EventWriter, index: int, kind: TextKind, *, logprobs: bool = False) -> None:
        item: Item
        if kind is MESSAGE:
            item = {"type": "message", "id": item_id("message"), "role": "assistant", "content": []}
        else:
            item = {"type": "reasoning", "id": item_id("reasoning"), "summary": [], "content": []}
        item["status"] = "in_progress"
        super().__init__(writer, index, item)
        self.kind = kind
        self.place["content_index"] = 0
        self._pieces: list[str] = []
        self._entries: list[dict[str, Any]] | None = [] if logprobs else None
        extra: dict[str, Any] = {"logprobs": []} if kind is MESSAGE else {}
        self._frame = DeltaFrame(f"{kind.event}.delta", self.place, extra) if writer.streaming else None
        self.added()
        writer.event("response.content_part.added", self.place | {"part": self._part("")})

    def _part(self, text: str) -> Item:
        part = {"type": self.kind.part, "text": text, **self.kind.members}
        return part if self._entries is None else part | {"logprobs": list(self._entries)}

    def add(self, text: str, entries: list[dict[str, Any]]) -> None:
        """More of the text, and the log-probabilities that have come with it."""
        self._pieces.append(text)
        if entries and self._entries is not None:
            self._entries += entries
            self.writer.event(f"{self.kind.event}.delta", self.place | {"delta": text, "logprobs": entries})
        elif self._frame is not None:
            self.writer.delta(self._frame, text)

    def close(self, status: str, entries: list[dict[str, Any]]) -> None:
        """The text is complete ("completed") or was cut ("incomplete")."""
        if entries:
            self.add("", entries)
        text = "".join(self._pieces)
        part = self._part(text)
        self.item["content"] = [part]
        self.item["status"] = status
        extra = {"logprobs": self._entries or []} if self.kind is MESSAGE else {}
        self.writer.event(f"{self.kind.event}.done", self.place | {"text": text} | extra)
        self.writer.event("response.content_part.done", self.place | {"part": part})
        self.done()


# Calls -------------------------------------------------------------------------------------------------


class Call:
    """A call while the model writes it, and a tool call until its result is there. ``kept`` is its output item, None
    for calls that leave nothing in the output. ``tool`` is set for calls that the gateway runs (``runs``);
    ``identity`` names the call in the conversation. ``complete``: the model finished the arguments."""

    tool: ToolInfo | None = None
    kept: Item | None = None
    identity = ""
    runs = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments = ""
        self.complete = False

    def add(self, fragment: str) -> None:
        """More of the arguments."""
        self.arguments += fragment

    def close(self, status: str) -> None:
        """No more arguments come."""
        self.complete = status == "completed"

    def finish(self, result: ToolResult) -> None:
        """The result of a call that the gateway ran."""

    def abandon(self) -> None:
        """The call will not run, or not be waited for."""


class DroppedCall(Call):
    """A call over the request's limit: the client never hears of it."""


class HiddenCall(Call):
    """A call of an internal tool."""

    runs = True

    def __init__(self, name: str, tool: ToolInfo) -> None:
        super().__init__(name)
        self.tool = tool
        self.identity = item_id("mcp_call")


class _ItemCall(Call, OpenItem):
    """A call that is an output item."""

    def __init__(self, writer: EventWriter, index: int, name: str, item: Item) -> None:
        Call.__init__(self, name)
        OpenItem.__init__(self, writer, index, item)
        self.kept = item
        self.identity = item["id"]


class _StreamedCall(_ItemCall):
    """A call whose arguments are streamed as the model writes them."""

    events = ""

    def __init__(self, writer: EventWriter, index: int, name: str, item: Item) -> None:
        super().__init__(writer, index, name, item)
        self._pieces: list[str] = []
        self._frame = DeltaFrame(f"{self.events}.delta", self.place, {}) if writer.streaming else None
        self.added()

    def add(self, fragment: str) -> None:
        self._pieces.append(fragment)
        if self._frame is not None:
            self.writer.delta(self._frame, fragment)

    def close(self, status: str) -> None:
        super().close(status)
        self.arguments = self.item["arguments"] = "".join(self._pieces)
        self.writer.event(f"{self.events}.done", self.place | {"arguments": self.arguments})


class FunctionCall(_StreamedCall):
    """A call that the client runs."""

    events = "response.function_call_arguments"

    def __init__(self, writer: EventWriter, index: int, name: str, namespace: str | None) -> None:
        item = {
            "type": "function_call", "id": item_id("function_call"), "call_id": call_id(), "name": name,
            "arguments": "", "status": "in_progress",
        }  # fmt: skip
        if namespace is not None:
            item["namespace"] = namespace
        super().__init__(writer, index, name, item)

    def close(self, status: str) -> None:
        super().close(status)
        self.item["status"] = status
        self.done()


class McpCall(_StreamedCall):
    """A call of an MCP tool that the gateway runs. It is closed with the arguments and done with the result."""

    events = "response.mcp_call_arguments"
    runs = True

    def __init__(self, writer: EventWriter, index: int, tool: ToolInfo, approval: str | None = None) -> None:
        item: Item = {
            "type": "mcp_call", "id": item_id("mcp_call"), "status": "in_progress", "approval_request_id": approval,
            "arguments": "", "error": None, "name": tool.name, "output": None, "server_label": tool.server_label,
        }  # fmt: skip
        self.tool = tool
        super().__init__(writer, index, tool.name, item)
        writer.event("response.mcp_call.in_progress", self.place)

    def close(self, status: str) -> None:
        super().close(status)
        if status != "completed":
            self.item["status"] = status
            self.done()

    def finish(self, result: ToolResult) -> None:
        self.item["error"] = call_error(result)
        self.item["output"] = output_text(result)
        outcome = "failed" if result.error is not None else "completed"
        self.item["status"] = outcome
        self.writer.event(f"response.mcp_call.{outcome}", self.place)
        self.done()

    def abandon(self) -> None:
        if self.item["status"] == "in_progress":
            self.item["status"] = "incomplete"
            self.done()


class ApprovalRequest(_ItemCall):
    """A call of an MCP tool that waits for the client's approval; it appears when its arguments are complete."""

    def __init__(self, writer: EventWriter, index: int, tool: ToolInfo) -> None:
        item = {
            "type": "mcp_approval_request", "id": item_id("mcp_approval_request"), "arguments": "", "name": tool.name,
            "server_label": tool.server_label,
        }  # fmt: skip
        super().__init__(writer, index, tool.name, item)

    def close(self, status: str) -> None:
        super().close(status)
        self.item["arguments"] = self.arguments
        self.added()
        self.done()


class CustomCall(_ItemCall):
    """A call of a custom tool: the model writes ``{"input": TEXT}``, the client gets the text."""

    def __init__(self, writer: EventWriter, index: int, name: str, namespace: str | None) -> None:
        item = {
            "type": "custom_tool_call", "id": item_id("custom_tool_call"), "call_id": call_id(), "name": name,
            "input": "",
        }  # fmt: skip
        if namespace is not None:
            item["namespace"] = namespace
        super().__init__(writer, index, name, item)
        self.added()

    def close(self, status: str) -> None:
        super().close(status)
        text = str(arguments_of(self.arguments).get("input", ""))
        if text:
            self.writer.event("response.custom_tool_call_input.delta", self.place | {"delta": text})
        self.item["input"] = text
        self.writer.event("response.custom_tool_call_input.done", self.place | {"input": text})
        self.done()


# Hosted tools ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosted:
    """How the calls of one hosted tool look: events while it runs, members from arguments and from the result."""

    steps: tuple[str, ...]
    begin: Callable[[dict[str, Any]], Item]
    finish: Callable[[ToolResult], Item]


def _query(arguments: dict[str, Any]) -> str:
    return str(arguments.get("query", ""))


def _image(result: ToolResult) -> Item:
    data = (block.get("data") for block in result.content if block.get("type") == "image")
    return {"result": next(data, None)}


HOSTED = {
    "web_search_call": Hosted(
        ("in_progress", "searching"), lambda args: {"action": {"type": "search", "query": _query(args)}}, lambda _: {}
    ),
    "file_search_call": Hosted(
        ("in_progress", "searching"), lambda args: {"queries": [_query(args)], "results": None}, lambda _: {}
    ),
    "code_interpreter_call": Hosted(
        ("in_progress", "interpreting"),
        lambda args: {"code": str(args.get("code", "")), "container_id": "", "outputs": None},
        lambda result: {"outputs": [{"type": "logs", "logs": output_text(result)}]},
    ),
    "image_generation_call": Hosted(("in_progress", "generating"), lambda _: {"result": None}, _image),
}


class HostedCall(_ItemCall):
    """A call of a tool that answers a hosted tool type; it appears when its arguments are complete."""

    runs = True

    def __init__(self, writer: EventWriter, index: int, tool: ToolInfo) -> None:
        item = {"type": tool.kind, "id": item_id(tool.kind), "status": "in_progress"}
        super().__init__(writer, index, tool.name, item)
        self.tool = tool
        self._look = HOSTED[tool.kind]

    def close(self, status: str) -> None:
        super().close(status)
        self.item.update(self._look.begin(arguments_of(self.arguments)))
        self.added()
        for step in self._look.steps if self.complete else ():
            self.writer.event(f"response.{self.item['type']}.{step}", self.place)
        if not self.complete:
            self.item["status"] = "failed"
            self.done()

    def finish(self, result: ToolResult) -> None:
        self.item.update(self._look.finish(result))
        self.item["status"] = "failed" if result.error is not None else "completed"
        if result.error is None:
            self.writer.event(f"response.{self.item['type']}.completed", self.place)
        self.done()

    def abandon(self) -> None:
        if self.item["status"] == "in_progress":
            self.item["status"] = "failed"
            self.done()


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call; ``{}`` when the text is no JSON object."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if type(value) is dict else {}
