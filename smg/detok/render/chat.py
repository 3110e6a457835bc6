"""Chat Completions: stream chunks and the complete answer.

A stream chunk is a prefix and a suffix made once per choice, with the escaped delta between them; only the rare
chunks (roles, log-probabilities, running usage) are put together from parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg.detok.choice import Choice
from smg.detok.logprobs import chat_entries
from smg.detok.render.base import DONE, Output, Renderer, client_finish_reason, json_bytes, uint32_list
from smg.detok.usage import Usage
from smg.engines.base import TokenLogprobs
from smg.messages import (
    ContentDelta,
    GenerationPlan,
    ParserEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)  # fmt: skip
from smg.vocab.decode import DecodeTable

_NULL_LOGPROBS = b',"logprobs":null'
_SUFFIX = b'},"logprobs":null,"finish_reason":null}]}\n\n'


class _Lane:
    """One choice of a stream: what its chunks begin with, and what is still to be said."""

    __slots__ = ("begun", "content", "has_calls", "new_ids", "prefix", "reasoning")

    def __init__(self, head: bytes, index: int) -> None:
        self.prefix = head + b',"choices":[{"index":%d,"delta":' % index
        self.content = self.prefix + b'{"content":'
        self.reasoning = self.prefix + b'{"reasoning_content":'
        self.begun = self.has_calls = False
        self.new_ids: list[int] = []


class ChatStream(Output):
    """Server-sent events of a streamed chat. Order per choice: role, deltas; then, after all choices, the finish
    chunks.
    """

    streaming = True

    def __init__(self, plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> None:
        super().__init__()
        response = plan.response
        self._choices = choices
        self._table = table
        self._include_usage = response.include_usage
        self._part = plan.parts[0]
        self._alternatives = response.logprobs or 0
        self._return_ids = response.return_token_ids
        self._forced = bool(plan.parser.forced) or bool(response.options.get("forced"))
        self._continuous = response.continuous_usage
        head = {
            "id": response.body_id,
            "object": "chat.completion.chunk",
            "created": response.created,
            "model": response.model,
            "system_fingerprint": "default",
        }
        self._head = b"data: " + json_bytes(head)[:-1]
        self._lanes = [_Lane(self._head, choice.index) for choice in choices]
        self._first = self._lanes[0]
        self._plain = not self._continuous and response.logprobs is None and not self._return_ids

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        lane = self._lanes[choice.index] if choice.index else self._first
        if not lane.begun:
            if not choice.started:
                return
            lane.begun = True
            self._begin(choice)
        if self._return_ids:
            lane.new_ids += token_ids
        if self._plain and len(events) == 1:
            event = events[0]
            if type(event) is ContentDelta:
                self._parts.append(lane.content + json_bytes(event.text) + _SUFFIX)
                return
            if type(event) is ReasoningDelta:
                self._parts.append(lane.reasoning + json_bytes(event.text) + _SUFFIX)
                return
        for position, event in enumerate(events):
            self._event(choice, event, last=position == len(events) - 1)

    def _begin(self, choice: Choice) -> None:
        if self._forced:
            self._chunk(choice, b'{"role":"assistant","content":null}', with_tokens=False)
        else:
            self._chunk(choice, b'{"role":"assistant","content":"","refusal":null}', with_tokens=False)

    def _event(self, choice: Choice, event: ParserEvent, *, last: bool) -> None:
        if type(event) is ContentDelta:
            delta = b'{"content":' + json_bytes(event.text) + b"}"
        elif type(event) is ReasoningDelta:
            delta = b'{"reasoning_content":' + json_bytes(event.text) + b"}"
        elif type(event) is ToolCallStart:
            self._lanes[choice.index].has_calls = True
            delta = (
                b'{"tool_calls":[{"index":%d,"id":' % event.index
                + json_bytes(choice.call_id(event))
                + b',"type":"function","function":{"name":'
                + json_bytes(event.name)
                + b',"arguments":""}}]}'
            )
        elif type(event) is ToolCallArguments:
            delta = (
                b'{"tool_calls":[{"index":%d,"function":{"arguments":' % event.index
                + json_bytes(event.fragment)
                + b"}}]}"
            )
        else:
            return
        self._chunk(choice, delta, with_tokens=last)

    def _chunk(self, choice: Choice, delta: bytes, *, with_tokens: bool) -> None:
        logprobs = _NULL_LOGPROBS
        extra = b""
        if with_tokens and not self._plain:
            logprobs = self._take_logprobs(choice, all_left=False)
            extra = self._take_ids(choice)
        self._emit(choice, delta, logprobs, b',"finish_reason":null' + extra)

    def _take_logprobs(self, choice: Choice, *, all_left: bool) -> bytes:
        if choice.logprobs is None:
            return _NULL_LOGPROBS
        entries = choice.logprobs.take(all_left=all_left)
        if not entries:
            return _NULL_LOGPROBS
        content = chat_entries(entries, self._table, self._alternatives)
        return b',"logprobs":' + json_bytes({"content": content, "refusal": None})

    def _take_ids(self, choice: Choice) -> bytes:
        ids = self._lanes[choice.index].new_ids
        if not ids:
            return b""
        text = b',"token_ids":' + json_bytes(ids)
        ids.clear()
        return text

    def _emit(self, choice: Choice, delta: bytes, logprobs: bytes, rest: bytes) -> None:
        usage = b""
        if self._continuous:
            usage = b',"usage":' + json_bytes(self._running_usage().chat())
        prefix = self._lanes[choice.index].prefix
        self._parts.append(prefix + delta + logprobs + rest + b"}]" + usage + b"}\n\n")

    def _running_usage(self) -> Usage:
        usage = Usage()
        usage.add_prompt(self._part, self._choices)
        return usage

    def on_end(self, usage: Usage) -> None:
        for choice in self._choices:
            if choice.finish_reason is None:
                continue
            all_left = not choice.stop_string_matched
            reason = client_finish_reason(choice.finish_reason, has_calls=self._lanes[choice.index].has_calls)
            rest = b',"finish_reason":' + json_bytes(reason)
            stop = choice.matched_stop
            if isinstance(stop, str) or (stop is not None and stop in choice.stop_token_ids):
                rest += b',"matched_stop":' + json_bytes(stop)
            rest += self._take_ids(choice)
            self._emit(choice, b"{}", self._take_logprobs(choice, all_left=all_left), rest)
        if self._include_usage:
            self._parts.append(self._head + b',"choices":[],"usage":' + json_bytes(usage.chat()) + b"}\n\n")
        self._parts.append(DONE)


class _Message:
    """The parts of one choice's message."""

    __slots__ = ("calls", "content", "reasoning")

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []


