"""Request rules of model providers."""

from __future__ import annotations

from typing import Any

import pytest

from smg.models.profiles import ProfileRequest, apply_profile, provider_of
from smg.models.prompt import PromptError

FORCED: Any = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("model", "provider"),
    [
        ("deepseek-ai/DeepSeek-V4-Flash", "deepseek"),
        ("deepseek-flash", "deepseek"),
        ("deepseek-ai/DeepSeek-V3.2", ""),
        ("acme/deepseek-v4-flash-fp8", ""),
        ("moonshotai/kimi-k2", "kimi"),
        ("MiniMaxAI/MiniMax-M2", "minimax"),
        ("zai-org/whatever", "glm"),
        ("Qwen/Qwen3-8B", ""),
        ("acme/my-glm", ""),
    ],
)
def test_provider(model: str, provider: str) -> None:
    assert provider_of(model) == provider


@pytest.mark.parametrize(
    ("model", "code", "fields"),
    [
        ("deepseek-v4-flash", "reasoning_effort_not_allowed", {"reasoning_effort": "banana"}),
        ("deepseek-v4-flash", "reasoning_effort_not_allowed", {"thinking_effort": "37"}),
        ("deepseek-v4.1-flash", "reasoning_effort_not_allowed", {"reasoning_effort": "101"}),
        ("deepseek-v4.1-flash", "reasoning_effort_not_allowed", {"reasoning_effort": "0"}),
        ("deepseek-v4.1-flash", "reasoning_effort_not_allowed", {"reasoning_effort": "٣"}),
        (
            "deepseek-v4-pro",
            "reasoning_effort_not_allowed",
            {"reasoning_effort": "banana", "thinking_effort": "high"},
        ),
        ("deepseek-v4-flash", "thinking_type_not_supported", {"thinking_type": "adaptive"}),
        ("deepseek-v4-flash", "invalid_thinking_override", {"template_kwargs": {"thinking": "yes"}}),
        ("deepseek-v4-flash", "invalid_thinking_override", {"template_kwargs": {"enable_thinking": 1}}),
        (
            "deepseek-v4-flash",
            "conflicting_thinking_overrides",
            {"template_kwargs": {"thinking": True, "enable_thinking": False}},
        ),
        ("deepseek-v4-flash", "tool_choice_not_supported", {"tool_choice": "required"}),
        ("deepseek-v4-flash", "tool_choice_not_supported", {"tool_choice": FORCED}),
        (
            "deepseek-v4-flash",
            "tool_choice_not_supported",
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
        ),
        ("Kimi-K3", "thinking_type_not_supported", {"thinking_type": "adaptive"}),
        ("kimi_k3-fp8", "thinking_effort_invalid", {"thinking_effort": "medium"}),
        ("kimi-k3", "temperature_not_allowed", {"temperature": 0.7}),
        ("kimi-k3", "top_p_not_allowed", {"top_p": 1.0}),
        ("kimi-k3", "n_not_allowed", {"n": 2}),
        ("kimi-k3", "frequency_penalty_not_allowed", {"frequency_penalty": 0.5}),
        ("kimi-k3", "presence_penalty_not_allowed", {"presence_penalty": -1}),
        ("glm-4.5", "thinking_type_not_supported", {"thinking_type": "adaptive"}),
        ("zai-org/GLM-4.7", "reasoning_effort_not_allowed", {"reasoning_effort": "banana"}),
        ("glm-5.3-air", "reasoning_effort_not_allowed", {"reasoning_effort": "none"}),
        ("glm-5.3", "thinking_disabled_not_supported", {"thinking_type": "disabled"}),
        ("glm-5", "tool_type_not_supported", {"tools": [{"type": "custom"}]}),
    ],
)
def test_refused(model: str, code: str, fields: dict[str, Any]) -> None:
    with pytest.raises(PromptError) as caught:
        apply_profile(model, ProfileRequest(**fields))
    assert caught.value.code == code
    assert caught.value.param is None
    apply_profile("acme/my-model", ProfileRequest(**fields))


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, True),
        ({"reasoning_effort": "none", "thinking_effort": "low"}, True),
        ({"thinking_type": "disabled", "reasoning_effort": "high"}, False),
        ({"thinking_type": "enabled", "reasoning_effort": "none"}, True),
        ({"thinking_type": "enabled", "template_kwargs": {"reasoning_effort": "none"}}, False),
        ({"thinking_type": "disabled", "template_kwargs": {"reasoning_effort": "max"}}, True),
        ({"thinking_type": "disabled", "template_kwargs": {"reasoning_effort": "banana"}}, False),
        ({"template_kwargs": {"enable_thinking": False}}, False),
        ({"template_kwargs": {"thinking": None, "enable_thinking": None}, "thinking_type": "disabled"}, False),
        ({"thinking_type": "disabled", "template_kwargs": {"thinking": True}}, True),
    ],
)
def test_deepseek_thinking(fields: dict[str, Any], thinking: bool) -> None:
    assert apply_profile("deepseek-v4-flash", ProfileRequest(**fields)).template_kwargs["thinking"] is thinking


