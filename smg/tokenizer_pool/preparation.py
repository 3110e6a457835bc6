"""From a conversation in API shape to what a Jinja chat template expects: content format, roles, tool-call ids.

Nothing here changes what the client sent; messages that need a change are copied.
"""

from __future__ import annotations

import hashlib
import re
import string
from typing import Any

from smg.tokenizer_pool.content_format import OPENAI

Messages = list[dict[str, Any]]

# Roles that many templates do not know; they speak with the voice of the system.
_SYSTEM_LIKE = ("developer", "root")
_ID_CHARACTERS = string.digits + string.ascii_letters
_SHORT_ID = re.compile(r"[0-9A-Za-z]{9}")
_DEMANDS_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")


class MessagePreparation:
    """The transformations that one template needs, found once from its source."""

    def __init__(self, source: str, content_format: str) -> None:
        self._parts = content_format == OPENAI
        self._unknown_roles = [role for role in _SYSTEM_LIKE if f'"{role}"' not in source and f"'{role}'" not in source]
        self._short_ids = bool(_DEMANDS_SHORT_IDS.search(source))

    def apply(self, messages: Messages) -> Messages:
        """The messages as the template wants them."""
        if self._unknown_roles:
            messages = _as_system(messages, self._unknown_roles)
        if self._short_ids:
            messages = _with_short_ids(messages)
        convert = _as_parts if self._parts else _as_string
        return [convert(message) for message in messages]


def _as_string(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts joined by a newline; a list without text stays as it is."""
    content = message.get("content")
    if type(content) is list:
        texts = _texts(content)
        return message | {"content": "\n".join(texts)} if texts else message
    if content is None and message.get("role") == "system":
        return message | {"content": ""}
    return message


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """String content as one text part, except for tool messages."""
    content = message.get("content")
    role = message.get("role")
    if content is None and role == "system":
        content = ""
    if type(content) is str and role != "tool":
        return message | {"content": [{"type": "text", "text": content}]}
    return message


def _texts(content: list[Any]) -> list[str]:
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _whole(content: Any) -> str:
    return "\n".join(_texts(content)) if isinstance(content, list) else content or ""


def _as_system(messages: Messages, roles: list[str]) -> Messages:
    """Messages of ``roles`` become system messages; a system message that then is not the first is merged into the
    first one."""
    if not any(message.get("role") in roles for message in messages):
        return messages
    renamed = [
        {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
        if message.get("role") in roles
        else message
        for message in messages
    ]
    return system_first(renamed)


def system_first(messages: Messages) -> Messages:
    """System messages that are not the first message are merged into the first one."""
    if not any(message.get("role") == "system" for message in messages[1:]):
        return messages
    texts = [_whole(message.get("content")) for message in messages if message.get("role") == "system"]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message.get("role") != "system")]


def users_joined(messages: Messages) -> Messages:
    """User messages that follow one another become one, a blank line between their texts."""
    joined: Messages = []
    for message in messages:
        before = joined[-1] if joined else None
        if before is not None and before.get("role") == message.get("role") == "user":
            texts = (_whole(before.get("content")), _whole(message.get("content")))
            joined[-1] = before | {"content": "\n\n".join(text for text in texts if text)}
        else:
            joined.append(message)
    return joined


def _short_id(call_id: Any) -> str:
    """Nine alphanumeric characters for a call id: itself when it is of that form, else a digest of it."""
    text = str(call_id)
    if _SHORT_ID.fullmatch(text):
        return text
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
    characters = []
    for _ in range(9):
        number, index = divmod(number, len(_ID_CHARACTERS))
        characters.append(_ID_CHARACTERS[index])
    return "".join(characters)


def _with_short_ids(messages: Messages) -> Messages:
    """Every call id replaced by a short one, the same for a call and its result."""
    changed = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [call | {"id": _short_id(call.get("id"))} for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        if "tool_call_id" in message:
            message = message | {"tool_call_id": _short_id(message["tool_call_id"])}
        changed.append(message)
    return changed
