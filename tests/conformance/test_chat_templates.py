"""Chat templates of public models, and the shipped one, against the environment that transformers builds.

``SMG_TEST_CORPUS`` names a folder with ``NAME.jinja`` and ``NAME.json`` (a list of ``{"id", "messages", "tools",
"documents", "add_generation_prompt", "continue_final_message", "special_tokens", "kwargs", "now", and "expect" or
"expect_error"}``) and ``manifest.json`` (content formats).
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from smg.models.prompt import PromptError, RenderRequest
from smg.tokenizer_pool.probes import probe_variables
from smg.tokenizer_pool.renderer import PromptRenderer
from smg.tokenizer_pool.template import ChatTemplate, TemplateInput
from smg.vocab.load import load_model_dir

MODEL = Path(__file__).parents[2] / "smg" / "simengine" / "model"
CORPUS = Path(os.environ.get("SMG_TEST_CORPUS") or "/nonexistent")
NAMES = sorted(path.stem for path in CORPUS.glob("*.jinja") if path.with_suffix(".json").exists())
needs_corpus = pytest.mark.skipif(not NAMES, reason="SMG_TEST_CORPUS is unset or holds no templates")


class Clock:
    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1)

    def __call__(self) -> datetime:
        return self.time


@needs_corpus
@pytest.mark.parametrize("fast", [False, True], ids=["jinja2", "fast"])
@pytest.mark.parametrize("name", NAMES or ["none"])
def test_cases_of_a_template(name: str, fast: bool) -> None:
    cases: list[dict[str, Any]] = json.loads((CORPUS / f"{name}.json").read_text(encoding="utf-8"))
    source = (CORPUS / f"{name}.jinja").read_text(encoding="utf-8")
    clock = Clock()
    templates: dict[str, ChatTemplate] = {}
    for case in cases:
        special = case["special_tokens"]
        key = json.dumps(special)
        template = templates.get(key) or templates.setdefault(key, ChatTemplate(source, special, fast=fast, now=clock))
        if "now" in case:
            clock.time = datetime.fromisoformat(case["now"])
        fields = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "kwargs")
        given = TemplateInput(**{field: case[field] for field in fields})
        if "expect_error" in case:
            with pytest.raises(PromptError) as caught:
                template.render(given)
            assert case["expect_error"]["message"] in caught.value.message, case["id"]
        else:
            assert template.render(given).text == case["expect"], case["id"]


@needs_corpus
def test_content_formats() -> None:
    manifest = json.loads((CORPUS / "manifest.json").read_text(encoding="utf-8"))
    for name, entry in manifest.items():
        source = (CORPUS / entry["file"]).read_text(encoding="utf-8")
        assert ChatTemplate(source, {}, fast=False).format == entry["content_format"], name


def test_the_shipped_template_against_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(MODEL))
    files = load_model_dir(str(MODEL))
    renderer = PromptRenderer(files, {"eos_token": "<|end|>", "pad_token": "<|endoftext|>"}, [])
    compared = 0
    for probe in probe_variables():
        messages = probe["messages"]
        if any(isinstance(m["content"], list) or m["role"] == "developer" for m in messages):
            continue
        kwargs = {name: probe[name] for name in ("enable_thinking",) if name in probe}
        tools, generation = probe["tools"], probe["add_generation_prompt"]
        expected = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation, **kwargs
        )
        request = RenderRequest("m", messages, tools=tools, add_generation_prompt=generation, template_kwargs=kwargs)
        assert renderer.render(request).text == expected
        compared += 1
    assert compared > 30


def test_continuation_against_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(MODEL))
    renderer = PromptRenderer(load_model_dir(str(MODEL)), {}, [])
    for content in ("Once upon  ", "a", "<think>b", "\n x \n"):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
        expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        rendered = renderer.render(RenderRequest("m", messages, continue_final_message=True))
        assert (rendered.text, rendered.continued) == (expected, True)
