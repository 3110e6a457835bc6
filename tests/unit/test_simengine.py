"""The embedded engine's core: what it says, when it stops, what it refuses."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smg.simengine.cli import sim_engine_command
from smg.simengine.core import Choice, Generation, RefusalError, SimEngine, SimOptions, SimRequest, synthetic_logprobs
from smg.simengine.grammar import GrammarError, GrammarGenerator
from smg.simengine.prefix_cache import PrefixCache
from smg.simengine.script import Failure, Output, Script, ScriptError, ToolCall, load_script
from smg.simengine.vocabulary import SHIPPED_MODEL, ModelError, Vocabulary

VOCABULARY = Vocabulary.load(SHIPPED_MODEL)
EOS = VOCABULARY.eos_ids[0]
PROMPT = VOCABULARY.encode("<|turn|>user\nDescribe lighthouses and tides.<|end|>\n<|turn|>assistant\n")


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(test(), 20))


def choices(options: SimOptions | None = None, script: Script | None = None, **request: Any) -> list[Choice]:
    """The planned choices of one request."""

    async def test() -> list[Choice]:
        engine = SimEngine(VOCABULARY, options, script)
        generation = await engine.prepare(SimRequest("r", **{"prompt_ids": PROMPT, **request}))
        return generation.choices

    result: list[Choice] = run(test)
    return result


def choice(**arguments: Any) -> Choice:
    (only,) = choices(**arguments)
    return only


def refused(**arguments: Any) -> RefusalError:
    with pytest.raises(RefusalError) as caught:
        choices(**arguments)
    return caught.value


# ---- what it says


def test_reply_repeats_words_of_the_prompt_and_ends_with_eos() -> None:
    said = choice()
    text = VOCABULARY.decode(said.plan[:-1])
    assert re.search("Describe|lighthouses|tides", text)
    assert not re.search("turn|assistant|<", text)
    assert text.endswith((".", "?", "!"))
    assert (said.plan[-1], said.finish_reason, said.matched_stop) == (EOS, "stop", EOS)


def test_reply_is_reproducible() -> None:
    first, second = choices(n=2)
    assert choices(n=2)[0].plan == first.plan
    assert second.plan != first.plan
    assert choice(seed=1).plan == choice(seed=1).plan != choice(seed=2).plan
    assert choice(options=SimOptions(seed=9)).plan != first.plan


def test_open_thinking_is_closed() -> None:
    text = VOCABULARY.decode(choice(prompt_ids=[*PROMPT, *VOCABULARY.encode("<think>\n")]).plan)
    assert text.count("</think>\n\n") == 1
    assert "</think>" not in VOCABULARY.decode(choice().plan)


def test_limits() -> None:
    short = choice(max_tokens=5)
    assert (len(short.plan), short.finish_reason, short.matched_stop) == (5, "length", None)
    assert choice(max_tokens=0).plan == []
    long = choice(min_tokens=500)
    assert len(long.plan) > 500
    assert (long.plan[-1], EOS in long.plan[:-1]) == (EOS, False)
    endless = choice(ignore_eos=True, max_tokens=700)
    assert (len(endless.plan), endless.finish_reason, EOS in endless.plan) == (700, "length", False)
    assert len(choice(ignore_eos=True).plan) == 4096


def test_context_is_a_limit() -> None:
    filler = [index % 5000 for index in range(VOCABULARY.context_length - 3)]
    assert len(choice(prompt_ids=filler).plan) == 3
    assert choice(prompt_ids=filler).finish_reason == "length"


def test_stop_token() -> None:
    plain = choice().plan
    stop = plain[6]
    said = choice(stop_token_ids=[stop])
    first = plain.index(stop)
    assert (said.plan, said.finish_reason, said.matched_stop) == (plain[: first + 1], "stop", stop)
    assert choice(stop_token_ids=[stop], trim_stop=True).plan == plain[:first]
    assert len(choice(stop_token_ids=[stop], min_tokens=first + 1).plan) > first + 1


@pytest.mark.parametrize("start", [5, 17, 40])
def test_stop_string_ends_at_the_token_that_completes_it(start: int) -> None:
    plain = choice().plan
    text = VOCABULARY.decode(plain)
    stop = text[start : start + 7]
    said = choice(stop=["never said", stop])
    assert (said.finish_reason, said.matched_stop) == ("stop", stop)
    assert said.plan == plain[: len(said.plan)]
    assert stop in VOCABULARY.decode(said.plan)
    assert stop not in VOCABULARY.decode(said.plan[:-1])


def test_logit_bias_at_its_ends() -> None:
    assert set(choice(logit_bias={77: 100.0}, max_tokens=9).plan) == {77}
    banned = choice().plan[3]
    assert banned not in choice(logit_bias={banned: -100.0}).plan


def test_prompts_it_does_not_take() -> None:
    assert refused(prompt_ids=[]).code == "INVALID_ARGUMENT"
    assert refused(prompt_ids=[VOCABULARY.size]).code == "INVALID_ARGUMENT"
    assert refused(prompt_ids=[1] * VOCABULARY.context_length).code == "INVALID_ARGUMENT"
    assert refused(n=0).code == "INVALID_ARGUMENT"
    assert refused(n=129).code == "INVALID_ARGUMENT"
    assert refused(dp_rank=1).code == "INVALID_ARGUMENT"


def test_logprobs_are_exact_and_ordered() -> None:
    values, top = synthetic_logprobs([3, 9], 6, 3, 10)
    assert values == [-0.875, -0.125]
    assert top == [[(3, -0.875), (4, -1.125), (5, -1.375)], [(9, -0.125), (0, -0.375), (1, -0.625)]]
    assert synthetic_logprobs([3], 0, 0, 10) == ([-0.125], [[]])


# ---- scripts


def test_script_outputs_in_turn_and_by_match() -> None:
    async def test() -> list[str]:
        script = Script([Output(text="one"), Output(text="about tides", match="tides"), Output(text="two")])
        engine = SimEngine(VOCABULARY, script=script)
        said = []
        for prompt in ("first", "the tides", "second", "third"):
            generation = await engine.prepare(SimRequest("r", VOCABULARY.encode(prompt)))
            said.append(VOCABULARY.decode(generation.choices[0].plan, skip_special=True))
        return said

    assert run(test) == ["one", "about tides", "two", "one"]


def test_script_parts_are_written_in_the_models_format() -> None:
    output = Output(
        reasoning="hm", content="Let me look.", tool_calls=[ToolCall("f", {"x": "é"}), ToolCall("g")], finish_reason="x"
    )
    assert output.full_text() == (
        "<think>\nhm\n</think>\n\nLet me look."
        '\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    said = choice(script=Script([output]))
    assert VOCABULARY.decode(said.plan) == output.full_text()
    assert said.finish_reason == "x"
    assert VOCABULARY.encode("<think>")[0] in said.plan


def test_script_file(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('["plain", {"ids": [5, 6], "finish_reason": "length", "error": {"code": "UNAVAILABLE", "at": 1}}]')
    script = load_script(path)
    assert script.choose("") == Output(text="plain")
    assert script.choose("") == Output(ids=[5, 6], finish_reason="length", error=Failure("UNAVAILABLE", at=1))
    for bad in ("{}", '[{"txt": 1}]', "[1]", "nothing"):
        path.write_text(bad)
        with pytest.raises(ScriptError):
            load_script(path)


# ---- the loop


class Log:
    """Collects what the engine delivers for one generation."""

    def __init__(self, generation: Generation) -> None:
        self.ids: list[list[int]] = [[] for _ in generation.choices]
        self.steps = 0
        self.closed = asyncio.Event()
        self.refusal: RefusalError | None = None
        generation.deliver = self.deliver
        generation.failed = self.failed

    def deliver(self, generation: Generation, choice: Choice, ids: list[int]) -> None:
        self.steps += 1
        self.ids[choice.index] += ids
        if all(other.done for other in generation.choices):
            self.closed.set()

    def failed(self, generation: Generation) -> None:
        self.refusal = generation.refusal
        self.closed.set()


async def submit(engine: SimEngine, name: str, **request: Any) -> Log:
    generation = await engine.prepare(SimRequest(name, **{"prompt_ids": PROMPT, **request}))
    log = Log(generation)
    engine.submit(generation)
    return log


def test_everything_runs_in_one_loop() -> None:
    async def test() -> None:
        engine = SimEngine(VOCABULARY, SimOptions(tokens_per_step=4))
        steps = asyncio.create_task(engine.run())
        logs = [await submit(engine, f"r{i}", n=2, seed=i, ignore_eos=True, max_tokens=10) for i in range(20)]
        for log in logs:
            await log.closed.wait()
            assert [len(ids) for ids in log.ids] == [10, 10]
            assert log.steps == 6  # two choices of 4 + 4 + 2
        assert engine.finished == 20
        steps.cancel()

    run(test)


def test_the_others_wait_and_abort_frees_a_place() -> None:
    async def test() -> None:
        engine = SimEngine(VOCABULARY, SimOptions(max_concurrency=1, step_ms=1))
        steps = asyncio.create_task(engine.run())
        first = await submit(engine, "first", ignore_eos=True)
        second = await submit(engine, "second", max_tokens=3)
        third = await submit(engine, "third", max_tokens=3)
        while not first.steps:
            await asyncio.sleep(0)
        (load,) = engine.loads()
        assert (load.running, load.waiting) == (1, 2)
        assert load.used_tokens >= len(PROMPT)
        assert not engine.abort("nobody")
        assert engine.abort("third")
        assert engine.abort("first")
        await second.closed.wait()
        assert (first.closed.is_set(), third.steps, engine.aborted) == (False, 0, 2)
        steps.cancel()

    run(test)


def test_a_request_id_in_use_is_refused() -> None:
    async def test() -> None:
        engine = SimEngine(VOCABULARY)
        await submit(engine, "same")
        with pytest.raises(RefusalError) as caught:
            await submit(engine, "same")
        assert caught.value.code == "ALREADY_EXISTS"

    run(test)


@pytest.mark.parametrize("at", [0, 3])
def test_failing_at_a_token(at: int) -> None:
    async def test() -> None:
        engine = SimEngine(VOCABULARY, SimOptions(fail_at=at, fail_code="UNAVAILABLE"))
        steps = asyncio.create_task(engine.run())
        log = await submit(engine, "r")
        await log.closed.wait()
        assert log.refusal is not None
        assert (log.refusal.code, len(log.ids[0])) == ("UNAVAILABLE", at)
        assert engine.loads()[0].running == 0
        steps.cancel()

    run(test)


def test_prefill_delays_only_the_first_token() -> None:
    async def test() -> None:
        engine = SimEngine(VOCABULARY, SimOptions(prefill_ms=30))
        loop = asyncio.get_running_loop()
        steps = asyncio.create_task(engine.run())
        began = loop.time()
        log = await submit(engine, "r", ignore_eos=True, max_tokens=100)
        await log.closed.wait()
        assert loop.time() - began >= 0.03
        steps.cancel()

    run(test)


def test_ranks_are_balanced() -> None:
    async def test() -> None:
        engine = SimEngine(VOCABULARY, SimOptions(dp_size=2))
        for name in "abcd":
            await submit(engine, name)
        await submit(engine, "pinned", dp_rank=1)
        assert [rank.waiting for rank in engine.loads()] == [2, 3]

    run(test)


def test_prefix_cache() -> None:
    cache = PrefixCache(block_size=4, max_blocks=3)
    assert cache.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert cache.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert cache.lookup([1, 2, 3, 4, 5, 6, 7, 8]) == 7  # the last token is always computed
    assert cache.lookup([1, 2, 3, 4, 0, 0, 0, 0, 0]) == 4
    assert cache.lookup([0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0  # a block counts only behind the same beginning
    assert len(cache) == 3
    cache.clear()
    assert cache.lookup([1, 2, 3, 4, 5]) == 0


# ---- constraints


TOOL = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {
                "begin": '<tool_call>\n{"name": "wx", "arguments": ',
                "content": {"type": "json_schema", "json_schema": TOOL},
                "end": "}\n</tool_call>",
            }
        ],
        "at_least_one": True,
    },
}


def constrained(kind: str, value: str, seed: int, **request: Any) -> tuple[str, str]:
    """Text without EOS and finish reason."""
    said = choice(constraint=(kind, value), seed=seed, **request)
    return VOCABULARY.decode(said.plan, skip_special=True), said.finish_reason


@pytest.mark.parametrize("seed", range(8))
def test_json_schema_is_kept(seed: int) -> None:
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["a", "b"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "size": {"type": "number"},
            "more": TOOL,
        },
        "required": ["name", "kind", "tags", "size", "more"],
        "additionalProperties": False,
    }
    text, finish = constrained("json_schema", json.dumps(schema), seed)
    value = json.loads(text)
    assert finish == "stop"
    assert list(value) == ["name", "kind", "tags", "size", "more"]
    assert value["kind"] in ("a", "b")
    assert isinstance(value["more"]["city"], str)


@pytest.mark.parametrize("seed", range(5))
def test_any_object_comes_to_an_end(seed: int) -> None:
    pytest.importorskip("xgrammar")
    text, finish = constrained("json_schema", '{"type":"object"}', seed)
    assert finish == "stop"
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("pattern", [r"It is (sunny|rainy) in Oslo\.", r"[a-z]+@[a-z]+\.com", r"[ab]{2,4}", r"é{3}x*"])
@pytest.mark.parametrize("seed", range(3))
def test_regex_is_kept(pattern: str, seed: int) -> None:
    pytest.importorskip("xgrammar")
    text, finish = constrained("regex", pattern, seed)
    assert finish == "stop"
    assert re.fullmatch(pattern, text)


def test_ebnf_is_kept() -> None:
    pytest.importorskip("xgrammar")
    assert constrained("ebnf", 'root ::= "yes" | "no"', 1)[0] in ("yes", "no")


@pytest.mark.parametrize("seed", range(5))
def test_forced_tool_call_comes_out(seed: int) -> None:
    pytest.importorskip("xgrammar")
    said = choice(constraint=("structural_tag", json.dumps(TAG)), seed=seed)
    text = VOCABULARY.decode(said.plan, skip_special=True)
    match = re.search(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
    assert match is not None
    call = json.loads(match[1])
    assert call["name"] == "wx"
    assert isinstance(call["arguments"]["city"], str)
    assert VOCABULARY.encode("<tool_call>")[0] in said.plan
    assert said.finish_reason == "stop"


def test_constraint_under_a_token_limit() -> None:
    pytest.importorskip("xgrammar")
    said = choice(constraint=("regex", "a{200}"), max_tokens=3)
    assert (len(said.plan), said.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("kind", "value"), [("regex", "("), ("json_schema", "{"), ("ebnf", "nonsense"), ("structural_tag", "{}")]
)
def test_bad_constraints_are_refused(kind: str, value: str) -> None:
    pytest.importorskip("xgrammar")
    refusal = refused(constraint=(kind, value))
    assert refusal.code == "INVALID_ARGUMENT"
    assert refusal.message.startswith(f"invalid {kind}: ")


def test_constraint_without_xgrammar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    refusal = refused(constraint=("regex", "a"))
    assert (refusal.code, "not installed" in refusal.message) == ("INVALID_ARGUMENT", True)
    with pytest.raises(GrammarError, match="too big"):
        GrammarGenerator(VOCABULARY).generate("regex", "a" * 2_000_000, random.Random(1), 5)


# ---- the model directory and the command


def test_model_directories_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Vocabulary.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Vocabulary.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((SHIPPED_MODEL / "tokenizer.json").read_bytes())
    with pytest.raises(ModelError, match="no EOS token"):
        Vocabulary.load(tmp_path)


def test_command_says_what_is_wrong(tmp_path: Path) -> None:
    result = CliRunner().invoke(sim_engine_command, ["--model-path", str(tmp_path)])
    assert (result.exit_code, "no tokenizer.json" in result.output) == (1, True)
    script = tmp_path / "s.json"
    script.write_text("{}")
    result = CliRunner().invoke(sim_engine_command, ["--script", str(script)])
    assert (result.exit_code, "s.json" in result.output) == (1, True)
