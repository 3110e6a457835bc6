"""What the prompt encoders of DeepSeek-V3.2, V4 and V4.1 share: control tokens, DSML blocks, history trimming."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from smg.models.renderers.common import PromptBuilder, spaced_json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
SYSTEM = "<｜System｜>"
REMINDER = "<｜latest_reminder｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"
IMAGE = "<｜deepseek_image｜>"
TASKS = {task: f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")}

CONTROLS = re.compile(
    "|".join(
        map(
            re.escape,
            (BOS, EOS, USER, ASSISTANT, SYSTEM, REMINDER, THINK_OPEN, THINK_CLOSE, DSML, IMAGE, *TASKS.values()),
        )
    )
)

RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

Parameters = Iterable[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class DsmlNames:
    """Tag names of a DSML call block. V4.1 writes them with a leading space."""

    block: str
    invoke: str
    parameter: str


class DeepSeekPrompt(PromptBuilder):
    """A DeepSeek prompt under construction. ``thinking_open``: the text so far ends inside an open think block."""

    __slots__ = ("thinking_open",)

    def __init__(self) -> None:
        super().__init__(CONTROLS)
        self.thinking_open = False
        self.control(BOS)

    def control(self, token: str) -> None:
        self.thinking_open = token == THINK_OPEN or (self.thinking_open and token in _INSIDE_THOUGHT)
        super().control(token)

    def think_tag(self, thinking: bool) -> None:
        self.control(THINK_OPEN if thinking else THINK_CLOSE)

    def response_format(self, schema: Any) -> None:
        self.text("\n\n" + RESPONSE_FORMAT + spaced_json(schema))

    def call_block(self, names: DsmlNames, calls: Sequence[tuple[str, Parameters]]) -> None:
        """Writes ``calls``, pairs of function name and parameters, as a DSML block."""
        self.text("\n\n")
        self._tag("<", names.block, ">\n")
        for number, (name, parameters) in enumerate(calls):
            if number:
                self.text("\n")
            self._tag("<", names.invoke, f' name="{name}">\n')
            self._parameters(names, parameters)
            self.text("\n")
            self._tag("</", names.invoke, ">")
        self.text("\n")
        self._tag("</", names.block, ">")

    def _parameters(self, names: DsmlNames, parameters: Parameters) -> None:
        separator = ""
        for key, value in parameters:
            self.text(separator)
            is_string = isinstance(value, str)
            kind = "true" if is_string else "false"
            self._tag("<", names.parameter, f' name="{key}" string="{kind}">')
            self.text(value if is_string else spaced_json(value))
            self._tag("</", names.parameter, ">")
            separator = "\n"

    def _tag(self, opener: str, name: str, rest: str) -> None:
        self.text(opener)
        self.control(DSML)
        self.text(name + rest)


# Tokens that can stand inside a thought without ending it.
_INSIDE_THOUGHT = frozenset({DSML, IMAGE, REMINDER, *TASKS.values()})


def last_index(messages: Sequence[dict[str, Any]], roles: frozenset[str]) -> int:
    """Index of the last message whose role is in ``roles``, -1 without one."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] in roles:
            return index
    return -1


def without_old_thoughts(messages: Sequence[dict[str, Any]], last: int, kept: frozenset[str]) -> list[dict[str, Any]]:
    """The history with the thoughts of finished turns dropped.

    Everything from index ``last`` on stays, and of what is before it the roles in ``kept``; earlier assistant messages
    lose their reasoning, other earlier messages (developer) are removed.
    """
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if index >= last or message["role"] in kept:
            result.append(message)
        elif message["role"] == "assistant":
            result.append({key: value for key, value in message.items() if key not in _REASONING_KEYS})
    return result


_REASONING_KEYS = frozenset({"reasoning_content", "reasoning"})
