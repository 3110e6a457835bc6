"""Which renderer a plan asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smg.detok.choice import Choice
from smg.detok.render.base import Renderer
from smg.detok.render.chat import ChatAnswer, ChatStream
from smg.detok.render.completions import CompletionAnswer, CompletionStream
from smg.detok.render.generate import GenerateAnswer, GenerateStream
from smg.detok.render.messages import MessagesAnswer, MessagesStream
from smg.messages import GenerationPlan
from smg.vocab.decode import DecodeTable

_Factory = Callable[[GenerationPlan, Sequence[Choice], DecodeTable], Renderer]

_RENDERERS: dict[tuple[str, bool], _Factory] = {
    ("chat", True): ChatStream,
    ("chat", False): ChatAnswer,
    ("completions", True): CompletionStream,
    ("completions", False): CompletionAnswer,
    ("generate", True): GenerateStream,
    ("generate", False): GenerateAnswer,
    ("messages", True): MessagesStream,
    ("messages", False): MessagesAnswer,
}


def make_renderer(plan: GenerationPlan, choices: Sequence[Choice], table: DecodeTable) -> Renderer:
    """A fresh renderer for one request. Raises ``KeyError`` for an API without one."""
    return _RENDERERS[(plan.response.api, plan.response.stream)](plan, choices, table)
