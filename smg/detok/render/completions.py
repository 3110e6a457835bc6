"""Completions: text chunks and the complete answer. Choice ``i`` of prompt ``p`` has index ``p * n + i``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg.detok.choice import Choice
from smg.detok.logprobs import completion_logprobs, joined_logprobs, prompt_logprobs
from smg.detok.render.base import DONE, Output, json_bytes, uint32_list
from smg.detok.usage import Usage
from smg.engines.base import TokenLogprobs
from smg.messages import ContentDelta, GenerationPlan, ParserEvent, PromptPart
from smg.vocab.decode import DecodeTable


def _text(events: Sequence[ParserEvent]) -> str:
    return "".join(event.text for event in events if type(event) is ContentDelta)


class _Shared(Output):
    """What both renderers read from the plan."""

    def __init__(self, plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> None:
        super().__init__()
        self.plan = plan
        self.choices = choices
        self.table = table
        self.echo = bool(plan.response.options.get("echo"))
        self.suffix: str = plan.response.options.get("suffix") or ""

    def part(self, choice: Choice) -> PromptPart:
        return self.plan.parts[choice.index // self.plan.response.n]

    def echoed(self, choice: Choice) -> str:
        return (self.part(choice).text or "") if self.echo else ""

    def logprobs(self, choice: Choice, *, first: bool, all_left: bool) -> dict[str, Any] | None:
        """What is due of the choice's logprobs; ``first``: those of the echoed prompt in front."""
        if choice.logprobs is None:
            return None
        alternatives = self.plan.response.logprobs or 0
        entries = choice.logprobs.take(all_left=all_left)
        output = None
        if entries:
            output = completion_logprobs(entries, self.table, alternatives, len(self.echoed(choice)))
        if not (first and self.echo):
            return output
        n = self.plan.response.n
        begin = choice.index // n * n
        # Some engines report the prompt once for all choices.
        reported = (other.prompt_logprobs for other in (choice, *self.choices[begin : begin + n]))
        source = next((found for found in reported if found is not None), None)
        return output if source is None else joined_logprobs(prompt_logprobs(source, self.table, alternatives), output)


class CompletionStream(_Shared):
    """Server-sent events of a streamed completion; each choice closes with its own finish chunk."""

    streaming = True

    def __init__(self, plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> None:
        super().__init__(plan, choices, table)
        response = plan.response
        head = {"id": response.body_id, "object": "text_completion", "created": response.created}
        tail = {"model": response.model, "system_fingerprint": "default"}
        self._head = b"data: " + json_bytes(head)[:-1] + b',"choices":['
        self._tail = b"]," + json_bytes(tail)[1:-1]
        self._begun = [False] * len(choices)
        self._plain = response.logprobs is None and not response.return_token_ids and not response.continuous_usage
        self._new_ids: list[list[int]] = [[] for _ in choices]

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        text = _text(events)
        if self.plan.response.return_token_ids:
            self._new_ids[choice.index] += token_ids
        first = not self._begun[choice.index] and bool(text or choice.finish_reason is not None)
        if first:
            self._begun[choice.index] = True
            text = self.echoed(choice) + text
        if text:
            self._chunk(choice, text, None, first=first)

    def _chunk(self, choice: Choice, text: str, reason: str | None, *, first: bool = False) -> None:
        if self._plain and reason is None:
            body = b'{"text":' + json_bytes(text) + b',"index":%d,"finish_reason":null}' % choice.index
            self._parts.append(self._head + body + self._tail + b"}\n\n")
            return
        shown: dict[str, Any] = {"text": text, "index": choice.index}
        if self.plan.response.logprobs is not None:
            all_left = reason is not None and not choice.stop_string_matched
            shown["logprobs"] = self.logprobs(choice, first=first, all_left=all_left)
        shown["finish_reason"] = reason
        if reason is not None:
            stop = choice.matched_stop
            if isinstance(stop, str) or (stop is not None and stop in choice.stop_token_ids):
                shown["matched_stop"] = stop
        if self.plan.response.return_token_ids:
            shown["token_ids"] = self._new_ids[choice.index].copy()
            self._new_ids[choice.index].clear()
        usage = b""
        if self.plan.response.continuous_usage:
            usage = b',"usage":' + json_bytes(self._running_usage().completions())
        self._parts.append(self._head + json_bytes(shown) + self._tail + usage + b"}\n\n")

    def _running_usage(self) -> Usage:
        usage = Usage()
        n = self.plan.response.n
        for index, part in enumerate(self.plan.parts):
            usage.add_prompt(part, self.choices[index * n : (index + 1) * n])
        return usage

    def on_choice_end(self, choice: Choice) -> None:
        if self.suffix:
            self._chunk(choice, self.suffix, None)
        self._chunk(choice, "", choice.finish_reason)

    def on_end(self, usage: Usage) -> None:
        if self.plan.response.include_usage:
            self._parts.append(self._head + self._tail + b',"usage":' + json_bytes(usage.completions()) + b"}\n\n")
        self._parts.append(DONE)


class CompletionAnswer(_Shared):
    """The complete answer. ``keep``: only so many of each prompt's choices are shown, best mean logprob first."""

    def __init__(self, plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> None:
        super().__init__(plan, choices, table)
        self._texts: list[list[str]] = [[] for _ in choices]

    def on_tokens(
        self,
        choice: Choice,
        token_ids: Sequence[int],
        events: Sequence[ParserEvent],
        logprobs: TokenLogprobs | None,
    ) -> None:
        self._texts[choice.index].append(_text(events))

    def body(self, usage: Usage) -> bytes:
        response = self.plan.response
        answer = {
            "id": response.body_id,
            "object": "text_completion",
            "created": response.created,
            "model": response.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._shown())],
            "usage": usage.completions(),
            "system_fingerprint": "default",
        }
        return json_bytes(answer)

    def _shown(self) -> list[Choice]:
        keep = self.plan.response.options.get("keep")
        if not keep:
            return list(self.choices)
        n = self.plan.response.n
        shown: list[Choice] = []
        for start in range(0, len(self.choices), n):
            ranked = sorted(self.choices[start : start + n], key=_mean_logprob, reverse=True)
            shown += ranked[:keep]
        return shown

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echoed = self.echoed(choice)
        shown: dict[str, Any] = {
            "text": echoed + "".join(self._texts[choice.index]) + self.suffix,
            "index": index,
        }
        if self.plan.response.logprobs is not None and not self.plan.response.options.get("hide_logprobs"):
            all_left = not choice.stop_string_matched
            shown["logprobs"] = self.logprobs(choice, first=True, all_left=all_left)
        shown["finish_reason"] = choice.finish_reason
        if choice.matched_stop is not None:
            shown["matched_stop"] = choice.matched_stop
        if self.plan.response.return_token_ids:
            shown["prompt_token_ids"] = uint32_list(self.part(choice).token_ids)
            shown["token_ids"] = choice.token_ids
        return shown


def _mean_logprob(choice: Choice) -> float:
    entries = choice.logprobs.entries if choice.logprobs is not None else []
    return sum(entry.logprob for entry in entries) / len(entries) if entries else float("-inf")
