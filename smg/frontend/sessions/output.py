"""The output of one response: parser events of its generations in, items and stream events out.

Pure: no clock, no sockets. Items appear in the order in which the model (or the gateway) began them; their objects in
``items`` are final when the output is closed, and what a client adds up from the events is the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smg.frontend.sessions.events import EventWriter
from smg.frontend.sessions.items import Item, item_id
from smg.frontend.sessions.output_items import (
    MESSAGE,
    REASONING,
    ApprovalRequest,
    Call,
    CustomCall,
    DroppedCall,
    FunctionCall,
    HiddenCall,
    HostedCall,
    McpCall,
    OpenItem,
    TextItem,
    TextKind,
)
from smg.mcp.base import ServerTools, ToolInfo
from smg.messages import (
    ContentDelta,
    LogprobsDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    TurnEvent,
)

MAX_BLANK = 64
NO_ENTRIES: list[dict[str, Any]] = []


@dataclass(slots=True)
class ToolNames:
    """What a called name means. ``tools``: run by the gateway; ``custom``: custom tools of the request;
    ``namespaces``: full name -> (namespace, name); every other name is a function of the client."""

    tools: Mapping[str, ToolInfo] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)


class Output:
    """See the module's text. ``most_calls`` bounds the calls that the gateway runs; later ones are dropped and
    ``over_limit`` is set."""

    def __init__(self, writer: EventWriter, names: ToolNames, most_calls: int, *, logprobs: bool = False) -> None:
        self.writer = writer
        self.names = names
        self.items: list[Item] = []
        self.over_limit = False
        self._calls_left = most_calls
        self._text: TextItem | None = None
        self._logprobs = logprobs
        self._entries: list[dict[str, Any]] = []  # log-probabilities of text that is still to come
        self._blank = ""  # white space where a message could begin
        self._open: dict[int, Call] = {}
        self._turn: list[Call] = []

    # From the model ------------------------------------------------------------------------------

    def feed(self, events: Iterable[TurnEvent]) -> None:
        """Events of one generation; neighbouring pieces of one text become one stream event."""
        pending: list[str] = []
        kind = MESSAGE
        for event in events:
            if isinstance(event, ContentDelta | ReasoningDelta):
                wanted = MESSAGE if isinstance(event, ContentDelta) else REASONING
                if pending and wanted is not kind:
                    self._add_text(kind, pending)
                kind = wanted
                pending.append(event.text)
            elif isinstance(event, LogprobsDelta):
                self._entries += event.entries
            else:
                self._add_text(kind, pending)
                self._on_call(event)
        self._add_text(kind, pending)

    def _add_text(self, kind: TextKind, pieces: list[str]) -> None:
        text = "".join(pieces)
        pieces.clear()
        if not text:
            return
        current = self._text
        if current is None or current.kind is not kind:
            if kind is MESSAGE:
                text = self._blank + text
                self._blank = text if text.isspace() and len(text) <= MAX_BLANK else ""
                if self._blank:
                    return
            current = self._open_text(kind)
        current.add(text, self._take_entries(kind))

    def _open_text(self, kind: TextKind) -> TextItem:
        self._close_text("completed")
        self._text = TextItem(self.writer, len(self.items), kind, logprobs=self._logprobs and kind is MESSAGE)
        self.items.append(self._text.item)
        return self._text

    def _take_entries(self, kind: TextKind) -> list[dict[str, Any]]:
        if kind is not MESSAGE or not self._entries:
            return NO_ENTRIES
        entries, self._entries = self._entries, []
        return entries

    def _close_text(self, status: str) -> None:
        if self._text is not None:
            self._text.close(status, self._take_entries(self._text.kind))
            self._text = None

    def _on_call(self, event: ParserEvent) -> None:
        if isinstance(event, ToolCallStart):
            self._blank = ""  # it only set the call apart
            self._close_text("completed")
            self._entries = []  # those of the call's own tokens
            call = self._begin(event.name)
            self._open[event.index] = call
            self._turn.append(call)
        elif isinstance(event, ToolCallArguments):
            self._open[event.index].add(event.fragment)
        elif isinstance(event, ToolCallEnd):
            self._open.pop(event.index).close("completed")

    def _begin(self, name: str) -> Call:
        tool = self.names.tools.get(name)
        if tool is not None:
            return self._begin_tool(name, tool)
        namespace, short = self.names.namespaces.get(name, (None, name))
        made = CustomCall if name in self.names.custom else FunctionCall
        return self._keep(made(self.writer, len(self.items), short, namespace))

    def _begin_tool(self, name: str, tool: ToolInfo) -> Call:
        if self.over_limit or self._calls_left <= 0:
            self.over_limit = True
            return DroppedCall(name)
        self._calls_left -= 1
        if tool.internal:
            return HiddenCall(name, tool)
        index = len(self.items)
        if tool.needs_approval:
            return self._keep(ApprovalRequest(self.writer, index, tool))
        if tool.kind == "mcp_call":
            return self._keep(McpCall(self.writer, index, tool))
        return self._keep(HostedCall(self.writer, index, tool))

    def _keep(self, call: Call) -> Call:
        if call.kept is not None:
            self.items.append(call.kept)
        return call

    def end_turn(self, *, cut: bool) -> list[Call]:
        """One generation has ended (``cut``: before the model wanted to). Its calls, in order."""
        status = "incomplete" if cut else "completed"
        if self._blank and not self._turn:
            self._open_text(MESSAGE).add(self._blank, self._take_entries(MESSAGE))
        self._blank = ""
        self._close_text(status)
        self._entries = []
        for call in self._open.values():
            call.close(status)
        self._open.clear()
        calls, self._turn = self._turn, []
        return calls

    # From the gateway ----------------------------------------------------------------------------

    def list_tools(self, server: ServerTools) -> None:
        """An ``mcp_list_tools`` item: what a server offers, or why it could not be asked."""
        item: Item = {
            "type": "mcp_list_tools", "id": item_id("mcp_list_tools"), "server_label": server.label, "tools": [],
            "error": None,
        }  # fmt: skip
        entry = OpenItem(self.writer, len(self.items), item)
        self.items.append(item)
        entry.added()
        self.writer.event("response.mcp_list_tools.in_progress", entry.place)
        item["tools"] = [_listed(tool) for tool in server.tools]
        item["error"] = server.error
        outcome = "failed" if server.error is not None else "completed"
        self.writer.event(f"response.mcp_list_tools.{outcome}", entry.place)
        entry.done()

    def approved_call(self, request: Item, tool: ToolInfo) -> Call:
        """A call that the client has approved, its arguments complete."""
        call = self._keep(McpCall(self.writer, len(self.items), tool, request["id"]))
        call.add(request["arguments"])
        call.close("completed")
        return call


def _listed(tool: ToolInfo) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "annotations": {"read_only": tool.read_only},
    }
