"""Prompt encoder of DeepSeek-V3.2 (the format of the checkpoint's ``encoding/encoding_dsv32.py``)."""

from __future__ import annotations

from typing import Any

from smg.models.prompt import PromptError, RenderedPrompt, RenderRequest
from smg.models.renderers.common import (
    boolean_kwarg,
    call_arguments,
    call_name,
    content_text,
    ends_with_assistant,
    function_object,
    parse_json,
    prompt_tools,
    reasoning_text,
    spaced_json,
    tool_calls,
)
from smg.models.renderers.deepseek import (
    ASSISTANT,
    EOS,
    THINK_CLOSE,
    USER,
    DeepSeekPrompt,
    DsmlNames,
    last_index,
    without_old_thoughts,
)

NAMES = DsmlNames("function_calls", "invoke", "parameter")

_TOOLS_HEAD = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects \
should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for \
other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking \
block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""
_TOOLS_TAIL = "\n</functions>\n"

_TURN_STARTS = frozenset({"user", "developer"})
_KEPT = frozenset({"user", "system", "tool"})


def _parameters(call: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a call as parameters: none for JSON that is no object; text that is no JSON stays whole, under
    the name
    ``arguments``."""
    text = call_arguments(call)
    if not text.strip():
        return []
    try:
        value = parse_json(text)
        if isinstance(value, str):
            value = parse_json(value)
    except ValueError:
        return [("arguments", text)]
    return list(value.items()) if isinstance(value, dict) else []


class _Encoder:
    """One encoding run over a fixed list of messages."""

    def __init__(self, messages: list[dict[str, Any]], thinking: bool, add_generation_prompt: bool) -> None:
        last = last_index(messages, _TURN_STARTS)
        if thinking and not any(message.get("tools") for message in messages):
            messages = without_old_thoughts(messages, last, _KEPT)
            last = last_index(messages, _TURN_STARTS)
        self.messages = messages
        self.thinking = thinking
        self.last = last
        self.open_end = add_generation_prompt
        self.prompt = DeepSeekPrompt()
        # Calls of the assistant message that the running tool messages answer, and how many of them are answered.
        self.calls = 0
        self.answered = 0

    def run(self) -> DeepSeekPrompt:
        encoders = {
            "system": self._system,
            "developer": self._developer,
            "user": self._user,
            "tool": self._tool,
            "assistant": self._assistant,
        }
        for index, message in enumerate(self.messages):
            role = message["role"]
            if role not in encoders:
                raise PromptError(f"DeepSeek-V3.2 has no role {role!r}")
            if role != "tool":
                self.calls = len(tool_calls(message)) if role == "assistant" else 0
                self.answered = 0
            encoders[role](index, message)
        return self.prompt

    def _declarations(self, message: dict[str, Any]) -> None:
        if message.get("tools"):
            self.prompt.text("\n\n")
            self.prompt.markup(_TOOLS_HEAD)
            self.prompt.text("\n".join(spaced_json(function_object(tool)) for tool in message["tools"]))
            self.prompt.text(_TOOLS_TAIL)
        if message.get("response_format") is not None:
            self.prompt.response_format(message["response_format"])

    def _assistant_header(self, index: int) -> None:
        if self.open_end or index + 1 < len(self.messages):
            self.prompt.control(ASSISTANT)
            self.prompt.think_tag(self.thinking and index == self.last)

    def _system(self, index: int, message: dict[str, Any]) -> None:
        self.prompt.text(content_text(message, "\n"))
        self._declarations(message)

    def _developer(self, index: int, message: dict[str, Any]) -> None:
        content = content_text(message, "\n")
        if not content:
            raise PromptError("a developer message needs content")
        self.prompt.control(USER)
        self._declarations(message)
        self.prompt.text("\n\n# The user's message is: " + content)
        self._assistant_header(index)

    def _user(self, index: int, message: dict[str, Any]) -> None:
        self.prompt.control(USER)
        self.prompt.text(content_text(message, "\n"))
        self._assistant_header(index)

    def _tool(self, index: int, message: dict[str, Any]) -> None:
        self.answered += 1
        number = self.answered
        if number > self.calls:
            raise PromptError("a tool message has no matching tool call before it")
        if number == 1:
            self.prompt.text("\n\n<function_results>")
        self.prompt.text(f"\n<result>{content_text(message, chr(10))}</result>")
        if number == self.calls:
            self.prompt.text("\n</function_results>\n\n")
            if self.open_end or index + 1 < len(self.messages):
                self.prompt.think_tag(self.thinking and index >= self.last)

    def _assistant(self, index: int, message: dict[str, Any]) -> None:
        calls = tool_calls(message)
        if self.thinking and index > self.last:
            reasoning = reasoning_text(message)
            if not reasoning and not calls:
                raise PromptError("an assistant message of the current turn needs reasoning_content or tool calls")
            self.prompt.text(reasoning)
            self.prompt.control(THINK_CLOSE)
        self.prompt.text(content_text(message, "\n"))
        if calls:
            self.prompt.call_block(NAMES, [(call_name(call), _parameters(call)) for call in calls])
        self.prompt.control(EOS)


class DeepSeekV32Renderer:
    """Renders conversations for DeepSeek-V3.2. Thinking is off unless ``thinking`` or the client turns it on."""

    name = "deepseek_v32"

    def render(self, request: RenderRequest) -> RenderedPrompt:
        thinking = boolean_kwarg(request, "thinking")
        if thinking is None:
            thinking = request.thinking_type == "enabled"
        continued = ends_with_assistant(request)
        messages = list(request.messages[:-1] if continued else request.messages)
        tools = prompt_tools(request)
        if tools:
            if not messages or messages[0]["role"] not in ("system", "developer"):
                messages.insert(0, {"role": "system", "content": ""})
            messages[0] = {**messages[0], "tools": tools}
        prompt = self.encode(
            messages, thinking=thinking, add_generation_prompt=request.add_generation_prompt or continued
        )
        if continued:
            prompt.text(content_text(request.messages[-1], "\n"))
        return RenderedPrompt(prompt.finish(), self.name, armed=prompt.thinking_open, continued=continued)

    def encode(
        self, messages: list[dict[str, Any]], *, thinking: bool, add_generation_prompt: bool = True
    ) -> DeepSeekPrompt:
        """Encodes messages that may carry ``tools`` and ``response_format`` themselves. Raises ``PromptError``."""
        return _Encoder(messages, thinking, add_generation_prompt).run()
