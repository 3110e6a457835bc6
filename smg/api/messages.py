"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: request types and validation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from smg.api.decode import BodyDecoder
from smg.api.errors import ApiError, invalid, refused
from smg.api.fields import MAX_ENGINE_STOP_STRINGS, U32, Request, check_decimal, check_stop, fill_defaults
from smg.api.messages_blocks import Block, check_conversation
from smg.api.tools import AUTO, NO_TOOLS, NONE, REQUIRED, ToolChoice
from smg.engines.base import Sampling

MIN_THINKING_BUDGET = 1024

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}\Z")
_TOOL_MEMBERS = frozenset(
    (
        "name",
        "description",
        "input_schema",
        "type",
        "cache_control",
        "strict",
        "eager_input_streaming",
        "defer_loading",
        "allowed_callers",
        "input_examples",
    )
)


class InputMessage(Request, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class SystemBlock(Request, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingEnabled(Request, kw_only=True, tag_field="type", tag="enabled"):
    budget_tokens: U32


class ThinkingDisabled(Request, tag_field="type", tag="disabled"):
    """No thinking."""


class ThinkingAdaptive(Request, tag_field="type", tag="adaptive"):
    """The model decides how much; it does think."""


Thinking = ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive


class ChoiceAuto(Request, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class ChoiceAny(Request, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class ChoiceTool(Request, kw_only=True, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class ChoiceNone(Request, tag_field="type", tag="none"):
    """No call."""


Choice = ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone


class Metadata(Request):
    user_id: str | None = None


class OutputConfig(Request):
    effort: str | None = None
    format: Any = None


class McpServer(Request, kw_only=True):
    name: str
    url: str


class CountTokensRequest(Request, kw_only=True):
    """What both routes have in common: everything that makes the prompt."""

    model: str
    messages: list[InputMessage]
    system: str | list[SystemBlock] | None = None
    thinking: Thinking | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of ``/v1/messages``."""

    max_tokens: U32
    temperature: float | None = None
    top_p: float | None = None
    top_k: U32 | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    mcp_servers: list[McpServer] | None = None
    container: str | dict[str, Any] | None = None
    context_management: Any = None
    output_format: Any = None
    thread: Any = None


_DECODER = BodyDecoder(MessagesRequest)
_COUNT_DECODER = BodyDecoder(CountTokensRequest)


def decode(body: bytes, headers: Mapping[str, str]) -> MessagesRequest:
    """The typed body of ``/v1/messages``. Raises ``ApiError``."""
    return _DECODER.decode(body, headers)


def decode_count(body: bytes, headers: Mapping[str, str]) -> CountTokensRequest:
    """The typed body of ``/v1/messages/count_tokens``. Raises ``ApiError``."""
    return _COUNT_DECODER.decode(body, headers)


def is_client_tool(tool: dict[str, Any]) -> bool:
    """A function of the client, as opposed to the typed tools that the vendor's own service runs."""
    return tool.get("type") in (None, "custom")


def _shape_error(where: str, text: str) -> ApiError:
    return ApiError(400, "invalid_type", f"Invalid JSON data: {where}: {text}", where)


def _check_tool_shape(tool: dict[str, Any], index: int) -> None:
    where = f"tools[{index}]"
    kind = tool.get("type")
    if kind is not None and type(kind) is not str:
        raise _shape_error(where, "type: expected a string")
    if kind == "mcp_toolset":
        return
    if type(tool.get("name")) is not str:
        raise _shape_error(where, "name: expected a string")
    if not is_client_tool(tool):
        return
    schema = tool.get("input_schema")
    if type(schema) is not dict or type(schema.get("type")) is not str:
        raise _shape_error(where, "input_schema: expected an object with a type")
    if tool.get("description") is not None and type(tool["description"]) is not str:
        raise _shape_error(where, "description: expected a string")


def _check_tools(tools: list[dict[str, Any]]) -> None:
    """Rules for client tools."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if not is_client_tool(tool):
            continue
        where = f"tools.{index}.custom"
        if not _TOOL_NAME.match(tool["name"]):
            raise invalid("tool_name_invalid", f"{where}.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'")
        if tool["input_schema"]["type"] != "object":
            raise invalid("tool_schema_invalid", f"{where}.input_schema.type: Input should be 'object'")
        for member in tool:
            if member not in _TOOL_MEMBERS:
                raise invalid("tool_member_unknown", f"{where}.{member}: Extra inputs are not permitted")
        if tool["name"] in seen:
            raise invalid("tool_name_duplicate", "tools: Tool names must be unique")
        seen.add(tool["name"])


def check_tool_shapes(request: CountTokensRequest) -> None:
    """The part of the rules for tools that belongs to decoding. Raises ``ApiError``."""
    for index, tool in enumerate(request.tools or ()):
        _check_tool_shape(tool, index)


def _check_choice(request: MessagesRequest) -> None:
    choice = request.tool_choice
    if choice is None or type(choice) is ChoiceNone:
        return
    if not request.tools:
        raise invalid("tool_choice_requires_tools", NO_TOOLS)
    if type(choice) is ChoiceTool and choice.name not in {tool.get("name") for tool in request.tools}:
        raise invalid(
            "tool_choice_tool_not_found", f"Invalid value for 'tool_choice': tool '{choice.name}' not found in 'tools'."
        )


def _check_thread(request: MessagesRequest) -> None:
    """The gateway holds no threads. Clients that are told so in this form send the whole conversation from then on;
    the new messages alone would make no sense."""
    if request.thread is not None:
        text = "thread is not supported: send the whole conversation with every request"
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ApiError(400, "thread_unsupported_request", text, "thread", details=details)


def validate(request: MessagesRequest) -> None:
    """All rules that need nothing but the request. Raises ``ApiError``."""
    _check_thread(request)
    check_tool_shapes(request)
    if not request.model:
        raise invalid("model_empty", "model field is required and cannot be empty", "model")
    if not request.messages:
        raise invalid("empty_array", "messages array is required and cannot be empty", "messages")
    check_decimal("temperature", request.temperature, 0, 1)
    check_decimal("top_p", request.top_p, 0, 1)
    check_stop("stop_sequences", request.stop_sequences, MAX_ENGINE_STOP_STRINGS)
    if not all(text.strip() for text in request.stop_sequences or ()):
        raise invalid("invalid_value", "each stop sequence must contain non-whitespace", "stop_sequences")
    thinking = request.thinking
    if type(thinking) is ThinkingEnabled:
        if thinking.budget_tokens < MIN_THINKING_BUDGET:
            text = f"Input should be greater than or equal to {MIN_THINKING_BUDGET}"
            raise invalid("thinking_budget_too_small", text, "thinking.enabled.budget_tokens")
        if thinking.budget_tokens >= request.max_tokens:
            raise refused("thinking_budget_too_large", "`max_tokens` must be greater than `thinking.budget_tokens`")
    _check_tools(request.tools or [])
    if any(tool.get("type") == "mcp_toolset" for tool in request.tools or ()) and not request.mcp_servers:
        raise invalid("mcp_servers_required", "mcp_servers is required when mcp_toolset tools are present")
    _check_choice(request)
    check_conversation(request.messages)
    if request.output_config is not None and request.output_config.format is not None:
        raise refused("unsupported_output_format", "output_config.format is not supported")
    if request.output_format is not None:
        raise refused("unsupported_output_format", "output_format is not supported")


def validate_count(request: CountTokensRequest) -> None:
    """The rules of the token count, which answers for drafts too. Raises ``ApiError``."""
    check_tool_shapes(request)
    if not request.messages:
        raise invalid("empty_array", "at least one message is required", "messages")


def chat_tool_choice(request: CountTokensRequest) -> ToolChoice | None:
    """``tool_choice`` as the chat API spells it; None = not given."""
    choice = request.tool_choice
    if choice is None:
        return None
    if type(choice) is ChoiceAny:
        return REQUIRED
    if type(choice) is ChoiceNone:
        return NONE
    if type(choice) is ChoiceTool:
        return ToolChoice("function", (choice.name,), {"type": "function", "function": {"name": choice.name}})
    return AUTO


def thinking_type(request: CountTokensRequest) -> str | None:
    """The chat API's ``thinking.type``. Adaptive thinking is thinking."""
    if request.thinking is None:
        return None
    return "disabled" if type(request.thinking) is ThinkingDisabled else "enabled"


def parallel_calls(request: CountTokensRequest) -> bool:
    """Whether the answer may hold several calls."""
    return not getattr(request.tool_choice, "disable_parallel_tool_use", None)


def sampling_of(request: MessagesRequest, defaults: Mapping[str, float]) -> Sampling:
    """The engine's sampling parameters. ``top_k`` 0 means off, as -1 does elsewhere."""
    sampling = Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=-1 if request.top_k == 0 else request.top_k,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or (),
    )
    fill_defaults(sampling, defaults)
    return sampling
