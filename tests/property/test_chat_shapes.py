"""Whatever came before, a chat request gets the prompt and the plan that it gets on its own: real tokenizer, template
and native renderers, several models in one process, and a table of models that changes in between."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smg.api.chat_shape import ChatShapes
from smg.api.context import Flags
from smg.api.entry import handle
from smg.api.errors import ApiError, refused
from smg.api.plan import Codec, Planned
from smg.engines.base import Constraint
from smg.engines.grpc.codecs import CODECS
from smg.engines.zmq.codecs import ZMQ_CODECS
from smg.messages import ModelInfo
from smg.tokenizer_pool.model import TokenizerModel
from smg.vocab.load import load_model_dir

SHIPPED = Path(__file__).parents[2] / "smg" / "simengine" / "model"
CHAT = "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}

# Model name -> what config.json says of it. The vocabulary is the shipped one: renderers do not look at it.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {},
    "house-model": {},
    "deepseek-v3.2": {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "house-v4": {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
    "deepseek-v4-flash": {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
    "deepseek-v4.1-flash": {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"},
    "kimi-k3": {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"},
    "house-k3": {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"},
    "kimi-k2.5": {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"},
    "gpt-oss-20b": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
}


@cache
def tokenizer_of(model: str, *, fast: bool) -> TokenizerModel:
    """The warm side's tokenizer (fast engines), or that of fresh contexts (reference engines)."""
    folder = Path(mkdtemp()) / "model"
    shutil.copytree(SHIPPED, folder)
    if CONFIGS[model]:
        (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    loaded = TokenizerModel(load_model_dir(str(folder)), fast=fast)
    shutil.rmtree(folder.parent)
    return loaded


class Pool:
    """A ``Context`` that serves all models. ``age`` counts the states of the model table."""

    def __init__(self, *, fast: bool) -> None:
        self.flags = Flags()
        self.codecs: dict[str, Codec] = {**CODECS, **ZMQ_CODECS}
        self.chat_shapes = ChatShapes()
        self._fast = fast
        self.move_on(0)

    def move_on(self, age: int) -> None:
        """Another state of the table: every second one bounds the context and sets a default."""
        facts: dict[str, Any] = {"context_length": 180, "default_sampling": {"top_p": 0.5}} if age % 2 else {}
        self._models = {}
        for name, config in CONFIGS.items():
            info = ModelInfo(
                id=name, tokenizer=name, kinds=["vllm", "sglang"], aliases=[f"alias-of-{name}"],
                architectures=config.get("architectures", []), model_type=config.get("model_type", ""),
                tool_parser="qwen" if name == "house-model" else "",
                reasoning_parser="qwen3" if name == "house-model" else "", **facts,
            )  # fmt: skip
            self._models |= {name: info, f"alias-of-{name}": info}

    def find_model(self, name: str) -> ModelInfo | None:
        return self._models.get(name)

    def tokenizer(self, info: ModelInfo) -> TokenizerModel:
        return tokenizer_of(info.tokenizer, fast=self._fast)

    def named_tokenizer(self, name: str) -> TokenizerModel | None:
        raise refused("not_found", name)

    def tokenizer_names(self) -> Sequence[str]:
        return list(CONFIGS)

    def check_constraint(self, constraint: Constraint) -> str | None:
        return None


def outcome(pool: Pool, body: bytes) -> Any:
    """The plan without its time, or the refusal."""
    try:
        planned = handle(CHAT, body, HEADERS, "req", pool)
    except ApiError as error:
        return error.status, error.code, error.message, error.param
    assert isinstance(planned, Planned)
    plan = planned.plan(1, 0)
    return msgspec.structs.replace(
        plan, response=msgspec.structs.replace(plan.response, created=0)
    ), planned.route_parts


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells <|end|> the weather.",
        "parameters": {"properties": {"city": {"type": "string"}}, "type": "object"},
    },
}
CLOCK = {"type": "function", "function": {"parameters": {}, "name": "clock", "strict": True}}
words = st.sampled_from(
    ["", "a", "json, please", "早上好 🚀", "x\x1cy", "<think>t</think>b", "<|end|>", "<｜User｜>", "a" * 60]
)
parts = st.lists(words.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=2)
content = words | parts
arguments = st.sampled_from(["{}", "", '{"city": "Oslo"}', '{"city": 1e-7, "b": [1, 2.0, null]}', '{"cut": ', "[1]"])
calls = st.lists(
    st.builds(
        lambda number, text: {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": text},
        },
        st.integers(0, 2),
        arguments,
    ),
    min_size=1,
    max_size=2,
    unique_by=lambda call: str(call["id"]),
)