def test_deepseek_effort_names() -> None:
    def both(model: str, effort: str) -> tuple[str | None, str | None]:
        made = apply_profile(model, ProfileRequest(reasoning_effort=effort, thinking_effort=effort))
        assert made.reasoning_effort == made.thinking_effort
        return made.reasoning_effort, made.effort

    assert both("deepseek-v4-flash", "minimal") == ("low", "low")
    assert both("deepseek-v4-flash", "medium") == ("high", "high")
    assert both("deepseek-v4-flash", "xhigh") == ("high", "high")
    assert both("deepseek-v4.1-flash", "xhigh") == ("xhigh", "xhigh")
    assert both("deepseek-v4.1-flash", "37") == ("37", "37")


def test_a_forced_call_without_thinking() -> None:
    apply_profile("deepseek-v4-flash", ProfileRequest(tool_choice="required", thinking_type="disabled"))
    apply_profile(
        "deepseek-v4-flash", ProfileRequest(tool_choice={"type": "allowed_tools", "mode": "auto", "tools": []})
    )


def test_glm_clear_thinking() -> None:
    made = apply_profile("glm-5", ProfileRequest(clear_thinking=False))
    assert made.template_kwargs == {"clear_thinking": False}
    kept = apply_profile("glm-5", ProfileRequest(clear_thinking=False, template_kwargs={"clear_thinking": True}))
    assert kept.template_kwargs == {"clear_thinking": True}
    assert apply_profile("qwen3", ProfileRequest(clear_thinking=False)).template_kwargs == {}


def tool(name: Any = "f", **extra: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}} | extra


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("tools_role_restricted", {"role": "user", "content": "", "tools": [tool()]}),
        ("tools_content_conflict", {"role": "system", "content": "x", "tools": [tool()]}),
        ("tools_malformed", {"role": "system", "content": "", "tools": {}}),
        ("tools_malformed", {"role": "system", "tools": [{"type": "function"}]}),
        ("tool_type_unsupported", {"role": "system", "tools": [tool(type="custom")]}),
        ("tool_name_invalid", {"role": "system", "tools": [tool("a-b")]}),
        ("tool_name_invalid", {"role": "system", "tools": [tool("a" * 257)]}),
        ("tool_name_invalid", {"role": "system", "tools": [tool(None)]}),
        ("tool_name_duplicate", {"role": "system", "tools": [tool(), tool()]}),
    ],
)
def test_kimi_message_tools(code: str, message: dict[str, Any]) -> None:
    with pytest.raises(PromptError) as caught:
        apply_profile("moonshot-v1", ProfileRequest(messages=[message]))
    assert caught.value.code == code


def test_kimi_accepts() -> None:
    message = {"role": "system", "content": "", "tools": [tool("a" * 256), tool("_b")]}
    request = ProfileRequest(messages=[message], temperature=0.6, top_p=0.95, n=1, thinking_effort="max")
    assert apply_profile("kimi-k3", request) is request
    assert apply_profile("kimi-k2", ProfileRequest(temperature=0.3)).temperature == 0.3
