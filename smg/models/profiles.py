"""Request rules of model providers, keyed on the model name alone.

A request for a model that carries a provider's name obeys the rules of that provider's own API, so a client that works
there works here and mistakes are told early. Names are looked at per ``/``-separated segment; the first segment that
belongs to a provider decides. Rules on how calls and their answers pair up are checked with the messages, in
``smg.api``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from smg.models.prompt import PromptError

_DEEPSEEK = frozenset({"deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash", "deepseek-flash"})
_PREFIXES = (("kimi", ("kimi", "moonshot")), ("minimax", ("minimax", "abab")), ("glm", ("glm", "zai", "z-ai")))

_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
_LEVELS = frozenset({"low", "high", "max"})
_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """The request fields that profiles read, in the shape of the chat API; None = not given.

    ``messages`` and ``tools`` are plain JSON values. ``thinking_effort`` is ``thinking.effort``.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    reasoning_effort: str | None = None
    thinking_type: str | None = None
    thinking_effort: str | None = None
    clear_thinking: bool | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None

    @property
    def effort(self) -> str | None:
        """The effective effort."""
        return self.reasoning_effort if self.thinking_effort is None else self.thinking_effort


def provider_of(model: str) -> str:
    """``deepseek``, ``kimi``, ``minimax``, ``glm`` or "" (no profile)."""
    for segment in model.lower().split("/"):
        if segment in _DEEPSEEK:
            return "deepseek"
        for provider, prefixes in _PREFIXES:
            if segment.startswith(prefixes):
                return provider
    return ""


def apply_profile(model: str, request: ProfileRequest) -> ProfileRequest:
    """The request as the model's provider would read it. ``model`` is the canonical model name. Raises ``PromptError``
    with the provider's error code for a request that it refuses."""
    provider = provider_of(model)
    if provider == "deepseek":
        return _deepseek(model.lower().split("/"), request)
    if provider == "kimi":
        return _kimi(model.lower().split("/"), request)
    if provider == "glm":
        return _glm(model.lower().split("/"), request)
    return request


def is_forced(tool_choice: Any) -> bool:
    """Whether a ``tool_choice`` demands a call: ``required``, a named function, or ``allowed_tools`` in that mode."""
    if isinstance(tool_choice, dict):
        if tool_choice.get("type") == "allowed_tools":
            nested = tool_choice.get("allowed_tools")
            return (nested if isinstance(nested, dict) else tool_choice).get("mode") == "required"
        return True
    return bool(tool_choice == "required")


# --------------------------------------------------------------------------------------------------
# DeepSeek

_DEEPSEEK_ALIASES = {"minimal": "low", "medium": "high", "xhigh": "high"}
_KWARG_EFFORTS = {"none": False, "minimal": False, "low": True, "high": True, "xhigh": True, "max": True}


def _deepseek(segments: list[str], request: ProfileRequest) -> ProfileRequest:
    newer = next(segment for segment in segments if segment in _DEEPSEEK) == "deepseek-v4.1-flash"
    for effort in (request.reasoning_effort, request.thinking_effort):
        _check_deepseek_effort(effort, newer)
    if request.thinking_type == "adaptive":
        raise PromptError("thinking.type must be enabled or disabled", "thinking_type_not_supported")
    aliases = {key: value for key, value in _DEEPSEEK_ALIASES.items() if not (newer and key == "xhigh")}
    request = replace(
        request,
        reasoning_effort=_renamed(request.reasoning_effort, aliases),
        thinking_effort=_renamed(request.thinking_effort, aliases),
    )
    thinking = _deepseek_thinking(request)
    if thinking and is_forced(request.tool_choice):
        raise PromptError("a forced tool_choice needs thinking turned off", "tool_choice_not_supported")
    if request.template_kwargs.get("thinking") is None:
        request = replace(request, template_kwargs=request.template_kwargs | {"thinking": thinking})
    return request


def _check_deepseek_effort(effort: str | None, newer: bool) -> None:
    if effort is None or effort in _EFFORTS:
        return
    if newer and effort.isascii() and effort.isdigit() and len(effort) <= 3 and 1 <= int(effort) <= 100:
        return
    raise PromptError(
        f"reasoning effort {effort[:64]!r} is not supported by this model", "reasoning_effort_not_allowed"
    )


