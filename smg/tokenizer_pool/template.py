"""One chat template: compiled once, rendered with a tolerance for ordinary histories that real templates stumble over.

Two engines render. Jinja2 in ``ChatEnvironment`` defines what a template means. The ``fast_template`` engine is several
times faster and is used where it has shown the same text; every error it meets is settled by Jinja2.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import jinja2

from smg.models.prompt import PromptError
from smg.models.renderers.common import parse_json
from smg.tokenizer_pool.content_format import content_format, parse_template
from smg.tokenizer_pool.environment import (
    DEFAULT_LIMITS,
    ChatEnvironment,
    LimitExceeded,
    RenderLimits,
    TemplateRefusal,
)
from smg.tokenizer_pool.fast_template import FastTemplate
from smg.vocab.load import TokenizerLoadError

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
FAILED = "Failed to apply chat template: Failed to render template: "
# Variables that belong to the render itself; template kwargs of these names are ignored.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"})
_MARKERS = ("CONTINUE_FINAL_MESSAGE_TAG ", "CONTINUE_THE_LAST_MESSAGE_HERE ", "GO_ON_BEHIND_THIS_MARK_OF_THE_TURN ")


class Rendered(NamedTuple):
    """Text of a render, the engine that made it, and whether it ends inside the continued assistant message."""

    text: str
    engine: str
    continued: bool = False


@dataclass(slots=True)
class TemplateInput:
    """What a template is rendered with.

    ``messages`` are as the template shall see them, tool-call arguments as JSON values. ``argument_texts`` gives the
    client's own text of arguments by (index of the message, index of the call), for templates that want text.
    ``tools`` None means there are none. ``fast`` False: only Jinja2 may render (text that the engines are known to
    treat differently). ``tools_digest``: a digest of the tool list, where the caller has one.
    """

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] | None = None
    argument_texts: Mapping[tuple[int, int], str] = field(default_factory=dict)
    fast: bool = True
    tools_digest: bytes | None = None


class ChatTemplate:
    """A compiled template with its special tokens. ``format`` is the content format it wants ("string", "openai").

    Raises ``TokenizerLoadError`` for a syntax error. ``now`` is the clock of ``strftime_now``; ``fast`` False keeps to
    Jinja2. Not for concurrent renders.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        fast: bool = True,
        now: Callable[[], datetime] = datetime.now,
        limits: RenderLimits = DEFAULT_LIMITS,
    ) -> None:
        self.source = source
        self._special_tokens = {name: special_tokens[name] for name in SPECIAL_NAMES if name in special_tokens}
        self.reserved = RESERVED | SPECIAL_NAMES
        self._environment = ChatEnvironment(limits, now)
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise TokenizerLoadError(f"The chat template cannot be compiled: {error}") from None
        self.format = content_format(parse_template(source, self._environment))
        self._fast: FastTemplate | None = None
        if fast:
            self._fast = FastTemplate.checked(source, now, limits, self._render_reference, self._special_tokens)

    @property
    def engine(self) -> str:
        """The engine that renders this template when nothing is odd."""
        return "minijinja" if self._fast is not None else "jinja2"

    def render(self, given: TemplateInput) -> Rendered:
        """The prompt. Raises ``PromptError`` when the template refuses or cannot render the conversation."""
        first_error: Exception | None = None
        for messages, tools in _attempts(given):
            try:
                return self._render_once(messages, tools, given)
            except (TemplateRefusal, LimitExceeded) as error:
                raise PromptError(FAILED + str(first_error or error)) from None
            except Exception as error:  # a template may fail in any way Python code can
                first_error = first_error or error
        raise PromptError(FAILED + _describe(first_error)) from None

    def _render_once(self, messages: Messages, tools: list[dict[str, Any]] | None, given: TemplateInput) -> Rendered:
        if given.continue_final_message and messages and messages[-1].get("role") == "assistant":
            return self._continue(messages, tools, given)
        return Rendered(*self._text(messages, tools, given, given.add_generation_prompt))

    def _text(
        self, messages: Messages, tools: list[dict[str, Any]] | None, given: TemplateInput, generation_prompt: bool
    ) -> tuple[str, str]:
        variables: dict[str, Any] = {}
        if given.kwargs:
            variables = {name: value for name, value in given.kwargs.items() if name not in self.reserved}
        variables |= self._special_tokens
        variables["messages"] = messages
        variables["tools"] = tools
        variables["documents"] = given.documents
        variables["add_generation_prompt"] = generation_prompt
        if self._fast is not None and given.fast:
            text = self._fast.render(variables, given.tools_digest if tools is given.tools else None)
            if text is not None:
                return text, "minijinja"
        return self._render_reference(variables), "jinja2"

    def _render_reference(self, variables: Mapping[str, Any]) -> str:
        return self._environment.render(self._template, variables)

    def _continue(self, messages: Messages, tools: list[dict[str, Any]] | None, given: TemplateInput) -> Rendered:
        """The last message is an assistant's and stays open: a marker behind its text shows where to cut."""
        text = _last_text(messages[-1])
        if text is not None:
            marker = _unused_marker(messages)
            try:
                rendered, engine = self._text([*messages[:-1], _marked(messages[-1], marker)], tools, given, False)
            except LimitExceeded:
                raise
            except Exception as error:
                logger.debug("no continuation in place: %s", type(error).__name__)
            else:
                opened = _cut(rendered, marker, text)
                if opened is not None:
                    return Rendered(opened, engine, continued=True)
        if messages[-1].get("reasoning_content"):
            raise PromptError(
                "continue_final_message: the chat template cannot continue a message that has reasoning_content",
                param="continue_final_message",
            )
        before, engine = self._text(messages[:-1], tools, given, True)
        return Rendered(before + _whole_text(messages[-1]), engine)


