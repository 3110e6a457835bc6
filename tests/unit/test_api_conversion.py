"""What the prompt renderer is given for a request of each API."""

from __future__ import annotations

from typing import Any

import pytest
from api_context import MODEL, Gateway

from smg.api.errors import ApiError

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
HI = {"role": "user", "content": "hi"}


def call(call_id: str, arguments: str = "{}", name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def rendered(path: str, body: dict[str, Any]) -> Any:
    gateway = Gateway()
    gateway.plan(path, {"model": MODEL, **body})
    return gateway.render


@pytest.mark.parametrize(
    ("message", "expect"),
    [
        ({"role": "system"}, {"role": "system", "content": ""}),
        ({"role": "system", "content": "a", "tools": []}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": "u", "name": "bob", "x": 1}, {"role": "user", "content": "u", "name": "bob"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
        ({"role": "assistant"}, {"role": "assistant", "content": None}),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": None}),
        (
            {
                "role": "assistant",
                "reasoning_content": "R",
                "tool_calls": [call("1", "{}")],
                "content": "t",
                "name": "z",
            },
            {
                "role": "assistant",
                "content": "t",
                "name": "z",
                "tool_calls": [call("1", "{}")],
                "reasoning_content": "R",
            },
        ),
        ({"role": "assistant", "reasoning": "R"}, {"role": "assistant", "content": None, "reasoning_content": "R"}),
        ({"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": None, "tool_calls": []}),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "assistant", "content": None, "tool_calls": [call("f", "{}")]},
        ),
        (
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"},
            {"role": "tool", "content": "r", "name": "f", "tool_call_id": "1"},
        ),
        ({"role": "function", "content": "r", "name": "f"}, {"role": "function", "content": "r", "name": "f"}),
        ({"role": "developer", "content": "d"}, {"role": "developer", "content": "d"}),
    ],
)
def test_chat_messages(message: dict[str, Any], expect: dict[str, Any]) -> None:
    got = rendered(CHAT, {"messages": [message]}).messages[0]
    assert got == expect
    assert list(got) == list(expect)


def test_missing_arguments_of_a_call_are_an_empty_object() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}
    assert rendered(CHAT, {"messages": [message]}).messages[0]["tool_calls"] == [call("1")]


def test_chat_tools_are_put_in_order_and_unknown_members_kept() -> None:
    function = {"strict": True, "zz": 1, "parameters": {"z": 1, "a": 2}, "description": "d", "name": "f", "aa": None}
    tools = rendered(CHAT, {"messages": [HI], "tools": [{"type": "function", "function": function, "x": 1}]}).tools
    assert list(tools[0]) == ["type", "function"]
    assert list(tools[0]["function"].items()) == [
        ("name", "f"),
        ("description", "d"),
        ("parameters", {"z": 1, "a": 2}),
        ("strict", True),
        ("zz", 1),
        ("aa", None),
    ]
    bare = {"name": "f", "description": None, "parameters": None, "strict": None}
    tools = rendered(CHAT, {"messages": [HI], "tools": [{"type": "function", "function": bare}]}).tools
    assert tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


TWO = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
NESTED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("choice", "names", "seen"),
    [
        (None, ["f", "g"], "auto"),
        ("auto", ["f", "g"], "auto"),
        ("none", None, "none"),
        ("required", ["f", "g"], "required"),
        (NAMED, ["f", "g"], NAMED),
        (ALLOWED, ["g"], ALLOWED),
        (NESTED, ["f"], NESTED),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, None, {**ALLOWED, "tools": []}),
    ],
)
def test_tools_a_model_is_shown(choice: Any, names: list[str] | None, seen: Any) -> None:
    request = rendered(CHAT, {"messages": [HI], "tools": TWO, "tool_choice": choice})
    assert (request.tools and [tool["function"]["name"] for tool in request.tools]) == names
    assert request.tool_choice == seen


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tools": TWO, "tool_choice": "none"}, ["f", "g"]),
        ({"tools": TWO, "tool_choice": ALLOWED}, ["g"]),
        ({"tools": []}, []),
        ({}, None),
    ],
)
def test_renderers_that_state_the_choice_keep_the_tools(fields: dict[str, Any], names: list[str] | None) -> None:
    gateway = Gateway()
    gateway.characters.keeps_tools = True
    gateway.plan(CHAT, {"model": MODEL, "messages": [HI], **fields})
    tools = gateway.render.tools
    assert (tools and [tool["function"]["name"] for tool in tools]) == names


