"""The prompt renderer of one model: its native encoder, or its Jinja template with everything around it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest

from smg.models.harmony import HarmonyRenderer, ResponsesConversation, speaks_harmony
from smg.models.prompt import Piece, PromptError, RenderedPrompt, Renderer, RenderRequest
from smg.models.renderers import create_renderer, select_renderer
from smg.models.renderers.kimi_k25 import template_variables
from smg.models.thinking import (
    NO_SWITCH,
    PROBE_MESSAGES,
    ThinkingSwitch,
    detect_switch,
    template_kwargs,
)
from smg.tokenizer_pool.injection import ControlGuard, json_form
from smg.tokenizer_pool.preparation import MessagePreparation, system_first, users_joined
from smg.tokenizer_pool.template import ChatTemplate, TemplateInput, parse_arguments
from smg.vocab.controls import AddedToken
from smg.vocab.load import ModelFiles

logger = logging.getLogger(__name__)

NO_TEMPLATE = (
    "Failed to apply chat template: Cannot use chat template functions because tokenizer.chat_template is not set "
    "and no chat template was given"
)
# Switches that native renderers read; the default is the renderer's own.
_NATIVE_SWITCHES = {
    "deepseek_v32": ThinkingSwitch("thinking", default_on=False),
    "deepseek_v4": ThinkingSwitch("thinking", default_on=False),
    "deepseek_v4_0731": ThinkingSwitch("thinking", default_on=False),
    "deepseek_v41": ThinkingSwitch("thinking", default_on=True),
    "kimi_k3": ThinkingSwitch("thinking", default_on=True),
}
# These write what ``tool_choice`` says into the prompt themselves and take the client's tool list as it is.
_KEEPING_TOOLS = ("kimi_k3", "harmony")
_LATE_SYSTEM = [
    {"role": "system", "content": "opening-words"},
    {"role": "user", "content": "question"},
    {"role": "system", "content": "later-words"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "question"},
]
_USER_RUN = [{"role": "user", "content": "first-words"}, {"role": "user", "content": "later-words"}]
# White space to Python's str.strip, not to the fast engine's: the information separators, as JSON escapes them.
_ODD_SPACE = re.compile(rb"\\u001[c-f]", re.IGNORECASE)
_MAX_TOOL_LISTS = 256


class PromptRenderer:
    """Renders the conversations of one model.

    ``name`` is the chosen renderer: "jinja", "kimi_k25" (Jinja with one more variable), "harmony" or a native encoder.
    ``switch`` is the thinking switch the prompt obeys. With ``trust_control_tokens`` control-token text in messages is
    left to become control tokens. Raises ``TokenizerLoadError`` when the template does not compile.
    """

    def __init__(
        self,
        files: ModelFiles,
        special_tokens: dict[str, str],
        added_tokens: Sequence[AddedToken],
        *,
        trust_control_tokens: bool = False,
        fast: bool = True,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.name = _choose(files)
        self.keeps_tools = self.name in _KEEPING_TOOLS
        self.switch = _NATIVE_SWITCHES.get(self.name, NO_SWITCH)
        self._native: Renderer | None = None
        self._harmony = HarmonyRenderer(lambda: now().date().isoformat())
        self._default: _JinjaRenderer | None = None
        self._tool_use: _JinjaRenderer | None = None
        if self.name == "harmony":
            return
        self._native = create_renderer(self.name, files.root)
        if self._native is not None:
            return

        def build(source: str | None) -> _JinjaRenderer | None:
            if source is None:
                return None
            template = ChatTemplate(source, special_tokens, fast=fast, now=now)
            guard = None if trust_control_tokens else ControlGuard(added_tokens, source)
            return _JinjaRenderer(template, guard, typescript_tools=self.name == "kimi_k25")

        self._default = build(files.template.default)
        self._tool_use = build(files.template.tool_use)
        either = self._default or self._tool_use
        if either is not None:
            self.switch = either.switch

    def render(self, request: RenderRequest) -> RenderedPrompt:
        """The prompt of a conversation. Raises ``PromptError``."""
        if self.name == "harmony" or speaks_harmony(request.model):
            return self._harmony.render(request)
        renderer: Renderer | None = self._native
        if renderer is None:
            renderer = self._tool_use if request.tools and self._tool_use is not None else self._default
        if renderer is None:
            raise PromptError(NO_TEMPLATE)
        return renderer.render(request)

    def render_responses(self, conversation: ResponsesConversation) -> RenderedPrompt:
        """The prompt of a Responses conversation, of models that speak Harmony. Raises ``PromptError``."""
        return self._harmony.render_responses(conversation)


def _has_odd_space(value: bytes) -> bool:
    # Two cheap looks first: code is full of backslashes.
    return b"\\" in value and b"\\u001" in value and _ODD_SPACE.search(value) is not None


@dataclass(frozen=True, slots=True)
class _ToolFacts:
    """A tool list, the digest of its JSON form, whether the fast engine treats its texts alike, and whether they may
    contain control-token text. The list is kept so that its id stays its own."""

    tools: list[dict[str, Any]]
    digest: bytes
    plain: bool
    suspect: bool


class _JinjaRenderer:
    """Conversations through one chat template."""

    def __init__(self, template: ChatTemplate, guard: ControlGuard | None, *, typescript_tools: bool) -> None:
        self._template = template
        self._guard = guard
        self._typescript_tools = typescript_tools
        self._known_tools: dict[int, _ToolFacts] = {}
        self._preparation = MessagePreparation(template.source, template.format)
        self.switch = detect_switch(template.source, self._probe)

    def render(self, request: RenderRequest) -> RenderedPrompt:
        """The prompt of a conversation. Raises ``PromptError``."""
        conversation = self._adapted(request.messages) if request.adapt else request.messages
        messages, texts = parse_arguments(self._preparation.apply(conversation))
        kwargs = template_kwargs(request, self.switch, self._template.reserved)
        tools = request.tools or None
        given = TemplateInput(
            messages,
            tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=kwargs,
            argument_texts=texts,
        )
        supplied = json_form((messages, kwargs) if kwargs else messages)
        given.fast = not _has_odd_space(supplied)
        suspect = self._guard is not None and self._guard.suspects(supplied, messages)
        if tools is not None:
            facts = self._facts(tools)
            given.fast = given.fast and facts.plain
            given.tools_digest = facts.digest
            suspect = suspect or facts.suspect
        if self._typescript_tools:
            given.kwargs = kwargs | template_variables(tools)
        rendered = self._template.render(given)
        if suspect and self._guard is not None:
            pieces = self._guard.pieces(given, rendered, self._template.render)
        else:
            pieces = [Piece(rendered.text)]
        return RenderedPrompt(pieces, rendered.engine, continued=rendered.continued)

    def _facts(self, tools: list[dict[str, Any]]) -> _ToolFacts:
        """What is known of a tool list; many requests share one list object."""
        facts = self._known_tools.get(id(tools))
        if facts is None or facts.tools is not tools:
            text = json_form(tools)
            suspect = self._guard is not None and self._guard.suspects(text, [])
            facts = _ToolFacts(tools, xxh3_128_digest(text), plain=not _has_odd_space(text), suspect=suspect)
            if len(self._known_tools) >= _MAX_TOOL_LISTS:
                self._known_tools.clear()
            self._known_tools[id(tools)] = facts
        return facts

    def _adapted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self._shows_late_system:
            messages = system_first(messages)
        return messages if self._shows_user_runs else users_joined(messages)

    @cached_property
    def _shows_late_system(self) -> bool:
        """Whether the template shows a system message inside a conversation, and the first one as well."""
        return self._shows(_LATE_SYSTEM, "system")

    @cached_property
    def _shows_user_runs(self) -> bool:
        """Whether the template shows user messages that follow one another."""
        return self._shows(_USER_RUN, "user")

    def _shows(self, messages: list[dict[str, Any]], role: str) -> bool:
        try:
            text = self._template.render(TemplateInput(self._preparation.apply(messages))).text
        except PromptError:
            return False
        return all(message["content"] in text for message in messages if message["role"] == role)

    def _probe(self, kwargs: dict[str, Any]) -> str:
        """The prompt of the conversation that thinking switches are found with."""
        messages = self._preparation.apply(PROBE_MESSAGES)
        return self._template.render(TemplateInput(messages, kwargs=kwargs)).text


def _choose(files: ModelFiles) -> str:
    architectures = files.config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if speaks_harmony(Path(files.source).name, names, str(files.config.get("model_type") or "")):
        return "harmony"
    return select_renderer(files.config if files.has_config else None, files.root, files.source)
