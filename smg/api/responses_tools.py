"""Tools and ``tool_choice`` of the Responses API: types, rules, and what a model is shown of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from smg.api.errors import invalid
from smg.api.tools import (
    AUTO,
    NO_TOOLS,
    ToolChoice,
    declaration,
    function_not_found,
    parse_word,
    tool_not_found,
    type_error,
    wrong_mode,
)

_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z")
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The raw payload to pass to this custom tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
HOSTED = (
    "web_search_preview",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview_2025_03_11",
    "file_search",
    "computer",
    "computer_use_preview",
    "code_interpreter",
    "image_generation",
    "shell",
    "apply_patch",
    "tool_search",
    "programmatic_tool_calling",
)


class ToolBase(msgspec.Struct, tag_field="type", kw_only=True, gc=False):
    """Base of the tools; the type selects the rest. Unknown members are ignored."""


class FunctionTool(ToolBase, kw_only=True, tag="function"):
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class CustomTool(ToolBase, kw_only=True, tag="custom"):
    """Takes free text. The model sees a function with one string parameter, ``input``."""

    name: str
    description: str | None = None
    format: Any = None


class NamespaceTool(ToolBase, kw_only=True, tag="namespace"):
    """A group of functions; the model sees each as ``<namespace>.<name>``."""

    description: str
    name: str
    tools: list[FunctionTool | CustomTool]


class McpTool(ToolBase, kw_only=True, tag="mcp"):
    server_label: str
    server_url: str | None = None
    server_description: str | None = None
    authorization: str | None = None
    headers: dict[str, str] | None = None
    allowed_tools: Any = None
    require_approval: Any = None
    connector_id: str | None = None


class FileSearchTool(ToolBase, kw_only=True, tag="file_search"):
    vector_store_ids: list[str]


class ComputerPreviewTool(ToolBase, kw_only=True, tag="computer_use_preview"):
    display_height: int
    display_width: int
    environment: str


class WebSearchPreviewTool(ToolBase, tag="web_search_preview"):
    """Hosted."""


class WebSearchPreviewDatedTool(ToolBase, tag="web_search_preview_2025_03_11"):
    """Hosted."""


class WebSearchTool(ToolBase, tag="web_search"):
    """Hosted."""


class WebSearchDatedTool(ToolBase, tag="web_search_2025_08_26"):
    """Hosted."""


class CodeInterpreterTool(ToolBase, tag="code_interpreter"):
    """Hosted."""

    container: Any = None


class ImageGenerationTool(ToolBase, tag="image_generation"):
    """Hosted."""


class ComputerTool(ToolBase, tag="computer"):
    """Hosted."""


class ShellTool(ToolBase, tag="shell"):
    """Hosted."""


class ApplyPatchTool(ToolBase, tag="apply_patch"):
    """Hosted."""


class ToolSearchTool(ToolBase, tag="tool_search"):
    """Finds functions whose loading is deferred. All functions are shown here from the start, so it has no use."""


class ProgrammaticCallingTool(ToolBase, tag="programmatic_tool_calling"):
    """Lets a program of the vendor's service call the functions; here the model calls them itself."""


class LocalShellTool(ToolBase, tag="local_shell"):
    """Refused: it needs a client that runs commands."""


ResponsesTool = (
    FunctionTool
    | CustomTool
    | NamespaceTool
    | McpTool
    | FileSearchTool
    | ComputerPreviewTool
    | WebSearchPreviewTool
    | WebSearchPreviewDatedTool
    | WebSearchTool
    | WebSearchDatedTool
    | CodeInterpreterTool
    | ImageGenerationTool
    | ComputerTool
    | ShellTool
    | ApplyPatchTool
    | ToolSearchTool
    | ProgrammaticCallingTool
    | LocalShellTool
)


def check_tools(tools: Sequence[ResponsesTool]) -> None:
    """Rules of the tools. Raises ``ApiError``."""
    labels: dict[str, str | None] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if isinstance(tool, FunctionTool):
            _check_parameters(tool, where)
        elif isinstance(tool, NamespaceTool):
            for position, inner in enumerate(tool.tools):
                if isinstance(inner, FunctionTool):
                    _check_parameters(inner, f"{where}.tools[{position}]")
        elif isinstance(tool, LocalShellTool):
            raise invalid("tool_not_supported", f"Invalid '{where}': the local_shell tool is not supported", "tools")
        elif isinstance(tool, McpTool):
            _check_mcp(tool, where, labels)


def _check_parameters(tool: FunctionTool, where: str) -> None:
    if tool.parameters is not None and type(tool.parameters) is not dict:
        raise invalid("invalid_type", f"Invalid type for '{where}.parameters': expected an object", "tools")


def _check_mcp(tool: McpTool, where: str, labels: dict[str, str | None]) -> None:
    if not tool.server_label:
        raise invalid("missing_required_parameter", f"Missing required parameter: '{where}.server_label'", "tools")
    if not _LABEL.match(tool.server_label):
        text = f"'{where}.server_label' must be a letter, then letters, digits, - or _"
        raise invalid("invalid_server_label", text, "tools")
    key = tool.server_label.lower()
    if key in labels:
        text = f"Duplicate MCP server_label '{tool.server_label}' found in 'tools' parameter"
        raise invalid("mcp_tool_duplicate_server_label", text, "tools")
    if tool.server_url is not None and tool.connector_id is not None:
        text = f"'{where}' names both a server_url and a connector_id"
        raise invalid("mcp_tool_conflicting_targets", text, "tools")
    labels[key] = tool.server_url