def test_functions_are_tools() -> None:
    body = {"messages": [HI], "functions": [{"name": "f", "zz": 1}], "function_call": {"name": "f"}}
    request = rendered(CHAT, body)
    assert request.tools == [{"type": "function", "function": {"name": "f", "parameters": {}, "zz": 1}}]
    assert request.tool_choice == NAMED
    assert rendered(CHAT, {**body, "function_call": "none"}).tools is None
    assert rendered(CHAT, {**body, "tools": TWO, "function_call": None}).tools[1]["function"]["name"] == "g"


@pytest.mark.parametrize(
    ("fields", "effort", "thinking"),
    [
        ({"reasoning_effort": 64}, "64", None),
        ({"reasoning_effort": 1.5}, "1.5", None),
        ({"reasoning_effort": "low", "thinking": {"effort": "high"}}, "high", None),
        ({"thinking": {"type": "disabled"}}, None, "disabled"),
        ({}, None, None),
    ],
)
def test_effort_and_thinking(fields: dict[str, Any], effort: str | None, thinking: str | None) -> None:
    request = rendered(CHAT, {"messages": [HI], **fields})
    assert (request.effort, request.thinking_type) == (effort, thinking)


def test_vendor_rules_reach_the_renderer() -> None:
    gateway = Gateway(id="org/DeepSeek-V4-Flash")
    gateway.plan(CHAT, {"model": "org/DeepSeek-V4-Flash", "messages": [HI], "reasoning_effort": "medium"})
    assert (gateway.render.effort, gateway.render.template_kwargs) == ("high", {"thinking": True})
    gateway.plan(MESSAGES, {"model": "org/DeepSeek-V4-Flash", "messages": [HI], "max_tokens": 1})
    assert gateway.render.template_kwargs == {"thinking": True}
    gateway.plan(RESPONSES, {"model": "org/DeepSeek-V4-Flash", "input": "x", "reasoning": {"effort": "none"}})
    assert gateway.render.template_kwargs == {"thinking": False}


def test_aliases_show_the_canonical_name() -> None:
    gateway = Gateway(aliases=["nick"])
    planned = gateway.plan(CHAT, {"model": "nick", "messages": [HI]})
    assert (planned.model, planned.response.model, gateway.render.model) == (MODEL, MODEL, MODEL)


def test_response_format_is_shown_as_sent() -> None:
    schema = {"name": "a", "schema": {"z": 1, "a": 2}, "strict": True}
    body = {"messages": [HI], "response_format": {"type": "json_schema", "json_schema": schema, "x": 1}}
    assert rendered(CHAT, body).response_format == {"type": "json_schema", "json_schema": schema}
    assert rendered(CHAT, {**body, "response_format": {"type": "text"}}).response_format == {"type": "text"}


