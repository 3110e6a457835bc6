"""The prompt renderer of a model: which one it is, and what it gives to a template."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from smg.messages import TokenizerSource
from smg.models.prompt import PromptError, RenderRequest
from smg.tokenizer_pool.model import TokenizerModel
from smg.tokenizer_pool.renderer import PromptRenderer
from smg.vocab.load import ModelFiles, TemplateSource, load_model_dir

MODEL = Path(__file__).parents[2] / "smg" / "simengine" / "model"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def files(template: str | None = None, tool_use: str | None = None, **config: Any) -> ModelFiles:
    return replace(
        load_model_dir(str(MODEL)), template=TemplateSource(template, tool_use, "t"), config=config, has_config=True
    )


def render(made: ModelFiles, **fields: Any) -> str:
    renderer = PromptRenderer(made, {}, [], now=lambda: datetime(2025, 1, 2))
    return renderer.render(RenderRequest("m", fields.pop("messages", HI), **fields)).text


def test_the_shipped_model_from_source_to_ids() -> None:
    model = TokenizerModel.load(TokenizerSource("sim", str(MODEL)))
    assert model.renderer.name == "jinja" and not model.keeps_tools
    assert (model.switch.key, model.switch.default_on) == ("enable_thinking", False)
    prompt, ids = model.prepare(RenderRequest("sim", HI, thinking_type="enabled"))
    assert prompt.text == "<|turn|>user\nHi<|end|>\n<|turn|>assistant\n<think>\n"
    assert model.decode(ids, skip_special_tokens=False) == prompt.text
    assert (model.eos_ids, model.vocab_size) == ([6002, 6000], 6009)


def test_a_model_loaded_in_one_thread_serves_another() -> None:
    loaded: list[TokenizerModel] = []
    thread = threading.Thread(target=lambda: loaded.append(TokenizerModel.load(TokenizerSource("sim", str(MODEL)))))
    thread.start()
    thread.join()
    prompt, ids = loaded[0].prepare(RenderRequest("sim", HI))
    assert prompt.renderer == "minijinja" and len(ids) == 10


def test_a_template_file_replaces_the_model_s_own(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}!")
    model = TokenizerModel.load(TokenizerSource("sim", str(MODEL), str(path)))
    assert model.prepare(RenderRequest("sim", HI))[0].text == "Hi!"


def test_no_template() -> None:
    with pytest.raises(PromptError, match="chat_template is not set") as caught:
        render(files())
    assert caught.value.code == "process_messages_failed"


def test_the_template_for_tools() -> None:
    made = files("plain", "{{ tools[0].function.name }}")
    assert render(made) == "plain"
    assert render(made, tools=TOOLS) == "f"
    with pytest.raises(PromptError, match="is not set"):
        render(files(None, "only for tools"))


def test_variables() -> None:
    source = "{{ tool_choice }}|{{ response_format }}|{{ reasoning_effort }}|{{ x }}|{{ tools is none }}"
    assert render(files(source)) == "||||True"
    assert render(files(source), tools=TOOLS) == "auto||||False"
    fields: dict[str, Any] = {"tool_choice": "required", "response_format": {"type": "text"}, "effort": "low"}
    assert render(files(source), tools=TOOLS, **fields) == "required|{'type': 'text'}|low||False"
    kwargs = {"x": 1, "reasoning_effort": "max", "tool_choice": "c"}
    assert render(files(source), **fields, template_kwargs=kwargs) == "c|{'type': 'text'}|max|1|True"
    assert render(files("{{ tools is none }}"), tools=[]) == "True"


@pytest.mark.parametrize(
    ("source", "on", "off"),
    [
        ("{{ enable_thinking | default('unset') }}", "True", "False"),
        ("{% if thinking is defined and thinking %}T{% else %}N{% endif %}", "T", "N"),
        ("{% if thinking_mode == 'enabled' %}E{% elif thinking_mode == 'disabled' %}D{% endif %}", "E", "D"),
    ],
)
def test_the_thinking_switch(source: str, on: str, off: str) -> None:
    made = files(source)
    assert (render(made, thinking_type="enabled"), render(made, thinking_type="disabled")) == (on, off)
    assert render(made, effort="none") == off


def test_native_renderers_are_chosen_by_the_configuration() -> None:
    renderer = PromptRenderer(files("T", architectures=["DeepseekV32ForCausalLM"]), {}, [])
    assert renderer.name == "deepseek_v32"
    assert renderer.render(RenderRequest("m", HI)).text.startswith("<｜begin▁of▁sentence｜><｜User｜>Hi")
    gpt_oss = PromptRenderer(files("T", model_type="gpt_oss"), {}, [], now=lambda: datetime(2025, 1, 2))
    assert gpt_oss.name == "harmony" and gpt_oss.keeps_tools
    assert "Current date: 2025-01-02" in gpt_oss.render(RenderRequest("m", HI)).text
    by_name = PromptRenderer(files("T"), {}, []).render(RenderRequest("org/gpt-oss-20b", HI))
    assert by_name.text.startswith("<|start|>system")


def test_kimi_k25_gets_its_declarations(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25"}))
    (tmp_path / "chat_template.jinja").write_text("{{ tools_ts_str | default('none') }}")
    made = load_model_dir(str(tmp_path))
    assert render(made) == "none"
    assert render(made, tools=TOOLS).startswith("# Tools\n\n## functions\nnamespace functions {")


def test_developer_messages_and_parts_are_prepared() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, *HI]
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    assert render(files(source), messages=messages) == "system:a\nb;user:Hi;"


def test_white_space_that_only_python_strips() -> None:
    messages = [{"role": "user", "content": "\x1cHi\x1f"}]
    assert render(files("[{{ messages[0].content | trim }}]"), messages=messages) == "[Hi]"


LATE = [
    {"role": "system", "content": "first"},
    {"role": "user", "content": "Hi"},
    {"role": "system", "content": "second"},
]
EACH = "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "[{{ m.role }} {{ m.content }}]{% endfor %}"
)
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "[{{ m.role }} {{ m.content }}]{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role == messages[loop.index0 - 1].role and not loop.first %}"
    "{{ raise_exception('no') }}{% endif %}[{{ m.role }} {{ m.content }}]{% endfor %}"
)
LAST_ONLY = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endif %}{% endfor %}[system {{ ns.s }}]{% for m in messages %}{% if m.role != 'system' %}"
    "[{{ m.role }} {{ m.content }}]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [STRICT, FIRST_ONLY, LAST_ONLY], ids=["refused", "dropped", "replaced"])
def test_a_late_system_message_reaches_the_model(template: str) -> None:
    merged = "[system first\n\nsecond][user Hi]"
    assert render(files(template), messages=LATE, adapt=True) == merged
    assert render(files(EACH), messages=LATE, adapt=True) == "[system first][user Hi][system second]"
    without_first = render(files(template), messages=LATE[1:], adapt=True)
    assert without_first == "[system second][user Hi]"


def test_a_late_system_message_stays_unless_the_api_asks() -> None:
    with pytest.raises(PromptError):
        render(files(STRICT), messages=LATE)
    assert render(files(FIRST_ONLY), messages=LATE) == "[system first][user Hi]"


def test_user_messages_in_a_row_reach_a_template_that_demands_turns() -> None:
    messages = [HI[0], {"role": "user", "content": [{"type": "text", "text": "there"}]}]
    assert render(files(ALTERNATING), messages=messages, adapt=True) == "[user Hi\n\nthere]"
    assert render(files(EACH), messages=messages, adapt=True) == "[user Hi][user there]"
    with pytest.raises(PromptError):
        render(files(ALTERNATING), messages=messages)
