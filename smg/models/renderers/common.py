"""What the native renderers share: piece lists, JSON printing, tool objects, message fields."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import isinf
from typing import Any, NoReturn

from smg.models.prompt import Piece, PromptError, RenderRequest

_SURROGATE = re.compile(r"[\ud800-\udfff]")


class PromptBuilder:
    """Collects a prompt as control tokens and runs of ordinary text.

    A control token becomes a trusted piece of its own; everything between two control tokens, whether a renderer or a
    client wrote it, becomes one piece that is not trusted. The vocabulary splits text at control tokens anyway, so
    encoding the pieces one by one gives the ids of the whole text, except that control-token text inside supplied text
    stays text. ``controls`` is a pattern that finds the control tokens in the renderer's own constants.
    """

    __slots__ = ("_controls", "_run", "pieces")

    def __init__(self, controls: re.Pattern[str]) -> None:
        self._controls = controls
        self._run: list[str] = []
        self.pieces: list[Piece] = []

    def text(self, text: str) -> None:
        """Appends ordinary text (supplied by a client, or known to hold no control token)."""
        if text:
            self._run.append(text)

    def control(self, token: str) -> None:
        """Appends one control token."""
        self.flush()
        self.pieces.append(Piece(token))

    def markup(self, text: str) -> None:
        """Appends a constant of the renderer, in which control-token text means the control token."""
        position = 0
        for match in self._controls.finditer(text):
            self.text(text[position : match.start()])
            self.control(match.group())
            position = match.end()
        self.text(text[position:])

    def flush(self) -> None:
        """Ends the current run of ordinary text."""
        if self._run:
            self.pieces.append(Piece("".join(self._run), trusted=False))
            self._run.clear()

    def finish(self) -> list[Piece]:
        """The pieces of the whole prompt."""
        self.flush()
        return self.pieces


def compact_json(value: Any, *, sort_keys: bool = False) -> str:
    """JSON with ``,`` and ``:`` and raw non-ASCII text. Raises ``PromptError`` for nesting too deep to print."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)
    except RecursionError as error:
        raise PromptError("JSON value is nested too deeply") from error


def spaced_json(value: Any) -> str:
    """JSON as Python's ``json.dumps(value, ensure_ascii=False)``: ``", "`` and ``": "``, input key order. Raises
    ``PromptError`` for nesting too deep to print."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise PromptError("JSON value is nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError("a number beyond all floats")
    return value


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_scrub(item) for item in value]
    if isinstance(value, dict):
        return {_scrub(key): _scrub(item) for key, item in value.items()}
    return value


def parse_json(text: str) -> Any:
    """Decodes JSON text; of duplicate keys the last value wins, in the first one's place. Raises ``ValueError`` for
    text that is not JSON, for ``NaN``, infinities and numbers that would become one, and for nesting deeper than the
    interpreter's stack. Unpaired surrogate escapes, which no encoding can carry, become U+FFFD."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        return _scrub(value) if "\\u" in text else value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def function_object(tool: dict[str, Any]) -> dict[str, Any]:
    """The ``function`` of a tool with its keys in declaration order: name, description, parameters, strict, then any
    other key.

    A missing or null description is left out, missing parameters become ``{}``, ``strict`` appears only if given.
    """
    function = tool.get("function")
    if not isinstance(function, dict):
        raise PromptError("a tool has no function object")
    ordered: dict[str, Any] = {"name": function.get("name", "")}
    if function.get("description") is not None:
        ordered["description"] = function["description"]
    parameters = function.get("parameters")
    ordered["parameters"] = {} if parameters is None else parameters
    if function.get("strict") is not None:
        ordered["strict"] = function["strict"]
    ordered.update((key, value) for key, value in function.items() if key not in _FUNCTION_KEYS)
    return ordered


_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})


def prompt_tools(request: RenderRequest) -> list[dict[str, Any]]:
    """The tools the prompt declares: none when the client forbids calls."""
    if request.tool_choice == "none" or not request.tools:
        return []
    return request.tools


def content_parts(message: dict[str, Any]) -> Sequence[str]:
    """The texts of a message's content. Raises ``PromptError`` for a part that is not text."""
    content = message.get("content")
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        raise PromptError("message content is neither text nor a list of parts")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise PromptError(f"content part of type {kind!r} cannot be rendered by this model's prompt encoder")
        texts.append(part["text"])
    return texts


def content_text(message: dict[str, Any], separator: str) -> str:
    """A message's content as one text, parts joined with ``separator``."""
    return separator.join(content_parts(message))


def reasoning_text(message: dict[str, Any]) -> str:
    """A message's chain of thought, "" without one (``reasoning`` is an alias of ``reasoning_content``)."""
    value = message.get("reasoning_content") or message.get("reasoning")
    return value if isinstance(value, str) else ""


def tool_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of an assistant message."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def call_name(call: dict[str, Any]) -> str:
    """The function name of a call. Raises ``PromptError`` without one."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError("a tool call has no function name")
    return str(function["name"])


def call_arguments(call: dict[str, Any]) -> str:
    """The argument text of a call as the client sent it, "" without one."""
    arguments = call.get("function", {}).get("arguments")
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else spaced_json(arguments)


def boolean_kwarg(request: RenderRequest, *keys: str) -> bool | None:
    """The first of the template kwargs ``keys`` that is a boolean; other types count as absent."""
    for key in keys:
        value = request.template_kwargs.get(key)
        if isinstance(value, bool):
            return value
    return None


def effort_value(request: RenderRequest) -> Any:
    """The reasoning effort: the template kwarg if given and not null, else the request's (a text), else None."""
    value = request.template_kwargs.get("reasoning_effort")
    return request.effort if value is None else value


def ends_with_assistant(request: RenderRequest) -> bool:
    """Whether the last message is an assistant message that the model is asked to go on with."""
    return request.continue_final_message and bool(request.messages) and request.messages[-1].get("role") == "assistant"