class ChatAnswer(Renderer):
    """The complete chat answer."""

    def __init__(self, plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> None:
        self._plan = plan
        self._choices = choices
        self._table = table
        self._messages = [_Message() for _ in choices]

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        message = self._messages[choice.index]
        for event in events:
            if type(event) is ContentDelta:
                message.content.append(event.text)
            elif type(event) is ReasoningDelta:
                message.reasoning.append(event.text)
            elif type(event) is ToolCallStart:
                function = {"name": event.name, "arguments": ""}
                message.calls.append({"id": choice.call_id(event), "type": "function", "function": function})
            elif type(event) is ToolCallArguments:
                message.calls[event.index].setdefault("parts", []).append(event.fragment)

    def on_choice_end(self, choice: Choice) -> None:
        for call in self._messages[choice.index].calls:
            call["function"]["arguments"] = "".join(call.pop("parts", ()))

    def body(self, usage: Usage) -> bytes:
        response = self._plan.response
        answer: dict[str, Any] = {
            "id": response.body_id,
            "object": "chat.completion",
            "created": response.created,
            "model": response.model,
            "choices": [self._choice(choice) for choice in self._choices],
            "usage": usage.chat(),
            "system_fingerprint": "default",
            "service_tier": "default",
        }
        if response.return_token_ids:
            answer["prompt_token_ids"] = uint32_list(self._plan.parts[0].token_ids)
        return json_bytes(answer)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        parts = self._messages[choice.index]
        content = "".join(parts.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content.strip() else None,
            "refusal": None,
            "annotations": [],
        }
        if parts.calls:
            message["tool_calls"] = parts.calls
        message["reasoning_content"] = "".join(parts.reasoning) or None
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": client_finish_reason(choice.finish_reason, has_calls=bool(parts.calls)),
        }
        if choice.matched_stop is not None:
            shown["matched_stop"] = choice.matched_stop
        if choice.hidden_states is not None:
            shown["hidden_states"] = choice.hidden_states
        if self._plan.response.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if choice.logprobs is None or not choice.logprobs.reported:
            return None
        entries = [e for e in choice.logprobs.take(all_left=not choice.stop_string_matched) if e.answer]
        return {"content": chat_entries(entries, self._table, self._plan.response.logprobs or 0), "refusal": None}
