"""Round trips of constrained answers: the tokenizer pool builds the constraint, the embedded engine's matcher generates
under it, the detokenizer's machines read the tokens back. What comes out satisfies the schema that went in."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from api_context import MODEL, Gateway

from smg.api.context import Flags
from smg.api.plan import Planned
from smg.detok.choice import Choice
from smg.engines.base import Constraint, Delta
from smg.messages import ContentDelta, ParserEvent, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from smg.models.grammar_check import GrammarChecker
from smg.models.registry import REASONING_PARSERS, TOOL_PARSERS, ParserNames, tool_format
from smg.simengine.grammar import GrammarGenerator
from smg.simengine.vocabulary import SHIPPED_MODEL, Vocabulary
from smg.vocab.decode import DecodeTable
from smg.vocab.encoder import Encoder
from smg.vocab.load import load_model_dir

pytest.importorskip("xgrammar", reason="the embedded engine needs xgrammar to generate under a constraint")
validate = pytest.importorskip("jsonschema").validate

GENERATOR = GrammarGenerator(Vocabulary.load(SHIPPED_MODEL))
ENCODER = Encoder(load_model_dir(str(SHIPPED_MODEL)), fast=False)
TABLE = DecodeTable.build(ENCODER.tokenizer, ENCODER.special_ids)
# Much longer than what the generator writes before it closes what is open.
LIMIT = 6000

BOOK = {
    "type": "object",
    "$defs": {
        "Guest": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    },
    "properties": {
        "city": {"type": "string"},
        "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        "price": {"type": "number", "minimum": 0, "maximum": 1000},
        "board": {"type": "string", "enum": ["none", "half board", "full"]},
        "late": {"type": "boolean"},
        "guest": {"$ref": "#/$defs/Guest"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "nights", "board", "guest"],
    "additionalProperties": False,
}
ASK = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}
SCHEMAS: dict[str, dict[str, Any]] = {"book_room": BOOK, "ask-user.v2": ASK, "list_rooms": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {})}}
    for name, schema in SCHEMAS.items()
]
# The reasoning format of the same models, where it has a name of its own; any other is read with plain tags.
REASONING = {name: name for name in TOOL_PARSERS if name in REASONING_PARSERS} | {"kimik2": "kimi_thinking"}
NAMED = {"type": "function", "function": {"name": "book_room"}}
ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "book_room"}, {"type": "function", "name": "list_rooms"}],
}
CHOICES = [
    pytest.param("required", set(SCHEMAS), id="required"),
    pytest.param(NAMED, {"book_room"}, id="named"),
    pytest.param(ALLOWED, {"book_room", "list_rooms"}, id="allowed"),
]


def planned(gateway: Gateway, **body: Any) -> tuple[Planned, Constraint]:
    request = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, **body}
    made = gateway.plan("/v1/chat/completions", request)
    constraint = gateway.engine().constraint
    assert constraint is not None
    return made, constraint


def generated(constraint: Constraint, seed: int) -> list[int]:
    ids, complete = GENERATOR.generate(constraint.kind, constraint.value, random.Random(seed), LIMIT)
    assert complete
    return ids


def read(made: Planned, ids: list[int], size: int) -> list[ParserEvent]:
    """The events of the tokens, ``size`` at a time."""
    choice = Choice(0, made.plan(1, 0), TABLE, keep_token_ids=False)
    events = [event for at in range(0, len(ids), size) for event in choice.feed(ids[at : at + size])]
    end = Delta(0, [])
    end.finish_reason = "stop"
    return events + choice.complete(end)


def text(events: Iterable[ParserEvent], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def calls(events: Iterable[ParserEvent]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(found)
            found.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(found) - 1
            found[-1] = (found[-1][0], found[-1][1] + event.fragment)
    assert sum(isinstance(event, ToolCallEnd) for event in events) == len(found)
    return found


def summary(events: list[ParserEvent]) -> tuple[str, str, list[tuple[str, str]]]:
    return text(events, ReasoningDelta), text(events, ContentDelta), calls(events)


@pytest.mark.parametrize("thinking", [False, True], ids=["answer", "thinking"])
@pytest.mark.parametrize("native", [False, True], ids=["default", "native"])
@pytest.mark.parametrize(("choice", "names"), CHOICES)
@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_forced_call(parser: str, choice: Any, names: set[str], native: bool, thinking: bool) -> None:
    flags = Flags(ParserNames(parser, REASONING.get(parser, "qwen3")), native_constraints=native)
    made, constraint = planned(
        Gateway(flags=flags), tools=TOOLS, tool_choice=choice, chat_template_kwargs={"enable_thinking": thinking}
    )
    by_schema = native or parser != "deepseek_v41"
    for seed in range(2):
        ids = generated(constraint, seed)
        whole = summary(read(made, ids, len(ids)))
        for size in (1, 3):
            assert summary(read(made, ids, size)) == whole
        _, content, found = whole
        assert found
        assert not content.strip()
        for name, arguments in found:
            assert name in names
            value = json.loads(arguments)
            assert isinstance(value, dict)
            if by_schema:  # the default tag of deepseek_v41 constrains the markup only
                validate(value, SCHEMAS[name])


STRICT = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-z]{3}$"},
        "either": {"oneOf": [{"type": "integer"}, {"type": "string", "enum": ["p", "q"]}]},
        "word": {"const": "k"},
        "rows": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
    },
    "required": ["code", "either", "word", "rows"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("parser", ["deepseek_v41", "minimax_m3", "pythonic", "step3"])
def test_a_tag_holds_strings_to_more_than_their_type(parser: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": STRICT}}]
    made, constraint = planned(
        Gateway(flags=Flags(ParserNames(parser), native_constraints=True)), tools=tools, tool_choice="required"
    )
    for seed in range(4):
        for _, arguments in calls(read(made, generated(constraint, seed), 1)):
            validate(json.loads(arguments), STRICT)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "number"}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
WIRE_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_output_format_is_not_read_as_a_call(parser: str) -> None:
    """An answer in the client's format is content, with tools declared and not forced."""
    made, constraint = planned(
        Gateway(flags=Flags(ParserNames(parser, "qwen3"))), tools=TOOLS, response_format=WIRE_SCHEMA
    )
    ids = generated(constraint, 1)
    for size in (1, len(ids)):
        _, content, found = summary(read(made, ids, size))
        assert not found
        validate(json.loads(content), PERSON)


