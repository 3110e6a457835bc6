"""Tool declarations and ``tool_choice``: checks, canonical form, and what the choice means.

All APIs end up with the chat form of a declaration, ``{"type": "function", "function": {name, description,
parameters, strict}}``
with members in that order, then members this gateway does not know in the client's order; null members are left out,
except that
``parameters`` is always there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from smg.api.errors import ApiError, invalid

_MEMBERS = ("name", "description", "parameters", "strict")
_JSON_TYPES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


class Tool(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """One entry of ``tools``; ``function`` is checked by hand because its unknown members are kept."""

    type: str
    function: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What ``tool_choice`` asks for. ``mode``: "auto", "none", "required" or "function"; ``names`` are the functions
    the model
    may see (None = all), for "function" the one it must call. ``raw`` is what templates see."""

    mode: str
    names: tuple[str, ...] | None = None
    raw: Any = None

    @property
    def forced(self) -> bool:
        """A call must come out."""
        return self.mode == "function" or (self.mode == "required" and self.names != ())


AUTO = ToolChoice("auto", raw="auto")
NONE = ToolChoice("none", raw="none")
REQUIRED = ToolChoice("required", raw="required")
_WORDS = {"auto": AUTO, "none": NONE, "required": REQUIRED}


def parse_word(word: str) -> ToolChoice:
    """The choice for "auto", "none" or "required"."""
    return _WORDS[word]


def type_error(param: str, text: str) -> ApiError:
    """The error of a member with the wrong JSON type."""
    return ApiError(400, "invalid_type", f"Invalid JSON data: {param}: {text}", param)


def missing_error(param: str) -> ApiError:
    """The error of a member that is not there."""
    return ApiError(400, "missing_required_parameter", f"Invalid JSON data: {param}: missing field", param)


def check_declaration(function: dict[str, Any], where: str) -> None:
    """Types of the known members. ``where`` is the request path of ``function``."""
    name = function.get("name")
    if type(name) is not str:
        raise (
            missing_error(f"{where}.name")
            if "name" not in function
            else type_error(f"{where}.name", "expected a string")
        )
    description = function.get("description")
    if description is not None and type(description) is not str:
        raise type_error(f"{where}.description", "expected a string")
    strict = function.get("strict")
    if strict is not None and type(strict) is not bool:
        raise type_error(f"{where}.strict", "expected a boolean")


def check_parameters(function: dict[str, Any], where: str, param: str | None = None) -> None:
    """``parameters`` must be an object when it is there."""
    parameters = function.get("parameters")
    if parameters is not None and type(parameters) is not dict:
        got = _JSON_TYPES.get(type(parameters), "another type")
        raise invalid("invalid_type", f"Invalid '{where}.parameters': expected an object, but got {got} instead", param)


def declaration(function: dict[str, Any], kind: str = "function") -> dict[str, Any]:
    """The canonical chat form of one function declaration; a function without parameters takes ``{}``."""
    ordered: dict[str, Any] = {}
    for key in _MEMBERS:
        value = function.get(key)
        if value is not None:
            ordered[key] = value
        elif key == "parameters":
            ordered[key] = {}
    ordered.update((key, value) for key, value in function.items() if key not in _MEMBERS)
    return {"type": kind, "function": ordered}


def chat_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Checked and canonical declarations of a chat request."""
    result = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        check_declaration(tool.function, where)
        result.append(declaration(tool.function, tool.type))
    return result


NO_TOOLS = "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified."


def function_not_found(name: str | None) -> str:
    """Text of ``tool_choice_function_not_found``."""
    return f"Invalid value for 'tool_choice': function '{name}' not found in 'tools'."


def tool_not_found(name: str) -> str:
    """Text of ``tool_choice_tool_not_found``."""
    return f"Invalid value for 'tool_choice.tools': tool '{name}' not found in 'tools'."


def wrong_mode(mode: str | None) -> str:
    """Text of ``tool_choice_invalid_mode``."""
    return f"Invalid value for 'tool_choice.mode': must be 'auto' or 'required', got '{mode}'."


def _wrong_choice() -> ApiError:
    return type_error("tool_choice", "expected auto, none, required, a named function or allowed_tools")


def _entry_name(entry: Any, kinds: tuple[str, ...]) -> str:
    """The function name in one entry of an allowed_tools list, in the flat or the nested spelling."""
    if type(entry) is not dict or type(entry.get("type")) is not str:
        raise _wrong_choice()
    kind = entry["type"]
    holder = entry.get("function") if kind == "function" and type(entry.get("function")) is dict else entry
    name = holder.get("name") if holder is not None else None
    if kind == "mcp" and type(entry.get("server_label")) is str:
        name = name if type(name) is str else entry["server_label"]
    elif kind in ("file_search", "web_search_preview", "web_search", "code_interpreter", "image_generation"):
        name = kind
    elif kind != "function" or type(name) is not str:
        raise _wrong_choice()
    if kind not in kinds:
        raise invalid("tool_choice_invalid_tool_type", f"'tool_choice.tools' takes function tools only, not '{kind}'")
    return str(name)


def parse_choice(value: Any, kinds: tuple[str, ...] = ("function",)) -> ToolChoice:
    """``tool_choice`` of a chat request. Raises ``ApiError`` (``invalid_type``) for any other form.

    Named functions and ``allowed_tools`` are accepted in the nested spelling of the public API and in the flat one.
    """
    if type(value) is str:
        choice = _WORDS.get(value)
        if choice is None:
            raise _wrong_choice()
        return choice
    if type(value) is not dict:
        raise _wrong_choice()
    kind = value.get("type")
    if kind == "function":
        function = value.get("function")
        name = function.get("name") if type(function) is dict else None
        if type(name) is not str:
            raise _wrong_choice()
        return ToolChoice("function", (name,), value)
    if kind != "allowed_tools":
        raise _wrong_choice()
    nested = value.get("allowed_tools")
    body = nested if type(nested) is dict else value
    mode, entries = body.get("mode"), body.get("tools")
    if type(mode) is not str or type(entries) is not list:
        raise _wrong_choice()
    return ToolChoice(mode, tuple(_entry_name(entry, kinds) for entry in entries), value)


def check_choice(choice: ToolChoice, names: set[str]) -> None:
    """Cross-checks of a ``tool_choice`` with the names of the declared functions."""
    if choice.names is None and choice.mode != "required":
        return
    if not names:
        raise invalid("tool_choice_requires_tools", NO_TOOLS)
    if choice.names is None:
        return
    if choice.mode == "function":
        if choice.names[0] not in names:
            raise invalid("tool_choice_function_not_found", function_not_found(choice.names[0]))
        return
    if choice.mode not in ("auto", "required"):
        raise invalid("tool_choice_invalid_mode", wrong_mode(choice.mode))
    for name in choice.names:
        if name not in names:
            raise invalid("tool_choice_tool_not_found", tool_not_found(name))


def visible(tools: list[dict[str, Any]], choice: ToolChoice) -> list[dict[str, Any]] | None:
    """The declarations that the model is shown: none for "none", the subset for an allowed_tools list, else all."""
    if not tools or choice.mode == "none":
        return None
    if choice.mode == "function" or choice.names is None:
        return tools
    return [tool for tool in tools if tool["function"]["name"] in choice.names] or None
