"""Native prompt encoders against recorded prompts: text, pieces, errors, and which checkpoint gets which encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smg.models.profiles import ProfileRequest, apply_profile
from smg.models.prompt import Piece, PromptError, RenderedPrompt, RenderRequest
from smg.models.renderers import create_renderer, select_renderer
from smg.models.renderers.deepseek_v4 import REVISION_0731_MARK
from smg.models.renderers.kimi_k3 import CLOSE, END_OF_MESSAGE, OPEN, SEPARATOR
from smg.models.renderers.kimi_k25 import template_variables, tools_to_typescript

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("native_renderers.json").read_text("utf-8"))
RENDERERS = {
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4_original": "deepseek_v4",
    "deepseek_v4_0731": "deepseek_v4_0731",
    "deepseek_v41": "deepseek_v41",
    "kimi_k3": "kimi_k3",
}
XTML_TOKENS = (OPEN, CLOSE, SEPARATOR, END_OF_MESSAGE)


def cases(*renderers: str, profile: bool = False, level: str = "request") -> list[Any]:
    return [
        pytest.param(case, id=case["id"])
        for case in CASES
        if case["renderer"] in renderers and ("profile" in case) == profile and level in case
    ]


def prompt_tools(body: dict[str, Any], renderer: str) -> list[dict[str, Any]] | None:
    tools = body.get("tools")
    choice = body.get("tool_choice")
    if choice == "none" and renderer != "kimi_k3":
        return None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        names = {tool["name"] for tool in choice["tools"]}
        return [tool for tool in tools or () if tool["function"]["name"] in names]
    return tools


def render_request(body: dict[str, Any], renderer: str) -> RenderRequest:
    thinking = body.get("thinking") or {}
    effort = thinking.get("effort") or body.get("reasoning_effort")
    messages = [
        {key: value for key, value in message.items() if key != "tools" and (value is not None or key == "content")}
        for message in body["messages"]
    ]
    return RenderRequest(
        model=body["model"],
        messages=messages,
        tools=prompt_tools(body, renderer),
        tool_choice=body.get("tool_choice"),
        response_format=body.get("response_format"),
        continue_final_message=body.get("continue_final_message", False),
        thinking_type=thinking.get("type"),
        effort=None if effort is None else str(effort),
        template_kwargs=body.get("chat_template_kwargs") or {},
    )


def check(case: dict[str, Any], request: RenderRequest) -> RenderedPrompt | None:
    renderer = create_renderer(RENDERERS[case["renderer"]])
    assert renderer is not None
    if "expect_error" in case:
        with pytest.raises(PromptError) as caught:
            renderer.render(request)
        assert caught.value.code == case["expect_error"]["code"]
        return None
    rendered = renderer.render(request)
    assert rendered.text == case["expect_prompt"]
    assert rendered.renderer == RENDERERS[case["renderer"]]
    return rendered


@pytest.mark.parametrize("case", cases("deepseek_v32", "deepseek_v4_original", "deepseek_v4_0731", "deepseek_v41"))
def test_deepseek_prompt(case: dict[str, Any]) -> None:
    rendered = check(case, render_request(case["request"], case["renderer"]))
    if rendered is not None:
        visible = rendered.text.rpartition("<｜Assistant｜>")[2]
        inside = visible.rfind("<think>") > visible.rfind("</think>")
        assert rendered.armed == inside


@pytest.mark.parametrize("case", cases("deepseek_v32", "deepseek_v4_original", "deepseek_v41", level="messages"))
def test_deepseek_encoder(case: dict[str, Any]) -> None:
    renderer = create_renderer(RENDERERS[case["renderer"]])
    options: dict[str, Any] = {"thinking": case["mode"] == "thinking"}
    if "effort" in case:
        options["effort"] = case["effort"]
    pieces = renderer.encode(case["messages"], **options).finish()  # type: ignore[union-attr]
    assert "".join(piece.text for piece in pieces) == case["expect_prompt"]


@pytest.mark.parametrize("case", cases("kimi_k3"))
def test_kimi_k3_prompt(case: dict[str, Any]) -> None:
    rendered = check(case, render_request(case["request"], "kimi_k3"))
    if rendered is None:
        return
    if "expect_pieces" in case:
        expected = [
            Piece(XTML_TOKENS[piece]) if isinstance(piece, int) else Piece(piece, trusted=False)
            for piece in case["expect_pieces"]
        ]
        assert rendered.pieces == expected
    assert rendered.uncounted == case["stub"]
    assert rendered.armed == (case["stub"] == "<|open|>think<|sep|>")


def with_profile(body: dict[str, Any]) -> dict[str, Any]:
    """The body after the request profile that the model's name selects."""
    thinking = body.get("thinking") or {}
    effort = body.get("reasoning_effort")
    sampling = ("temperature", "top_p", "n", "frequency_penalty", "presence_penalty")
    request = apply_profile(
        body["model"],
        ProfileRequest(
            messages=body["messages"],
            tools=body.get("tools"),
            tool_choice=body.get("tool_choice"),
            reasoning_effort=None if effort is None else str(effort),
            thinking_type=thinking.get("type"),
            thinking_effort=thinking.get("effort"),
            template_kwargs=body.get("chat_template_kwargs") or {},
            **{name: body.get(name) for name in sampling},
        ),
    )
    return {
        **body,
        "reasoning_effort": request.reasoning_effort,
        "thinking": {"type": request.thinking_type, "effort": request.thinking_effort},
        "chat_template_kwargs": request.template_kwargs,
    }


