"""Rules of the thinking switch that the recorded requests do not reach."""

from __future__ import annotations

from typing import Any

import pytest

from smg.models.prompt import Piece, PromptError, RenderedPrompt, RenderRequest
from smg.models.registry import reasoning_format
from smg.models.thinking import (
    NO_SWITCH,
    PROBE_TEXT,
    ReasoningStart,
    ThinkingSwitch,
    decided,
    detect_switch,
    preference,
    reasoning_start,
    switch_from_source,
    template_kwargs,
)

MODE = ThinkingSwitch("thinking_mode")
DEFAULT_ON = ThinkingSwitch("enable_thinking", default_on=True)
DEFAULT_OFF = ThinkingSwitch("thinking")


def request(**fields: Any) -> RenderRequest:
    return RenderRequest(**({"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields))


def prompt(*pieces: str, **fields: Any) -> RenderedPrompt:
    return RenderedPrompt([Piece(piece) for piece in pieces], "jinja2", **fields)


@pytest.mark.parametrize(
    ("source", "key", "default_on"),
    [
        ("{{ messages }}", "", False),
        ("{% if thinking_mode == 'enabled' %}", "thinking_mode", False),
        ("{%- if thinking_mode is defined %}{{ enable_thinking }}", "thinking_mode", False),
        ("{% if enable_thinking %}{% if thinking %}", "enable_thinking", True),
        ("{% set enable_thinking = false %}", "enable_thinking", False),
        ("{% set enable_thinking=false %}", "enable_thinking", False),
        ("{% set enable_thinking = enable_thinking | default(false) %}", "enable_thinking", False),
        ("{% set thinking=thinking|default( false ) %}{% if thinking %}", "thinking", False),
        ("{% set enable_thinking = enable_thinking | default(true) %}", "enable_thinking", True),
        ("{% if thinking %}", "thinking", True),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking", False),
        ("{% if x and thinking == true %}", "thinking", True),
        ("{% if clear_thinking is defined %}", "", False),
        ("{% if message.rethinking is defined %}", "", False),
        ("I am thinking about it", "", False),
    ],
)
def test_source_rules(source: str, key: str, default_on: bool) -> None:
    switch = switch_from_source(source)
    assert (switch.key, switch.default_on) == (key, default_on)


@pytest.mark.parametrize(
    ("thinking_type", "effort", "expected"),
    [
        (None, None, None),
        ("enabled", "none", True),
        ("disabled", "high", False),
        ("adaptive", None, None),
        ("adaptive", "minimal", False),
        (None, "low", None),
        (None, "None", None),
    ],
)
def test_preference(thinking_type: str | None, effort: str | None, expected: bool | None) -> None:
    assert preference(thinking_type, effort) is expected


def test_kwargs() -> None:
    given = request(
        tools=[{}],
        response_format={"type": "json_object"},
        effort="none",
        template_kwargs={"messages": [], "bos_token": "x", "tool_choice": "mine", "extra": None},
    )
    assert template_kwargs(given, DEFAULT_ON, frozenset({"messages", "bos_token"})) == {
        "tool_choice": "mine",
        "response_format": {"type": "json_object"},
        "reasoning_effort": "none",
        "enable_thinking": False,
        "extra": None,
    }
    assert template_kwargs(request(), DEFAULT_ON) == {}
    assert template_kwargs(request(thinking_type="enabled"), NO_SWITCH) == {}
    assert template_kwargs(request(thinking_type="enabled"), MODE) == {"thinking_mode": "enabled"}


@pytest.mark.parametrize(
    ("switch", "kwargs", "expected"),
    [
        (MODE, {"thinking_mode": "adaptive"}, None),
        (MODE, {"thinking_mode": True}, None),
        (MODE, {"thinking_mode": "disabled"}, False),
        (DEFAULT_ON, {"enable_thinking": "false"}, None),
        (DEFAULT_ON, {"enable_thinking": None}, None),
        (DEFAULT_ON, {"enable_thinking": 0}, None),
        (DEFAULT_ON, {"thinking": False}, True),
        (NO_SWITCH, {"": False}, True),
    ],
)
def test_an_entry_of_the_client_decides_alone(
    switch: ThinkingSwitch, kwargs: dict[str, Any], expected: bool | None
) -> None:
    assert decided(request(thinking_type="enabled", template_kwargs=kwargs), switch) is expected


@pytest.mark.parametrize(
    ("end", "switch", "fields", "armed"),
    [
        ("<think>\n", NO_SWITCH, {}, True),
        ("<think>", DEFAULT_ON, {"thinking_type": "disabled"}, True),
        ("<think>\n\n</think>\n\n", DEFAULT_ON, {"thinking_type": "enabled"}, False),
        ("</think>", DEFAULT_ON, {}, False),
        ("assistant\n", DEFAULT_ON, {}, True),
        ("assistant\n", DEFAULT_ON, {"thinking_type": "disabled"}, False),
        ("assistant\n", DEFAULT_OFF, {}, False),
        ("assistant\n", DEFAULT_OFF, {"thinking_type": "enabled"}, True),
        ("assistant\n", NO_SWITCH, {"thinking_type": "enabled"}, False),
        ("assistant\n", ThinkingSwitch("thinking", default_on=True, effective=False), {}, False),
        ("say <think>\nassistant:", NO_SWITCH, {}, False),
        ("<think>\nOkay, ", ThinkingSwitch(tails=("<think>\nOkay, ",)), {}, True),
    ],
)
def test_start(end: str, switch: ThinkingSwitch, fields: dict[str, Any], armed: bool) -> None:
    start = reasoning_start(prompt("x" * 5000, end), request(**fields), switch, reasoning_format("qwen3"))
    assert start == ReasoningStart("qwen3", armed=armed, thinking=armed)
    split = reasoning_start(prompt("user", *end), request(**fields), switch, reasoning_format("qwen3"))
    assert split == start


def test_the_renderer_knows_best() -> None:
    declared = reasoning_format("deepseek_v4")
    for armed in (True, False):
        start = reasoning_start(prompt("</think>", armed=armed), request(), DEFAULT_ON, declared)
        assert (start.armed, start.thinking) == (armed, armed)


def test_a_parser_that_starts_in_reasoning() -> None:
    declared = reasoning_format("deepseek_r1")
    assert reasoning_start(prompt("a"), request(), NO_SWITCH, declared) == ReasoningStart("deepseek_r1", False, True)
    closed = reasoning_start(prompt("<think>\n</think>"), request(), NO_SWITCH, declared)
    assert closed.parser is not None
    assert not reasoning_format(closed.parser).starts_in_reasoning
    assert (closed.armed, closed.thinking) == (False, False)


def test_no_parser() -> None:
    assert reasoning_start(prompt("<think>"), request(), NO_SWITCH, None) == ReasoningStart(None, False, True)
    passthrough = reasoning_start(prompt("<think>"), request(), NO_SWITCH, reasoning_format("passthrough"))
    assert passthrough == ReasoningStart("passthrough", False, True)


@pytest.mark.parametrize(("content", "armed"), [("Once", False), ("<think>so far", True), ("<think>a</think>b", False)])
def test_a_continued_message(content: str, armed: bool) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    start = reasoning_start(
        prompt(content, continued=True), request(messages=messages), DEFAULT_ON, reasoning_format("qwen3")
    )
    assert start.armed is armed


@pytest.mark.parametrize(("name", "end"), [("minimax_m3", "<mm:think>"), ("kimi", "◁think▷"), ("qwen3", "<think>")])
def test_markers_of_the_format_count(name: str, end: str) -> None:
    assert reasoning_start(prompt(end), request(), NO_SWITCH, reasoning_format(name)).armed
    assert not reasoning_start(prompt("<thought>"), request(), NO_SWITCH, reasoning_format(name)).armed


def test_probing_finds_what_the_source_hides() -> None:
    def render(kwargs: dict[str, Any]) -> str:
        return f"{PROBE_TEXT} assistant: " + ("<think>Okay, " if kwargs.get("thinking", True) else "")

    switch = detect_switch("{{ (thinking | default(true)) and '...' }}", render)
    assert switch == ThinkingSwitch("thinking", default_on=True, tails=("<think>Okay, ",))


def test_probing_a_word_without_effect() -> None:
    switch = detect_switch("{# enable_thinking #}", lambda kwargs: PROBE_TEXT)
    assert switch == ThinkingSwitch("enable_thinking", default_on=True, effective=False)


def test_a_template_that_refuses_the_probe() -> None:
    def refuse(kwargs: dict[str, Any]) -> str:
        raise PromptError("system message first")

    assert detect_switch("{% if thinking %}", refuse) == ThinkingSwitch("thinking", default_on=True)

    def refuse_off(kwargs: dict[str, Any]) -> str:
        if kwargs.get("enable_thinking") is False:
            raise PromptError("this model always thinks")
        return PROBE_TEXT + "<think>"

    assert not detect_switch("{{ enable_thinking }}", refuse_off).effective
