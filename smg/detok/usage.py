"""Token counts of one answer, over its choices and prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smg.detok.choice import Choice
    from smg.messages import PromptPart


@dataclass(slots=True)
class Usage:
    """Totals in tokens. ``prompt`` counts every prompt once, ``completion`` sums the choices."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0

    def add_prompt(self, part: PromptPart, choices: Iterable[Choice]) -> None:
        """Count one prompt and its choices. The engine's own counts win where it reported any."""
        prompt = cached = 0
        for choice in choices:
            choice.settle()
            prompt = max(prompt, choice.prompt_tokens)
            cached = max(cached, choice.cached_tokens)
            self.completion += choice.output_tokens
            self.reasoning += choice.reasoning_tokens
            self.accepted += choice.spec_accepted
            self.rejected += max(0, choice.spec_draft - choice.spec_accepted)
        self.prompt += max(0, prompt - part.uncounted) if prompt else part.prompt_tokens
        self.cached += cached

    def chat(self) -> dict[str, Any]:
        """The usage object of the chat API."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "audio_tokens": 0,
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
            },
        }

    def completions(self) -> dict[str, Any]:
        """The usage object of the completions API."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def counts(self) -> dict[str, int]:
        """Plain numbers, for sessions and metrics."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "cached_tokens": self.cached,
            "reasoning_tokens": self.reasoning,
        }
