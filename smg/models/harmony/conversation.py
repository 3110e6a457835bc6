"""From an API conversation to Harmony messages. How messages become tokens is the business of ``render``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from smg.models.family import ToolSpec
from smg.models.harmony.declarations import developer_text
from smg.models.prompt import PromptError, RenderRequest
from smg.models.renderers.common import call_arguments, call_name, reasoning_text, tool_calls

BUILD_FAILED = "harmony_build_failed"

# Tools that the platform runs; they declare nothing in the prompt.
HOSTED_TOOLS = frozenset({"web_search_preview", "web_search", "code_interpreter", "container", "file_search", "shell"})

_LEVELS = {"high": "high", "xhigh": "high", "max": "high", "low": "low", "minimal": "low", "none": "low"}

IMAGE_GENERATION = ToolSpec(
    "image_generation",
    {
        "type": "object",
        "properties": {
            "prompt": {"type": "string", "description": "What the image shows"},
            "background": {"type": "string", "enum": ["transparent", "opaque", "auto"]},
            "model": {"type": "string"},
            "output_format": {"type": "string", "enum": ["png", "webp", "jpeg"]},
            "quality": {"type": "string", "enum": ["low", "medium", "high", "auto"]},
            "size": {"type": "string", "description": "Width x height in pixels, or auto"},
        },
        "required": ["prompt"],
    },
    "Generates an image from a text prompt",
)


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """One message. ``author`` is a role, ``role:NAME``, or the tool's name of a tool result."""

    author: str
    text: str
    channel: str = ""
    recipient: str = ""
    content_type: str = ""


def system_message(effort: str | None, date: str, *, commentary: bool, functions: bool) -> HarmonyMessage:
    """The system message. ``date`` is ``YYYY-MM-DD``; ``commentary``: the commentary channel exists; ``functions``:
    functions are declared."""
    channels = "analysis, commentary, final" if commentary else "analysis, final"
    text = (
        "You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\n"
        f"Current date: {date}\n\n"
        f"Reasoning: {_LEVELS.get(effort or '', 'medium')}\n\n"
        f"# Valid channels: {channels}. Channel must be included for every message."
    )
    if functions:
        text += "\nCalls to these tools must go to the commentary channel: 'functions'."
    return HarmonyMessage("system", text)


def chat_functions(tools: Iterable[Any] | None, tool_choice: Any) -> list[ToolSpec]:
    """The functions of a chat request's tool list that the prompt shows: a named function and ``allowed_tools`` (either
    mode) cut the list, ``none`` does not; of equal names the first counts."""
    specs = []
    for tool in tools or ():
        function = (
            tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
        )
        if isinstance(function, dict):
            specs.append(function_spec(function))
    return choose_functions(specs, tool_choice)


def function_spec(function: dict[str, Any]) -> ToolSpec:
    """A function object as a ``ToolSpec``."""
    parameters = function.get("parameters")
    description = function.get("description")
    return ToolSpec(
        name=str(function.get("name", "")),
        parameters=parameters if isinstance(parameters, dict) else {},
        description=description if isinstance(description, str) else "",
        strict=function.get("strict") is True,
    )


def choose_functions(functions: Iterable[ToolSpec], tool_choice: Any) -> list[ToolSpec]:
    """Applies ``tool_choice`` (chat or Responses form) to the declared functions and drops repeated names."""
    names: set[str] | None = None
    if isinstance(tool_choice, dict):
        if tool_choice.get("type") == "allowed_tools":
            tools = allowed_tools(tool_choice).get("tools") or ()
            names = {_choice_name(tool) for tool in tools if isinstance(tool, dict)}
        elif tool_choice.get("type") == "function":
            names = {_choice_name(tool_choice)}
    chosen: dict[str, ToolSpec] = {}
    for function in functions:
        if names is None or function.name in names:
            chosen.setdefault(function.name, function)
    return list(chosen.values())


def allowed_tools(tool_choice: dict[str, Any]) -> dict[str, Any]:
    """The object that holds ``mode`` and ``tools`` of an ``allowed_tools`` choice: the choice itself, or its member of
    that name, as Chat Completions nests it."""
    nested = tool_choice.get("allowed_tools")
    return nested if isinstance(nested, dict) else tool_choice


