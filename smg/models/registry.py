"""All model families, and which parsers read the output of a model.

Detection looks at the canonical model name, after aliases. The two registries break ties differently: among tool
formats the longest stem wins, among reasoning formats the first match in rank order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from smg.models import (
    cohere,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    deepseek_v41,
    generic,
    glm,
    inkling,
    kimi_k2,
    kimi_k3,
    llama,
    minimax,
    mistral,
    nemotron,
    qwen,
    qwen_coder,
    sarashina,
    step3,
)
from smg.models.family import Family, ReasoningFormat, ToolFormat

log = logging.getLogger(__name__)

# The order matters only for model names in which equally long stems of two formats occur: the first listed wins.
FAMILIES: tuple[Family, ...] = (
    generic.FAMILY,
    mistral.FAMILY,
    qwen.FAMILY,
    qwen_coder.FAMILY,
    llama.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v32.FAMILY,
    deepseek_v4.FAMILY,
    deepseek_v41.FAMILY,
    glm.FAMILY,
    step3.FAMILY,
    kimi_k2.FAMILY,
    kimi_k3.FAMILY,
    inkling.FAMILY,
    minimax.FAMILY,
    cohere.FAMILY,
    sarashina.FAMILY,
    nemotron.FAMILY,
)

PASSTHROUGH = "passthrough"
Format = TypeVar("Format", ToolFormat, ReasoningFormat)


def _by_name(formats: Iterable[Format]) -> dict[str, Format]:
    table: dict[str, Format] = {}
    for declared in formats:
        if declared.name in table:
            raise ValueError(f"two families declare the format {declared.name!r}")
        table[declared.name] = declared
    return table


_TOOLS = _by_name(declared for family in FAMILIES for declared in family.tools)
_REASONING = _by_name(
    sorted((declared for family in FAMILIES for declared in family.reasoning), key=lambda declared: declared.rank)
)

TOOL_PARSERS: tuple[str, ...] = tuple(sorted(_TOOLS))
REASONING_PARSERS: tuple[str, ...] = tuple(sorted(_REASONING))


def tool_format(name: str) -> ToolFormat:
    """The format registered under ``name``; an unknown name reads like ``passthrough``."""
    return _TOOLS.get(name) or _TOOLS[PASSTHROUGH]


def reasoning_format(name: str) -> ReasoningFormat:
    """The format registered under ``name``; an unknown name reads like ``passthrough``."""
    return _REASONING.get(name) or _REASONING[PASSTHROUGH]


def detect_tool(model: str) -> str:
    """The tool format for a model name: the longest stem that occurs in it, or ``passthrough``."""
    lowered = model.lower()
    best, length = PASSTHROUGH, 0
    for declared in _TOOLS.values():
        for stem in declared.stems:
            if len(stem) > length and stem in lowered:
                best, length = declared.name, len(stem)
    return best


def detect_reasoning(model: str) -> str | None:
    """The reasoning format for a model name: the first in rank order with a pattern that occurs in it."""
    lowered = model.lower()
    for declared in _REASONING.values():
        if any(pattern in lowered for pattern in declared.patterns):
            return declared.name
    return None


@dataclass(frozen=True, slots=True)
class ParserNames:
    """Names as a flag pair or a model card gives them; "" = not set."""

    tool: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Selection:
    """The parsers of one model. ``tool_set``: the tool parser was named by a flag or an override, not detected (only
    then a forced call uses the format's structural tag by default). ``reasoning`` None: nothing is separated."""

    tool: ToolFormat
    tool_set: bool
    reasoning: ReasoningFormat | None


_UNSET = ParserNames()


@lru_cache(maxsize=1024)
def select_parsers(model: str, override: ParserNames = _UNSET, flags: ParserNames = _UNSET) -> Selection:
    """The parsers for the canonical name ``model``: per-model override, else the gateway's flag, else detection."""
    tool = override.tool or flags.tool
    reasoning = override.reasoning or flags.reasoning or detect_reasoning(model)
    return Selection(
        tool=tool_format(tool or detect_tool(model)),
        tool_set=bool(tool),
        reasoning=reasoning_format(reasoning) if reasoning else None,
    )


def unstarted(declared: ReasoningFormat) -> ReasoningFormat:
    """The format with the same markers that does not start in reasoning: for prompts that closed the thought."""
    if not declared.starts_in_reasoning:
        return declared
    markers = (declared.open, declared.close, declared.parser)
    for other in _REASONING.values():
        if not other.starts_in_reasoning and (other.open, other.close, other.parser) == markers:
            return other
    return declared


def check_flags(flags: ParserNames) -> None:
    """Raises ``ValueError`` with the start-up message for a name that is not registered."""
    if flags.tool and flags.tool not in _TOOLS:
        raise ValueError(f"unknown tool-call parser '{flags.tool}'")
    if flags.reasoning and flags.reasoning not in _REASONING:
        raise ValueError(f"unknown reasoning parser '{flags.reasoning}'")


def check_override(url: str, model: str, override: ParserNames) -> None:
    """Raises ``ValueError`` when the worker at ``url`` names an unknown parser for ``model``."""
    if override.tool and override.tool not in _TOOLS:
        raise ValueError(f"worker {url} declares unknown tool_parser '{override.tool}' for model '{model}'")
    if override.reasoning and override.reasoning not in _REASONING:
        raise ValueError(f"worker {url} declares unknown reasoning_parser '{override.reasoning}' for model '{model}'")


def agree(model: str, overrides: Iterable[ParserNames]) -> ParserNames:
    """One override for a model that several workers serve. When they name different parsers, the lexicographically
    smallest name is used and a warning is logged."""
    given = list(overrides)
    return ParserNames(
        tool=_smallest(model, "tool_parser", [each.tool for each in given]),
        reasoning=_smallest(model, "reasoning_parser", [each.reasoning for each in given]),
    )


def _smallest(model: str, field: str, names: Iterable[str]) -> str:
    distinct = sorted({name for name in names if name})
    if len(distinct) > 1:
        log.warning(
            "workers of model '%s' disagree on %s (%s); using '%s'", model, field, ", ".join(distinct), distinct[0]
        )
    return distinct[0] if distinct else ""


def call_id_style(model: str) -> str:
    """The form of tool-call ids (see ``ParserPlan.id_style``). The model's name decides it, not the parser."""
    lowered = model.lower()
    if "kimi" not in lowered:
        return "call"
    return "kimi_k3" if "k3" in lowered else "kimi"


def skip_special_tokens(
    selection: Selection, *, separate_reasoning: bool, parse_tools: bool, json_constraint: bool, requested: bool
) -> bool:
    """Whether decoding leaves out special tokens.

    They stay when the reasoning format is written in them, or when calls are parsed (tools given, ``tool_choice`` not
    ``none``) and no JSON schema takes the format's markers away. Otherwise the client decides (``requested``).
    """
    if separate_reasoning and selection.reasoning is not None and selection.reasoning.needs_special_tokens:
        return False
    if parse_tools and not json_constraint:
        return False
    return requested
