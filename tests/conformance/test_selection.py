"""Which parsers a model gets: by name, by flag, by override."""

from __future__ import annotations

import logging

import pytest

from smg.models.registry import (
    FAMILIES,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserNames,
    agree,
    call_id_style,
    check_flags,
    check_override,
    detect_reasoning,
    detect_tool,
    reasoning_format,
    select_parsers,
    skip_special_tokens,
    tool_format,
    unstarted,
)

TOOL_NAMES = [
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "pythonic"),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "pythonic"),
    ("deepseek-coder-v2", "pythonic"),
    ("deepseek-ai/DeepSeek-V3-0324", "deepseek"),
    ("deepseek-ai/DeepSeek-V3.1", "deepseek31"),
    ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek31"),
    ("deepseek-ai/DeepSeek-V3.2-Speciale", "deepseek32"),
    ("deepseek-ai/DeepSeek-V4-Flash", "deepseek_v4"),
    ("deepseek-v4.1-flash", "deepseek_v41"),
    ("acme/deepseek_v4-mini", "passthrough"),
    ("acme/deepseek_v41-mini", "deepseek_v41"),
    ("acme/deepseek-v41-x", "deepseek_v41"),
    ("meta-llama/Llama-3.1-8B", "json"),
    ("TinyLlama-1.1B", "json"),
    ("google/codegemma-7b", "json"),
    ("THUDM/chatglm-6b", "json"),
    ("zai-org/glm-4-9b", "json"),
    ("google/gemma-4-31b", "json"),
    ("gpt-4o", "json"),
    ("meta-llama/Llama-3.2-1B", "llama"),
    ("llama3.2:3b", "passthrough"),
    ("meta-llama/Llama-4-Scout-17B", "pythonic"),
    ("nvidia/Llama-3.1-Nemotron-70B", "json"),
    ("nvidia/Nemotron-3-Super", "qwen_xml"),
    ("mistralai/Ministral-8B-Instruct", "passthrough"),
    ("mistralai/Mixtral-8x7B", "mistral"),
    ("open-mistral-nemo", "mistral"),
    ("acme/QwQ-32B", "passthrough"),
    ("Qwen/QwQ-32B", "qwen"),
    ("Qwen/Qwen3-Next-80B", "qwen"),
    ("Qwen/Qwen3.7-9B", "qwen"),
    ("Qwen/Qwen3.8-2.4T-A95B", "qwen_xml"),
    ("Qwen/Qwen3-Coder-Next", "qwen_xml"),
    ("zai-org/GLM-4.5V", "glm45_moe"),
    ("zai-org/GLM-4.7", "glm47_moe"),
    ("zai-org/glm-5.1", "glm47_moe"),
    ("moonshotai/Kimi-K2.5", "kimik2"),
    ("moonshotai/Kimi-Linear-48B", "passthrough"),
    ("acme/Kimi_K3-small", "kimi_k3"),
    ("stepfun-ai/Step-3.5-Flash", "step3"),
    ("acme/twinkling-1b", "inkling"),
    ("MiniMaxAI/MiniMax-Text-01", "minimax_m2"),
    ("MiniMaxAI/MiniMax-M3", "minimax_m3"),
    ("CohereLabs/aya-expanse-8b", "cohere"),
    ("sbintuitions/sarashina2.2-3b", "sarashina"),
    ("gpt-5-mini", "passthrough"),
    ("acme/my-model", "passthrough"),
    ("", "passthrough"),
]

REASONING_NAMES = [
    ("DeepSeek-R1-Distill-Qwen-7B", "deepseek_r1"),
    ("deepseek-ai/DeepSeek-V4.1", "deepseek_v41"),
    ("acme/deepseek_v4-mini", "deepseek_v4"),
    ("deepseek-ai/DeepSeek-V3.1", "deepseek_v31"),
    ("deepseek-ai/DeepSeek-V3.2", None),
    ("Qwen3-30B-A3B-Thinking-2507", "qwen3"),
    ("acme/qwen3-thinking-4b", "qwen3_thinking"),
    ("Qwen/Qwen3.8-2.4T-A95B", "qwen3"),
    ("zai-org/GLM-4.7", None),
    ("zai-org/GLM-4.5", None),
    ("zai-org/GLM-5.1", "glm45"),
    ("Llama-3.1-Nemotron-Nano-8B", "nano_v3"),
    ("moonshotai/Kimi-K2-Thinking", "kimi_thinking"),
    ("moonshotai/Kimi-K2.5", "kimi_k25"),
    ("moonshotai/Kimi-K3", "kimi_k3"),
    ("moonshotai/Kimi-K2-Instruct", "kimi"),
    ("stepfun-ai/step3", "step3"),
    ("stepfun-ai/Step-3.5-Flash", None),
    ("MiniMaxAI/MiniMax-M3", "minimax_m3"),
    ("MiniMaxAI/MiniMax-M2", "minimax"),
    ("CohereLabs/c4ai-command-a-03-2025", "cohere_cmd"),
    ("acme/twinkling-1b", "inkling"),
    ("acme/my-model", None),
]


