"""Request rules of model vendors, chosen by the model name the client wrote.

The rules of the vendors that change how a prompt is rendered live with the models (``smg.models.profiles``); here are
the calls
that apply them to a chat request, and what OpenAI's own API refuses for its own model names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from smg.api.chat_messages import AssistantMessage, ChatMessage, RootMessage, ToolMessage
from smg.api.errors import ApiError, invalid
from smg.models.profiles import ProfileRequest, apply_profile, provider_of
from smg.models.prompt import PromptError

if TYPE_CHECKING:
    from smg.api.chat import ChatRequest

_OPENAI = re.compile(r"gpt-(?!oss)|chatgpt-|o\d")


@lru_cache(maxsize=1024)
def vendor_of(model: str) -> str:
    """ "deepseek", "kimi", "minimax", "glm", "openai" or "" (no extra rules)."""
    vendor = provider_of(model)
    if not vendor and any(_OPENAI.match(part) for part in model.lower().split("/")):
        return "openai"
    return vendor


def apply_rules(
    request: ChatRequest,
    typed: Sequence[ChatMessage],
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    tool_choice: Any,
) -> ProfileRequest:
    """Checks the vendor's rules and returns effort and template variables as the vendor reads them.

    ``typed`` are the messages, ``messages`` and ``tools`` the plain forms, ``tool_choice`` the plain value. The other
    members count as ``request`` has them. Raises ``ApiError``.
    """
    thinking = request.thinking
    plain = ProfileRequest(
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        reasoning_effort=request.effort_text,
        thinking_type=thinking.type if thinking is not None else None,
        thinking_effort=thinking.effort if thinking is not None else None,
        clear_thinking=thinking.clear_thinking if thinking is not None else None,
        template_kwargs=request.chat_template_kwargs or {},
        temperature=request.temperature,
        top_p=request.top_p,
        n=request.n,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
    )
    vendor = vendor_of(request.model)
    if vendor == "minimax":
        _check_minimax_pairs(typed)
    else:
        refuse_root(typed)
    if vendor in ("", "openai"):
        if vendor:
            _check_openai(request, typed)
        return plain
    if vendor == "deepseek":
        _check_openai_pairs(typed)
    try:
        return apply_profile(request.model, plain)
    except PromptError as error:
        raise invalid(error.code, error.message, error.param) from None


def refuse_root(messages: Sequence[ChatMessage]) -> None:
    """One vendor alone knows the role. Raises ``ApiError``."""
    if RootMessage in map(type, messages):
        raise invalid("invalid_role", "invalid role: root")


def apply_turn_rules(
    model: str,
    messages: list[dict[str, Any]],
    tool_choice: Any,
    *,
    effort: str | None,
    thinking_type: str | None = None,
) -> ProfileRequest:
    """Effort and template variables of a Messages request or a session's turn, as the vendor reads them. These APIs
    pair tool calls by rules of their own. Raises ``ApiError``."""
    plain = ProfileRequest(
        messages=messages, tool_choice=tool_choice, reasoning_effort=effort, thinking_type=thinking_type
    )
    if vendor_of(model) not in ("deepseek", "kimi", "glm"):
        return plain
    try:
        return apply_profile(model, plain)
    except PromptError as error:
        raise invalid(error.code, error.message, error.param) from None


def _check_openai(request: ChatRequest, messages: Sequence[ChatMessage]) -> None:
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise invalid("invalid_parameter_combination", "'max_tokens' and 'max_completion_tokens' cannot both be set")
    if request.response_format is not None and request.response_format.__struct_config__.tag == "json_object":
        texts = (str(message.content).lower() for message in messages)
        if not any("json" in text for text in texts):
            raise invalid(
                "json_object_requires_json_in_messages",
                "'messages' must contain the word 'json' to use 'response_format' of type 'json_object'",
            )
    _check_openai_pairs(messages)


def _unanswered(index: int, pending: Sequence[str]) -> ApiError:
    return invalid(
        "tool_calls_without_tool_messages",
        f"messages[{index}]: these tool calls have no tool message right after: {', '.join(pending)}",
    )


def _calls(message: ChatMessage) -> list[str]:
    calls = message.tool_calls if type(message) is AssistantMessage else None
    return [call.id for call in calls or ()]


def _check_openai_pairs(messages: Sequence[ChatMessage]) -> None:
    """Tool messages follow the assistant message with their calls, one for each call."""
    caller = -1
    pending: dict[str, None] = {}
    for index, message in enumerate(messages):
        if type(message) is ToolMessage:
            where = f"messages[{index}]"
            if caller < 0:
                raise invalid("tool_message_without_tool_calls", f"{where}: no tool calls precede this tool message")
            if message.tool_call_id not in pending:
                raise invalid("tool_call_id_not_found", f"{where}.tool_call_id: no open call of messages[{caller}]")
            del pending[message.tool_call_id]
            continue
        if pending:
            raise _unanswered(caller, list(pending))
        pending = dict.fromkeys(_calls(message))
        caller = index if pending else -1
    if pending:
        raise _unanswered(caller, list(pending))


def _check_minimax_pairs(messages: Sequence[ChatMessage]) -> None:
    """As above, with this vendor's codes; ids must be distinct."""
    pending: dict[str, None] = {}
    for message in messages:
        if type(message) is ToolMessage:
            if message.tool_call_id not in pending:
                raise invalid("tool_call_id_mismatch", f"no pending tool_call with id '{message.tool_call_id}'")
            del pending[message.tool_call_id]
            continue
        if pending:
            raise invalid("tool_call_unanswered", f"tool_call '{next(iter(pending))}' has no matching tool message")
        for call_id in _calls(message):
            if call_id in pending:
                raise invalid("tool_call_id_duplicate", f"duplicate tool_call id '{call_id}'")
            pending[call_id] = None
    if pending:
        raise invalid("tool_call_unanswered", f"tool_call '{next(iter(pending))}' has no matching tool message")
