"""Harmony (gpt-oss): prompts, declarations, constraints and the output parser against recorded cases.

With ``TIKTOKEN_ENCODINGS_BASE`` naming a directory that holds ``o200k_base.tiktoken``, the published library checks the
tokens of the prompts as well.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from smg.detok.stop import StopMatcher
from smg.messages import ContentDelta, ParserEvent, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from smg.models.harmony import (
    STOP_TOKEN_IDS,
    HarmonyParser,
    HarmonyRenderer,
    HarmonyTextParser,
    ResponsesConversation,
    chat_functions,
    refuse_ignore_eos,
    responses_functions,
    speaks_harmony,
    structural_tag,
)
from smg.models.harmony.conversation import choose_functions, function_spec
from smg.models.harmony.declarations import developer_text
from smg.models.harmony.tokens import CALL, CHANNEL, CONSTRAIN, CONTROL_TOKENS, END, MESSAGE, RETURN, START, TOKEN_IDS
from smg.models.prompt import Piece, PromptError, RenderedPrompt, RenderRequest

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("harmony.json").read_text("utf-8"))
VOCABULARY = {int(token): bytes.fromhex(data) for token, data in DATA["vocabulary"].items()}
CONTROLS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
DATE = "2025-03-09"


def cases(kind: str, api: str | None = None) -> list[Any]:
    return [
        pytest.param(case, id=case["id"].removeprefix("harmony."))
        for case in DATA["cases"]
        if case["kind"] == kind and (api is None or case["api"] == api)
    ]


# Prompts


def chat_request(body: dict[str, Any]) -> RenderRequest:
    thinking = body.get("thinking") or {}
    return RenderRequest(
        model=body["model"],
        messages=body["messages"],
        tools=body.get("tools"),
        tool_choice=body.get("tool_choice"),
        response_format=body.get("response_format"),
        continue_final_message=body.get("continue_final_message", False),
        thinking_type=thinking.get("type"),
        effort=body.get("reasoning_effort"),
        template_kwargs=body.get("chat_template_kwargs") or {},
    )


def responses_conversation(body: dict[str, Any]) -> ResponsesConversation:
    items = body["input"]
    return ResponsesConversation(
        items=[{"role": "user", "content": items}] if isinstance(items, str) else items,
        instructions=body.get("instructions", ""),
        tools=body.get("tools", ()),
        tool_choice=body.get("tool_choice"),
        effort=(body.get("reasoning") or {}).get("effort"),
    )


def build(case: dict[str, Any]) -> tuple[RenderedPrompt, dict[str, Any] | None]:
    body = case["request"]
    refuse_ignore_eos(body.get("ignore_eos", False))
    renderer = HarmonyRenderer(lambda: DATE)
    choice = body.get("tool_choice")
    if case["api"] == "chat":
        functions = chat_functions(body.get("tools"), choice)
        tag = structural_tag(functions, choice, body.get("response_format"), conflict_code="invalid_request_parameters")
        return renderer.render(chat_request(body)), tag
    conversation = responses_conversation(body)
    output_format = (body.get("text") or {}).get("format")
    functions = responses_functions(conversation)
    tag = structural_tag(functions, choice, output_format, conflict_code="conflicting_constraints")
    return renderer.render_responses(conversation), tag


@pytest.mark.parametrize("case", cases("prompt"))
def test_prompt(case: dict[str, Any]) -> None:
    if "expect_error" in case:
        with pytest.raises(PromptError) as caught:
            build(case)
        assert caught.value.code == case["expect_error"]["code"]
        return
    rendered, tag = build(case)
    assert rendered.text == case["expect_prompt"].replace("{{DATE}}", DATE)
    expected = [
        Piece(CONTROLS[piece]) if isinstance(piece, int) else Piece(piece.replace("{{DATE}}", DATE), trusted=False)
        for piece in case["expect_pieces"]
    ]
    assert rendered.pieces == expected
    assert set(STOP_TOKEN_IDS) == set(case["expect_stop_token_ids"])
    constraint = case["expect_constraint"] or {}
    if "regex" not in constraint:
        assert tag == constraint.get("structural_tag")


@pytest.mark.parametrize("case", cases("developer_tools"))
def test_declarations(case: dict[str, Any]) -> None:
    functions = chat_functions(case["request"]["tools"], None)
    assert developer_text("", functions) == case["expect_developer_message"]


@pytest.mark.parametrize("case", cases("prompt"))
def test_prompt_tokens(case: dict[str, Any], encoding: Any) -> None:
    if "expect_error" in case:
        pytest.skip("no prompt")
    tokens: list[int] = []
    for piece in build(case)[0].pieces:
        tokens += [TOKEN_IDS[piece.text]] if piece.trusted else encoding.encode(piece.text, disallowed_special=())
    assert len(tokens) == case["expect_prompt_tokens"]


@pytest.fixture(scope="module")
def encoding() -> Any:
    library = pytest.importorskip("openai_harmony")
    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        pytest.skip("TIKTOKEN_ENCODINGS_BASE names no vocabulary")
    return library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)


def test_published_declarations(encoding: Any) -> None:
    library = pytest.importorskip("openai_harmony")
    for case in DATA["cases"]:
        if case["kind"] != "developer_tools":
            continue
        functions = [tool["function"] for tool in case["request"]["tools"]]
        content = library.DeveloperContent.new().with_function_tools(
            [
                library.ToolDescription.new(f["name"], f.get("description", ""), parameters=f.get("parameters") or {})
                for f in functions
            ]
        )
        message = library.Message.from_role_and_content(library.Role.DEVELOPER, content)
        text = encoding.decode(encoding.render(message))
        ours = developer_text("", choose_functions(map(function_spec, functions), None))
        assert text == f"<|start|>developer<|message|>{ours}<|end|>", case["id"]


@pytest.mark.parametrize(
    ("model", "architectures", "model_type", "expected"),
    [
        ("org/GPT-OSS-20b", [], "", True),
        ("house-model", ["GptOssForCausalLM"], "", True),
        ("house-model", [], "gpt_oss", True),
        ("house-model", ["LlamaForCausalLM"], "gpt_oss_mini", False),
        ("gptoss", [], "", False),
    ],
)
def test_selection(model: str, architectures: list[str], model_type: str, expected: bool) -> None:
    assert speaks_harmony(model, architectures, model_type) is expected


# Output


class Decoder:
    """Decodes the token ids of the cases."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(VOCABULARY[token] for token in token_ids))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