def results(called: list[dict[str, Any]]) -> list[dict[str, Any]]:
    said = {"role": "assistant", "content": None, "tool_calls": called, "reasoning_content": "hm"}
    return [said, *({"role": "tool", "tool_call_id": call["id"], "content": "17"} for call in called)]


plain = st.builds(
    lambda role, said: [{"role": role, "content": said}],
    st.sampled_from(["user", "user", "assistant", "system", "developer"]),
    content,
)
odd = st.sampled_from(
    [
        [{"role": "system", "content": "", "tools": [CLOCK]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [{"role": "root", "content": "r"}],
        [{"role": "assistant", "content": None, "reasoning": "only thought"}],
        [{"role": "user", "content": "named", "name": "ada"}],
    ]
)
conversations = st.lists(plain | plain | calls.map(results) | odd, min_size=1, max_size=4).map(
    lambda groups: [message for group in groups for message in group]
)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.sampled_from([[], [WEATHER], [WEATHER, CLOCK], [CLOCK, WEATHER]]),
        "tool_choice": st.sampled_from(
            ["none", "auto", "required", {"type": "function", "function": {"name": "weather"}}]
        ),
        "parallel_tool_calls": st.booleans(),
        "thinking": st.sampled_from([{"type": "enabled"}, {"type": "disabled"}, {"type": "adaptive", "effort": "low"}]),
        "reasoning_effort": st.sampled_from(["none", "minimal", "low", "high", "max", 7]),
        "chat_template_kwargs": st.sampled_from(
            [{}, {"thinking": True}, {"thinking": False}, {"enable_thinking": False}, {"reasoning_effort": "high"},
             {"thinking": None, "odd": [1, {"a": None}]}, {"thinking_effort": "low"}]
        ),
        "continue_final_message": st.booleans(),
        "response_format": st.sampled_from(
            [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}]
        ),
        "separate_reasoning": st.booleans(),
        "stop": st.sampled_from(["x", ["x", "y"]]),
        "temperature": st.sampled_from([0, 0.6, 1, 1.0]),
        "rid": st.sampled_from(["r1", "r1_t2"]),
        "stream": st.booleans(),
    },
)  # fmt: skip


@pytest.mark.parametrize("model", CONFIGS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_earlier_requests_change_nothing(model: str, data: st.DataObject) -> None:
    warm = Pool(fast=True)
    shapes = data.draw(st.lists(parameters, min_size=1, max_size=2), label="parameters")
    turns = st.tuples(
        st.sampled_from(shapes), conversations, st.sampled_from([model, model, f"alias-of-{model}", "house-model"]),
        st.sampled_from([0, 0, 0, 1]),
    )  # fmt: skip
    age = 0
    for chosen, messages, name, older in data.draw(st.lists(turns, min_size=2, max_size=6), label="requests"):
        age += older
        if older:
            warm.move_on(age)
        fresh = Pool(fast=False)
        fresh.move_on(age)
        body = json.dumps({"model": name, "messages": messages, "rid": "r", **chosen}).encode()
        expected = outcome(fresh, body)
        assert outcome(warm, body) == expected
        assert outcome(warm, body) == expected
