"""``smg render``: prompts of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smg.render_tool import render_command

MODEL = str(Path(__file__).parents[2] / "smg" / "simengine" / "model")
HI = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = "<|turn|>user\nHi<|end|>\n<|turn|>assistant\n"


def run(*lines: Any, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    result = CliRunner().invoke(render_command, ["--model-path", MODEL, *options], input=text)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_bodies_and_paths() -> None:
    chat, wrapped, messages, completion, several, generate = run(
        HI,
        {"body": HI},
        {"path": "/v1/messages", "body": {**HI, "max_tokens": 5, "system": "S"}},
        {"path": "/v1/completions", "body": {"model": "m", "prompt": "a<|end|>"}},
        {"path": "/v1/completions", "body": {"model": "m", "prompt": ["a", "b"]}},
        {"path": "/generate", "body": {"text": "a"}},
    )
    assert chat["prompt"] == PROMPT and chat["prompt_tokens"] == len(chat["token_ids"]) == 10
    assert wrapped == chat
    assert messages["prompt"] == "<|turn|>system\nS<|end|>\n" + PROMPT
    assert completion["token_ids"][-1] == 6002
    assert several["prompt"] == ["a", "b"] and several["prompt_tokens"] == 2
    assert generate["prompt"] == "a"


def test_refusals_are_answers() -> None:
    empty, broken, unknown, content = run(
        {"model": "m", "messages": []},
        "{nothing",
        {"path": "/v1/nothing", "body": {}},
        {"model": "m", "messages": [{"role": "robot", "content": "x"}]},
    )
    assert empty["error"]["status"] == 400 and empty["error"]["param"] == "messages"
    assert broken["error"]["status"] == 400
    assert unknown["error"]["code"] == "not_found"
    assert content["error"]["type"] == "invalid_request_error"


def test_template_and_explanation(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '<think>' if enable_thinking else '' }}"
    )
    options = ("--chat-template", str(template), "--explain", "--model", "qwen3-x")
    (answer,) = run({**HI, "chat_template_kwargs": {"enable_thinking": True}}, options=options)
    assert answer["prompt"] == "[Hi]<think>"
    explain = answer["explain"]
    assert explain["template"] == str(template) and explain["renderer"] == "jinja"
    assert explain["reasoning_parser"] == "qwen3" and explain["starts_in_reasoning"]
    assert explain["pieces"] == [{"text": "[Hi]<think>", "trusted": True}]


@pytest.mark.parametrize("path", ["/nowhere", str(Path(MODEL).parent)])
def test_models_that_cannot_be_loaded(path: str) -> None:
    result = CliRunner().invoke(render_command, ["--model-path", path], input="")
    assert result.exit_code == 1
    assert "Error: " in result.output