def _choice_name(choice: dict[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    return name if isinstance(name, str) else ""


def from_chat(request: RenderRequest, date: str) -> list[HarmonyMessage]:
    """The Harmony messages of a Chat Completions request. ``request.tools`` is the client's list (``tool_choice`` is
    applied here). Raises ``PromptError`` with code ``harmony_build_failed``."""
    functions = chat_functions(request.tools, request.tool_choice)
    messages = [
        system_message(request.effort, date, commentary=request.tools is not None, functions=bool(functions)),
        HarmonyMessage("developer", developer_text("", functions)),
    ]
    names = {call.get("id"): call_name(call) for message in request.messages for call in tool_calls(message)}
    for message in request.messages:
        role = message["role"]
        if role == "assistant":
            messages += _assistant(message)
        elif role == "tool":
            call_id = message.get("tool_call_id", "")
            messages.append(_result(names.get(call_id, call_id), _text(message, " ")))
        elif role == "function":
            messages.append(_result(message.get("name", ""), _text(message, " ")))
        elif role in ("system", "developer", "user"):
            messages.append(HarmonyMessage(_author(message), _text(message, "\n" if role == "user" else " ")))
        else:
            raise PromptError(f"Harmony has no role {role!r}", BUILD_FAILED)
    return messages


def _author(message: dict[str, Any]) -> str:
    name = message.get("name")
    role: str = message["role"]
    return f"{role}:{name}" if isinstance(name, str) and name else role


def _assistant(message: dict[str, Any]) -> list[HarmonyMessage]:
    author = _author(message)
    calls = tool_calls(message)
    if not calls:
        return [HarmonyMessage(author, _text(message, " "), channel="final")]
    messages = []
    reasoning = reasoning_text(message)
    if reasoning:
        messages.append(HarmonyMessage(author, reasoning, channel="analysis"))
    messages += [_call(author, call_name(call), call_arguments(call)) for call in calls]
    return messages


def _call(author: str, name: str, arguments: str) -> HarmonyMessage:
    return HarmonyMessage(author, arguments, "commentary", f"functions.{name}", "json")


def _result(name: str, text: str) -> HarmonyMessage:
    return HarmonyMessage(f"functions.{name}", text, recipient="assistant")


def _text(message: dict[str, Any], separator: str) -> str:
    """The text of a message; images are left out, other kinds of content are refused."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content:
        kind = part.get("type")
        if kind in ("text", "refusal"):
            texts.append(part.get(kind) or "")
        elif kind != "image_url":
            raise PromptError(f"content part of type {kind!r} is not supported by this model", BUILD_FAILED)
    return separator.join(texts)


@dataclass(slots=True)
class ResponsesConversation:
    """What the prompt of a Responses request is made of.

    ``items``: the input items, earlier ones of the conversation first (a plain text input is one user message).
    ``tools`` as the client sent them; ``functions``: functions that other parties add, such as MCP servers.
    ``tool_choice`` as sent.
    """

    items: Sequence[dict[str, Any]]
    instructions: str = ""
    tools: Sequence[dict[str, Any]] = ()
    functions: Sequence[ToolSpec] = ()
    tool_choice: Any = None
    effort: str | None = None


def responses_functions(conversation: ResponsesConversation) -> list[ToolSpec]:
    """The functions a Responses request declares in the prompt."""
    declared: list[ToolSpec] = []
    for tool in conversation.tools:
        if tool.get("type") == "function":
            declared.append(function_spec(tool))
        elif tool.get("type") == "image_generation":
            declared.append(IMAGE_GENERATION)
    return choose_functions((*declared, *conversation.functions), conversation.tool_choice)


def from_responses(conversation: ResponsesConversation, date: str) -> list[HarmonyMessage]:
    """The Harmony messages of a Responses request. Raises ``PromptError`` with code ``harmony_build_failed`` for an
    item that cannot be shown to the model, or a function result without its call."""
    functions = responses_functions(conversation)
    custom = bool(functions) or any(tool.get("type") not in HOSTED_TOOLS for tool in conversation.tools)
    messages = [system_message(conversation.effort, date, commentary=custom, functions=bool(functions))]
    if custom or conversation.instructions:
        messages.append(HarmonyMessage("developer", developer_text(conversation.instructions, functions)))
    calls: dict[str, str] = {}
    for item in conversation.items:
        kind = item.get("type") or "message"
        convert = _ITEMS.get(kind)
        if convert is None:
            raise PromptError(f"input item of type {kind!r} is not supported by this model", BUILD_FAILED)
        message = convert(item, calls)
        if message is not None:
            messages.append(message)
    return messages


def _message_item(item: dict[str, Any], calls: dict[str, str]) -> HarmonyMessage:
    role = item.get("role")
    return HarmonyMessage(role if role in ("user", "assistant", "system") else "user", _item_text(item.get("content")))


def _item_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [
        part.get("refusal" if part.get("type") == "refusal" else "text") for part in content if isinstance(part, dict)
    ]
    return "\n".join(text for text in texts if isinstance(text, str))


def _reasoning_item(item: dict[str, Any], calls: dict[str, str]) -> HarmonyMessage | None:
    text = _item_text(item.get("content"))
    return HarmonyMessage("assistant", text, channel="analysis") if text else None


def _call_item(item: dict[str, Any], calls: dict[str, str]) -> HarmonyMessage:
    name = item.get("name", "")
    calls[item.get("call_id", "")] = name
    if item.get("output") is not None:
        return _result(name, _item_text(item["output"]))
    return _call("assistant", name, item.get("arguments") or "")


def _output_item(item: dict[str, Any], calls: dict[str, str]) -> HarmonyMessage:
    call_id = item.get("call_id", "")
    if call_id not in calls:
        raise PromptError(f"no function call {call_id!r} comes before its output", BUILD_FAILED)
    return _result(calls[call_id], _item_text(item.get("output")))


_ITEMS: dict[str, Callable[[dict[str, Any], dict[str, str]], HarmonyMessage | None]] = {
    "message": _message_item,
    "reasoning": _reasoning_item,
    "function_call": _call_item,
    "function_call_output": _output_item,
}
