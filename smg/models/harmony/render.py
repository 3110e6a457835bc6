"""Harmony messages as prompt pieces.

Control tokens are pieces of their own; every text between them is encoded as ordinary text, so that control-token text
inside a message stays text.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable

from smg.models.harmony.conversation import HarmonyMessage, ResponsesConversation, from_chat, from_responses
from smg.models.harmony.tokens import CALL, CHANNEL, END, MESSAGE, START
from smg.models.prompt import Piece, RenderedPrompt, RenderRequest

_START = Piece(START)
_CHANNEL = Piece(CHANNEL)
_MESSAGE = Piece(MESSAGE)
_END = Piece(END)
_CALL = Piece(CALL)


def encode_messages(messages: Iterable[HarmonyMessage]) -> list[Piece]:
    """The pieces of a prompt that holds ``messages`` and asks the assistant to speak."""
    pieces: list[Piece] = []
    for message in messages:
        header = f"{message.author} to={message.recipient}" if message.recipient else message.author
        tail = f" {message.content_type}" if message.content_type else ""
        pieces.append(_START)
        if message.channel:
            pieces += (Piece(header, trusted=False), _CHANNEL, Piece(message.channel + tail, trusted=False))
        else:
            pieces.append(Piece(header + tail, trusted=False))
        pieces.append(_MESSAGE)
        if message.text:
            pieces.append(Piece(message.text, trusted=False))
        is_call = bool(message.recipient) and message.author.partition(":")[0] == "assistant"
        pieces.append(_CALL if is_call else _END)
    pieces += (_START, Piece("assistant", trusted=False))
    return pieces


def _today() -> str:
    return datetime.date.today().isoformat()


class HarmonyRenderer:
    """Renders Chat Completions and Responses conversations for gpt-oss. ``today`` gives the local date as
    ``YYYY-MM-DD``.

    ``render`` takes the client's tools whatever ``tool_choice`` says, and user content with its image parts (they are
    left out). ``continue_final_message`` has no effect: a Harmony message cannot be left open, so the model starts a
    new one.
    """

    name = "harmony"

    def __init__(self, today: Callable[[], str] = _today) -> None:
        self._today = today

    def render(self, request: RenderRequest) -> RenderedPrompt:
        return self._rendered(from_chat(request, self._today()))

    def render_responses(self, conversation: ResponsesConversation) -> RenderedPrompt:
        """The prompt of a Responses request."""
        return self._rendered(from_responses(conversation, self._today()))

    def _rendered(self, messages: Iterable[HarmonyMessage]) -> RenderedPrompt:
        return RenderedPrompt(encode_messages(messages), self.name, armed=False)