def test_json_object() -> None:
    made, constraint = planned(Gateway(), response_format={"type": "json_object"})
    for seed in range(3):
        assert isinstance(json.loads(summary(read(made, generated(constraint, seed), 1))[1]), dict)


def test_regex() -> None:
    pattern = r"It is (sunny|rainy) in Oslo, -?[0-9]{1,2} degrees\."
    made, constraint = planned(Gateway(), regex=pattern)
    for seed in range(3):
        assert re.fullmatch(pattern, summary(read(made, generated(constraint, seed), 1))[1])


def test_ebnf() -> None:
    grammar = 'root ::= item ("," item)*\nitem ::= "yes" | "no" | "¿?"'
    made, constraint = planned(Gateway(), ebnf=grammar)
    for seed in range(3):
        answer = summary(read(made, generated(constraint, seed), 1))[1]
        assert set(answer.split(",")) <= {"yes", "no", "¿?"}


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    shared = GrammarChecker()
    yield shared
    shared.close()


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_every_family_has_a_native_constraint(parser: str, checker: GrammarChecker) -> None:
    if parser != "passthrough":
        assert tool_format(parser).structural_tag is not None
    for choice in ("required", NAMED, ALLOWED):
        gateway = Gateway(flags=Flags(ParserNames(parser), native_constraints=True))
        assert checker.check(planned(gateway, tools=TOOLS, tool_choice=choice)[1]) is None
