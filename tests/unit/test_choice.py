"""One choice: tokens in, events out, with the shipped vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from smg.detok.choice import Choice, make_choice
from smg.detok.render.factory import make_renderer
from smg.detok.usage import Usage
from smg.engines.base import Delta, TokenLogprobs
from smg.messages import (
    ContentDelta,
    GenerationPlan,
    ParserEvent,
    ParserPlan,
    PromptPart,
    ReasoningDelta,
    ResponsePlan,
    StopPlan,
)
from smg.models.harmony.tokens import CHANNEL, MESSAGE, TOKEN_IDS
from smg.simengine.vocabulary import SHIPPED_MODEL
from smg.vocab.decode import DecodeTable
from smg.vocab.encoder import Encoder
from smg.vocab.load import load_model_dir

ENCODER = Encoder(load_model_dir(str(SHIPPED_MODEL)), fast=False)
TABLE = DecodeTable.build(ENCODER.tokenizer, ENCODER.special_ids)
EOS = ENCODER.eos_ids[0]


def plan(stop: StopPlan | None = None, parser: ParserPlan | None = None, **response: Any) -> GenerationPlan:
    answer = ResponsePlan("chat", "id", "id", "m", 0, True, **response)
    return GenerationPlan(1, 0, "t", [PromptPart("e", 3, {})], stop or StopPlan(), parser or ParserPlan(), answer)


def feed(choice: Choice, ids: Sequence[int], size: int, logprobs: bool = False) -> list[ParserEvent]:
    events: list[ParserEvent] = []
    for start in range(0, len(ids), size):
        part = list(ids[start : start + size])
        source = TokenLogprobs(part, [-0.5] * len(part), [[(token, -0.5)] for token in part]) if logprobs else None
        events += choice.feed(part, source)
    return events


def end(choice: Choice, reason: str = "stop") -> list[ParserEvent]:
    delta = Delta(0, [])
    delta.finish_reason = reason
    return choice.complete(delta)


def content(events: list[ParserEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def reasoning(events: list[ParserEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReasoningDelta))


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_text_is_whole_for_any_chunking(size: int) -> None:
    text = "Grüße aus dem Norden 🐋🦑 — 你好 नमस्ते"
    choice = Choice(0, plan(), TABLE, keep_token_ids=True)
    ids = ENCODER.encode(text)
    events = feed(choice, ids, size) + end(choice)
    assert content(events) == text
    assert choice.token_ids == ids
    assert not any("�" in event.text for event in events if isinstance(event, ContentDelta))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_end_of_sequence_is_silent_and_text_behind_it_is_dropped(size: int) -> None:
    choice = Choice(0, plan(StopPlan(eos_ids=[EOS])), TABLE, keep_token_ids=False)
    ids = [*ENCODER.encode("before"), EOS, *ENCODER.encode("after")]
    assert content(feed(choice, ids, size) + end(choice)) == "before"
    assert choice.matched_stop is None


def test_a_stop_token_of_the_client_is_reported_and_kept_on_demand() -> None:
    [token] = ENCODER.encode(".")
    ids = [*ENCODER.encode("one"), token, *ENCODER.encode(" two")]
    cut = Choice(0, plan(StopPlan(token_ids=[token])), TABLE, keep_token_ids=False)
    assert content(feed(cut, ids, 2) + end(cut)) == "one"
    assert cut.matched_stop == token
    kept = Choice(0, plan(StopPlan(token_ids=[token], keep=True)), TABLE, keep_token_ids=False)
    assert content(feed(kept, ids, 2) + end(kept)) == "one."


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_reasoning_tokens_count_the_same_in_both_modes(size: int) -> None:
    parser = ParserPlan(reasoning="qwen3", armed=True)
    ids = ENCODER.encode("Let me think.\n</think>\n\nIt is done.")
    choice = Choice(0, plan(parser=parser), TABLE, keep_token_ids=False)
    events = feed(choice, ids, size) + end(choice)
    assert (reasoning(events), content(events)) == ("Let me think.\n", "\n\nIt is done.")
    assert choice.reasoning_tokens == len(ENCODER.encode("Let me think.\n"))


def test_logprobs_leave_out_tokens_of_a_stop_string_and_reasoning() -> None:
    stop, parser = StopPlan(strings=["STOP"]), ParserPlan(reasoning="qwen3", armed=True)
    choice = Choice(0, plan(stop, parser, logprobs=1), TABLE, keep_token_ids=False)
    feed(choice, ENCODER.encode("hm</think>go ") + ENCODER.encode("STOP rest"), 1, logprobs=True)
    choice.end_by_gateway()
    assert choice.logprobs is not None
    entries = [entry for entry in choice.logprobs.take() if entry.answer]
    assert b"".join(TABLE.token_bytes(entry.token_id) for entry in entries).decode() == "go "


@pytest.mark.parametrize("parser", [ParserPlan(), ParserPlan(reasoning="qwen3"), ParserPlan(harmony=True)])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_tokens_behind_a_stop_string_count_nowhere(parser: ParserPlan, logprobs: bool, size: int) -> None:
    """A busy gateway reads several tokens at once; the engine's own count includes those it made meanwhile."""
    head = [TOKEN_IDS[CHANNEL], *ENCODER.encode("final"), TOKEN_IDS[MESSAGE]] if parser.harmony else []
    answer = [*head, *ENCODER.encode("Grüße 🐋 go "), *ENCODER.encode("STOP")]
    ids = answer + ENCODER.encode(" 🦑 and more")
    shown = {"logprobs": 1} if logprobs else {}
    choice = make_choice(0, plan(StopPlan(strings=["STOP"]), parser, **shown), TABLE, keep_token_ids=True)
    fed = feed(choice, ids, size, logprobs)
    choice.completion_tokens = choice.tokens_seen + choice.surplus
    assert content(fed + choice.end_by_gateway()) == "Grüße 🐋 go "
    assert choice.token_ids == answer
    assert choice.output_tokens == len(answer)