# --------------------------------------------------------------------------------------------------
# Messages


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(use_id: str, value: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": use_id, "name": "f", "input": {} if value is None else value}


def result(use_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": use_id, **more}


def thought(value: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": value, "signature": "s"}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
CONTENT_DOCUMENT = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}, "title": "T"}
FOUND = {"type": "search_result", "source": "S", "title": "T", "content": [text("a"), text("b")]}
DOCUMENT_TEXT = "<document>\n<document_content>\nD\n</document_content>\n</document>"


@pytest.mark.parametrize(
    ("messages", "expect"),
    [
        ([HI], [HI]),
        ([user(text("a"))], [{"role": "user", "content": "a"}]),
        ([user(text("a"), text("b"))], [{"role": "user", "content": [text("a"), text("b")]}]),
        ([HI, assistant(text("a"), text("b")), HI], [HI, {"role": "assistant", "content": "ab"}, HI]),
        (
            [HI, assistant(thought("A"), thought("B"), text("x")), HI],
            [HI, {"role": "assistant", "content": "x", "reasoning_content": "A\nB"}, HI],
        ),
        (
            [HI, assistant({"type": "redacted_thinking", "data": "z"}, text("x")), HI],
            [HI, {"role": "assistant", "content": "x"}, HI],
        ),
        (
            [HI, assistant(text("t"), use("1", {"b": 2**64, "a": "é"})), user(text("more"), result("1", content="r"))],
            [
                HI,
                {"role": "assistant", "content": "t", "tool_calls": [call("1", '{"b":18446744073709551616,"a":"é"}')]},
                {"role": "tool", "content": "r", "tool_call_id": "1"},
                {"role": "user", "content": "more"},
            ],
        ),
        (
            [HI, assistant(use("1"), use("2")), user(result("2", content=[text("a"), text("b")]), result("1"))],
            [
                HI,
                {"role": "assistant", "content": None, "tool_calls": [call("1"), call("2")]},
                {"role": "tool", "content": "a\nb", "tool_call_id": "2"},
                {"role": "tool", "content": "", "tool_call_id": "1"},
            ],
        ),
        ([user(DOCUMENT)], [{"role": "user", "content": DOCUMENT_TEXT}]),
        (
            [user(CONTENT_DOCUMENT)],
            [
                {
                    "role": "user",
                    "content": "<document>\n<source>T</source>\n<document_content>\na\nb\n</document_content>\n"
                    "</document>",
                }
            ],
        ),
        (
            [user(FOUND)],
            [
                {
                    "role": "user",
                    "content": "<search_result>\n<source>S</source>\n<title>T</title>\n<content>\na\nb\n</content>\n"
                    "</search_result>",
                }
            ],
        ),
        ([user(thought("t"), text("x"))], [{"role": "user", "content": "x"}]),
        ([HI, {"role": "system", "content": "s"}, HI], [HI, {"role": "system", "content": "s"}, HI]),
        ([HI, assistant()], [HI]),
    ],
)
def test_messages_blocks(messages: list[dict[str, Any]], expect: list[dict[str, Any]]) -> None:
    assert rendered(MESSAGES, {"messages": messages, "max_tokens": 5}).messages == expect


@pytest.mark.parametrize(("system", "expect"), [("s", "s"), ("", ""), ([], ""), ([text("a"), text("b")], "a\nb")])
def test_messages_system(system: Any, expect: str) -> None:
    request = rendered(MESSAGES, {"messages": [HI], "max_tokens": 5, "system": system})
    assert request.messages == [{"role": "system", "content": expect}, HI]


def test_messages_prefill_is_continued() -> None:
    body = {"messages": [HI, {"role": "assistant", "content": "The answer is"}], "max_tokens": 5}
    assert rendered(MESSAGES, body).continue_final_message is True
    assert rendered(MESSAGES, {"messages": [HI], "max_tokens": 5}).continue_final_message is False


CLIENT_TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("choice", "seen", "shown"),
    [
        (None, "auto", [CHAT_TOOL]),
        ({"type": "auto"}, "auto", [CHAT_TOOL]),
        ({"type": "any"}, "required", [CHAT_TOOL]),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, NAMED, [CHAT_TOOL]),
    ],
)
def test_messages_tools(choice: Any, seen: Any, shown: Any) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, CLIENT_TOOL]
    request = rendered(MESSAGES, {"messages": [HI], "max_tokens": 5, "tools": tools, "tool_choice": choice})
    assert (request.tool_choice, request.tools) == (seen, shown)


@pytest.mark.parametrize(
    ("thinking", "expect"),
    [
        (None, None),
        ({"type": "disabled"}, "disabled"),
        ({"type": "adaptive"}, "enabled"),
        ({"type": "enabled", "budget_tokens": 1024}, "enabled"),
    ],
)
def test_messages_thinking(thinking: Any, expect: str | None) -> None:
    body = {"messages": [HI], "max_tokens": 2000, "thinking": thinking, "output_config": {"effort": "low"}}
    request = rendered(MESSAGES, body)
    assert (request.thinking_type, request.effort) == (expect, "low")


def test_nothing_to_show_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        rendered(MESSAGES, {"messages": [user(thought("t"))], "max_tokens": 5})
    assert caught.value.status == 400


# --------------------------------------------------------------------------------------------------
# Responses


