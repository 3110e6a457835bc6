"""Content blocks of the Messages API: types, rules for whole conversations, and their chat form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from smg.api.errors import ApiError, invalid, refused
from smg.api.fields import unsupported_media
from smg.api.tools import AUTO, ToolChoice, visible
from smg.models.prompt import RenderRequest

if TYPE_CHECKING:
    from smg.api.messages import CountTokensRequest, InputMessage


class Base(msgspec.Struct, tag_field="type", kw_only=True, gc=False):
    """Base of the blocks; unknown members are ignored."""


class TextBlock(Base, tag="text"):
    text: str


class ImageBlock(Base, tag="image"):
    source: dict[str, Any]


class DocumentBlock(Base, tag="document"):
    """``source.type``: "text" (``data``) and "content" (``content``) can be shown to a text model."""

    source: dict[str, Any]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Base, tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]


class ToolUseBlock(Base, tag="tool_use"):
    id: str
    name: str
    input: Any


class ToolResultBlock(Base, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None


class ToolReferenceBlock(Base, tag="tool_reference"):
    tool_name: str


class ThinkingBlock(Base, tag="thinking"):
    thinking: str
    signature: str


class RedactedThinkingBlock(Base, tag="redacted_thinking"):
    data: str


class ServerToolUseBlock(Base, tag="server_tool_use"):
    id: str
    name: str
    input: Any = None


class ServerResultBlock(Base):
    """What a tool that the vendor's own service ran gave."""

    tool_use_id: str
    content: Any


class WebSearchResultBlock(ServerResultBlock, tag="web_search_tool_result"):
    """A web search."""


class WebFetchResultBlock(ServerResultBlock, tag="web_fetch_tool_result"):
    """A fetched page."""


class CodeExecutionResultBlock(ServerResultBlock, tag="code_execution_tool_result"):
    """Code that was run."""


class BashExecutionResultBlock(ServerResultBlock, tag="bash_code_execution_tool_result"):
    """A shell command."""


class EditorExecutionResultBlock(ServerResultBlock, tag="text_editor_code_execution_tool_result"):
    """A change of a file."""


class ToolSearchResultBlock(ServerResultBlock, tag="tool_search_tool_result"):
    """Tools that were found."""


class ContainerUploadBlock(Base, tag="container_upload"):
    file_id: str


class CompactionBlock(Base, tag="compaction"):
    """A summary that stands for the conversation before it."""

    content: str | None = None


class McpToolUseBlock(Base, tag="mcp_tool_use"):
    id: str
    name: str
    server_name: str
    input: Any = None


class McpToolResultBlock(Base, tag="mcp_tool_result"):
    tool_use_id: str
    content: Any = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ServerToolUseBlock
    | WebSearchResultBlock
    | WebFetchResultBlock
    | CodeExecutionResultBlock
    | BashExecutionResultBlock
    | EditorExecutionResultBlock
    | ToolSearchResultBlock
    | ContainerUploadBlock
    | CompactionBlock
    | McpToolUseBlock
    | McpToolResultBlock
)


# --------------------------------------------------------------------------------------------------
# Rules


def check_conversation(messages: Sequence[InputMessage]) -> None:
    """Non-empty contents, no trailing white space in a prefilled answer, and tool uses paired with their results."""
    last = len(messages) - 1
    for index, message in enumerate(messages):
        content = message.content
        final = index == last and message.role == "assistant"
        blank = not content.strip() if isinstance(content, str) else not content
        if blank and message.role != "system" and not final:
            raise invalid(
                "message_content_empty", f"messages.{index}: {message.role} messages must have non-empty content"
            )
        for block in content if not isinstance(content, str) else ():
            if type(block) is TextBlock and not block.text.strip():
                raise invalid("text_block_empty", f"messages.{index}: text content blocks must be non-empty")
    if messages[last].role == "assistant":
        content = messages[last].content
        text = content if isinstance(content, str) else _last_text(content)
        if text != text.rstrip():
            raise invalid(
                "trailing_whitespace", "messages: final assistant content cannot end with trailing whitespace"
            )
    _check_pairs(messages)


def _last_text(content: Sequence[Block]) -> str:
    block = content[-1] if content else None
    return block.text if type(block) is TextBlock else ""


def _blocks(message: InputMessage, kind: type[Any]) -> list[tuple[int, Any]]:
    content = message.content
    if isinstance(content, str):
        return []
    return [(index, block) for index, block in enumerate(content) if type(block) is kind]


def _check_pairs(messages: Sequence[InputMessage]) -> None:
    """Each ``tool_use`` of an assistant message is answered in the next message, and nothing else is."""
    open_ids: dict[str, None] = {}
    for index, message in enumerate(messages):
        answered: set[str] = set()
        for position, block in _blocks(message, ToolResultBlock):
            where = f"messages.{index}.content.{position}"
            if block.tool_use_id in answered:
                raise invalid("tool_result_duplicate", f"{where}: {block.tool_use_id} is answered twice")
            if block.tool_use_id not in open_ids:
                raise invalid("tool_result_unexpected", f"{where}: no `tool_use` block matches {block.tool_use_id}")
            answered.add(block.tool_use_id)
        left = [tool_id for tool_id in open_ids if tool_id not in answered]
        if left:
            raise _unanswered(index - 1, left)
        uses = _blocks(message, ToolUseBlock) if message.role == "assistant" else []
        open_ids = dict.fromkeys(block.id for _, block in uses)
    if open_ids:
        raise _unanswered(len(messages) - 1, list(open_ids))


