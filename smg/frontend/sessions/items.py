"""Items of the Responses API as plain JSON objects: ids, the stored form of the input, what a model is shown of them.

A model is shown messages, thoughts, calls and their results. Calls that the gateway ran for it (``mcp_call``) are calls
with results like any other; lists of tools and approval requests are for the client only."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from smg.api.errors import refused

Item = dict[str, Any]

_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)

_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "mcp_call": "mcp_",
    "mcp_list_tools": "mcpl_",
    "mcp_approval_request": "mcpr_",
    "mcp_approval_response": "mcpa_",
    "additional_tools": "at_",
    "web_search_call": "ws_",
    "file_search_call": "fs_",
    "code_interpreter_call": "ci_",
    "image_generation_call": "ig_",
}
MAX_ID = 256
NO_CONTENT = "[]"  # the ``output`` of an ``mcp_call`` whose result had no content
_WITH_STATUS = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")


def fresh(prefix: str) -> str:
    """``prefix`` and 48 hexadecimal digits."""
    return f"{prefix}{_random.getrandbits(192):048x}"


def item_id(kind: str) -> str:
    """A fresh id for an item of this type."""
    return fresh(_PREFIXES.get(kind, "item_"))


def call_id() -> str:
    """A fresh id for a function call: ``call_`` and 24 hexadecimal digits."""
    return f"call_{_random.getrandbits(96):024x}"


def stored_item(value: Item) -> Item:
    """An input item in the form it is stored and listed in: typed, with an id, a message's text as parts. Values that
    the client gave stay."""
    kind = value.get("type") or "message"
    given = value.get("id")
    item: Item = {"id": given if given and len(given) <= MAX_ID else item_id(kind), "type": kind}
    item.update((key, member) for key, member in value.items() if key not in ("id", "type"))
    if kind == "message" and isinstance(item.get("content"), str):
        item["content"] = [_part(item.get("role"), item["content"])]
    if kind in _WITH_STATUS and item.get("status") is None:
        item["status"] = "completed"
    return item


def _part(role: Any, text: str) -> Item:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def stored_input(value: str | Sequence[Item]) -> list[Item]:
    """The stored form of a request's ``input``."""
    if isinstance(value, str):
        return [stored_item({"type": "message", "role": "user", "content": value})]
    return [stored_item(item) for item in value]


# What a model is shown --------------------------------------------------------------------------------


def feedback(item: Item) -> str:
    """What the model is told about the result of an ``mcp_call``: the JSON text of its content blocks, or
    ``{"error": ...}`` when the call itself failed."""
    error = item.get("error")
    if error is None:
        output = item.get("output")
        return "[]" if output in (None, "", NO_CONTENT) else blocks_text([{"type": "text", "text": output}])
    if isinstance(error, dict):
        if error.get("type") == "mcp_tool_execution_error" and "content" in error:
            content = error["content"]
            return blocks_text(content if isinstance(content, list) else [{"type": "text", "text": str(content)}])
        error = error.get("message") or error
    return orjson.dumps({"error": error}).decode()


def blocks_text(content: Sequence[Any]) -> str:
    """The JSON text of MCP content blocks."""
    return orjson.dumps(content).decode()


def _call(identity: str, name: str, arguments: str) -> Item:
    return {"type": "function_call", "call_id": identity, "name": name, "arguments": arguments}


def _result(identity: str, output: str) -> Item:
    return {"type": "function_call_output", "call_id": identity, "output": output}


def model_items(items: Iterable[Item]) -> list[Item]:
    """The items a model is shown: calls that the gateway ran are function calls with results, calls of a namespace have
    its name in theirs. Applied to its own result it changes nothing."""
    shown: list[Item] = []
    requests: dict[str, Item] = {}
    for item in items:
        kind = item.get("type")
        if kind == "mcp_call":
            if item.get("status") != "incomplete":
                shown.append(_call(item["id"], item["name"], item["arguments"] or "{}"))
                shown.append(_result(item["id"], feedback(item)))
        elif kind == "mcp_approval_request":
            requests[item["id"]] = item
        elif kind == "mcp_approval_response":
            request = requests.get(item["approval_request_id"])
            if request is not None and not item["approve"]:
                shown += _denied(request, item.get("reason"))
        elif kind in ("function_call", "custom_tool_call") and item.get("namespace"):
            called = {key: value for key, value in item.items() if key != "namespace"}
            shown.append(called | {"name": f"{item['namespace']}.{item['name']}"})
        elif kind not in ("mcp_list_tools", "additional_tools"):
            shown.append(item)
    return shown


def _denied(request: Item, reason: Any) -> list[Item]:
    text = "The user did not approve this tool call" + (f": {reason}" if reason else "")
    output = orjson.dumps({"error": text}).decode()
    return [_call(request["id"], request["name"], request["arguments"]), _result(request["id"], output)]


def approved_requests(history: Sequence[Item], given: Sequence[Item]) -> list[Item]:
    """The approval requests that ``given`` (the new input) approves, in the order of the approvals. Raises
    ``ApiError`` for an answer to a request that is not in the conversation."""
    requests = {item.get("id"): item for item in (*history, *given) if item.get("type") == "mcp_approval_request"}
    approved = []
    for item in given:
        if item.get("type") != "mcp_approval_response":
            continue
        request = requests.get(item["approval_request_id"])
        if request is None:
            text = f"Approval request '{item['approval_request_id']}' is not part of this conversation"
            raise refused("approval_request_not_found", text, param="input")
        if item["approve"]:
            approved.append(request)
    return approved
