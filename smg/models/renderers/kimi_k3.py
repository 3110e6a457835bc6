"""Prompt encoder of Kimi-K3: XTML, a markup of four control tokens, encoded piece by piece.

Every tag name, attribute part and text is a piece of its own and is encoded without special-token matching, so no
supplied text can become a control token and no token spans two pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from smg.models.prompt import Piece, PromptError, RenderedPrompt, RenderRequest
from smg.models.renderers.common import (
    boolean_kwarg,
    call_arguments,
    call_name,
    compact_json,
    content_parts,
    effort_value,
    ends_with_assistant,
    function_object,
    parse_json,
    reasoning_text,
    tool_calls,
)

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEPARATOR = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"

EFFORTS = ("low", "high", "max")
_DEFAULT_EFFORT = "max"

_DECLARE = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_DECLARE_MORE = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_FORMAT_SCHEMA = "\nThe JSON data must match the following schema:\n"

_Attributes = Sequence[tuple[str, str]]


def _fence(value: Any) -> str:
    return f"```json\n{compact_json(value, sort_keys=True)}\n```"


def _declaration(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": function_object(tool)}


def _json_type(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, dict):
        return "object"
    return "array" if isinstance(value, list) else "number"


@functools.lru_cache(maxsize=64)
def _word(text: str) -> Piece:
    """The piece of a tag or attribute name: one of few texts."""
    return Piece(text, trusted=False)


_OPEN = Piece(OPEN)
_CLOSE = Piece(CLOSE)
_SEPARATOR = Piece(SEPARATOR)
_END_OF_MESSAGE = Piece(END_OF_MESSAGE)
_EQUALS = _word('="')
_QUOTE = _word('"')


class _Markup:
    """A list of pieces with the tags of XTML."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def text(self, text: str) -> None:
        if text:
            self.pieces.append(Piece(text, trusted=False))

    def open(self, tag: str, attributes: _Attributes = ()) -> None:
        pieces = self.pieces
        pieces += (_OPEN, _word(tag))
        for key, value in attributes:
            pieces += (_word(" " + key), _EQUALS)
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            pieces.append(_QUOTE)
        pieces.append(_SEPARATOR)

    def close(self, tag: str) -> None:
        self.pieces += (_CLOSE, _word(tag), _SEPARATOR)

    def element(self, tag: str, attributes: _Attributes, *texts: str) -> None:
        self.open(tag, attributes)
        for text in texts:
            self.text(text)
        self.close(tag)

    def end_message(self) -> None:
        self.close("message")
        self.pieces.append(_END_OF_MESSAGE)

    def message(self, attributes: _Attributes, *texts: str) -> None:
        self.open("message", attributes)
        for text in texts:
            self.text(text)
        self.end_message()

    def notice(self, kind: str, text: str) -> None:
        self.message((("role", "system"), ("type", kind)), text)


class _Conversation:
    """Writes the messages of one conversation; remembers the last calls for the results that answer them."""

    def __init__(self, markup: _Markup, thinking: bool) -> None:
        self.markup = markup
        self.thinking = thinking
        self.calls: list[dict[str, Any]] = []
        self.answered = 0

    def write(self, messages: Sequence[dict[str, Any]]) -> None:
        index = 0
        while index < len(messages):
            message = messages[index]
            role = message["role"]
            if role == "tool":
                end = index + 1
                while end < len(messages) and messages[end]["role"] == "tool":
                    end += 1
                self._results(messages[index:end])
                index = end
                continue
            if role == "assistant":
                self._assistant(message)
            elif role == "system" and message.get("tools"):
                self.markup.notice(
                    "tool-declare", _DECLARE_MORE + _fence([_declaration(tool) for tool in message["tools"]])
                )
            elif role in ("system", "user"):
                self.markup.message(_identity(message), *content_parts(message))
            index += 1

    def _assistant(self, message: dict[str, Any]) -> None:
        markup = self.markup
        self.calls = tool_calls(message)
        self.answered = 0
        markup.open("message", _identity(message))
        if self.thinking:
            reasoning = reasoning_text(message)
            markup.element("think", (), reasoning if reasoning.strip() else "")
        markup.element("response", (), *content_parts(message))
        if self.calls:
            markup.open("tools")
            for number, call in enumerate(self.calls, 1):
                markup.open("call", (("tool", call_name(call)), ("index", str(number))))
                self._arguments(call_arguments(call))
                markup.close("call")
            markup.close("tools")
        markup.end_message()

    def _arguments(self, text: str) -> None:
        if not text.strip():
            return
        try:
            value = parse_json(text)
        except ValueError:
            value = ()
        if value is None:
            return
        if not isinstance(value, dict):
            self.markup.element("json", (("type", "object"),), text)
            return
        for key, item in value.items():
            shown = item if isinstance(item, str) else compact_json(item)
            self.markup.element("argument", (("key", key), ("type", _json_type(item))), shown)

    def _results(self, messages: Sequence[dict[str, Any]]) -> None:
        order = {call.get("id"): index for index, call in enumerate(self.calls)}
        if all(message.get("tool_call_id") in order for message in messages):
            messages = sorted(messages, key=lambda message: order[message.get("tool_call_id")])
        for message in messages:
            name = self._tool_name(message, order)
            self.answered += 1
            attributes = (("role", "tool"), ("tool", name), ("index", str(self.answered)))
            self.markup.message(attributes, *content_parts(message))

    def _tool_name(self, message: dict[str, Any], order: dict[Any, int]) -> str:
        place = order.get(message.get("tool_call_id"))
        if place is not None:
            return call_name(self.calls[place])
        own = message.get("tool") or message.get("name")
        if isinstance(own, str) and own:
            return own
        if self.answered < len(self.calls):
            return call_name(self.calls[self.answered])
        raise PromptError("a tool message answers no tool call")


