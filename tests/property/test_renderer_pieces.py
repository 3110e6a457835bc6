"""Marking supplied text as untrusted never changes a prompt, and no supplied text becomes a control token."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from smg.models.harmony import HarmonyRenderer
from smg.models.harmony.tokens import TOKEN_IDS
from smg.models.prompt import Piece, PromptError, RenderRequest
from smg.models.renderers import create_renderer
from smg.models.renderers.deepseek import CONTROLS
from smg.models.renderers.kimi_k3 import CLOSE, END_OF_MESSAGE, OPEN, SEPARATOR

WORDS = [
    "",
    "a",
    " b\n",
    "é灯",
    "<think>",
    "</think>",
    "<｜User｜>",
    "｜DSML｜",
    "<|open|>",
    "<|sep|>",
    "<|start|>",
    "<",
    '"',
]
texts = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
arguments = st.one_of(texts, st.dictionaries(texts, st.one_of(texts, st.integers(), st.booleans())).map(json.dumps))
calls = st.lists(st.tuples(texts, arguments), max_size=2)


@st.composite
def conversations(draw: st.DrawFn) -> RenderRequest:
    messages: list[dict[str, Any]] = []
    for turn in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            messages.append({"role": "system", "content": draw(texts)})
        messages.append({"role": "user", "content": draw(texts)})
        if draw(st.booleans()):
            continue
        made = [
            {"id": f"c{turn}.{number}", "type": "function", "function": {"name": name, "arguments": text}}
            for number, (name, text) in enumerate(draw(calls))
        ]
        assistant = {"role": "assistant", "content": draw(texts), "reasoning_content": draw(texts)}
        messages.append({**assistant, "tool_calls": made} if made else assistant)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": draw(texts)} for call in made]
    tools = [
        {"type": "function", "function": {"name": name, "description": draw(texts)}} for name in draw(st.lists(texts))
    ]
    return RenderRequest(
        model="m",
        messages=messages,
        tools=tools or None,
        continue_final_message=draw(st.booleans()),
        template_kwargs={"thinking": draw(st.booleans())},
    )


def mark(request: RenderRequest, renderer: Any) -> list[Piece]:
    try:
        return list(renderer.render(request).pieces)
    except PromptError:
        return []


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_deepseek_pieces(request: RenderRequest) -> None:
    for name in ("deepseek_v32", "deepseek_v4", "deepseek_v4_0731", "deepseek_v41"):
        pieces = mark(request, create_renderer(name))
        assert all(bool(CONTROLS.fullmatch(piece.text)) for piece in pieces if piece.trusted)
        assert all(piece.text for piece in pieces)
        assert not any(not a.trusted and not b.trusted for a, b in pairwise(pieces))


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_text_does_not_depend_on_what_is_supplied(request: RenderRequest) -> None:
    """The control tokens of a prompt are those of the same conversation with harmless texts of the same kinds."""
    for name in ("deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "harmony"):
        renderer = HarmonyRenderer(lambda: "2025-01-01") if name == "harmony" else create_renderer(name)
        pieces = mark(request, renderer)
        plain = mark(harmless(request), renderer)
        assert [piece.text for piece in pieces if piece.trusted] == [piece.text for piece in plain if piece.trusted]


def harmless(request: RenderRequest) -> RenderRequest:
    def clean(text: str) -> str:
        return "".join("x" if character in "<｜|" else character for character in text)

    messages = []
    for message in request.messages:
        changed = {**message, "content": clean(message["content"])}
        if "reasoning_content" in message:
            changed["reasoning_content"] = clean(message["reasoning_content"])
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {**call, "function": {key: clean(value) for key, value in call["function"].items()}}
                for call in message["tool_calls"]
            ]
        messages.append(changed)
    tools = [
        {"type": "function", "function": {key: clean(value) for key, value in tool["function"].items()}}
        for tool in request.tools or ()
    ]
    return RenderRequest(
        model="m",
        messages=messages,
        tools=tools or None,
        continue_final_message=request.continue_final_message,
        template_kwargs=request.template_kwargs,
    )


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_piecewise_prompts(request: RenderRequest) -> None:
    for pieces, controls in (
        (mark(request, create_renderer("kimi_k3")), {OPEN, CLOSE, SEPARATOR, END_OF_MESSAGE}),
        (mark(request, HarmonyRenderer(lambda: "2025-01-01")), set(TOKEN_IDS)),
    ):
        assert all(piece.text in controls for piece in pieces if piece.trusted)
        assert all(piece.text for piece in pieces)
