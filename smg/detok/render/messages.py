"""Anthropic Messages: stream events and the complete answer.

Content is a list of blocks. A block begins when its kind of output begins and ends when another kind follows; text or
thinking that is only white space makes no block.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from smg.detok.choice import Choice
from smg.detok.render.base import Output, Renderer, json_bytes
from smg.detok.usage import Usage
from smg.engines.base import TokenLogprobs
from smg.messages import (
    ContentDelta,
    GenerationPlan,
    ParserEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from smg.vocab.decode import DecodeTable

_TEXT, _THINKING, _TOOL = "text", "thinking", "tool_use"
_DELTAS = {_TEXT: (b"text_delta", b"text"), _THINKING: (b"thinking_delta", b"thinking")}


def stop_reason(choice: Choice, *, has_calls: bool) -> tuple[str, str | None]:
    """``(stop_reason, stop_sequence)`` of a finished choice."""
    if has_calls and choice.finish_reason != "length":
        return "tool_use", None
    if choice.finish_reason == "length":
        return "max_tokens", None
    if isinstance(choice.matched_stop, str):
        return "stop_sequence", choice.matched_stop
    return "end_turn", None


def new_tool_id() -> str:
    """An id for a ``tool_use`` block."""
    return f"toolu_{secrets.token_hex(12)}"


def usage_object(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """The usage of a whole message."""
    return {
        "input_tokens": prompt,
        "output_tokens": completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "service_tier": "standard",
        "inference_geo": "not_available",
    }


def _event(name: str, body: bytes) -> bytes:
    return b"event: " + name.encode() + b'\ndata: {"type":"' + name.encode() + b'"' + body + b"}\n\n"


class MessagesStream(Output):
    """Server-sent events: start, blocks, delta with the stop reason, stop. There is no end marker besides."""

    streaming = True

    def __init__(self, plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> None:
        super().__init__()
        self._plan = plan
        self._choice = choices[0]
        self._begun = False
        self._block = ""
        self._index = -1
        self._blank = ""
        self._blank_kind = ""
        self._has_calls = False
        self._prefix = b""

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        if not self._begun:
            self._begin()
        for event in events:
            if type(event) is ContentDelta:
                self._text(_TEXT, event.text)
            elif type(event) is ReasoningDelta:
                self._text(_THINKING, event.text)
            elif type(event) is ToolCallStart:
                self._tool(event)
            elif type(event) is ToolCallArguments:
                self._parts.append(self._prefix + json_bytes(event.fragment) + b"}}\n\n")

    def _begin(self) -> None:
        self._begun = True
        response, choice = self._plan.response, self._choice
        prompt = self._plan.parts[0].prompt_tokens
        message: dict[str, Any] = {
            "id": response.body_id, "type": "message", "role": "assistant", "content": [], "model": response.model,
            "stop_reason": None, "stop_sequence": None, "stop_details": None,
            "usage": usage_object(prompt, 0, choice.cached_tokens), "container": None,
        }  # fmt: skip
        self._parts.append(_event("message_start", b',"message":' + json_bytes(message)))

    def _text(self, kind: str, text: str) -> None:
        if self._block != kind:
            if self._blank_kind != kind:
                self._blank, self._blank_kind = "", kind
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._blank = ""
            self._open(kind, b'{"type":"text","text":""}' if kind == _TEXT else _THINKING_BLOCK)
            name, field = _DELTAS[kind]
            self._prefix = self._delta_prefix(name, field)
        self._parts.append(self._prefix + json_bytes(text) + b"}}\n\n")

    def _tool(self, event: ToolCallStart) -> None:
        self._has_calls = True
        block = {
            "type": "tool_use", "id": new_tool_id(), "name": event.name, "input": {}, "caller": {"type": "direct"},
        }  # fmt: skip
        self._open(_TOOL, json_bytes(block))
        self._prefix = self._delta_prefix(b"input_json_delta", b"partial_json")

    def _open(self, kind: str, block: bytes) -> None:
        self._close()
        self._blank = ""
        self._block = kind
        self._index += 1
        self._parts.append(_event("content_block_start", b',"index":%d,"content_block":' % self._index + block))

    def _close(self) -> None:
        if self._block:
            self._parts.append(_event("content_block_stop", b',"index":%d' % self._index))
            self._block = ""

    def _delta_prefix(self, name: bytes, field: bytes) -> bytes:
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{' % self._index
        return head + b'"type":"' + name + b'","' + field + b'":'

    def on_end(self, usage: Usage) -> None:
        if not self._begun:
            self._begin()
        self._close()
        reason, sequence = stop_reason(self._choice, has_calls=self._has_calls)
        counts: dict[str, Any] = {
            "output_tokens": usage.completion,
            "input_tokens": usage.prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
        }
        if self._plan.response.options.get("thinking"):
            counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}
        self._parts.append(
            _event("message_delta", b',"delta":' + json_bytes(delta) + b',"usage":' + json_bytes(counts))
        )
        self._parts.append(_event("message_stop", b""))


_THINKING_BLOCK = b'{"type":"thinking","thinking":"","signature":""}'


class MessagesAnswer(Renderer):
    """The complete message."""

    def __init__(self, plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> None:
        self._plan = plan
        self._choice = choices[0]
        self._blocks: list[tuple[str, str, list[str]]] = []

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        for event in events:
            if type(event) is ContentDelta:
                self._part(_TEXT).append(event.text)
            elif type(event) is ReasoningDelta:
                self._part(_THINKING).append(event.text)
            elif type(event) is ToolCallStart:
                self._blocks.append((_TOOL, event.name, []))
            elif type(event) is ToolCallArguments:
                self._blocks[-1][2].append(event.fragment)

    def _part(self, kind: str) -> list[str]:
        if not self._blocks or self._blocks[-1][0] != kind:
            self._blocks.append((kind, "", []))
        return self._blocks[-1][2]

    def body(self, usage: Usage) -> bytes:
        response = self._plan.response
        has_calls = any(kind == _TOOL for kind, _, _ in self._blocks)
        reason, sequence = stop_reason(self._choice, has_calls=has_calls)
        counts = usage_object(usage.prompt, usage.completion, usage.cached)
        if response.options.get("thinking"):
            counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
        message = {
            "id": response.body_id, "type": "message", "role": "assistant", "content": self._content(),
            "model": response.model, "stop_reason": reason, "stop_sequence": sequence, "stop_details": None,
            "usage": counts, "container": None,
        }  # fmt: skip
        return json_bytes(message)

    def _content(self) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        for kind, name, parts in self._blocks:
            text = "".join(parts)
            if kind == _TOOL:
                arguments = orjson.Fragment(text or "{}")  # as the model wrote it: numbers keep their digits
                content.append(
                    {"type": "tool_use", "id": new_tool_id(), "name": name, "input": arguments,
                     "caller": {"type": "direct"}}
                )  # fmt: skip
            elif text.strip():
                if kind == _THINKING:
                    content.append({"type": "thinking", "thinking": text, "signature": ""})
                else:
                    content.append({"type": "text", "text": text})
        return content
