"""Items of the Responses API: input types, their rules, and their chat form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from smg.api.errors import ApiError, invalid, refused
from smg.api.fields import unsupported_media

ROLES = ("assistant", "system", "developer", "user")


class Content(msgspec.Struct, tag_field="type", kw_only=True, gc=False):
    """Base of the content parts; unknown members are ignored."""


class InputText(Content, tag="input_text"):
    text: str


class OutputText(Content, tag="output_text"):
    text: str


class Refusal(Content, tag="refusal"):
    refusal: str


class InputImage(Content, tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None


class InputFile(Content, tag="input_file"):
    """A file by its id is passed over, as there is no store of files here; one that holds or links its content is
    refused, lest an answer pretend to know it."""

    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None


class InputAudio(Content, tag="input_audio"):
    input_audio: Any = None


Part = InputText | OutputText | Refusal | InputImage | InputFile | InputAudio


class Item(msgspec.Struct, tag_field="type", kw_only=True, gc=False):
    """Base of the input items. ``id`` and ``status`` of an item that came from an earlier answer may stay in it."""

    id: str | None = None
    status: str | None = None


class MessageItem(Item, kw_only=True, tag="message"):
    role: str
    content: str | list[Part]


class FunctionCallItem(Item, kw_only=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Item, kw_only=True, tag="function_call_output"):
    call_id: str
    output: str | list[Part]


class CustomToolCallItem(Item, kw_only=True, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str


class CustomToolCallOutputItem(Item, kw_only=True, tag="custom_tool_call_output"):
    call_id: str
    output: str | list[Part]


class ReasoningText(msgspec.Struct, kw_only=True, gc=False):
    type: str
    text: str


class ReasoningItem(Item, kw_only=True, tag="reasoning"):
    summary: list[ReasoningText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class ItemReference(Item, kw_only=True, tag="item_reference"):
    """Stands for a stored item; the session replaces it before the conversation is rendered."""


class McpCallItem(Item, kw_only=True, tag="mcp_call"):
    name: str
    arguments: str
    server_label: str
    output: str | None = None
    error: Any = None
    approval_request_id: str | None = None


class McpListToolsItem(Item, kw_only=True, tag="mcp_list_tools"):
    server_label: str
    tools: list[Any]
    error: Any = None


class McpApprovalRequestItem(Item, kw_only=True, tag="mcp_approval_request"):
    name: str
    arguments: str
    server_label: str


class McpApprovalResponseItem(Item, kw_only=True, tag="mcp_approval_response"):
    approval_request_id: str
    approve: bool
    reason: str | None = None


class AdditionalToolsItem(Item, kw_only=True, tag="additional_tools"):
    """Tools that the conversation brings along; they count as tools of the request."""

    tools: list[Any]


class WebSearchCallItem(Item, kw_only=True, tag="web_search_call"):
    action: Any = None


class FileSearchCallItem(Item, kw_only=True, tag="file_search_call"):
    queries: list[str] | None = None
    results: Any = None


class CodeInterpreterCallItem(Item, kw_only=True, tag="code_interpreter_call"):
    code: str | None = None
    container_id: str | None = None
    outputs: Any = None


class ImageGenerationCallItem(Item, kw_only=True, tag="image_generation_call"):
    result: Any = None


class ComputerCallItem(Item, kw_only=True, tag="computer_call"):
    call_id: str
    action: Any = None


class ComputerCallOutputItem(Item, kw_only=True, tag="computer_call_output"):
    call_id: str
    output: Any


class LocalShellCallItem(Item, kw_only=True, tag="local_shell_call"):
    call_id: str
    action: Any = None


class LocalShellCallOutputItem(Item, kw_only=True, tag="local_shell_call_output"):
    output: Any


class ShellCallItem(Item, kw_only=True, tag="shell_call"):
    call_id: str
    action: Any = None


class ShellCallOutputItem(Item, kw_only=True, tag="shell_call_output"):
    call_id: str
    output: Any


class ApplyPatchCallItem(Item, kw_only=True, tag="apply_patch_call"):
    call_id: str
    operation: Any = None


class ApplyPatchCallOutputItem(Item, kw_only=True, tag="apply_patch_call_output"):
    call_id: str
    output: Any = None


InputItem = (
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
    | ReasoningItem
    | ItemReference
    | McpCallItem
    | McpListToolsItem
    | McpApprovalRequestItem
    | McpApprovalResponseItem
    | AdditionalToolsItem
    | WebSearchCallItem
    | FileSearchCallItem
    | CodeInterpreterCallItem
    | ImageGenerationCallItem
    | ComputerCallItem
    | ComputerCallOutputItem
    | LocalShellCallItem
    | LocalShellCallOutputItem
    | ShellCallItem
    | ShellCallOutputItem
    | ApplyPatchCallItem
    | ApplyPatchCallOutputItem
)

# Traces of tools that ran elsewhere: accepted in a replayed conversation, and nothing a model here is shown.
_SILENT = (
    McpListToolsItem,
    McpApprovalRequestItem,
    McpApprovalResponseItem,
    AdditionalToolsItem,
    WebSearchCallItem,
    FileSearchCallItem,
    CodeInterpreterCallItem,
    ImageGenerationCallItem,
)

Message = dict[str, Any]


def parse_items(value: Sequence[Any]) -> list[InputItem]:
    """Typed input items from plain JSON values; an item without ``type`` is a message. Raises ``ApiError``."""
    typed = [{"type": "message", **item} if type(item) is dict and "type" not in item else item for item in value]
    try:
        return msgspec.convert(typed, list[InputItem])
    except msgspec.ValidationError as error:
        text = str(error).replace("$[", "input[", 1)
        raise ApiError(400, "invalid_type", f"Invalid JSON data: input: {text}", "input") from None


def check_items(items: Sequence[InputItem]) -> None:
    """Rules of the items. Raises ``ApiError``."""
    for item in items:
        if type(item) is not MessageItem:
            continue
        if item.role not in ROLES:
            raise invalid("invalid_value", f"role '{item.role}' is none of {', '.join(ROLES)}", "input")
        if not item.content:
            raise invalid("message_content_empty", "message content cannot be empty", "input")


def _text(part: Part, model: str) -> str | None:
    if isinstance(part, InputText | OutputText):
        return part.text
    if isinstance(part, Refusal):
        return part.refusal
    if isinstance(part, InputImage):
        raise unsupported_media("image", model)
    if isinstance(part, InputAudio):
        raise unsupported_media("audio", model)
    if isinstance(part, InputFile) and (part.file_data is not None or part.file_url is not None):
        raise unsupported_media("file", model)
    return None


def _message_content(content: str | list[Part], model: str) -> Any:
    if isinstance(content, str):
        return content
    texts = [text for text in (_text(part, model) for part in content) if text is not None]
    if len(texts) <= 1:
        return texts[0] if texts else ""
    return [{"type": "text", "text": text} for text in texts]


def _output_text(output: str | list[Part], model: str) -> str:
    if isinstance(output, str):
        return output
    return "".join(text for text in (_text(part, model) for part in output) if text is not None)


def _mcp_result(item: McpCallItem) -> str:
    if item.output is not None or item.error is None:
        return item.output or ""
    return item.error if isinstance(item.error, str) else msgspec.json.encode(item.error).decode()


class _Conversation:
    """Collects chat messages; calls and thoughts join the assistant message they belong to."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.messages: list[Message] = []
        self._thought = ""

    def _assistant(self) -> Message:
        """The assistant message at the end, a new one if the last message is another's."""
        if self._thought or not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
            self._close_thought()
        return self.messages[-1]

    def _close_thought(self) -> None:
        if self._thought:
            self.messages[-1]["reasoning_content"] = self._thought
            self._thought = ""

    def flush(self) -> None:
        """Give a thought that no answer followed a message of its own."""
        if self._thought:
            self._assistant()

    def message(self, item: MessageItem) -> None:
        content = _message_content(item.content, self.model)
        if item.role != "assistant":
            self.flush()
        self.messages.append({"role": item.role, "content": content})
        if item.role == "assistant":
            self._close_thought()

    def call(self, call_id: str, name: str, arguments: str) -> None:
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call_id: str, output: str) -> None:
        self.flush()
        self.messages.append({"role": "tool", "content": output, "tool_call_id": call_id})

    def thought(self, text: str) -> None:
        self._thought = f"{self._thought}\n{text}" if self._thought else text


