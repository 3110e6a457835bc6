"""Output constraints in the Harmony format, as xgrammar structural tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg.models.family import ToolSpec
from smg.models.harmony.conversation import allowed_tools
from smg.models.harmony.tokens import CHANNEL, CONSTRAIN, END, MESSAGE, START
from smg.models.prompt import PromptError

_ASSISTANT = f"{START}assistant"
_COMMENTARY = f"{CHANNEL}commentary"
_ANALYSIS = f"{CHANNEL}analysis"
_FINAL = f"{CHANNEL}final"
_JSON = f"{CONSTRAIN}json{MESSAGE}"


def forced_calls_tag(functions: Sequence[ToolSpec], *, single: bool) -> dict[str, Any]:
    """At least one call of one of ``functions``; with ``single`` exactly one, and nothing after it."""
    tags = []
    for function in functions:
        content = {"type": "json_schema", "json_schema": function.parameters}
        begin = f"{_COMMENTARY} to=functions.{function.name}{_JSON}"
        tags += [{"begin": start + begin, "content": content, "end": ""} for start in (_ASSISTANT, "")]
    return _tag((_ASSISTANT + _COMMENTARY, _COMMENTARY), tags, stop_after_first=single)


def schema_tag(schema: Any) -> dict[str, Any]:
    """A final answer that is JSON after ``schema``, with any analysis before it."""
    analysis = {"begin": f"{_ANALYSIS}{MESSAGE}", "content": {"type": "any_text"}, "end": END}
    final = {"begin": _FINAL + _JSON, "content": {"type": "json_schema", "json_schema": schema}, "end": ""}
    return _tag((_ANALYSIS, _FINAL), [analysis, final], stop_after_first=False)


def _tag(triggers: Sequence[str], tags: list[dict[str, Any]], *, stop_after_first: bool) -> dict[str, Any]:
    return {
        "format": {
            "type": "triggered_tags",
            "triggers": list(triggers),
            "tags": tags,
            "at_least_one": True,
            "stop_after_first": stop_after_first,
        }
    }


def structural_tag(
    functions: Sequence[ToolSpec], tool_choice: Any, response_format: Any, *, conflict_code: str
) -> dict[str, Any] | None:
    """The constraint of a request, or None.

    ``functions`` are those the prompt declares. ``response_format`` is the chat field or the Responses API's
    ``text.format``. Raises ``PromptError``: ``conflict_code`` when a forced call meets a JSON response format,
    ``tool_choice_function_not_found`` for a named function that is not declared.
    """
    single = isinstance(tool_choice, dict) and tool_choice.get("type") == "function"
    if single and not functions:
        raise PromptError(
            "tool_choice names a function that is not in tools", "tool_choice_function_not_found", "tool_choice"
        )
    forced = single or tool_choice == "required" or _allowed_mode(tool_choice) == "required"
    schema = _schema(response_format)
    if forced and schema is not None:
        raise PromptError("a forced tool call and a JSON response format exclude each other", conflict_code)
    if forced and functions:
        return forced_calls_tag(functions, single=single)
    return None if schema is None else schema_tag(schema)


def _allowed_mode(tool_choice: Any) -> Any:
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools":
        return allowed_tools(tool_choice).get("mode")
    return None


def _schema(response_format: Any) -> Any:
    """The JSON schema of a response format, None for text or no format."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        return response_format.get("json_schema", response_format).get("schema", {})
    return None


def refuse_ignore_eos(ignore_eos: bool) -> None:
    """Raises ``PromptError``: without its stop tokens a Harmony answer has no end."""
    if ignore_eos:
        raise PromptError("ignore_eos is not supported for this model", "ignore_eos_not_supported", "ignore_eos")