def answer(events: Sequence[ParserEvent]) -> dict[str, Any]:
    """The fields of a whole answer."""
    content = reasoning = ""
    calls: list[dict[str, str]] = []
    ended: list[int] = []
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(calls)
            calls.append({"name": event.name, "arguments": ""})
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(calls) - 1
            assert event.index not in ended
            calls[-1]["arguments"] += event.fragment
        elif isinstance(event, ToolCallEnd):
            assert event.index == len(calls) - 1
            ended.append(event.index)
    return {"content": content or None, "reasoning_content": reasoning or None, "tool_calls": calls}


def parse(case: dict[str, Any], size: int) -> dict[str, Any]:
    stops = case.get("stop")
    parser = HarmonyParser(Decoder, (lambda: StopMatcher(stops, keep=True)) if stops else None)
    tokens = case["token_ids"]
    events: list[ParserEvent] = []
    for start in range(0, len(tokens), size):
        events += parser.feed(tokens[start : start + size])
    events += parser.finish()
    return {
        **answer(events),
        "finish_reason": parser.finish_reason(case["engine_finish_reason"]),
        "matched_stop": parser.matched_stop,
        "reasoning_tokens": parser.reasoning_tokens,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 10_000])
@pytest.mark.parametrize("case", cases("parse"))
def test_output(case: dict[str, Any], size: int) -> None:
    assert parse(case, size) == case["expect"]


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("case", cases("parse"))
def test_output_as_text(case: dict[str, Any], size: int) -> None:
    if "stop" in case:
        pytest.skip("stop strings are matched in front of this parser")
    data = b"".join(CONTROL_TOKENS.get(t, "").encode() or VOCABULARY[t] for t in case["token_ids"])
    text = data.decode()
    parser = HarmonyTextParser()
    events: list[ParserEvent] = []
    for start in range(0, len(text), size):
        events += parser.feed(text[start : start + size])
    events += parser.finish()
    assert answer(events) == {key: case["expect"][key] for key in ("content", "reasoning_content", "tool_calls")}
    assert parser.finish_reason(case["engine_finish_reason"]) == case["expect"]["finish_reason"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there.", {"content": "Hello there.", "reasoning_content": None}),
        ("Hello" + " there" * 200, {"content": "Hello" + " there" * 200, "reasoning_content": None}),
        ("Hello<|return|>", {"content": "Hello", "reasoning_content": None}),
        ("<|channel|>final " + "word " * 200, {"content": "word " * 200, "reasoning_content": None}),
        ("<|channel|>analysis", {"content": None, "reasoning_content": None}),
        ("<|channel|>final<|message|>a<|end|>b<|start|>assistant<|channel|>final<|message|>c", {"content": "abc"}),
        ("<|channel|>final<|message|>a < b <|", {"content": "a < b <|"}),
        (
            " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
            {"tool_calls": [{"name": "f", "arguments": "{}"}]},
        ),
        ("<|start|>user<|message|>said", {"content": "said"}),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_output_without_proper_headers(text: str, expected: dict[str, Any], size: int) -> None:
    parser = HarmonyTextParser()
    events: list[ParserEvent] = []
    for start in range(0, len(text), size):
        events += parser.feed(text[start : start + size])
    result = answer(events + parser.finish())
    assert {key: result[key] for key in expected} == expected
