"""Thinking on or off: what a request wants, which variable of the chat template says so, and how the output parser
starts.

A template reads at most one switch. It is found once per template by rendering a short conversation with the switch
on and off; the template's source decides what rendering cannot tell. Later the rendered prompt has the last word: a
prompt that ends inside an open thought starts the parser in reasoning, one that ends behind a closed thought does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from smg.models.family import ReasoningFormat
from smg.models.prompt import PromptError, RenderedPrompt, RenderRequest
from smg.models.registry import PASSTHROUGH, REASONING_PARSERS, reasoning_format, unstarted

# The conversation that a template is probed with; no template contains this text.
PROBE_TEXT = "What is 6 times 7? (thinking switch probe)"
PROBE_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": PROBE_TEXT}]

MODE_KEY = "thinking_mode"
_KEYS = (MODE_KEY, "enable_thinking", "thinking")
_MODE_WORDS = {True: "enabled", False: "disabled"}

THINK_TAGS = ("<think>", "</think>")
# Variables that a request cannot replace. Renderers add their special tokens.
RESERVED_KWARGS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now"})

# How much of a prompt's end is looked at.
_TAIL = 2048


def markers_of(declared: ReasoningFormat | None) -> tuple[str, str]:
    """Open and close marker of a format as a prompt would end with them."""
    return (declared.open, declared.close) if declared is not None and declared.open else THINK_TAGS


_MARKERS = tuple(dict.fromkeys(markers_of(reasoning_format(name)) for name in REASONING_PARSERS))


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """The switch of one template. ``key`` "" = it reads none. ``default_on``: it thinks when the variable is not
    given. ``effective`` False: the variable occurs in the source but changes nothing, so only the prompt tells
    whether the model thinks. ``tails``: endings that leave a thought open behind words of their own, after the open
    marker."""

    key: str = ""
    default_on: bool = False
    effective: bool = True
    tails: tuple[str, ...] = ()

    def value(self, on: bool) -> bool | str:
        """What to write under ``key``."""
        return _MODE_WORDS[on] if self.key == MODE_KEY else on


NO_SWITCH = ThinkingSwitch()

# ``thinking`` as a variable of its own: tested (``thinking is ...``, ``thinking == ...``), a condition, or set.
_STAND_ALONE = re.compile(r"(?<!\w)thinking(?: is | ==)|(?:if |set )thinking ")
_SET_FALSE = re.compile(r"set (?:enable_thinking|thinking) ?= ?false")
_DEFAULT_FALSE = ("setenable_thinking=enable_thinking|default(false)", "setthinking=thinking|default(false)")


def switch_from_source(source: str) -> ThinkingSwitch:
    """The switch of a template by text tests alone."""
    if any(test in source for test in ("thinking_mode ==", "thinking_mode is defined", "if thinking_mode")):
        return ThinkingSwitch(MODE_KEY, default_on=False)
    if "enable_thinking" in source:
        key = "enable_thinking"
    elif _STAND_ALONE.search(source):
        key = "thinking"
    else:
        return NO_SWITCH
    squeezed = "".join(source.split())
    off = bool(_SET_FALSE.search(source)) or any(test in squeezed for test in _DEFAULT_FALSE)
    return ThinkingSwitch(key, default_on=not off)


def detect_switch(source: str, render: Callable[[dict[str, Any]], str] | None = None) -> ThinkingSwitch:
    """The switch of a template. ``render`` renders ``PROBE_MESSAGES`` with a generation prompt and the given
    variables; it raises ``PromptError`` where the template refuses. Expensive (a few renders): once per template."""
    by_text = switch_from_source(source)
    if render is None:
        return by_text
    try:
        unset = render({})
    except PromptError:
        return by_text
    for key in (by_text.key,) if by_text.key else _KEYS:
        candidate = ThinkingSwitch(key)
        try:
            on, off = (render({key: candidate.value(value)}) for value in (True, False))
        except PromptError:
            continue
        if on != off:
            default_on = _default_on(by_text, unset, on, off)
            return ThinkingSwitch(key, default_on, tails=_open_tails((unset, on, off)))
    return ThinkingSwitch(by_text.key, by_text.default_on, effective=not by_text.key, tails=_open_tails((unset,)))


def _default_on(by_text: ThinkingSwitch, unset: str, on: str, off: str) -> bool:
    if by_text.key == MODE_KEY:
        return False
    if unset in (on, off):
        return unset == on
    if _ends_open(on) != _ends_open(off):
        return _ends_open(unset) == _ends_open(on)
    return by_text.default_on


def _generation_prompt(text: str) -> str:
    return text[text.rfind(PROBE_TEXT) + len(PROBE_TEXT) :] if PROBE_TEXT in text else ""


def _ends_open(text: str) -> bool:
    tail = _generation_prompt(text)
    return any(tail.rfind(opening) > tail.rfind(closing) for opening, closing in _MARKERS)


def _open_tails(texts: Iterable[str]) -> tuple[str, ...]:
    tails = set()
    for text in texts:
        tail = _generation_prompt(text)
        for opening, closing in _MARKERS:
            at = tail.rfind(opening)
            if at > tail.rfind(closing) and tail[at:].strip() != opening:
                tails.add(tail[at:])
    return tuple(sorted(tails))


def preference(thinking_type: str | None, effort: str | None) -> bool | None:
    """What the request asks for. ``thinking_type``: "enabled", "disabled", "adaptive" (no opinion) or None;
    ``effort``: the effective effort. Other effort words than ``none`` and ``minimal`` are no opinion either."""
    if thinking_type in ("enabled", "disabled"):
        return thinking_type == "enabled"
    return False if effort in ("none", "minimal") else None


def template_kwargs(
    request: RenderRequest, switch: ThinkingSwitch, reserved: frozenset[str] = RESERVED_KWARGS
) -> dict[str, Any]:
    """The variables of a template beside its messages and tools. An entry of the client's ``chat_template_kwargs``
    replaces one of the same name, except the ``reserved`` ones."""
    kwargs: dict[str, Any] = {}
    choice = "auto" if request.tool_choice is None and request.tools else request.tool_choice
    if choice is not None:
        kwargs["tool_choice"] = choice
    if request.response_format is not None:
        kwargs["response_format"] = request.response_format
    if request.effort is not None:
        kwargs["reasoning_effort"] = request.effort
    wanted = preference(request.thinking_type, request.effort)
    if switch.key and wanted is not None:
        kwargs[switch.key] = switch.value(wanted)
    kwargs |= request.template_kwargs
    if kwargs:
        for name in reserved & kwargs.keys():
            del kwargs[name]
    return kwargs


def decided(request: RenderRequest, switch: ThinkingSwitch) -> bool | None:
    """Thinking on, off, or None = the template's default. A client's entry under the switch's key decides alone; a
    value that is no proper setting leaves the default."""
    if switch.key and switch.key in request.template_kwargs:
        value = request.template_kwargs[switch.key]
        if switch.key == MODE_KEY:
            return {"enabled": True, "disabled": False}.get(value) if isinstance(value, str) else None
        return value if isinstance(value, bool) else None
    return preference(request.thinking_type, request.effort)


def _tail(rendered: RenderedPrompt) -> str:
    if len(rendered.pieces) == 1:
        return rendered.pieces[0].text[-_TAIL:]
    parts: list[str] = []
    size = 0
    for piece in reversed(rendered.pieces):
        parts.append(piece.text[-_TAIL:])
        size += len(parts[-1])
        if size >= _TAIL:
            break
    return "".join(reversed(parts))


def _prompt_state(text: str, markers: tuple[str, str], tails: tuple[str, ...]) -> bool | None:
    """True: the prompt ends inside an open thought, False: right behind a closed one, None: neither."""
    end = text.rstrip()
    opening, closing = markers
    if end.endswith(opening):
        return True
    if end.endswith(closing):
        return False
    return True if tails and text.endswith(tails) else None


def _continues_thought(request: RenderRequest, markers: tuple[str, str]) -> bool:
    """Whether the assistant message that the prompt continues is itself cut inside a thought."""
    content = request.messages[-1].get("content") if request.messages else None
    return isinstance(content, str) and content.rfind(markers[0]) > content.rfind(markers[1])


class ReasoningStart(NamedTuple):
    """How the output is read: ``parser`` and ``armed`` go into the parser plan; ``thinking``: the model thinks in this
    answer (SGLang's ``require_reasoning``; thinking-aware structural tags)."""

    parser: str | None
    armed: bool
    thinking: bool


def reasoning_start(
    rendered: RenderedPrompt,
    request: RenderRequest,
    switch: ThinkingSwitch,
    declared: ReasoningFormat | None,
) -> ReasoningStart:
    """The start of the output of one rendered prompt. ``declared`` is the model's reasoning format, None = none; for a
    request with ``separate_reasoning: false`` drop ``parser`` from the plan but keep ``thinking``."""
    markers = markers_of(declared)
    if rendered.armed is not None:
        on, known = rendered.armed, True
    elif rendered.continued:
        on, known = _continues_thought(request, markers), True
    else:
        state = _prompt_state(_tail(rendered), markers, switch.tails)
        on = _by_decision(request, switch) if state is None else state
        known = state is not None
    if declared is None or declared.name == PASSTHROUGH:
        return ReasoningStart(declared.name if declared else None, armed=False, thinking=on)
    if known and not on:
        return ReasoningStart(unstarted(declared).name, armed=False, thinking=False)
    return ReasoningStart(declared.name, armed=on, thinking=on or declared.starts_in_reasoning)


def _by_decision(request: RenderRequest, switch: ThinkingSwitch) -> bool:
    if not switch.key or not switch.effective:
        return False
    wanted = decided(request, switch)
    return wanted is not False if switch.default_on else wanted is True