def function_names(tools: Sequence[ResponsesTool]) -> set[str]:
    """Names under which a model can call the declared functions."""
    return {tool["function"]["name"] for tool in chat_tools(tools)}


def _function(tool: FunctionTool | CustomTool, prefix: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": prefix + tool.name, "description": tool.description}
    if isinstance(tool, CustomTool):
        function["parameters"] = _CUSTOM_PARAMETERS
        function["strict"] = False
    else:
        function["parameters"] = tool.parameters
        function["strict"] = tool.strict
    return declaration({key: value for key, value in function.items() if value is not None})


def chat_tools(tools: Sequence[ResponsesTool]) -> list[dict[str, Any]]:
    """The functions and custom tools as chat declarations. Hosted tools and MCP servers have none: what an MCP server
    offers is added by the session that talks to it."""
    declared: list[dict[str, Any]] = []
    for tool in tools:
        if isinstance(tool, FunctionTool | CustomTool):
            declared.append(_function(tool, ""))
        elif isinstance(tool, NamespaceTool):
            declared += [_function(inner, f"{tool.name}.") for inner in tool.tools]
    return declared


class AllowedEntry(msgspec.Struct, kw_only=True, gc=False):
    """One tool of an allowed_tools list."""

    type: str
    name: str | None = None
    server_label: str | None = None


class ChoiceObject(msgspec.Struct, kw_only=True, gc=False):
    """Any object form of ``tool_choice``."""

    type: str
    name: str | None = None
    function: dict[str, Any] | None = None
    mode: str | None = None
    tools: list[AllowedEntry] | None = None
    server_label: str | None = None


def _wrong_choice() -> Exception:
    return type_error("tool_choice", "expected auto, none, required or one of the tool choice objects")


def parse_choice(value: Any) -> ChoiceObject | str | None:
    """``tool_choice`` checked for its form. Raises ``ApiError`` (``invalid_type``)."""
    if value is None:
        return None
    if isinstance(value, str) and value in ("auto", "none", "required"):
        return value
    if type(value) is not dict:
        raise _wrong_choice()
    try:
        choice = msgspec.convert(value, ChoiceObject)
    except msgspec.ValidationError:
        raise _wrong_choice() from None
    if choice.type == "function" and choice.name is None and choice.function is not None:
        name = choice.function.get("name")
        choice.name = name if type(name) is str else None
    complete = {
        "function": choice.name is not None,
        "custom": choice.name is not None,
        "mcp": choice.server_label is not None,
        "allowed_tools": choice.mode is not None and choice.tools is not None,
    }
    if not complete.get(choice.type, choice.type in HOSTED):
        raise _wrong_choice()
    return choice


def check_choice(choice: ChoiceObject | str | None, tools: Sequence[ResponsesTool] | None) -> None:
    """Cross-checks of ``tool_choice`` with ``tools``. Raises ``ApiError``."""
    if choice is None or choice == "none":
        return
    if not tools:
        raise invalid("tool_choice_requires_tools", NO_TOOLS)
    if isinstance(choice, str):
        return
    names = function_names(tools)
    if choice.type == "function" and choice.name not in names:
        raise invalid("tool_choice_function_not_found", function_not_found(choice.name))
    if choice.type != "allowed_tools":
        return
    if choice.mode not in ("auto", "required"):
        raise invalid("tool_choice_invalid_mode", wrong_mode(choice.mode))
    labels = {tool.server_label for tool in tools if isinstance(tool, McpTool)}
    kinds = {tool.__struct_config__.tag for tool in tools}
    for entry in choice.tools or ():
        known = {"function": entry.name in names, "custom": entry.name in names, "mcp": entry.server_label in labels}
        if not known.get(entry.type, entry.type in kinds):
            shown = entry.name or entry.server_label or entry.type
            raise invalid("tool_choice_tool_not_found", tool_not_found(shown))


def chat_choice(choice: ChoiceObject | str | None, names: set[str]) -> ToolChoice:
    """``tool_choice`` as the chat API spells it. ``names`` are the functions the model can call in this turn. A
    choice of a hosted tool forces nothing."""
    if choice is None or isinstance(choice, str):
        return parse_word(choice or "auto")
    if choice.type in ("function", "custom") and choice.name is not None and choice.name in names:
        return ToolChoice("function", (choice.name,), {"type": "function", "function": {"name": choice.name}})
    if choice.type == "allowed_tools":
        allowed = tuple(entry.name for entry in choice.tools or () if entry.name is not None and entry.name in names)
        entries = [{"type": "function", "name": name} for name in allowed]
        return ToolChoice(
            choice.mode or "auto", allowed, {"type": "allowed_tools", "mode": choice.mode, "tools": entries}
        )
    return AUTO