def item(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


def output(call_id: str, value: Any = "out") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def call_item(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def reasoning(value: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": value}]}


Q = {"role": "user", "content": "q"}
CALLS_1 = {"role": "assistant", "content": None, "tool_calls": [call("1")]}
RESULT_1 = {"role": "tool", "content": "out", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("items", "expect"),
    [
        ("q", [Q]),
        ([Q], [Q]),
        (
            [item("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])],
            [{"role": "user", "content": [text("a"), text("b")]}],
        ),
        (
            [item("user", [{"type": "input_text", "text": "a"}, {"type": "input_file", "file_id": "f"}])],
            [{"role": "user", "content": "a"}],
        ),
        (
            [item("assistant", [{"type": "refusal", "refusal": "no"}]), Q],
            [{"role": "assistant", "content": "no"}, Q],
        ),
        ([Q, call_item("1"), output("1")], [Q, CALLS_1, RESULT_1]),
        (
            [Q, call_item("1"), call_item("2"), output("1"), output("2")],
            [
                Q,
                {"role": "assistant", "content": None, "tool_calls": [call("1"), call("2")]},
                RESULT_1,
                {"role": "tool", "content": "out", "tool_call_id": "2"},
            ],
        ),
        (
            [Q, item("assistant", "pre"), call_item("1"), output("1")],
            [Q, {"role": "assistant", "content": "pre", "tool_calls": [call("1")]}, RESULT_1],
        ),
        ([Q, output("1")], [Q, RESULT_1]),
        (
            [
                Q,
                call_item("1"),
                output("1", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
            ],
            [Q, CALLS_1, {"role": "tool", "content": "ab", "tool_call_id": "1"}],
        ),
        (
            [Q, {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "raw"}],
            [Q, {"role": "assistant", "content": None, "tool_calls": [call("1", '{"input":"raw"}')]}],
        ),
        (
            [Q, reasoning("T"), item("assistant", "a"), Q],
            [Q, {"role": "assistant", "content": "a", "reasoning_content": "T"}, Q],
        ),
        ([Q, reasoning("T"), call_item("1"), output("1")], [Q, {**CALLS_1, "reasoning_content": "T"}, RESULT_1]),
        (
            [Q, reasoning("T"), Q],
            [Q, {"role": "assistant", "content": None, "reasoning_content": "T"}, Q],
        ),
        (
            [Q, {"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "server_label": "s", "error": "bad"}],
            [
                Q,
                {"role": "assistant", "content": None, "tool_calls": [call("m")]},
                {"role": "tool", "content": "bad", "tool_call_id": "m"},
            ],
        ),
        ([{"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []}, Q], [Q]),
    ],
)
def test_responses_items(items: Any, expect: list[dict[str, Any]]) -> None:
    got = rendered(RESPONSES, {"input": items}).messages
    assert got == expect
    for message in got:
        assert list(message) == [
            key for key in ("role", "content", "tool_calls", "reasoning_content", "tool_call_id") if key in message
        ]


def test_responses_instructions_come_first() -> None:
    messages = rendered(RESPONSES, {"input": "q", "instructions": "I"}).messages
    assert messages == [{"role": "system", "content": "I"}, Q]


def test_responses_tools() -> None:
    tools = [
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
        {"type": "web_search"},
        {"type": "custom", "name": "c"},
        {"type": "namespace", "name": "ns", "description": "n", "tools": [{"type": "function", "name": "g"}]},
    ]
    request = rendered(RESPONSES, {"input": "q", "tools": tools})
    assert [tool["function"]["name"] for tool in request.tools] == ["f", "c", "ns.g"]
    assert request.tools[0]["function"] == {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object"},
        "strict": True,
    }
    assert request.tools[1]["function"]["parameters"]["required"] == ["input"]
    assert request.tool_choice == "auto"


@pytest.mark.parametrize(
    ("choice", "seen"),
    [
        ({"type": "function", "name": "f"}, NAMED),
        ({"type": "web_search"}, "auto"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
        ),
    ],
)
def test_responses_tool_choice(choice: Any, seen: Any) -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "web_search"}]
    assert rendered(RESPONSES, {"input": "q", "tools": tools, "tool_choice": choice}).tool_choice == seen


def test_responses_text_format() -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    request = rendered(RESPONSES, {"input": "q", "text": {"format": schema}})
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
    }
