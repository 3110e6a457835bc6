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
ANY_OBJECT = '{"type":"object"}'
END_ID = 6002
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


def test_constraints_and_thinking_are_explained() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    forced, formatted, free = run(
        {**HI, "tools": tools, "tool_choice": "required", "thinking": {"type": "disabled"}},
        {**HI, "response_format": schema, "thinking": {"type": "enabled"}},
        HI,
        options=("--explain", "--model", "qwen3-x"),
    )
    assert [item["from"] for item in forced["explain"]["constraints"]] == ["tool_choice"]
    assert forced["explain"]["thinks"] is False
    assert formatted["explain"]["constraints"] == [{"from": "output", "kind": "json_schema", "value": ANY_OBJECT}]
    assert formatted["explain"]["thinks"] is True
    assert free["explain"]["constraints"] == []


def test_control_tokens_are_text_unless_trusted() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a<|end|>b"}]}
    (kept,) = run(body)
    (trusted,) = run(body, options=("--trust-control-tokens",))
    assert kept["prompt"] == trusted["prompt"]
    assert (kept["token_ids"].count(END_ID), trusted["token_ids"].count(END_ID)) == (1, 2)


@pytest.mark.parametrize("text", ["1e999", '{"a": -1e999}'])
def test_arguments_that_no_number_can_hold_stay_text(text: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    (answer,) = run({"model": "m", "messages": [*HI["messages"], asked]})
    assert text in answer["prompt"] and "Infinity" not in answer["prompt"]


@pytest.mark.parametrize("path", ["/nowhere", str(Path(MODEL).parent)])
def test_models_that_cannot_be_loaded(path: str) -> None:
    result = CliRunner().invoke(render_command, ["--model-path", path], input="")
    assert result.exit_code == 1
    assert "Error: " in result.output