@pytest.mark.parametrize(("model", "parser"), TOOL_NAMES)
def test_tool_detection(model: str, parser: str) -> None:
    assert detect_tool(model) == parser
    assert detect_tool(model.upper()) == parser


@pytest.mark.parametrize(("model", "parser"), REASONING_NAMES)
def test_reasoning_detection(model: str, parser: str | None) -> None:
    assert detect_reasoning(model) == parser
    assert detect_reasoning(model.upper()) == parser


def test_the_registry_has_the_documented_formats() -> None:
    assert set(TOOL_PARSERS) >= {parser for _, parser in TOOL_NAMES} | {"nemotron", "qwen_coder"}
    assert set(REASONING_PARSERS) >= {parser for _, parser in REASONING_NAMES if parser} | {"base", "passthrough"}


def test_stems_and_patterns_are_lower_case() -> None:
    declared = [(tool.name, tool.stems) for family in FAMILIES for tool in family.tools]
    declared += [(thought.name, thought.patterns) for family in FAMILIES for thought in family.reasoning]
    for name, words in declared:
        assert all(word and word == word.lower() for word in words), name


def test_override_beats_flag_beats_detection() -> None:
    flags = ParserNames("qwen", "qwen3")
    override = ParserNames("mistral", "deepseek_r1")
    detected = select_parsers("moonshotai/Kimi-K3")
    assert (detected.tool.name, detected.tool_set) == ("kimi_k3", False)
    assert detected.reasoning is not None
    assert detected.reasoning.name == "kimi_k3"
    by_flag = select_parsers("moonshotai/Kimi-K3", flags=flags)
    assert (by_flag.tool.name, by_flag.tool_set, by_flag.reasoning) == ("qwen", True, reasoning_format("qwen3"))
    overridden = select_parsers("moonshotai/Kimi-K3", override, flags)
    assert (overridden.tool.name, overridden.tool_set) == ("mistral", True)
    assert overridden.reasoning == reasoning_format("deepseek_r1")
    half = select_parsers("acme", ParserNames(reasoning="glm45"), flags)
    assert (half.tool.name, half.reasoning) == ("qwen", reasoning_format("glm45"))


def test_no_match_parses_nothing() -> None:
    selection = select_parsers("acme/my-model")
    assert selection.tool.name == "passthrough"
    assert selection.reasoning is None


def test_unknown_names_read_like_passthrough() -> None:
    assert tool_format("nope").name == "passthrough"
    assert reasoning_format("nope").name == "passthrough"


def test_start_up_messages() -> None:
    check_flags(ParserNames("qwen_xml", "deepseek_r1"))
    check_flags(ParserNames())
    with pytest.raises(ValueError, match=r"^unknown tool-call parser 'hermes'$"):
        check_flags(ParserNames("hermes"))
    with pytest.raises(ValueError, match=r"^unknown reasoning parser 'deepseek-r1'$"):
        check_flags(ParserNames(reasoning="deepseek-r1"))


def test_registration_messages() -> None:
    check_override("grpc://a:1", "m", ParserNames("json", "base"))
    with pytest.raises(ValueError, match=r"^worker grpc://a:1 declares unknown tool_parser 'x' for model 'm'$"):
        check_override("grpc://a:1", "m", ParserNames("x"))
    with pytest.raises(ValueError, match=r"^worker grpc://a:1 declares unknown reasoning_parser 'y' for model 'm'$"):
        check_override("grpc://a:1", "m", ParserNames("json", "y"))


def test_workers_that_disagree(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert agree("m", [ParserNames("qwen"), ParserNames(), ParserNames("qwen")]) == ParserNames("qwen")
        assert not caplog.records
        chosen = agree("m", [ParserNames("qwen_xml", "qwen3"), ParserNames("json", "qwen3")])
    assert chosen == ParserNames("json", "qwen3")
    assert len(caplog.records) == 1
    assert "tool_parser" in caplog.text


@pytest.mark.parametrize(
    ("model", "style"),
    [("moonshotai/Kimi-K2.5", "kimi"), ("Kimi-K3", "kimi_k3"), ("acme/k3", "call"), ("qwen3", "call")],
)
def test_call_id_style(model: str, style: str) -> None:
    assert call_id_style(model) == style


def test_special_tokens() -> None:
    def skip(model: str, **kwargs: bool) -> bool:
        given = {"separate_reasoning": True, "parse_tools": False, "json_constraint": False, "requested": True}
        return skip_special_tokens(select_parsers(model), **(given | kwargs))

    assert skip("qwen3")
    assert not skip("qwen3", requested=False)
    assert not skip("qwen3", parse_tools=True)
    assert skip("qwen3", parse_tools=True, json_constraint=True)
    assert not skip("kimi-k3")
    assert not skip("inkling", parse_tools=True, json_constraint=True)
    assert skip("kimi-k3", separate_reasoning=False)


def test_a_started_format_has_an_unstarted_sibling() -> None:
    for name in REASONING_PARSERS:
        sibling = unstarted(reasoning_format(name))
        assert not sibling.starts_in_reasoning, name
    assert unstarted(reasoning_format("kimi")).name == "kimi"
