"""Messages of a chat request: their types, and the plain dicts that prompt renderers take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from smg.api.errors import ApiError, refused
from smg.api.fields import unsupported_media

Part = dict[str, Any]
Content = str | list[Part]

_MEDIA = {
    "image_url": ("image", "url"),
    "video_url": ("video", "url"),
    "audio_url": ("audio", "url"),
    "input_audio": ("audio", "data"),
}


class Message(msgspec.Struct, tag_field="role", kw_only=True, gc=False):
    """Base of the chat messages; the role selects the type."""

    name: str | None = None


class SystemMessage(Message, tag="system"):
    """``tools`` are declarations that one vendor's models take from the message itself; others never see them."""

    content: Content = ""
    tools: Any = None


class DeveloperMessage(Message, kw_only=True, tag="developer"):
    content: Content
    tools: Any = None


class UserMessage(Message, kw_only=True, tag="user"):
    content: Content
    tools: Any = None


class RootMessage(Message, kw_only=True, tag="root"):
    content: Content


class FunctionCall(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """``arguments`` is JSON text."""

    name: str
    arguments: str | None = None


class ToolCallItem(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    id: str
    type: str
    function: FunctionCall


class AssistantMessage(Message, tag="assistant"):
    """``reasoning`` is another spelling of ``reasoning_content``; ``function_call`` is the deprecated single call."""

    content: Content | None = None
    tool_calls: list[ToolCallItem] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: FunctionCall | None = None


class ToolMessage(Message, kw_only=True, tag="tool"):
    content: Content
    tool_call_id: str


class FunctionMessage(Message, kw_only=True, tag="function"):
    name: str
    content: str


ChatMessage = (
    SystemMessage | DeveloperMessage | UserMessage | RootMessage | AssistantMessage | ToolMessage | FunctionMessage
)


_CARRIERS = (SystemMessage, DeveloperMessage, UserMessage)


def _wrong_part(kind: Any) -> ApiError:
    shown = kind if isinstance(kind, str) else "<missing>"
    return refused("unsupported_content_part", f'Unsupported chat content part type "{shown}"')


def text_parts(parts: Sequence[Part], model: str) -> list[Part]:
    """Text parts reduced to ``type`` and ``text``. Raises ``ApiError`` for media and for parts of another form."""
    result = []
    for part in parts:
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if (kind == "text" or kind == "refusal") and type(text) is str:
            result.append(part if kind == "text" and len(part) == 2 else {"type": "text", "text": text})
            continue
        media = _MEDIA.get(kind) if type(kind) is str else None
        if media is not None:
            body = part.get(str(kind))
            if type(body) is dict and type(body.get(media[1])) is str:
                raise unsupported_media(media[0], model)
        raise _wrong_part(kind)
    return result


def _content(content: Content | None, model: str) -> Any:
    return text_parts(content, model) if type(content) is list else content


def _calls(message: AssistantMessage) -> list[dict[str, Any]] | None:
    if message.tool_calls is not None:
        return [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function)},
            }
            for call in message.tool_calls
        ]
    if message.function_call is not None:
        call = message.function_call
        # The deprecated form has no id; the answer to it is a "function" message that names the function instead.
        return [{"id": call.name, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}]
    return None


def _arguments(call: FunctionCall) -> str:
    return call.arguments if call.arguments is not None else "{}"


def _assistant(message: AssistantMessage, model: str) -> dict[str, Any]:
    result: dict[str, Any] = {"role": "assistant", "content": _content(message.content, model)}
    if message.name is not None:
        result["name"] = message.name
    calls = _calls(message)
    if calls is not None:
        result["tool_calls"] = calls
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    return result


def message_dict(message: ChatMessage, model: str, *, keep_tools: bool = False) -> dict[str, Any]:
    """One message as a plain dict, members in the order role, content, name, tool_calls, reasoning_content,
    tool_call_id.

    Members that are null or that this gateway does not know are left out, except that an assistant message always has
    ``content``. ``keep_tools`` keeps the declarations a message carries. Raises ``ApiError``.
    """
    if type(message) is AssistantMessage:
        return _assistant(message, model)
    result: dict[str, Any] = {
        "role": message.__struct_config__.tag,
        "content": _content(message.content, model),
    }
    if message.name is not None:
        result["name"] = message.name
    if type(message) is ToolMessage:
        result["tool_call_id"] = message.tool_call_id
    elif keep_tools and isinstance(message, _CARRIERS) and message.tools is not None:
        result["tools"] = message.tools
    return result


def message_dicts(messages: Sequence[ChatMessage], model: str, *, keep_tools: bool = False) -> list[dict[str, Any]]:
    """All messages of a conversation; see ``message_dict``."""
    return [message_dict(message, model, keep_tools=keep_tools) for message in messages]


def count_calls(messages: Sequence[ChatMessage]) -> int:
    """Tool calls that the conversation already holds (call ids of some families continue this count)."""
    return sum(
        len(message.tool_calls) for message in messages if type(message) is AssistantMessage and message.tool_calls
    )
