"""Conversations of every kind, for comparing template engines: roles, tool calls, reasoning, odd values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'Town, e.g. "Zürich" <b>&</b>', "default": "Köln"},
        "days": {"type": "integer", "minimum": 1, "maximum": 2**64, "default": 3},
        "ratio": {"type": "number", "default": 1e-7, "enum": [1.0, 2.5, 1e22]},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}, "default": []},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean", "default": False}, "x": {"type": "null"}}},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Looks.\nTwice.", "parameters": _SCHEMA}},
    {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "now", "description": "Time", "strict": True}},
]
_ARGUMENTS: dict[str, Any] = {
    "city": "Paris\n\"x\" 'y' <é> 早 🚀",
    "days": 3,
    "big": 2**70,
    "small": 1e-7,
    "large": 1e22,
    "one": 1.0,
    "no": None,
    "yes": True,
    "list": [1, "a", None, {"k": "v"}],
    "empty": {},
    "nested": {"a": {"b": [True, 2.5]}},
}


def _call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _conversations() -> Iterator[list[dict[str, Any]]]:
    system = {"role": "system", "content": "  Be kind.\n"}
    user = {"role": "user", "content": " Hi, <b>ß</b> {{ x }} 早上好\n\n"}
    yield [user]
    yield [system, user]
    yield [system, user, {"role": "assistant", "content": " Hello!\n"}, {"role": "user", "content": "More\tplease "}]
    yield [user, {"role": "assistant", "content": "A", "reasoning_content": "\nBecause.\n"}, user]
    yield [user, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA"}, user]
    yield [user, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA"}]
    calls = [_call("get_weather", _ARGUMENTS, "call00001"), _call("ping", {}, "call00002")]
    results = [
        {"role": "tool", "content": '{"t": 18.0}', "name": "get_weather", "tool_call_id": "call00001"},
        {"role": "tool", "content": "pong", "tool_call_id": "call00002"},
    ]
    for content in (None, "", "Wait."):
        for reasoning in ({}, {"reasoning_content": "I must look."}):
            turn = {"role": "assistant", "content": content, "tool_calls": calls, **reasoning}
            yield [system, user, turn, *results]
            yield [user, turn, *results, {"role": "assistant", "content": "18 degrees."}, user]
    single = {"role": "assistant", "content": "", "tool_calls": [_call("ping", {"n": 1}, "call00003")]}
    yield [user, single, {"role": "tool", "content": "pong", "tool_call_id": "call00003"}]
    yield [system, {"role": "user", "content": "a"}, {"role": "user", "content": ""}]
    yield [user, {"role": "assistant", "content": "ok"}, system, user]
    yield [{"role": "developer", "content": "D"}, user]


def _parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with content as lists of parts."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def probe_variables() -> Iterator[dict[str, Any]]:
    """Template variables of all probes, special tokens excepted."""
    switches: list[dict[str, Any]] = [
        {},
        {"enable_thinking": True, "thinking": True, "thinking_mode": "enabled", "reasoning_effort": "high"},
        {"enable_thinking": False, "thinking": False, "thinking_mode": "disabled", "tool_choice": "auto"},
    ]
    for messages in _conversations():
        for index, conversation in enumerate((messages, _parts(messages))):
            for number, tools in enumerate((None, _TOOLS)):
                yield {
                    "messages": conversation,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": messages[-1]["role"] != "assistant",
                } | switches[(index + number) % 3]
    for switch in switches:
        yield {"messages": [{"role": "user", "content": "x"}], "tools": None, "add_generation_prompt": True} | switch
