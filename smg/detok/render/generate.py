"""The ``/generate`` API: text with token ids. A stream repeats the text so far in every event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from smg.detok.choice import Choice
from smg.detok.render.base import DONE, Output, json_bytes
from smg.detok.usage import Usage
from smg.engines.base import TokenLogprobs
from smg.messages import ContentDelta, GenerationPlan, ParserEvent
from smg.vocab.decode import DecodeTable


class _Shared(Output):
    """Accumulates texts and builds ``meta_info``."""

    def __init__(self, plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> None:
        super().__init__()
        self.plan = plan
        self.choices = choices
        self.begun = time.monotonic()
        self.texts = [""] * len(choices)
        self.logprobs: list[list[list[float | int]]] = [[] for _ in choices]

    def collect(self, choice: Choice, events: Sequence[ParserEvent], logprobs: TokenLogprobs | None) -> None:
        for event in events:
            if type(event) is ContentDelta:
                self.texts[choice.index] += event.text
        if logprobs is not None and self.plan.response.logprobs is not None:
            self.logprobs[choice.index] += _pairs(logprobs)

    def meta(self, choice: Choice, request_id: str, reason: Any) -> dict[str, Any]:
        choice.settle()
        part = self.plan.parts[0]
        prompt = max(0, choice.prompt_tokens - part.uncounted) if choice.prompt_tokens else part.prompt_tokens
        meta: dict[str, Any] = {
            "id": request_id,
            "finish_reason": reason,
            "prompt_tokens": prompt,
            "weight_version": "default",
        }
        if self.plan.response.logprobs is not None:
            if choice.prompt_logprobs is not None:
                meta["input_token_logprobs"] = _pairs(choice.prompt_logprobs)
            if self.logprobs[choice.index]:
                meta["output_token_logprobs"] = self.logprobs[choice.index]
        meta["completion_tokens"] = choice.output_tokens
        meta["cached_tokens"] = choice.cached_tokens
        meta["reasoning_tokens"] = choice.reasoning_tokens
        if choice.hidden_states is not None:
            meta["hidden_states"] = choice.hidden_states
        return meta


def _pairs(source: TokenLogprobs) -> list[list[float | int]]:
    return [[logprob, token] for logprob, token in zip(source.logprobs, source.token_ids, strict=False)]


class GenerateStream(_Shared):
    """Server-sent events: cumulative text, the ids of this event."""

    streaming = True

    def __init__(self, plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> None:
        super().__init__(plan, choices, table)
        self._last_ids: list[list[int]] = [[] for _ in choices]

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        self.collect(choice, events, logprobs)
        if token_ids:
            self._last_ids[choice.index] = list(token_ids)
            self._event(choice, None)

    def _event(self, choice: Choice, reason: str | None) -> None:
        meta = self.meta(choice, f"{self.plan.response.body_id}-{choice.index}", reason)
        if reason is not None:
            meta["e2e_latency"] = time.monotonic() - self.begun
            if isinstance(choice.matched_stop, str) or choice.matched_stop in choice.stop_token_ids:
                meta["matched_stop"] = choice.matched_stop
        event = {
            "text": self.texts[choice.index],
            "output_ids": self._last_ids[choice.index],
            "meta_info": meta,
            "index": choice.index,
        }
        self._parts.append(b"data: " + json_bytes(event) + b"\n\n")

    def on_choice_end(self, choice: Choice) -> None:
        self._event(choice, choice.finish_reason)

    def on_end(self, usage: Usage) -> None:
        self._parts.append(DONE)


class GenerateAnswer(_Shared):
    """The complete answer: a list with one object per sample."""

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        self.collect(choice, events, logprobs)

    def body(self, usage: Usage) -> bytes:
        return json_bytes([self._sample(choice) for choice in self.choices])

    def _sample(self, choice: Choice) -> dict[str, Any]:
        reason: Any = choice.finish_reason
        if reason == "stop":
            reason = {"type": "stop"}
        elif reason == "length":
            reason = {"type": "length", "length": choice.output_tokens}
        meta = self.meta(choice, self.plan.response.body_id, reason)
        meta["e2e_latency"] = time.monotonic() - self.begun
        if choice.matched_stop is not None:
            meta["matched_stop"] = choice.matched_stop
        return {"text": self.texts[choice.index], "output_ids": choice.token_ids, "meta_info": meta}
