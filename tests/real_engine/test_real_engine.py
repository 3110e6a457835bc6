"""The gateway in front of a real engine, over gRPC and over ZMQ. See README.md of this folder."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from processes import MODEL, GatewayProcess, wait_for
from prompts import CHAT, COMPLETIONS, SCHEMA


def ask(gateway: GatewayProcess, body: dict[str, Any], path: str = COMPLETIONS) -> Any:
    answer = gateway.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(gateway: GatewayProcess, body: dict[str, Any], path: str = COMPLETIONS) -> list[Any]:
    with gateway.client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def chat(content: str = "hello", *, thinking: bool = False, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": thinking},
    } | fields  # fmt: skip


def test_thought_and_tool_call_are_told_from_text(gateway: GatewayProcess) -> None:
    pattern = r"<think>\nLet me see\.\n</think>\n\nIt is sunny\."
    message = ask(gateway, chat(thinking=True, regex=pattern), CHAT)["choices"][0]["message"]
    assert message["reasoning_content"].strip() == "Let me see."
    assert message["content"].strip() == "It is sunny."

    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    pattern = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Oslo"\}\}\n</tool_call>'
    body = chat(tools=[tool], tool_choice="auto", regex=pattern)
    whole = ask(gateway, body, CHAT)["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    [call] = whole["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Oslo"})
    deltas = [chunk["choices"][0]["delta"] for chunk in events(gateway, body, CHAT) if chunk["choices"]]
    parts = [part for delta in deltas for part in delta.get("tool_calls") or []]
    assert "".join(part["function"].get("arguments") or "" for part in parts) == call["function"]["arguments"]


def test_forced_output_is_what_was_asked_for(gateway: GatewayProcess) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    choice = ask(gateway, chat(response_format=schema, max_tokens=60), CHAT)["choices"][0]
    assert json.loads(choice["message"]["content"]).keys() == {"ok", "tags"}
    assert choice["finish_reason"] == "stop"


FATAL: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "word " * 3000}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": [[1, 2, 999_999]]}),
    (COMPLETIONS, {"prompt": [[151_936]]}),
    (CHAT, chat(temperature=-1)),
    (CHAT, chat(top_p=0)),
    (CHAT, chat(logit_bias={"999999": 1})),
    (CHAT, chat(min_tokens=9, max_tokens=3)),
]


def test_no_request_kills_the_engine(gateway: GatewayProcess) -> None:
    for path, body in FATAL:
        answer = gateway.client.post(path, json={"model": MODEL, "max_tokens": 4} | body)
        assert 400 <= answer.status_code < 500, (body, answer.status_code, answer.text)
    odd: list[dict[str, Any]] = [
        {"stop_token_ids": [99_999_999]}, {"seed": -1}, {"seed": 2**63 - 1}, {"max_tokens": 10**6},
        {"top_k": -1}, {"min_tokens": 3, "stop_token_ids": [5]},
    ]  # fmt: skip
    for fields in odd:
        body = chat(**({"max_tokens": 4} | fields))
        if body["max_tokens"] > 4:
            body["stop"] = ["e", "a", " "]
        answer = gateway.client.post(CHAT, json=body)
        assert answer.status_code in (200, 400), (fields, answer.text)
    assert gateway.ready


def running(gateway: GatewayProcess) -> int:
    """Requests in the engine, as far as it says."""
    loads = gateway.client.get("/get_loads").json()["loads"]
    return sum(load["num_running_reqs"] for load in loads)


def test_a_client_that_leaves_frees_the_engine(gateway: GatewayProcess) -> None:
    body = chat(max_tokens=1900, ignore_eos=True, stream=True)
    with gateway.client.stream("POST", CHAT, json=body) as response:
        lines = response.iter_lines()  # kept: a generator that is collected closes the response
        next(lines)
        wait_for(lambda: running(gateway) == 1, 10.0)
    wait_for(lambda: running(gateway) == 0, 3.0)


def test_a_stop_string_frees_the_engine(gateway: GatewayProcess) -> None:
    """It would go on for seconds; the answer comes at the match, and the engine is idle."""
    text = ask(gateway, chat(max_tokens=30), CHAT)["choices"][0]["message"]["content"]
    start = time.monotonic()
    answer = ask(gateway, chat(max_tokens=1900, stop=[text[10:16]], ignore_eos=True), CHAT)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert time.monotonic() - start < 3.0
    wait_for(lambda: running(gateway) == 0, 3.0)


class Background(threading.Thread):
    """A stream that is read to its end; ``last`` is its last line, or why there was none."""

    def __init__(self, gateway: GatewayProcess) -> None:
        super().__init__(daemon=True)
        self.gateway = gateway
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        body = chat(max_tokens=1900, ignore_eos=True, stream=True)
        with self.gateway.client.stream("POST", CHAT, json=body) as response:
            for line in response.iter_lines():
                self.lines.append(line)
                self.begun.set()


def test_a_killed_engine_is_noticed_and_taken_back(gateway: GatewayProcess) -> None:
    if gateway.engine.mode == "zmq":
        stream = Background(gateway)
        assert stream.begun.wait(20.0)
        gateway.engine.kill()
        stream.join(3.0)
        assert not stream.is_alive()
        assert any('"error"' in line for line in stream.lines[-4:])
        assert not gateway.ready
        assert gateway.client.post(CHAT, json=chat(max_tokens=2)).status_code == 503
        gateway.engine.start()
        gateway.wait_ready()
        assert ask(gateway, chat(max_tokens=2), CHAT)["usage"]["completion_tokens"] == 2
    else:
        assert gateway.ready


def test_a_restarted_gateway_finds_the_engine(gateway: GatewayProcess) -> None:
    first = ask(gateway, chat(max_tokens=12), CHAT)["choices"][0]["message"]["content"]
    gateway.stop()
    gateway.start()
    assert gateway.wait_ready() < 20.0
    again = ask(gateway, chat(max_tokens=12), CHAT)["choices"][0]["message"]["content"]
    assert again == first
