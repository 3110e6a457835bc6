"""One request of the Responses API as its session knows it, and the response object it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from smg.api.responses import Parsed, ResponsesRequest
from smg.api.responses_tools import McpTool, NamespaceTool
from smg.frontend.sessions.items import Item


@dataclass(slots=True)
class Job:
    """``history``: earlier items of the conversation; ``given``: the request's own input items, in stored form;
    ``scope``: whose records these are; ``created``: wall-clock seconds; ``deadline`` likewise, 0 = none;
    ``harmony``: the model speaks gpt-oss's format."""

    id: str
    parsed: Parsed
    request_id: str
    headers: dict[str, str]
    scope: str
    created: float
    deadline: float
    given: list[Item]
    history: list[Item] = field(default_factory=list)
    harmony: bool = False
    background: bool = False

    @property
    def request(self) -> ResponsesRequest:
        return self.parsed.request

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    @property
    def store(self) -> bool:
        return self.request.store is not False


@dataclass(slots=True)
class Usage:
    """Token counts over all generations of a response."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0

    def add(self, counts: dict[str, int]) -> None:
        """Counts of one generation, as ``TurnEnd`` carries them."""
        self.input += counts.get("prompt_tokens", 0)
        self.output += counts.get("completion_tokens", 0)
        self.cached += counts.get("cached_tokens", 0)
        self.reasoning += counts.get("reasoning_tokens", 0)

    def shown(self) -> dict[str, Any]:
        """The ``usage`` object."""
        return {
            "input_tokens": self.input,
            "output_tokens": self.output,
            "total_tokens": self.input + self.output,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass(slots=True)
class State:
    """How far a response is. ``error`` is ``{"code", "message"}``; ``incomplete`` the reason of an incomplete one."""

    status: str = "in_progress"
    completed: float | None = None
    error: dict[str, Any] | None = None
    incomplete: str | None = None
    usage: Usage | None = None


def shown_tools(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The request's tools as the response repeats them: unset members left out, no credentials."""
    return [_shown_tool(tool) for tool in request.tools or ()]


def _shown_tool(tool: Any) -> dict[str, Any]:
    shown = {key: value for key, value in msgspec.to_builtins(tool).items() if value is not None}
    if isinstance(tool, McpTool):
        shown.pop("authorization", None)
        if "headers" in shown:
            shown["headers"] = dict.fromkeys(shown["headers"], "<redacted>")
    elif isinstance(tool, NamespaceTool):
        shown["tools"] = [_shown_tool(inner) for inner in tool.tools]
    return shown


def _shown_text(request: ResponsesRequest) -> dict[str, Any]:
    config = request.text
    plain: dict[str, Any] = {"type": "text"}
    shown = _shown_tool(config.format) if config is not None and config.format is not None else plain
    return {"format": shown, "verbosity": (config.verbosity if config is not None else None) or "medium"}


def response_object(job: Job, state: State, output: Sequence[Item]) -> dict[str, Any]:
    """The response object. Every member is there in every state, so that the first event of a stream has the form of
    the last."""
    request = job.request
    conversation = request.conversation_id
    reasoning = request.reasoning
    return {
        "id": job.id,
        "object": "response",
        "created_at": int(job.created),
        "completed_at": int(state.completed) if state.completed is not None else None,
        "background": job.background,
        **({"conversation": {"id": conversation}} if conversation is not None else {}),
        "status": state.status,
        "error": state.error,
        "incomplete_details": {"reason": state.incomplete} if state.incomplete else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": request.model,
        "output": list(output),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "service_tier": "default",
        "store": job.store,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": _shown_text(request),
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": shown_tools(request),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": state.usage.shown() if state.usage is not None else None,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "presence_penalty": request.presence_penalty or 0.0,
        "metadata": request.metadata or {},
    }