def _renamed(effort: str | None, aliases: dict[str, str]) -> str | None:
    return aliases.get(effort, effort) if effort is not None else None


def _deepseek_thinking(request: ProfileRequest) -> bool:
    toggles = [request.template_kwargs.get(key) for key in ("thinking", "enable_thinking")]
    if any(toggle is not None and not isinstance(toggle, bool) for toggle in toggles):
        raise PromptError("thinking and enable_thinking must be booleans", "invalid_thinking_override")
    given = [toggle for toggle in toggles if toggle is not None]
    if len(set(given)) > 1:
        raise PromptError("thinking and enable_thinking contradict each other", "conflicting_thinking_overrides")
    if given:
        return bool(given[0])
    by_kwarg = request.template_kwargs.get("reasoning_effort")
    if isinstance(by_kwarg, str) and by_kwarg in _KWARG_EFFORTS:
        return _KWARG_EFFORTS[by_kwarg]
    if request.thinking_type is not None:
        return request.thinking_type == "enabled"
    return request.effort != "none"


# --------------------------------------------------------------------------------------------------
# Kimi

_K3_SAMPLING: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("temperature", (0, 0.6, 1)),
    ("top_p", (0.95,)),
    ("n", (1,)),
    ("frequency_penalty", (0,)),
    ("presence_penalty", (0,)),
)


def _kimi(segments: list[str], request: ProfileRequest) -> ProfileRequest:
    for message in request.messages:
        if message.get("tools") is not None:
            _check_message_tools(message)
    if any(segment.startswith(("kimi-k3", "kimi_k3")) for segment in segments):
        for name, allowed in _K3_SAMPLING:
            value = getattr(request, name)
            if value is not None and value not in allowed:
                raise PromptError(f"{name} must be one of {', '.join(map(str, allowed))}", f"{name}_not_allowed")
        if request.thinking_type == "adaptive":
            raise PromptError("thinking.type must be enabled or disabled", "thinking_type_not_supported")
        if request.thinking_effort is not None and request.thinking_effort not in _LEVELS:
            raise PromptError("thinking.effort must be low, high or max", "thinking_effort_invalid")
    return request


def _check_message_tools(message: dict[str, Any]) -> None:
    """Tools that a system message brings along."""
    if message.get("role") != "system":
        raise PromptError("only a system message may carry tools", "tools_role_restricted")
    if message.get("content"):
        raise PromptError("a system message with tools must have no content", "tools_content_conflict")
    tools = message["tools"]
    if not isinstance(tools, list):
        raise PromptError("tools must be a list", "tools_malformed")
    seen: set[str] = set()
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            raise PromptError("a tool must be an object with a function", "tools_malformed")
        if tool.get("type", "function") != "function":
            raise PromptError("only function tools are supported", "tool_type_unsupported")
        name = tool["function"].get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise PromptError("a tool name must match [A-Za-z_][A-Za-z0-9_]* and be short", "tool_name_invalid")
        if name in seen:
            raise PromptError(f"tool {name!r} is declared twice", "tool_name_duplicate")
        seen.add(name)


# --------------------------------------------------------------------------------------------------
# GLM


def _glm(segments: list[str], request: ProfileRequest) -> ProfileRequest:
    always_thinks = any(segment.startswith("glm-5.3") for segment in segments)
    if request.thinking_type == "adaptive":
        raise PromptError("thinking.type must be enabled or disabled", "thinking_type_not_supported")
    if always_thinks and request.thinking_type == "disabled":
        raise PromptError("this model cannot answer without thinking", "thinking_disabled_not_supported")
    allowed = _LEVELS if always_thinks else _EFFORTS
    for effort in (request.reasoning_effort, request.thinking_effort):
        if effort is not None and effort not in allowed:
            raise PromptError(f"reasoning effort {effort[:64]!r} is not supported", "reasoning_effort_not_allowed")
    if any(tool.get("type", "function") != "function" for tool in request.tools or ()):
        raise PromptError("only function tools are supported", "tool_type_not_supported")
    if request.clear_thinking is None or "clear_thinking" in request.template_kwargs:
        return request
    kwargs = request.template_kwargs | {"clear_thinking": request.clear_thinking}
    return replace(request, template_kwargs=kwargs)