def test_logprobs_of_a_character_that_spans_tokens_come_together() -> None:
    choice = Choice(0, plan(logprobs=0), TABLE, keep_token_ids=False)
    ids = ENCODER.encode("🦑")
    assert len(ids) > 1
    assert feed(choice, ids[:-1], 1, logprobs=True) == []
    assert choice.logprobs is not None
    assert choice.logprobs.take() == []
    assert content(feed(choice, ids[-1:], 1, logprobs=True)) == "🦑"
    taken = choice.logprobs.take()
    assert b"".join(TABLE.token_bytes(entry.token_id) for entry in taken).decode() == "🦑"


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_without_tokens_has_a_role_if_the_engine_streamed_it(streamed: bool) -> None:
    choice = Choice(0, plan(), TABLE, keep_token_ids=False)
    renderer = make_renderer(plan(), [choice], TABLE)
    if streamed:
        choice.last = Delta(0, [])
    renderer.on_tokens(choice, [], end(choice), None)
    renderer.on_choice_end(choice)
    renderer.on_end(Usage())
    sent = renderer.take()
    assert (b'"role":"assistant"' in sent) is streamed
    assert b'"finish_reason":"stop"' in sent


@pytest.mark.parametrize(
    ("reported", "expected"), [(True, b'"logprobs":{"content":[],"refusal":null}'), (False, b'"logprobs":null')]
)
def test_logprobs_that_the_engine_does_not_report_are_null(reported: bool, expected: bytes) -> None:
    made = plan(StopPlan(eos_ids=[EOS]), logprobs=0)
    made = msgspec.structs.replace(made, response=msgspec.structs.replace(made.response, stream=False))
    choice = Choice(0, made, TABLE, keep_token_ids=False)
    renderer = make_renderer(made, [choice], TABLE)
    renderer.on_tokens(choice, [], feed(choice, [EOS], 1, logprobs=reported) + end(choice), None)
    assert expected in renderer.body(Usage())


def test_numbers_in_the_arguments_of_a_messages_answer_keep_their_digits() -> None:
    parser = ParserPlan(tool="qwen")
    made = plan(parser=parser)
    made = msgspec.structs.replace(made, response=msgspec.structs.replace(made.response, api="messages", stream=False))
    choice = Choice(0, made, TABLE, keep_token_ids=False)
    renderer = make_renderer(made, [choice], TABLE)
    written = '<tool_call>{"name": "f", "arguments": {"n": 12345678901234567890123}}</tool_call>'
    renderer.on_tokens(choice, [], feed(choice, ENCODER.encode(written), 3) + end(choice), None)
    assert b'"input":{"n":12345678901234567890123}' in renderer.body(Usage())
