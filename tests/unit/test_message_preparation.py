"""What happens to messages before a chat template sees them."""

from __future__ import annotations

from typing import Any

import pytest

from smg.tokenizer_pool.content_format import OPENAI, STRING
from smg.tokenizer_pool.preparation import MessagePreparation


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_string_templates_get_text() -> None:
    apply = MessagePreparation("", STRING).apply
    assert apply([message("user", parts("a", "b"))]) == [message("user", "a\nb")]
    assert apply([message("tool", parts("a"), name="f")]) == [message("tool", "a", name="f")]
    assert apply([message("user", [])]) == [message("user", [])]
    assert apply([message("assistant", None)]) == [message("assistant", None)]
    assert apply([{"role": "system"}]) == [message("system", "")]


def test_openai_templates_get_parts() -> None:
    apply = MessagePreparation("", OPENAI).apply
    assert apply([message("user", "a")]) == [message("user", parts("a"))]
    assert apply([message("tool", "a")]) == [message("tool", "a")]
    assert apply([message("tool", parts("a"))]) == [message("tool", parts("a"))]
    assert apply([message("assistant", None)]) == [message("assistant", None)]
    assert apply([message("system", None)]) == [message("system", parts(""))]


def test_the_order_of_fields_is_kept() -> None:
    changed = MessagePreparation("", OPENAI).apply([{"role": "user", "content": "x", "name": "n"}])
    assert list(changed[0]) == ["role", "content", "name"]


@pytest.mark.parametrize("role", ["developer", "root"])
def test_roles_that_a_template_does_not_know(role: str) -> None:
    apply = MessagePreparation("", STRING).apply
    assert apply([message(role, "d", tools=[1]), message("user", "u")]) == [
        message("system", "d"),
        message("user", "u"),
    ]
    merged = apply([message("system", "s"), message("user", "u"), message(role, parts("d", "e")), message(role, "")])
    assert merged == [message("system", "s\n\nd\ne"), message("user", "u")]
    assert apply([message("user", "u"), message("system", "s")]) == [message("user", "u"), message("system", "s")]


@pytest.mark.parametrize("source", ["{{ 'developer' }}", '{{ "developer" }}'])
def test_roles_that_a_template_knows(source: str) -> None:
    conversation = [message("user", "u"), message("developer", "d")]
    assert MessagePreparation(source, STRING).apply(conversation) == conversation


def test_short_call_ids() -> None:
    source = "{% if call.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    calls = [{"id": "call_abc", "function": {}}, {"id": "abcDEF123", "function": {}}, {"function": {}}]
    conversation = [
        message("assistant", None, tool_calls=calls),
        message("tool", "x", tool_call_id="call_abc"),
        message("tool", "y", tool_call_id="abcDEF123"),
    ]
    changed = MessagePreparation(source, STRING).apply(conversation)
    ids = [call["id"] for call in changed[0]["tool_calls"]]
    assert all(len(call_id) == 9 and call_id.isalnum() and call_id.isascii() for call_id in ids)
    assert ids[1] == "abcDEF123"
    assert [item["tool_call_id"] for item in changed[1:]] == ids[:2]
    assert conversation[0]["tool_calls"][0]["id"] == "call_abc"
    assert MessagePreparation("", STRING).apply(conversation) == conversation
