"""What goes into a prompt renderer and what comes out. Shared by Jinja templates and native renderers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class PromptError(Exception):
    """The conversation cannot be rendered: answered with 400.

    ``code`` is the API error code (``process_messages_failed`` unless a renderer knows better), ``param`` the request
    field.
    """

    def __init__(self, message: str, code: str = "process_messages_failed", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class Piece(NamedTuple):
    """A run of prompt text. ``trusted`` text comes from the template or renderer, where control-token text is a
    control token; text that is not trusted was supplied by a user, tool or document and is encoded without
    special-token matching."""

    text: str
    trusted: bool = True


@dataclass(slots=True)
class RenderRequest:
    """A conversation after API normalisation.

    ``messages``: OpenAI chat shape as plain dicts (keys in the order role, content, name, tool_calls,
    reasoning_content, tool_call_id; null and unknown fields dropped, except ``content: None`` of an assistant).
    ``content`` is a string, None or a list of ``{"type": "text", "text": ...}`` parts. Tool-call ``arguments`` are
    the client's *text* here; renderers that want objects parse it. ``tools``: ``[{"type": "function", "function":
    {...}}]`` already filtered by ``tool_choice``, or None. ``thinking_type``: "enabled", "disabled", "adaptive" or
    None. ``effort``: ``thinking.effort`` or else ``reasoning_effort``, as text. ``template_kwargs``: the client's
    ``chat_template_kwargs``. ``tool_choice`` and ``response_format`` as the client sent them. ``model`` is the
    canonical model name. ``adapt``: the API knows system messages inside a conversation and several user messages in
    a row; where a template refuses or drops them, they are joined into what it shows.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    thinking_type: str | None = None
    effort: str | None = None
    clear_thinking: bool | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    adapt: bool = False


@dataclass(slots=True)
class RenderedPrompt:
    """The prompt. ``armed``: output begins inside an open reasoning block (the renderer's own knowledge; None =
    decide by the thinking rules). ``uncounted``: text at the end that the engine receives and ``prompt_tokens``
    leaves out (Kimi-K3's stub; it is also the last of ``pieces``). ``renderer`` names what rendered it ("jinja2",
    "minijinja", "deepseek_v4" ...)."""

    pieces: list[Piece]
    renderer: str
    armed: bool | None = None
    uncounted: str = ""
    continued: bool = False

    @property
    def text(self) -> str:
        pieces = self.pieces
        return pieces[0].text if len(pieces) == 1 else "".join([piece.text for piece in pieces])


class Renderer(Protocol):
    """Renders conversations of one model. Raises ``PromptError``."""

    def render(self, request: RenderRequest) -> RenderedPrompt: ...
