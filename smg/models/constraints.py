"""What an answer is constrained to: forced tool calls, and the output formats that a client asks for.

A request carries at most one constraint. Both kinds are built here as text, once per request; which one is sent when a
forced call and an output format meet depends on the engine.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from smg.engines.base import BuildError, Constraint
from smg.messages import ToolCallStart
from smg.models.family import ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.machine import parse_whole
from smg.models.output import tool_specs
from smg.models.prompt import PromptError
from smg.models.registry import Selection
from smg.models.structural import after_thought, beginnings

VLLM_KINDS = frozenset(("vllm", "vllm-zmq"))


class ToolChoice(Protocol):
    """A ``tool_choice`` after validation. ``mode``: "auto", "none", "required" or "function" (one is named);
    ``names``: the
    only functions that may be called, None = all; ``forced``: a call must come out."""

    @property
    def mode(self) -> str: ...

    @property
    def names(self) -> Collection[str] | None: ...

    @property
    def forced(self) -> bool: ...


def callable_tools(tools: Sequence[dict[str, Any]], choice: ToolChoice) -> list[dict[str, Any]]:
    """The tools that the answer may call."""
    if choice.mode == "none":
        return []
    return [tool for tool in tools if choice.names is None or _name_of(tool) in choice.names]


def _name_of(tool: dict[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


@dataclass(frozen=True, slots=True)
class ToolConstraint:
    """A forced call. ``forced`` and ``leads`` are those of ``ParserPlan``: how to read the answer, and how it begins.
    ``reasons``: the grammar itself begins with the thought, so an engine must not wait for the end of reasoning
    before it applies it (SGLang's ``require_reasoning`` off)."""

    constraint: Constraint
    forced: str
    leads: tuple[str, ...] = ()
    reasons: bool = False


def tool_constraint(
    tools: Sequence[dict[str, Any]],
    choice: ToolChoice,
    selection: Selection,
    *,
    native: bool = False,
    thinking: bool = False,
    parallel: bool = True,
    decoding_start: str = "",
) -> ToolConstraint | None:
    """The constraint of a forced call; None when nothing is forced.

    A structural tag, in the model's own format, when the parser was set by flag or override and its format asks for
    it, or with ``native`` for every format that has one; otherwise, and for names that the format cannot carry, a
    JSON schema. ``thinking``: the prompt ends
    inside an open thought. ``decoding_start``: the worker label ``constrained_decoding_start``; "after_reasoning"
    means that the engine applies grammars behind the thought by itself.

    Raises ``PromptError`` (``invalid_tool_configuration``) when two tools define one ``$defs`` name differently.
    """
    specs = tool_specs(callable_tools(tools, choice))
    if not choice.forced or not specs:
        return None
    declared = selection.tool
    named = tuple(spec for spec in specs if spec.name)
    wanted = native or (selection.tool_set and declared.tag_by_default)
    if declared.structural_tag is not None and wanted and named and all(_writable(declared, s.name) for s in named):
        plain = declared.structural_tag(TagRequest(named, parallel, thinking=False, native=native))
        tag = plain
        if thinking and decoding_start != "after_reasoning":
            tag = _thinking_tag(
                declared, plain, TagRequest(named, parallel, thinking=True, native=native), selection.reasoning
            )
        reasons = tag != plain
        leads = () if reasons else beginnings(tag["format"])
        return ToolConstraint(Constraint("structural_tag", _compact(tag), "tool"), "tag", leads, reasons)
    if choice.mode == "function":
        schema, forced, leads = specs[0].parameters, f"function:{specs[0].name}", ('{"', "{}")
    else:
        schema, forced, leads = calls_schema(specs), "array", ("[{",)
    return ToolConstraint(Constraint("json_schema", _compact(schema), "tool"), forced, leads)


@lru_cache(maxsize=4096)
def _writable(declared: ToolFormat, name: str) -> bool:
    """Whether a call of the function ``name`` can be written in the format and read back."""
    if declared.encode is None:
        return True
    written = declared.encode("", [ToolCall(name, {})])
    events = parse_whole(declared.parser([ToolSpec(name)]), written)
    return name.isprintable() and [event.name for event in events if isinstance(event, ToolCallStart)] == [name]


def _thinking_tag(
    declared: ToolFormat, plain: dict[str, Any], request: TagRequest, reasoning: ReasoningFormat | None
) -> dict[str, Any]:
    """The tag behind a prompt that ends inside an open thought. Where the format says nothing about thoughts, the model
    has to close the thought first, or its call would be read as a part of it. Tags that are sent by default are left
    alone: their formats end a thought by the call itself."""
    tag = declared.structural_tag(request) if declared.structural_tag is not None else plain
    if tag != plain or declared.tag_by_default or reasoning is None or not reasoning.close:
        return tag
    markers = {reasoning.open, reasoning.close, *declared.special_tokens}
    return after_thought(plain["format"], request, reasoning.close, *sorted(markers))


def calls_schema(specs: Sequence[ToolSpec]) -> dict[str, Any]:
    """The JSON schema of a list of at least one call, ``[{"name", "parameters"}]``. ``$defs`` of all tools are
    collected at the top, where references of the form ``#/$defs/...`` look for them."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "anyOf": [
                {
                    "properties": {"name": {"type": "string", "enum": [spec.name]}, "parameters": spec.parameters},
                    "required": ["name", "parameters"],
                }
                for spec in specs
            ],
        },
    }
    definitions: dict[str, Any] = {}
    for spec in specs:
        own = spec.parameters.get("$defs")
        for name, definition in own.items() if isinstance(own, dict) else ():
            if name in definitions and not _same(definitions[name], definition):
                raise PromptError(
                    f"Invalid tool configuration: Tool definition '{name}' has multiple conflicting schemas",
                    "invalid_tool_configuration",
                )
            definitions[name] = definition
    if definitions:
        schema["$defs"] = definitions
    return schema


def output_constraint(
    response_format: dict[str, Any] | None = None,
    *,
    regex: str | None = None,
    ebnf: str | None = None,
    json_schema: str | None = None,
) -> Constraint | None:
    """The constraint of the output format. ``response_format`` as in the chat API, ``json_schema`` as text (the
    completions and generate APIs). Raises ``PromptError`` (``invalid_request_parameters``) when more than one is
    asked for."""
    found = []
    if response_format is not None and response_format.get("type") == "json_object":
        found.append(Constraint("json_schema", '{"type":"object"}'))
    elif response_format is not None and response_format.get("type") == "json_schema":
        found.append(Constraint("json_schema", _compact(response_format["json_schema"]["schema"])))
    if json_schema is not None:
        found.append(Constraint("json_schema", json_schema))
    if regex is not None:
        found.append(Constraint("regex", regex))
    if ebnf is not None:
        found.append(Constraint("ebnf", ebnf))
    if len(found) > 1:
        raise PromptError("only one structured output constraint is possible", "invalid_request_parameters")
    return found[0] if found else None


def engine_constraint(
    kind: str, tool: Constraint | None, output: Constraint | None, *, response_format: bool = False, chat: bool = True
) -> Constraint | None:
    """What an engine of this ``kind`` gets. When both apply, the forced call wins on vLLM and the output format
    elsewhere.

    MLX enforces nothing: every constraint is refused (``BuildError``), never left out.
    """
    if kind == "mlx":
        _refuse_mlx(tool, output, response_format=response_format, chat=chat)
        return None
    if tool is not None and output is not None:
        return tool if kind in VLLM_KINDS else output
    return tool if output is None else output


def _refuse_mlx(tool: Constraint | None, output: Constraint | None, *, response_format: bool, chat: bool) -> None:
    if tool is not None:
        raise BuildError(f"MLX backend does not support structured output constraint: {tool.kind}")
    if output is None:
        return
    if response_format and output.kind != "structural_tag":  # the tag is how gpt-oss takes a response_format
        raise BuildError("MLX backend does not support response_format (structured outputs)")
    if chat:
        raise BuildError(f"MLX backend does not support structured output constraint: {output.kind}")
    raise BuildError("MLX backend does not support structured output constraints")


def forced_mode(tool: ToolConstraint | None, output: Constraint | None, kinds: Sequence[str]) -> str | None:
    """How to read the answer of a forced call when the model's workers are of these ``kinds``: ``ParserPlan.forced``.
    None means as plain text, without any tool parser: the output format replaced the forced call on all of them."""
    if tool is None:
        return ""
    if output is not None and VLLM_KINDS.isdisjoint(kinds):
        return None
    return tool.forced


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _same(left: Any, right: Any) -> bool:
    """Equality of JSON values; True and 1 differ."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
