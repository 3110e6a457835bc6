"""From a job to the generations it asks for: tools, tool choice, and the request of one turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from smg.api.responses import ResponsesRequest, TurnRequest, turn_request
from smg.api.responses_items import chat_messages, parse_items
from smg.api.responses_tools import (
    HOSTED,
    ChoiceObject,
    CustomTool,
    McpTool,
    NamespaceTool,
    chat_tools,
)
from smg.api.tools import declaration
from smg.frontend.sessions.items import Item, model_items
from smg.frontend.sessions.job import Job, shown_tools
from smg.frontend.sessions.output import ToolNames
from smg.mcp.base import ServerRequest, ServerTools, ToolInfo

Declaration = dict[str, Any]


def server_requests(request: ResponsesRequest) -> list[ServerRequest]:
    """The MCP servers a request names."""
    return [
        ServerRequest(
            label=tool.server_label,
            url=tool.server_url,
            connector_id=tool.connector_id,
            description=tool.server_description,
            authorization=tool.authorization,
            headers=tool.headers or {},
            allowed_tools=tool.allowed_tools,
            require_approval=tool.require_approval,
        )
        for tool in request.tools or ()
        if isinstance(tool, McpTool)
    ]


def hosted_types(request: ResponsesRequest) -> list[str]:
    """The hosted tool types a request names."""
    tags = (str(tool.__struct_config__.tag) for tool in request.tools or ())
    return [tag for tag in dict.fromkeys(tags) if tag in HOSTED]


def tool_names(request: ResponsesRequest, servers: Sequence[ServerTools]) -> ToolNames:
    """What a called name means in this request. Tools of servers win over functions, the first server over others."""
    tools: dict[str, ToolInfo] = {}
    for server in servers:
        for tool in server.tools:
            tools.setdefault(tool.name, tool)
    custom: set[str] = set()
    namespaces: dict[str, tuple[str, str]] = {}
    for entry in request.tools or ():
        if isinstance(entry, CustomTool):
            custom.add(entry.name)
        elif isinstance(entry, NamespaceTool):
            for inner in entry.tools:
                name = f"{entry.name}.{inner.name}"
                namespaces[name] = (entry.name, inner.name)
                if isinstance(inner, CustomTool):
                    custom.add(name)
    return ToolNames(tools, frozenset(custom), namespaces)


def server_functions(tools: Iterable[ToolInfo]) -> list[Declaration]:
    """The chat declarations of the tools of servers."""
    return [
        declaration({"name": tool.name, "description": tool.description or None, "parameters": tool.input_schema})
        for tool in tools
    ]


# Tool choice -------------------------------------------------------------------------------------------


def _names_of(label: str | None, name: str | None, tools: Iterable[ToolInfo]) -> list[str]:
    return [tool.name for tool in tools if tool.server_label == label and name in (None, tool.name)]


def _allowed(mode: str, names: Iterable[str]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


def first_choice(request: ResponsesRequest, choice: ChoiceObject | str | None, names: ToolNames) -> Any:
    """``tool_choice`` of the first turn, servers replaced by the functions they offer."""
    if not isinstance(choice, ChoiceObject):
        return choice
    tools = names.tools.values()
    if choice.type == "mcp":
        return _allowed("required", _names_of(choice.server_label, choice.name, tools))
    if choice.type != "allowed_tools":
        return request.tool_choice
    chosen: list[str] = []
    for entry in choice.tools or ():
        if entry.type == "mcp":
            chosen += _names_of(entry.server_label, entry.name, tools)
        elif entry.name is not None:
            chosen.append(entry.name)
    return _allowed(choice.mode or "auto", chosen)


def later_choice(choice: Any) -> Any:
    """The same for the turns that follow: a demand has been met, a restriction stays."""
    if isinstance(choice, dict):
        return choice | {"mode": "auto"} if choice.get("type") == "allowed_tools" else None
    return choice if choice == "none" else None


# One turn ----------------------------------------------------------------------------------------------


def build_turn(job: Job, names: ToolNames, items: Sequence[Item], choice: Any, room: int | None) -> TurnRequest:
    """The next generation. ``items``: the whole conversation so far; ``room``: output tokens that are left. The engine
    id is set by the caller. Raises ``ApiError``."""
    shown = model_items(items)
    functions = server_functions(names.tools.values())
    declared = [tool for tool in chat_tools(job.request.tools or ()) if tool["function"]["name"] not in names.tools]
    messages = [] if job.harmony else chat_messages(parse_items(shown), job.request.model)
    turn = turn_request(job.parsed, messages, [*declared, *functions], "")
    turn.tool_choice = choice
    turn.sampling.max_tokens = room
    if job.harmony:
        _fill_harmony(turn, job, names, shown, [*_special(declared, names), *functions])
    return turn


def _special(declared: Sequence[Declaration], names: ToolNames) -> list[Declaration]:
    """Declarations that the Harmony encoder does not find among the client's tools itself."""
    return [
        tool
        for tool in declared
        if tool["function"]["name"] in names.custom or tool["function"]["name"] in names.namespaces
    ]


def _fill_harmony(
    turn: TurnRequest, job: Job, names: ToolNames, shown: list[Item], functions: list[Declaration]
) -> None:
    turn.items = [_harmony_item(item) for item in shown]
    turn.instructions = job.request.instructions
    known = ("custom", "namespace", "mcp")
    turn.client_tools = [
        tool
        for tool in shown_tools(job.request)
        if tool["type"] not in known and not (tool["type"] == "function" and tool["name"] in names.tools)
    ]
    turn.mcp_tools = functions


def _harmony_item(item: Item) -> Item:
    """Custom tools are functions there."""
    if item.get("type") == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.get("input", "")}).decode()
        return {"type": "function_call", "call_id": item["call_id"], "name": item["name"], "arguments": arguments}
    if item.get("type") == "custom_tool_call_output":
        return {"type": "function_call_output", "call_id": item["call_id"], "output": item.get("output", "")}
    return item
