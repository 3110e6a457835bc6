"""Prompt encoder of DeepSeek-V4.1 (the format of the checkpoint's ``encoding/encoding.py``)."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from smg.models.prompt import PromptError, RenderedPrompt, RenderRequest
from smg.models.renderers.common import (
    call_arguments,
    content_parts,
    effort_value,
    ends_with_assistant,
    parse_json,
    prompt_tools,
    reasoning_text,
)
from smg.models.renderers.deepseek import IMAGE, SYSTEM, DeepSeekPrompt, DsmlNames
from smg.models.renderers.deepseek_v4 import Encoder as V4Encoder

# Levels of the first release; "high" is the default. A checkpoint that ships its encoder brings its own table.
EFFORTS: Mapping[str, int] = {"low": 25, "high": 50, "xhigh": 75, "max": 100}
_EFFORT_OFF = frozenset({"none", "minimal"})
_EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_MAX_ENCODER_BYTES = 1 << 20


def published_efforts(model_dir: Path) -> Mapping[str, int]:
    """The effort levels that the checkpoint's own encoder declares, over ``EFFORTS``.

    Reads the literal ``REASONING_EFFORT_MAPPINGS`` of ``encoding/encoding.py`` without running the file; a file that is
    missing or declares none leaves ``EFFORTS`` as it is.
    """
    path = model_dir / "encoding" / "encoding.py"
    try:
        if path.stat().st_size > _MAX_ENCODER_BYTES:
            return EFFORTS
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return EFFORTS
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if not any(isinstance(target, ast.Name) and target.id == "REASONING_EFFORT_MAPPINGS" for target in targets):
            continue
        try:
            table = ast.literal_eval(node.value)  # type: ignore[attr-defined]
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return EFFORTS
        if isinstance(table, dict):
            return {
                **EFFORTS,
                **{key: value for key, value in table.items() if isinstance(key, str) and type(value) is int},
            }
    return EFFORTS


class Encoder(V4Encoder):
    """V4 with system tokens, numbered effort, spaced DSML names and lenient arguments."""

    names: ClassVar[DsmlNames] = DsmlNames(" calls", " invoke", " parameter")
    separator = "\n\n"
    label = "DeepSeek-V4.1"

    def last_turn_start(self) -> int:
        return next((index for index in range(len(self.messages) - 1, -1, -1) if self.opens_turn(index)), -1)

    def opens_turn(self, index: int) -> bool:
        role = self.messages[index]["role"]
        return role in ("user", "developer") or (role == "system" and index > 0)

    def preamble(self, index: int) -> None:
        if self.messages[index]["role"] == "system" or (index == 0 and self.effort_text):
            self.prompt.control(SYSTEM)
        super().preamble(index)

    def parameters(self, call: dict[str, Any]) -> list[tuple[str, Any]]:
        text = call_arguments(call)
        try:
            value = parse_json(text)
            if isinstance(value, str):
                value = parse_json(value)
        except ValueError:
            value = None
        return list(value.items()) if isinstance(value, dict) else [("arguments", text)]


class DeepSeekV41Renderer:
    """Renders conversations for DeepSeek-V4.1; ``efforts`` maps effort words to levels from 1 to 100.

    Thinking is on by default. First that decides: the template kwargs ``thinking`` and ``enable_thinking``, the effort
    (``none`` and ``minimal`` off, any level on), ``thinking.type``.
    """

    name = "deepseek_v41"

    def __init__(self, efforts: Mapping[str, int] = EFFORTS) -> None:
        self.efforts = efforts

    def render(self, request: RenderRequest) -> RenderedPrompt:
        effort = effort_value(request)
        level = self.level(effort)
        messages = list(request.messages)
        _refuse_image_tokens(messages)
        tools = prompt_tools(request)
        if tools:
            place = next((index for index, message in enumerate(messages) if message["role"] == "system"), None)
            if place is None:
                place = 0
                messages.insert(0, {"role": "system", "content": ""})
            messages[place] = {**messages[place], "tools": tools}
        continued = ends_with_assistant(request)
        if continued:
            messages[-1] = {**messages[-1], "wo_eos": True}
        prompt = self.encode(
            messages,
            thinking=_thinking(request, effort),
            effort=level,
            drop_thinking=request.template_kwargs.get("drop_thinking") is not False,
            add_generation_prompt=request.add_generation_prompt,
        )
        return RenderedPrompt(prompt.finish(), self.name, armed=prompt.thinking_open, continued=continued)

    def level(self, effort: Any) -> int:
        """The effort as a level from 1 to 100. Raises ``PromptError`` for anything that is neither a level nor a known
        word."""
        if effort is None or (isinstance(effort, str) and effort in _EFFORT_OFF):
            return self.efforts["high"]
        if isinstance(effort, str):
            if effort in self.efforts:
                return self.efforts[effort]
            number = int(effort) if effort.isascii() and effort.isdigit() and len(effort) <= 3 else 0
        else:
            number = effort if type(effort) is int else 0
        if not 1 <= number <= 100:
            words = ", ".join(self.efforts)
            raise PromptError(f"reasoning_effort must be one of {words} or an integer from 1 to 100")
        return number

    def encode(
        self,
        messages: list[dict[str, Any]],
        *,
        thinking: bool,
        effort: int | None = None,
        drop_thinking: bool = True,
        add_generation_prompt: bool = True,
    ) -> DeepSeekPrompt:
        """Encodes messages that may carry ``tools``, ``response_format``, ``task`` and ``wo_eos`` themselves, and the
        role ``latest_reminder``; ``effort`` is a level. Raises ``PromptError``."""
        return Encoder(
            messages,
            thinking=thinking,
            effort_text=_EFFORT_LINE.format(self.efforts["high"] if effort is None else effort),
            drop_thinking=drop_thinking,
            add_generation_prompt=add_generation_prompt,
        ).run()


def _thinking(request: RenderRequest, effort: Any) -> bool:
    switches: list[bool] = []
    for key in ("thinking", "enable_thinking"):
        value = request.template_kwargs.get(key)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise PromptError(f"chat_template_kwargs.{key} must be a boolean")
        switches.append(value)
    if switches:
        if switches[0] != switches[-1]:
            raise PromptError("chat_template_kwargs.thinking and enable_thinking disagree")
        return switches[0]
    if effort is not None:
        return effort not in _EFFORT_OFF
    return request.thinking_type != "disabled"


def _refuse_image_tokens(messages: list[dict[str, Any]]) -> None:
    """Image tokens stand for images; a text that spells one would be taken for an image."""
    for message in messages:
        if any(IMAGE in text for text in (*content_parts(message), reasoning_text(message))):
            raise PromptError(f"message text must not contain {IMAGE}")