@pytest.mark.parametrize("case", cases(*RENDERERS, profile=True))
def test_prompt_under_a_profile(case: dict[str, Any]) -> None:
    error = case.get("expect_error")
    if error is not None and error["code"] != "process_messages_failed":
        with pytest.raises(PromptError) as caught:
            with_profile(case["request"])
        assert caught.value.code == error["code"]
        return
    check(case, render_request(with_profile(case["request"]), case["renderer"]))


@pytest.mark.parametrize("case", cases("kimi_k25_tools"))
def test_kimi_k25_declarations(case: dict[str, Any]) -> None:
    tools = prompt_tools(case["request"], "kimi_k25")
    if "expect_tools_ts" in case:
        assert tools_to_typescript(tools) == case["expect_tools_ts"]
    else:
        assert render_jinja(case, template_variables(tools), tools) == case["expect_prompt"]


def render_jinja(case: dict[str, Any], variables: dict[str, str], tools: list[dict[str, Any]] | None) -> str:
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    body = case["request"]
    kwargs = body.get("chat_template_kwargs") or {}
    template = environment.from_string(case["config"]["chat_template"])
    return str(
        template.render(
            {**kwargs, "messages": body["messages"], "tools": tools, "add_generation_prompt": True, **variables}
        )
    )


def checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    """A checkpoint directory with just the files that selection looks at."""
    name = config.get("dir_name")
    path = directory / ("checkpoint" if name in (None, "no marker") else name)
    path.mkdir()
    (path / config["tokenizer"]).write_text("")
    encoder = config.get("encoder_file")
    if encoder is not None:
        (path / "encoding").mkdir()
        text = "" if "without" in encoder else f'REASONING_EFFORT_MAX = "{REVISION_0731_MARK}\\n"\n'
        (path / "encoding" / "encoding_dsv4.py").write_text(text, "utf-8")
    return path


@pytest.mark.parametrize("case", cases("selection"))
def test_selection(case: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoint(tmp_path, case["config"])
    name = select_renderer(case["config"]["config_json"], path, path.name)
    renderer = create_renderer(name, path)
    if renderer is not None:
        prompt = renderer.render(render_request(case["request"], name)).text
    else:
        tools = case["request"].get("tools")
        prompt = render_jinja(case, template_variables(tools) if name == "kimi_k25" else {}, tools)
    if "expect_error" in case:  # Jinja without a template
        assert renderer is None
    else:
        assert prompt == case["expect_prompt"]