SPECIAL_NAMES = frozenset({"bos_token", "eos_token", "unk_token", "pad_token"})
"""Special tokens that templates see, where the model names them."""


def _attempts(given: TemplateInput) -> Iterator[tuple[Messages, list[dict[str, Any]] | None]]:
    """What to render in turn until something works: the conversation as it is; arguments as text; null content as "";
    both; an empty tool list; arguments that are no JSON object wrapped in one."""
    messages, tools = given.messages, given.tools
    yield messages, tools
    texts = _map_arguments(messages, lambda place, value: given.argument_texts.get(place) or _as_text(value))
    if texts is not messages:
        yield texts, tools
    filled = _fill_null_content(messages)
    if filled is not messages:
        yield filled, tools
        if texts is not messages:
            yield _fill_null_content(texts), tools
    if tools is None:
        yield messages, []
    wrapped = _map_arguments(messages, lambda _, value: value if isinstance(value, dict) else {"arguments": value})
    if wrapped != messages:
        yield wrapped, tools
        yield _fill_null_content(wrapped), tools


def parse_arguments(messages: Messages) -> tuple[Messages, dict[tuple[int, int], str]]:
    """Tool-call arguments as JSON values, and their texts by place. Empty text means no arguments; text that is not
    JSON stays text."""
    texts: dict[tuple[int, int], str] = {}

    def parse(place: tuple[int, int], arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        texts[place] = arguments
        if not arguments.strip():
            return {}
        try:
            return parse_json(arguments)
        except ValueError:
            return arguments

    return _map_arguments(messages, parse), texts


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _map_arguments(messages: Messages, convert: Callable[[tuple[int, int], Any], Any]) -> Messages:
    """The messages with every call's arguments converted; the same list when there are no calls."""
    for message in messages:
        if message.get("tool_calls"):
            break
    else:
        return messages
    changed = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls:
            calls = [_with_arguments(call, (index, number), convert) for number, call in enumerate(calls)]
            changed.append(message | {"tool_calls": calls})
        else:
            changed.append(message)
    return changed


def _with_arguments(
    call: dict[str, Any], place: tuple[int, int], convert: Callable[[tuple[int, int], Any], Any]
) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return call | {"function": function | {"arguments": convert(place, function["arguments"])}}


def _fill_null_content(messages: Messages) -> Messages:
    if all(message.get("content", "") is not None for message in messages):
        return messages
    return [message | {"content": ""} if message.get("content", "") is None else message for message in messages]


def _describe(error: Exception | None) -> str:
    return str(error) or type(error).__name__


def _last_text(message: Mapping[str, Any]) -> str | None:
    """The text that a continuation grows from: string content, or the text of the last part that has one."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                return str(part["text"])
    return None


def _whole_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def _unused_marker(messages: Messages) -> str:
    """A marker whose words the conversation does not contain."""
    words = json.dumps(messages, ensure_ascii=False, default=str)
    marker = next((marker for marker in _MARKERS if marker.strip() not in words), "")
    number = 0
    while not marker:
        candidate = f"CONTINUE_HERE_{number} "
        marker = "" if candidate.strip() in words else candidate
        number += 1
    return marker


def _marked(message: dict[str, Any], marker: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + marker}
    at = max(
        index for index, part in enumerate(content) if isinstance(part, dict) and isinstance(part.get("text"), str)
    )
    part = content[at] | {"text": content[at]["text"] + marker}
    return message | {"content": [*content[:at], part, *content[at + 1 :]]}


def _cut(rendered: str, marker: str, text: str) -> str | None:
    """The prompt up to the marker, None when the message did not come out there. A template that trimmed the marker's
    trailing space trims what it continues as well."""
    at = rendered.rfind(marker.strip())
    if at < 0:
        return None
    before = rendered[:at]
    if not rendered.startswith(marker, at):
        before, text = before.rstrip(), text.rstrip()
    ending = text.strip()[-8:]
    return before if before.rstrip().endswith(ending) else None
