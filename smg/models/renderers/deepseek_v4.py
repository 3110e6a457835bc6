"""Prompt encoder of DeepSeek-V4 (the format of the checkpoint's ``encoding/encoding_dsv4.py``), both revisions.

The 0731 refresh of the checkpoints kept the format and changed what the reasoning-effort levels say.
"""

from __future__ import annotations

from typing import Any, ClassVar

from smg.models.prompt import PromptError, RenderedPrompt, RenderRequest
from smg.models.renderers.common import (
    boolean_kwarg,
    call_arguments,
    call_name,
    content_text,
    effort_value,
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
    REMINDER,
    TASKS,
    THINK_CLOSE,
    USER,
    DeepSeekPrompt,
    DsmlNames,
    last_index,
    without_old_thoughts,
)

_EFFORT_ABSOLUTE = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_EFFORT_BEYOND = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that \
no assumption remains unchecked and no error remains undiscovered.

"""
REVISION_0731_MARK = _EFFORT_BEYOND.partition("\n")[0]

_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜{block}>" block like the following:

<｜DSML｜{block}>
<｜DSML｜{invoke} name="$TOOL_NAME">
<｜DSML｜{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜{parameter}>
...
</｜DSML｜{invoke}>
<｜DSML｜{invoke} name="$TOOL_NAME2">
...
</｜DSML｜{invoke}>
</｜DSML｜{block}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

# Effort words that turn thinking on, and the text each revision puts in front of the prompt. Other words leave the
# decision to the switches, and then count as the default level, "high".
_EFFORTS: dict[str, dict[str, str]] = {
    "original": {"high": "", "max": _EFFORT_ABSOLUTE},
    "0731": {"low": "", "high": _EFFORT_ABSOLUTE, "max": _EFFORT_BEYOND},
}
# Words of other APIs that mean less than the default level.
_BELOW_DEFAULT = frozenset({"minimal", "low", "medium"})

_KEPT = frozenset({"user", "system", "tool", "latest_reminder", "direct_search_results"})


def merge_tool_results(messages: list[dict[str, Any]], separator: str) -> list[dict[str, Any]]:
    """Folds tool messages into user messages.

    Consecutive user and tool messages become one user message whose ``blocks`` are ``(tool_call_id, text)`` pairs in
    arrival order, with None for the id of user text. Nothing is merged into a message that carries a task. Other
    messages are kept.
    """
    merged: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] not in ("user", "tool"):
            merged.append(message)
            continue
        call_id = message.get("tool_call_id", "") if message["role"] == "tool" else None
        block = (call_id, content_text(message, separator))
        previous = merged[-1] if merged else None
        if previous is not None and "blocks" in previous and previous.get("task") is None:
            previous["blocks"].append(block)
            if message.get("task") is not None:
                previous["task"] = message["task"]
        else:
            merged.append({**message, "role": "user", "blocks": [block]})
    return merged


def sort_tool_results(messages: list[dict[str, Any]]) -> None:
    """Puts the tool results inside each user message into the order of the calls they answer, in place.

    Results swap places only with results; ids that no call has sort first.
    """
    order: dict[str, int] = {}
    for message in messages:
        if message["role"] == "assistant" and tool_calls(message):
            order = {call.get("id", ""): index for index, call in enumerate(tool_calls(message))}
        blocks = message.get("blocks")
        if not blocks:
            continue
        places = [index for index, (call_id, _) in enumerate(blocks) if call_id is not None]
        if len(places) > 1:
            results = sorted((blocks[place] for place in places), key=lambda block: order.get(block[0], 0))
            for place, block in zip(places, results, strict=True):
                blocks[place] = block


class Encoder:
    """One encoding run. Class attributes and the underscore methods are what V4.1 changes."""

    names: ClassVar[DsmlNames] = DsmlNames("tool_calls", "invoke", "parameter")
    separator = "\n"
    label = "DeepSeek-V4"

    def __init__(
        self,
        messages: list[dict[str, Any]],
        *,
        thinking: bool,
        effort_text: str = "",
        drop_thinking: bool = True,
        add_generation_prompt: bool = True,
    ) -> None:
        self.thinking = thinking
        self.effort_text = effort_text if thinking else ""
        self.drop = drop_thinking and not any(message.get("tools") for message in messages)
        self.open_end = add_generation_prompt
        self.messages = merge_tool_results(messages, self.separator)
        sort_tool_results(self.messages)
        self.last = self.last_turn_start()
        if thinking and self.drop:
            self.messages = without_old_thoughts(self.messages, self.last, _KEPT)
            self.last = self.last_turn_start()
        self.prompt = DeepSeekPrompt()

    def last_turn_start(self) -> int:
        """Index of the message that opened the current turn, -1 without one."""
        return last_index(self.messages, frozenset({"user", "developer"}))

    def opens_turn(self, index: int) -> bool:
        """Whether the model speaks next after message ``index``."""
        return self.messages[index]["role"] in ("user", "developer")

    def run(self) -> DeepSeekPrompt:
        for index, message in enumerate(self.messages):
            self.preamble(index)
            self._body(index, message)
            self._transition(index)
        return self.prompt

    def preamble(self, index: int) -> None:
        """What stands in front of message ``index``."""
        if index == 0:
            self.prompt.text(self.effort_text)

    def _body(self, index: int, message: dict[str, Any]) -> None:
        role = message["role"]
        if role == "system":
            self.prompt.text(content_text(message, self.separator))
            self._declarations(message)
        elif role == "developer":
            content = content_text(message, self.separator)
            if not content:
                raise PromptError("a developer message needs content")
            self.prompt.control(USER)
            self.prompt.text(content)
            self._declarations(message)
        elif role == "user":
            self.prompt.control(USER)
            self._blocks(message["blocks"])
        elif role == "latest_reminder":
            self.prompt.control(REMINDER)
            self.prompt.text(content_text(message, self.separator))
        elif role == "assistant":
            self._assistant(index, message)
        else:
            raise PromptError(f"{self.label} has no role {role!r}")

    def _declarations(self, message: dict[str, Any]) -> None:
        if message.get("tools"):
            names = self.names
            self.prompt.text("\n\n")
            self.prompt.markup(_TOOLS.format(block=names.block, invoke=names.invoke, parameter=names.parameter))
            self.prompt.text("\n".join(spaced_json(function_object(tool)) for tool in message["tools"]))
            self.prompt.text(_TOOLS_TAIL)
        if message.get("response_format") is not None:
            self.prompt.response_format(message["response_format"])

    def _blocks(self, blocks: list[tuple[str | None, str]]) -> None:
        self.prompt.text(
            "\n\n".join(text if call_id is None else f"<tool_result>{text}</tool_result>" for call_id, text in blocks)
        )

    def _assistant(self, index: int, message: dict[str, Any]) -> None:
        after_task = index > 0 and self.messages[index - 1].get("task") is not None
        if self.thinking and not after_task and (not self.drop or index > self.last):
            self.prompt.text(reasoning_text(message))
            self.prompt.control(THINK_CLOSE)
        self.prompt.text(content_text(message, self.separator))
        calls = tool_calls(message)
        if calls:
            self.prompt.call_block(self.names, [(call_name(call), self.parameters(call)) for call in calls])
        if not message.get("wo_eos"):
            self.prompt.control(EOS)

    def parameters(self, call: dict[str, Any]) -> list[tuple[str, Any]]:
        """The arguments of a call as parameters: a value that is no object becomes one parameter named
        ``arguments``."""
        text = call_arguments(call)
        if not text.strip():
            return []
        value: Any = text
        try:
            value = parse_json(text)
            if isinstance(value, str):
                value = parse_json(value)
        except ValueError:
            pass  # what was decoded so far is the value
        return list(value.items()) if isinstance(value, dict) else [("arguments", value)]

    def _transition(self, index: int) -> None:
        following = self.messages[index + 1]["role"] if index + 1 < len(self.messages) else None
        if following is None and not self.open_end:
            return
        if following is not None and following not in ("assistant", "latest_reminder"):
            return
        task = self.messages[index].get("task")
        if task is not None:
            self._task(task)
        elif self.opens_turn(index):
            self.prompt.control(ASSISTANT)
            self.prompt.think_tag(self.thinking and (not self.drop or index >= self.last))

    def _task(self, task: str) -> None:
        if task not in TASKS:
            raise PromptError(f"unknown task {task!r}")
        if task == "action":
            self.prompt.control(ASSISTANT)
            self.prompt.think_tag(self.thinking)
        self.prompt.control(TASKS[task])


class DeepSeekV4Renderer:
    """Renders conversations for DeepSeek-V4; ``revision`` is "original" or "0731".

    Thinking is off by default. First that decides: the template kwargs ``thinking`` and ``enable_thinking``, the effort
    ``none`` (off) or an effort the revision knows (on), ``thinking.type``.
    """

    def __init__(self, revision: str = "original") -> None:
        self.revision = revision
        self.efforts = _EFFORTS[revision]
        self.name = "deepseek_v4" if revision == "original" else f"deepseek_v4_{revision}"

    def render(self, request: RenderRequest) -> RenderedPrompt:
        effort = effort_value(request)
        continued = ends_with_assistant(request)
        messages = list(request.messages[:-1] if continued else request.messages)
        tools = prompt_tools(request)
        if tools:
            if not messages or messages[0]["role"] not in ("system", "developer"):
                messages.insert(0, {"role": "system", "content": ""})
            messages[0] = {**messages[0], "tools": tools}
        prompt = self.encode(
            messages,
            thinking=self.thinking(request, effort),
            effort=effort,
            add_generation_prompt=request.add_generation_prompt or continued,
        )
        if continued:
            prompt.text(content_text(request.messages[-1], "\n"))
        return RenderedPrompt(prompt.finish(), self.name, armed=prompt.thinking_open, continued=continued)

    def thinking(self, request: RenderRequest, effort: Any) -> bool:
        """Whether the prompt opens a think block."""
        switch = boolean_kwarg(request, "thinking", "enable_thinking")
        if switch is not None:
            return switch
        if effort == "none":
            return False
        if isinstance(effort, str) and effort in self.efforts:
            return True
        return request.thinking_type == "enabled"

    def encode(
        self,
        messages: list[dict[str, Any]],
        *,
        thinking: bool,
        effort: Any = None,
        add_generation_prompt: bool = True,
    ) -> DeepSeekPrompt:
        """Encodes messages that may carry ``tools``, ``response_format``, ``task`` and ``wo_eos`` themselves, and the
        role
        ``latest_reminder``. Raises ``PromptError``."""
        return Encoder(
            messages,
            thinking=thinking,
            effort_text=self.effort_text(effort),
            add_generation_prompt=add_generation_prompt,
        ).run()

    def effort_text(self, effort: Any) -> str:
        """The instruction that a reasoning effort puts in front of the prompt."""
        if isinstance(effort, str):
            if effort in self.efforts:
                return self.efforts[effort]
            if effort in _BELOW_DEFAULT:
                return ""
        return self.efforts["high"]