def _identity(message: dict[str, Any]) -> _Attributes:
    name = message.get("name")
    role = ("role", message["role"])
    return (role, ("name", name)) if isinstance(name, str) and name else (role,)


class KimiK3Renderer:
    """Renders conversations for Kimi-K3.

    Thinking is on by default. First that decides: the template kwargs ``thinking`` and ``enable_thinking``,
    ``thinking.type`` disabled or the effort ``none`` (off), ``thinking.type`` enabled, the effort ``minimal`` (off).
    With ``tool_choice`` "none" the tools stay declared and a notice forbids them, so ``RenderRequest.tools`` must still
    hold them.
    """

    name = "kimi_k3"

    def render(self, request: RenderRequest) -> RenderedPrompt:
        effort = effort_value(request)
        thinking = _thinking(request, effort)
        markup = _Markup()
        if request.tools:
            markup.notice("tool-declare", _DECLARE + _fence([_declaration(tool) for tool in request.tools]))
        if thinking:
            markup.notice("thinking-effort", _EFFORT.format(_effort(request, effort)))
        continued = ends_with_assistant(request)
        messages = request.messages[:-1] if continued else request.messages
        _Conversation(markup, thinking).write(messages)
        _notices(markup, request)
        uncounted = ""
        if request.add_generation_prompt or continued:
            markup.open("message", (("role", "assistant"),))
            stub = len(markup.pieces)
            markup.open("think" if thinking else "response")
            uncounted = "".join(piece.text for piece in markup.pieces[stub:])
        if continued:
            for text in content_parts(request.messages[-1]):
                markup.text(text)
        return RenderedPrompt(
            markup.pieces, self.name, armed=thinking and bool(uncounted), uncounted=uncounted, continued=continued
        )


def _thinking(request: RenderRequest, effort: Any) -> bool:
    switch = boolean_kwarg(request, "thinking", "enable_thinking")
    if switch is not None:
        return switch
    if request.thinking_type == "disabled" or effort == "none":
        return False
    return request.thinking_type == "enabled" or effort != "minimal"


def _effort(request: RenderRequest, effort: Any) -> str:
    own = request.template_kwargs.get("thinking_effort")
    if own is not None:
        if own not in EFFORTS:
            raise PromptError(f"chat_template_kwargs.thinking_effort must be one of {', '.join(EFFORTS)}")
        return str(own)
    return effort if isinstance(effort, str) and effort in EFFORTS else _DEFAULT_EFFORT


def _notices(markup: _Markup, request: RenderRequest) -> None:
    choice = request.tool_choice
    if request.tools is not None and not request.tools:
        choice = "none"
    if isinstance(choice, str) and choice in _CHOICES:
        markup.notice("tool-choice", _CHOICES[choice])
    response_format = request.response_format
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        markup.notice("response-format", _FORMAT.format(kind))
    elif kind == "json_schema":
        schema = response_format.get("json_schema", {}).get("schema", {})
        markup.notice("response-format", _FORMAT.format(kind) + _FORMAT_SCHEMA + _fence(schema))
