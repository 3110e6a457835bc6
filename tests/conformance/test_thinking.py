"""Thinking controls from request to parsed answer: template variables, prompt, arming, output."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest

from smg.messages import ContentDelta, ParserPlan, ReasoningDelta
from smg.models.output import ResponseParser
from smg.models.profiles import ProfileRequest, apply_profile
from smg.models.prompt import Piece, PromptError, RenderedPrompt, RenderRequest
from smg.models.registry import ParserNames, select_parsers
from smg.models.thinking import PROBE_MESSAGES, detect_switch, reasoning_start, switch_from_source, template_kwargs

DATA = json.loads((Path(__file__).parent / "thinking.json").read_text())


class Template:
    """A chat template as a renderer uses it."""

    def __init__(self, source: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.add_extension("jinja2.ext.loopcontrols")
        environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
        environment.globals["raise_exception"] = self._refuse
        environment.globals["strftime_now"] = lambda form: "26 Jul 2025"
        self._template = environment.from_string(source)

    @staticmethod
    def _refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def render(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], tools: Any = None) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=True, bos_token="", eos_token="", **kwargs
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise PromptError(str(error)) from error

    def probe(self, kwargs: dict[str, Any]) -> str:
        return self.render(PROBE_MESSAGES, kwargs)


def normalised(case: dict[str, Any]) -> RenderRequest:
    """What the APIs make of their own spelling of the controls."""
    body = case["request"]
    thinking = body.get("thinking") or {}
    thinking_type, effort = thinking.get("type"), thinking.get("effort") or body.get("reasoning_effort")
    if case["api"] == "messages":
        thinking_type = "enabled" if thinking_type == "adaptive" else thinking_type
        effort = (body.get("output_config") or {}).get("effort")
    elif case["api"] == "responses":
        effort = (body.get("reasoning") or {}).get("effort")
    profiled = apply_profile(
        case["model"],
        ProfileRequest(
            thinking_type=thinking_type,
            reasoning_effort=effort,
            template_kwargs=body.get("chat_template_kwargs") or {},
        ),
    )
    return RenderRequest(
        model=case["model"],
        messages=[{"role": "user", "content": "Hi"}],
        tools=body.get("tools"),
        tool_choice=body.get("tool_choice"),
        response_format=body.get("response_format"),
        thinking_type=profiled.thinking_type,
        effort=profiled.effort,
        template_kwargs=profiled.template_kwargs,
    )


@pytest.mark.parametrize("probed", [True, False], ids=["probed", "by source"])
@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["id"])
def test_case(case: dict[str, Any], probed: bool) -> None:
    source = DATA["templates"][case["template"]]
    template = Template(source)
    switch = detect_switch(source, template.probe if probed else None)
    request = normalised(case)
    prompt = template.render(request.messages, template_kwargs(request, switch), request.tools)
    assert prompt == case["prompt"]

    selection = select_parsers(case["model"], flags=ParserNames(reasoning=case["reasoning_parser"]))
    start = reasoning_start(RenderedPrompt([Piece(prompt)], "jinja2"), request, switch, selection.reasoning)
    separate = case["request"].get("separate_reasoning") is not False
    parser = ResponseParser(ParserPlan(reasoning=start.parser if separate else None, armed=start.armed))
    events = parser.feed(case["output"]) + parser.finish()
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == case["reasoning"]
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == case["content"]


@pytest.mark.parametrize("source", DATA["templates"])
def test_rendering_and_source_agree(source: str) -> None:
    by_text, by_rendering = switch_from_source(source), detect_switch(source, Template(source).probe)
    assert (by_text.key, by_text.default_on) == (by_rendering.key, by_rendering.default_on)


# Public templates: name -> (key, thinks by default).
PUBLIC = {
    "deepseek-v3.1": ("enable_thinking", False),
    "glm-4.5": ("enable_thinking", True),
    "glm-4.6": ("enable_thinking", True),
    "glm-4.7-flash": ("enable_thinking", True),
    "granite-3.3": ("thinking", False),
    "kimi-k2.5": ("thinking", True),
    "llama3.1-8b-instruct": ("", False),
    "minimax-m2": ("", False),
    "minimax-m3": ("thinking_mode", False),
    "nemotron-3-nano": ("enable_thinking", True),
    "qwen3-0.6b": ("enable_thinking", True),
    "qwen3-instruct-2507": ("", False),
    "qwq-32b": ("enable_thinking", False),
    "qwen3.5-9b": ("enable_thinking", True),
    "smollm3": ("enable_thinking", True),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_templates(name: str) -> None:
    corpus = os.environ.get("SMG_TEST_CORPUS")
    if not corpus:
        pytest.skip("SMG_TEST_CORPUS is not set: no public chat templates")
    source = (Path(corpus) / f"{name}.jinja").read_text()
    switch = detect_switch(source, Template(source).probe)
    assert (switch.key, switch.default_on) == PUBLIC[name]
