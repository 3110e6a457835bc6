"""Decoding of bodies: positions, paths, depth, and values that must survive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smg.api import chat, completions, generate
from smg.api.decode import MAX_DEPTH, is_json_content_type, nesting_exceeds
from smg.api.errors import ApiError

JSON = {"content-type": "application/json"}


def refusal(body: bytes, module: Any = chat) -> ApiError:
    with pytest.raises(ApiError) as caught:
        module.decode(body, JSON)
    return caught.value


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "line 1 column 0"),
        (b"{", "line 1 column 1"),
        (b'{"model":\n "a",}', "line 2 column 6"),
        (b'{"messages": [], "model": "a"}\n x', "line 2 column 3"),
        (b'{"model":"ab\xff"}', "line 1 column 13"),
        (b'{"model": NaN}', "line 1 column 11"),
    ],
)
def test_syntax_errors_tell_line_and_column(body: bytes, where: str) -> None:
    error = refusal(body)
    assert (error.code, error.param) == ("invalid_json", None)
    assert error.message.startswith("JSON syntax error: ")
    assert error.message.endswith(where)


def test_generate_answers_in_plain_text() -> None:
    assert refusal(b"{", generate).status == 400
    wrong = refusal(b'{"sampling_params": {"n": "x"}}', generate)
    assert (wrong.status, wrong.plain) == (422, True)
    assert "sampling_params.n: " in wrong.message
    with pytest.raises(ApiError) as caught:
        generate.decode(b"{}", {})
    assert caught.value.status == 415


@pytest.mark.parametrize(
    ("value", "expect"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/problem+json", True),
        ("text/json", False),
        ("application/jsonx", False),
        ("", False),
        (None, False),
    ],
)
def test_content_type(value: str | None, expect: bool) -> None:
    assert is_json_content_type(value) is expect


def test_message_text_spells_the_inner_path_that_param_leaves_out() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {}}]}],
    }
    error = refusal(json.dumps(body).encode())
    assert error.param == "messages[0].name"
    body["messages"][0]["tool_calls"] = 3  # type: ignore[index]
    error = refusal(json.dumps(body).encode())
    assert (error.code, error.param) == ("invalid_type", "messages[0]")


def test_map_entries_are_named() -> None:
    body = b'{"model":"m","messages":[],"metadata":{"a":"x","b":3,"c":4}}'
    assert refusal(body).param == "metadata.b"


def test_wrong_value_in_front_of_broken_text() -> None:
    error = refusal(b'{"model":"m","messages":[],"metadata":{"a":3},')
    assert error.status == 400


@pytest.mark.parametrize("field", ["max_tokens", "seed", "n", "min_tokens"])
@pytest.mark.parametrize("value", [10**30, -(10**30), 2**64, -(2**63) - 1])
def test_numbers_beyond_64_bits_are_no_integers(field: str, value: int) -> None:
    error = refusal(json.dumps({"model": "m", "messages": [], field: value}).encode())
    assert (error.code, error.param) == ("invalid_type", field)


def test_schema_numbers_and_key_order_survive() -> None:
    text = (
        b'{"model":"m","messages":[],"tools":[{"type":"function","function":{"name":"f","parameters":'
        b'{"z":18446744073709551616,"a":-9223372036854775809,"m":[1.50,1e3,9007199254740993],"b":true}}}]}'
    )
    tools = chat.declared_tools(chat.decode(text, JSON))
    parameters = tools[0]["function"]["parameters"]
    assert list(parameters) == ["z", "a", "m", "b"]
    assert parameters["z"] == 2**64
    assert parameters["a"] == -(2**63) - 1
    assert parameters["m"] == [1.5, 1000.0, 9007199254740993]
    assert type(parameters["m"][1]) is float
    assert parameters["b"] is True


def test_a_body_that_names_two_models_is_refused() -> None:
    body = b'{"model":"a","messages":[{"role":"user","content":"x"}],"model":"b"}'
    assert refusal(body).code == "json_parse_error"
    nested = b'{"model":"a","prompt":"x","unknown":{"model":"b"},"user":"say \\"model\\""}'
    assert completions.decode(nested, JSON).model == "a"


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":['])
def test_depth_is_bounded(opening: str) -> None:
    closing = "".join({"[": "]", "{": "}"}[char] for char in reversed(opening) if char in "[{")
    levels = opening.count("[") + opening.count("{")

    def body(depth: int) -> bytes:
        return ('{"model":"m","messages":[],"x":' + opening * depth + "1" + closing * depth + "}").encode()

    chat.decode(body((MAX_DEPTH - 1) // levels), JSON)
    assert refusal(body(MAX_DEPTH // levels + 1)).code == "invalid_json"
    assert refusal(body(200_000 // levels)).code == "invalid_json"


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ('{"a": "[[[[", "b": []}', 2),
        ('{"a": "\\"[[[[", "b": "\\\\"}', 1),
        ('{"a": "{", "b": "}", "c": {"d": "]"}}', 2),
        ('[{}, [], {"a": [""]}, "\\\\\\"[["]', 3),
    ],
)
def test_brackets_in_strings_do_not_count(text: str, depth: int) -> None:
    json.loads(text)
    filler = ",{}" * 200  # enough brackets that the count alone decides nothing
    padded = ("[" + text + filler + "]").encode()
    assert nesting_exceeds(padded, depth)
    assert not nesting_exceeds(padded, depth + 1)
