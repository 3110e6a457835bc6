"""Results of tool calls as clients and models see them."""

from __future__ import annotations

from typing import Any

from smg.frontend.sessions.items import NO_CONTENT, blocks_text, feedback
from smg.mcp.base import ToolError, ToolResult


def _texts(result: ToolResult) -> str:
    return "\n".join(str(block.get("text", "")) for block in result.content if block.get("type") == "text")


def output_text(result: ToolResult) -> str:
    """The ``output`` of an ``mcp_call``: the text blocks, one per line; empty on failure."""
    if result.error is not None:
        return ""
    return _texts(result) if result.content else NO_CONTENT


def call_error(result: ToolResult) -> dict[str, Any] | None:
    """The ``error`` of an ``mcp_call``."""
    error = result.error
    if error is None:
        return None
    if error.kind == "tool":
        return {"type": "mcp_tool_execution_error", "content": _texts(result) or error.message}
    if error.kind in ("protocol", "http"):
        kind = "mcp_protocol_error" if error.kind == "protocol" else "http_error"
        return {"type": kind, "code": error.code, "message": error.message}
    return {"type": "mcp_tool_execution_error", "content": error.message}


def model_text(result: ToolResult) -> str:
    """What the model is told."""
    if result.error is None or (result.error.kind == "tool" and result.content):
        return blocks_text(result.content)
    return feedback({"error": {"message": result.error.message}})


def bounded(result: ToolResult, most: int) -> ToolResult:
    """The result, or an error in its place when its JSON text is longer than ``most`` bytes."""
    size = len(blocks_text(result.content))
    if size <= most:
        return result
    text = f"The result of the tool call is too large: {size} bytes, at most {most} are allowed"
    return ToolResult(error=ToolError(kind="tool", message=text))
