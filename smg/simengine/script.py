"""Scripted output of the embedded engine (``--script FILE``).

The file is a JSON list. Each entry is the text of one reply, or an object:

``text``
    the whole output, markers included; or ``ids``: token ids
``reasoning``, ``content``, ``tool_calls``
    instead of ``text``: the parts of an answer, written in the shipped model's own format (``<think>`` block, text,
    ``<tool_call>`` blocks); a tool call is ``{"name": ..., "arguments": {...}}``
``finish_reason``
    default "stop": the reply ends with EOS; any other word ends it without
``match``
    only for prompts that contain this text
``error``
    ``{"code": "UNAVAILABLE", "message": ..., "at": 3}``: fail with this gRPC status before token ``at`` (default 0)

Entries with a fitting ``match`` come first; the others are used in turn, from the start again after the last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


class ScriptError(Exception):
    """The script file cannot be used."""


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scripted failure: gRPC status name, text, and the number of tokens that come before it."""

    code: str = "INTERNAL"
    message: str = "scripted failure"
    at: int = 0


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call to write in the shipped model's format."""

    name: str
    arguments: dict[str, Any] = {}


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One scripted reply."""

    text: str | None = None
    ids: list[int] | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = []
    finish_reason: str = "stop"
    match: str | None = None
    error: Failure | None = None

    def full_text(self) -> str:
        """The output as the model would write it."""
        if self.text is not None:
            return self.text
        parts = [] if self.reasoning is None else [f"<think>\n{self.reasoning}\n</think>\n\n"]
        parts.append(self.content or "")
        for call in self.tool_calls:
            body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            parts.append(f"\n<tool_call>\n{body}\n</tool_call>" if any(parts) else f"<tool_call>\n{body}\n</tool_call>")
        return "".join(parts)


class Script:
    """Chooses the output for each request."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._matching = [output for output in outputs if output.match is not None]
        self._in_turn = [output for output in outputs if output.match is None]
        self._next = 0

    @property
    def needs_prompt(self) -> bool:
        """Whether ``choose`` looks at the prompt's text."""
        return bool(self._matching)

    def choose(self, prompt: str) -> Output | None:
        """The output for this request; None when the script has none for it."""
        for output in self._matching:
            if output.match is not None and output.match in prompt:
                return output
        if not self._in_turn:
            return None
        output = self._in_turn[self._next % len(self._in_turn)]
        self._next += 1
        return output


def load_script(path: Path) -> Script:
    """Read a script file. Raises ``ScriptError``."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[str | Output])
    except (OSError, msgspec.DecodeError) as error:
        raise ScriptError(f"{path}: {error}") from error
    return Script([Output(text=entry) if isinstance(entry, str) else entry for entry in entries])