def _unanswered(index: int, ids: Sequence[str]) -> ApiError:
    text = f"messages.{index}: `tool_use` blocks without `tool_result` blocks right after: {', '.join(ids)}"
    return invalid("tool_use_unanswered", text)


# --------------------------------------------------------------------------------------------------
# Chat form


def _document_text(block: DocumentBlock, where: str) -> str:
    kind = block.source.get("type")
    inner = block.source.get("data" if kind == "text" else "content")
    if kind == "content" and isinstance(inner, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in inner):
            raise refused("unsupported_content_part", f"{where}: the document holds more than text")
        inner = "\n".join(part["text"] for part in inner)
    if kind not in ("text", "content") or not isinstance(inner, str):
        text = f"{where}: document source type {kind!r} is not supported; send the document as text or content"
        raise refused("unsupported_content_part", text)
    head = f"<source>{block.title}</source>\n" if block.title else ""
    if block.context:
        head += f"<document_context>{block.context}</document_context>\n"
    return f"<document>\n{head}<document_content>\n{inner}\n</document_content>\n</document>"


def _search_text(block: SearchResultBlock) -> str:
    text = "\n".join(part.text for part in block.content)
    head = f"<source>{block.source}</source>\n<title>{block.title}</title>"
    return f"<search_result>\n{head}\n<content>\n{text}\n</content>\n</search_result>"


def _shown_text(block: Any, where: str, model: str) -> str | None:
    """The text a model sees for a block. None for what it has no form for: blocks that the vendor's own service made,
    and thoughts and tool uses outside assistant messages."""
    if type(block) is TextBlock:
        return block.text
    if type(block) is ImageBlock:
        raise unsupported_media("image", model)
    if type(block) is DocumentBlock:
        return _document_text(block, where)
    if type(block) is SearchResultBlock:
        return _search_text(block)
    if type(block) is ToolReferenceBlock:
        return block.tool_name
    if type(block) is CompactionBlock:
        return block.content
    return None


def _result_text(block: ToolResultBlock, where: str, model: str) -> str:
    if block.content is None:
        return ""
    if isinstance(block.content, str):
        return block.content
    texts = (_shown_text(part, where, model) for part in block.content)
    return "\n".join(text for text in texts if text is not None)


def _user_messages(message: InputMessage, index: int, model: str) -> list[dict[str, Any]]:
    """A user turn: its tool results first, as tool messages, then what the user says."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for position, block in enumerate(message.content):
        where = f"messages.{index}.content.{position}"
        if type(block) is ToolResultBlock:
            text = _result_text(block, where, model)
            results.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})
        else:
            shown = _shown_text(block, where, model)
            if shown is not None:
                texts.append(shown)
    if len(texts) == 1:
        results.append({"role": message.role, "content": texts[0]})
    elif texts:
        results.append({"role": message.role, "content": [{"type": "text", "text": text} for text in texts]})
    return results


def _assistant_message(message: InputMessage, index: int, model: str) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for position, block in enumerate(message.content):
        if type(block) is ThinkingBlock:
            thoughts.append(block.thinking)
        elif type(block) is ToolUseBlock:
            arguments = msgspec.json.encode(block.input).decode()
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        else:
            text = _shown_text(block, f"messages.{index}.content.{position}", model)
            if text is not None:
                texts.append(text)
    result: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    if calls:
        result["tool_calls"] = calls
    if thoughts:
        result["reasoning_content"] = "\n".join(thoughts)
    return result


def chat_messages(request: CountTokensRequest, model: str) -> list[dict[str, Any]]:
    """The conversation in chat shape: system first, tool results as tool messages. Raises ``ApiError``."""
    messages: list[dict[str, Any]] = []
    system = request.system
    if isinstance(system, list):
        system = "\n".join(block.text for block in system)
    if system is not None:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(request.messages):
        if message.role == "assistant":
            messages.append(_assistant_message(message, index, model))
        else:
            messages += _user_messages(message, index, model)
    return messages


def chat_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Client tools as chat declarations; tools that the vendor's own service runs are left out."""
    declared = []
    for tool in tools:
        if tool.get("type") not in (None, "custom"):
            continue
        function: dict[str, Any] = {"name": tool["name"]}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        function["parameters"] = tool["input_schema"]
        declared.append({"type": "function", "function": function})
    return declared


def render_request(
    request: CountTokensRequest, choice: ToolChoice | None, thinking_type: str | None, model: str
) -> RenderRequest:
    """The conversation for the prompt renderer. A trailing assistant message is continued, one that holds nothing is as
    good as absent. Raises ``ApiError``."""
    tools = chat_tools(request.tools or ())
    if choice is None and tools:
        choice = AUTO
    messages = chat_messages(request, model)
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] is None and "tool_calls" not in last:
        messages.pop()
    if not messages:
        raise refused("convert_request_failed", "messages: there is nothing in them that this model can be shown")
    return RenderRequest(
        model=model,
        messages=messages,
        tools=visible(tools, choice) if choice is not None else None,
        tool_choice=choice.raw if choice is not None else None,
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
        thinking_type=thinking_type,
        effort=request.output_config.effort if request.output_config is not None else None,
        adapt=True,
    )
