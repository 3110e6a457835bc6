"""Control-token text in messages stays text, and nothing else changes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smg.models.prompt import Piece, PromptError, RenderRequest
from smg.tokenizer_pool.model import TokenizerModel
from smg.tokenizer_pool.renderer import PromptRenderer
from smg.vocab.load import load_model_dir

MODEL = Path(__file__).parents[2] / "smg" / "simengine" / "model"
common = settings(max_examples=60, deadline=None)

# Templates that treat message text in ways that could move, hide or change a mark.
TEMPLATES = {
    "own": "",
    "trim": "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}<|end|>{% endfor %}<|turn|>assistant\n",
    "json": "{% for m in messages %}<|turn|>{{ m | tojson }}<|end|>{% endfor %}<|turn|>",
    "ascii": "{% for m in messages %}<|turn|>{{ m | tojson(ensure_ascii=true) }}<|end|>{% endfor %}<|turn|>",
    "split": "{% for m in messages %}<|turn|>{{ m.content.split('<|end|>')[-1].split('</think>')[-1].strip() }}<|end|>"
    "{% endfor %}",
    "measure": "{% for m in messages %}<|turn|>{{ m.content | length }} {{ m.content }}<|end|>{% endfor %}",
    "cut": "{% for m in messages %}<|turn|>{{ m.content[:12] }}<|end|>{% endfor %}",
    "upper": "{% for m in messages %}<|turn|>{{ m.content | upper }}{{ m.content }}<|end|>{% endfor %}",
    "parts": "{% for m in messages %}<|turn|>{% for p in m.content %}{{ p.text }}{% endfor %}<|end|>{% endfor %}",
}  # fmt: skip

CONTROL = ["<|turn|>", "<|end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
fragments = st.sampled_from([*CONTROL, "<|tu", "rn|>", " ", "\n", "a", "Hello ", "é早🚀", "<", "|>", "\ue000", '"'])
texts = st.lists(fragments, max_size=8).map("".join)


@cache
def model(name: str, trust: bool = False) -> TokenizerModel:
    made = TokenizerModel(load_model_dir(str(MODEL)))
    if TEMPLATES[name] or trust:
        files = made.files
        source = TEMPLATES[name] or files.template.default
        object.__setattr__(files, "template", type(files.template)(source))
        encoder = made.encoder
        made.renderer = PromptRenderer(files, encoder.special_tokens, encoder.added_tokens, trust_control_tokens=trust)
    return made


def controls(made: TokenizerModel, ids: list[int]) -> list[int]:
    return [token for token in ids if token >= made.encoder.vocab_size]


def conversation(user: str, tool: str, assistant: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": user})}}
    return [
        {"role": "user", "content": user},
        {"role": "assistant", "content": assistant, "tool_calls": [call]},
        {"role": "tool", "content": tool, "tool_call_id": "c"},
        {"role": "user", "content": "x"},
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@given(user=texts, tool=texts, assistant=texts)
@common
def test_supplied_text_makes_no_turns(name: str, user: str, tool: str, assistant: str) -> None:
    made = model(name)
    messages = conversation(user, tool, assistant)
    neutral = conversation("u", "t", "a")
    try:
        prompt, ids = made.prepare(RenderRequest("m", messages))
    except PromptError:
        pytest.fail("a conversation that renders without the protection must render with it")
    turns = [token for token in controls(made, ids) if token in made.encoder.special_ids]
    _, plain_ids = made.prepare(RenderRequest("m", neutral))
    expected = [token for token in controls(made, plain_ids) if token in made.encoder.special_ids]
    assert turns == expected
    assert made.decode(ids, skip_special_tokens=False) == prompt.text


@given(user=texts, tool=texts, assistant=texts)
@common
def test_the_text_is_that_of_an_unprotected_prompt(user: str, tool: str, assistant: str) -> None:
    request = RenderRequest("m", conversation(user, tool, assistant))
    prompt, ids = model("own").prepare(request)
    trusted, trusted_ids = model("own", trust=True).prepare(request)
    assert prompt.text == trusted.text
    if not any(token in text for token in CONTROL for text in (user, tool, assistant)):
        assert ids == trusted_ids


def test_untrusted_markers_in_a_user_message() -> None:
    made = model("own")
    prompt, ids = made.prepare(RenderRequest("m", [{"role": "user", "content": "<think>a</think>"}]))
    assert controls(made, ids) == [6001, 6002, 6001]
    assert prompt.text == "<|turn|>user\n<think>a</think><|end|>\n<|turn|>assistant\n"


def test_markers_that_the_model_wrote_itself_count() -> None:
    made = model("own")
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>a</think>b<|end|>"}]
    _, ids = made.prepare(RenderRequest("m", history))
    assert controls(made, ids) == [6001, 6002, 6001, 6003, 6004, 6002, 6001]


def test_a_control_token_in_two_parts() -> None:
    made = model("parts")
    parts = [{"type": "text", "text": "<|tu"}, {"type": "text", "text": "rn|>x"}]
    prompt, ids = made.prepare(RenderRequest("m", [{"role": "user", "content": parts}]))
    assert prompt.text == "<|turn|><|turn|>x<|end|>"
    assert controls(made, ids) == [6001, 6002]


def test_escapes_in_arguments_and_names() -> None:
    made = model("own")
    arguments = '{"a": "\\u003c|end|\\u003e"}'
    call = {"id": "c", "type": "function", "function": {"name": "f<|turn|>", "arguments": arguments}}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "g", "description": "<|end|>", "parameters": {"<|turn|>": 1}}}]
    prompt, ids = made.prepare(RenderRequest("m", messages, tools=tools))
    assert prompt.text.count("<|end|>") == 5 and prompt.text.count("<|turn|>") == 6
    assert controls(made, ids).count(6002) == 3 and controls(made, ids).count(6001) == 4


def test_trust_can_be_given() -> None:
    made = model("own", trust=True)
    _, ids = made.prepare(RenderRequest("m", [{"role": "user", "content": "a<|end|>"}]))
    assert controls(made, ids) == [6001, 6002, 6002, 6001]


def test_text_that_is_no_unicode_is_refused() -> None:
    for fast in (True, False):
        made = TokenizerModel(load_model_dir(str(MODEL)), fast=fast)
        for pieces in ([Piece("\ud800")], [Piece("a"), Piece("\ud800", trusted=False)]):
            with pytest.raises(PromptError, match="Unicode"):
                made.encode_pieces(pieces)


def test_escaped_surrogates_in_arguments() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt, _ = model("own").prepare(RenderRequest("m", messages))
    assert '{"a": "\ufffd"}' in prompt.text
