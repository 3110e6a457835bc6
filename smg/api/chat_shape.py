"""Chat requests that differ in nothing but their messages share all work that does not look at these.

The first request of a shape goes the whole way (``drafts.chat_draft``), which defines what a request means. It leaves a
``ChatShape`` behind: its parameters checked and translated, and a ``Mold`` for every way in which prompts start the
output. Later requests decode their messages, render, encode, and pour.

A shape belongs to one state of the model table: another ``ModelInfo`` object makes it stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec

from smg.api.chat import ChatRequest
from smg.api.chat_messages import count_calls, message_dicts
from smg.api.context import Context
from smg.api.conversation import Conversation, check_prompt, prompt_error, prompt_of, selection_of
from smg.api.decode import screened
from smg.api.ids import engine_ids
from smg.api.mold import Mold
from smg.api.plan import Draft, EncodedPrompt, Planned
from smg.api.profiles import apply_rules, refuse_root, vendor_of
from smg.messages import ModelInfo
from smg.models.profiles import ProfileRequest
from smg.models.prompt import PromptError, RenderRequest
from smg.models.registry import call_id_style
from smg.models.thinking import ReasoningStart, reasoning_start

MAX_SHAPES = 256
MAX_MOLDS = 64
# Parameters above this size (tool declarations, schemas) are not kept.
MAX_KEY_BYTES = 128 * 1024

# Members whose JSON text stands for them: comparing it is cheaper than decoding it.
RAW_MEMBERS = (
    "tools", "tool_choice", "functions", "function_call", "response_format", "reasoning_effort", "thinking",
    "chat_template_kwargs", "modalities", "stop", "stop_token_ids", "logit_bias", "stream_options", "session_params",
)  # fmt: skip
# Members that change from request to request and have no part in the plan (``rid`` only names it).
PASSING_MEMBERS = (
    "messages", "rid", "metadata", "user", "store", "prediction", "audio", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
_TYPES = {field.name: field.type for field in msgspec.structs.fields(ChatRequest)}
PLAIN_MEMBERS = tuple(name for name in _TYPES if name not in RAW_MEMBERS and name not in PASSING_MEMBERS)

# A chat request as far as a known shape needs it.
_Envelope: Any = msgspec.defstruct(
    "ChatEnvelope",
    [
        (name, kind) if name in ("messages", "model") else (name, msgspec.Raw if name in RAW_MEMBERS else kind, None)
        for name, kind in _TYPES.items()
    ],
    kw_only=True,
    gc=False,
)
_decode = msgspec.json.Decoder(_Envelope).decode
_plain_values = attrgetter(*PLAIN_MEMBERS)
_raw_values = attrgetter(*RAW_MEMBERS)
_NO_RAW = (None,) * len(RAW_MEMBERS)

Key = tuple[Any, ...]


def open_envelope(body: bytes, headers: Mapping[str, str]) -> tuple[Any, Key] | None:
    """The messages and the shape's key; None for a body that must go the whole way, or be refused there."""
    if not screened(body, headers):
        return None
    try:
        envelope = _decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    raw = _raw_values(envelope)
    if raw != _NO_RAW:
        raw = tuple([None if value is None else bytes(value) for value in raw])
        if sum([len(value) for value in raw if value is not None]) > MAX_KEY_BYTES:
            return None
    return envelope, (_plain_values(envelope), raw)


class ChatShape:
    """See the module's text. Made of the first request and what became of it."""

    __slots__ = ("_base", "_molds", "_offsets", "_request", "_tools", "_vendor", "info")

    def __init__(self, info: ModelInfo, request: ChatRequest, conversation: Conversation) -> None:
        self.info = info
        self._request = msgspec.structs.replace(request, messages=[])
        self._tools = conversation.tools
        self._base = replace(conversation.render, messages=[])
        self._vendor = vendor_of(request.model)
        self._offsets = call_id_style(info.id) != "call"
        self._molds: dict[tuple[ReasoningStart, int], Mold] = {}

    def add(self, start: ReasoningStart, known_calls: int, mold: Mold) -> None:
        """Keep a mold for outputs that start so, behind so many tool calls."""
        if len(self._molds) >= MAX_MOLDS:
            self._molds.clear()
        self._molds[(start, known_calls if self._offsets else 0)] = mold

    def plan(self, context: Context, envelope: Any, request_id: str) -> Planned | None:
        """The plan of a request of this shape, None when no mold fits. Raises ``ApiError``."""
        tokenizer = context.tokenizer(self.info)
        render = self._render(envelope)
        try:
            rendered, ids, uncounted = prompt_of(tokenizer, render)
        except PromptError as error:
            raise prompt_error(error) from None
        check_prompt(ids, self.info)
        start = reasoning_start(rendered, render, tokenizer.switch, selection_of(context, self.info).reasoning)
        calls = count_calls(envelope.messages) if self._offsets else 0
        mold = self._molds.get((start, calls))
        if mold is None:
            return None
        rid = envelope.rid
        names = engine_ids(request_id, 1, rid)
        prompt = EncodedPrompt(rendered.text, ids, uncounted)
        return mold.planned(names, [prompt], body_id=names[0], request_id=request_id, routing_key=rid or "")

    def _render(self, envelope: Any) -> RenderRequest:
        base, request = self._base, self._request
        messages = message_dicts(envelope.messages, request.model, keep_tools=self._vendor == "kimi")
        ruled: ProfileRequest | RenderRequest = base
        if self._vendor:
            ruled = apply_rules(request, envelope.messages, messages, self._tools, base.tool_choice)
        else:
            refuse_root(envelope.messages)
        return RenderRequest(
            base.model,
            messages,
            base.tools,
            base.tool_choice,
            base.response_format,
            base.add_generation_prompt,
            base.continue_final_message,
            ruled.thinking_type,
            ruled.effort,
            ruled.clear_thinking,
            ruled.template_kwargs,
        )


class ChatShapes:
    """The shapes that one tokenizer process knows."""

    def __init__(self) -> None:
        self._shapes: dict[Key, ChatShape] = {}

    def __len__(self) -> int:
        return len(self._shapes)

    def get(self, key: Key, info: ModelInfo | None) -> ChatShape | None:
        """The shape under ``key`` if it still holds for ``info``."""
        shape = self._shapes.get(key)
        return shape if shape is not None and shape.info is info else None

    def learn(self, key: Key, draft: Draft, request: ChatRequest, conversation: Conversation, mold: Mold) -> None:
        """Keep what became of a request that went the whole way."""
        if conversation.start is None:
            return  # read by other rules
        shape = self.get(key, draft.info)
        if shape is None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[key] = ChatShape(draft.info, request, conversation)
        shape.add(conversation.start, conversation.known_calls, mold)