def _add(conversation: _Conversation, item: InputItem) -> None:
    if type(item) is MessageItem:
        conversation.message(item)
    elif type(item) is FunctionCallItem:
        conversation.call(item.call_id, item.name, item.arguments)
    elif type(item) is CustomToolCallItem:
        conversation.call(item.call_id, item.name, msgspec.json.encode({"input": item.input}).decode())
    elif isinstance(item, FunctionCallOutputItem | CustomToolCallOutputItem):
        conversation.result(item.call_id, _output_text(item.output, conversation.model))
    elif type(item) is ReasoningItem:
        conversation.thought("\n".join(part.text for part in item.content or ()))
    elif type(item) is McpCallItem:
        call_id = item.id or f"call_{len(conversation.messages)}"
        conversation.call(call_id, item.name, item.arguments)
        conversation.result(call_id, _mcp_result(item))
    elif not isinstance(item, _SILENT):
        kind = item.__struct_config__.tag
        raise refused("convert_request_failed", f"Failed to convert request: unsupported input item type '{kind}'")


def chat_messages(items: Sequence[InputItem], model: str) -> list[Message]:
    """The items as chat messages, in the member order of the chat API: calls and thoughts become part of the
    assistant message they belong to, outputs become tool messages. Raises ``ApiError`` (``convert_request_failed``
    when an item has no chat form or nothing is left to say)."""
    conversation = _Conversation(model)
    for item in items:
        _add(conversation, item)
    conversation.flush()
    if not conversation.messages:
        raise refused("convert_request_failed", "Failed to convert request: it must contain at least one message")
    return [_ordered(message) for message in conversation.messages]


def _ordered(message: Message) -> Message:
    """Members in the order renderers expect; a thought is known before the calls it led to."""
    if "tool_calls" in message and "reasoning_content" in message:
        message["reasoning_content"] = message.pop("reasoning_content")
    return message
