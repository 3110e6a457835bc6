"""The example family of docs/models.md works as printed."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path

import pytest

from smg.messages import ContentDelta, ToolCallArguments, ToolCallStart
from smg.models.family import Family, TagRequest, ToolCall, ToolSpec
from smg.models.reasoning import encode_reasoning, reasoning_parser

GUIDE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(scope="module")
def family() -> Family:
    (source,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    module = types.ModuleType("seed_oss")
    exec(compile(source, str(GUIDE), "exec"), module.__dict__)
    declared = module.FAMILY
    assert isinstance(declared, Family)
    return declared


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_come_back(family: Family, size: int) -> None:
    (tool,) = family.tools
    assert tool.encode is not None
    spec = ToolSpec("find", {"properties": {"q": {"type": "string"}, "n": {"type": "integer"}}})
    calls = [ToolCall("find", {"q": "two\nlines </seed:tool_call>", "n": 3}), ToolCall("find", {})]
    output = tool.encode("Looking.\n", calls)
    parser = tool.parser([spec])
    events = [event for at in range(0, len(output), size) for event in parser.feed(output[at : at + size])]
    events += parser.finish()
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == "Looking.\n"
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["find", "find"]
    for index, call in enumerate(calls):
        fragments = [
            event.fragment for event in events if isinstance(event, ToolCallArguments) and event.index == index
        ]
        assert json.loads("".join(fragments)) == call.arguments


def test_thoughts_come_back(family: Family) -> None:
    (thought,) = family.reasoning
    events = reasoning_parser(thought).feed(encode_reasoning(thought, "plan", "ok"))
    assert [event.text for event in events if hasattr(event, "text")] == ["plan", "ok"]


def test_the_tag_names_the_tools(family: Family) -> None:
    (tool,) = family.tools
    assert tool.structural_tag is not None
    assert "<function=find>" in json.dumps(tool.structural_tag(TagRequest([ToolSpec("find")])))


def test_the_cases_hold(family: Family) -> None:
    (source,) = re.findall(r"```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    called, thought = json.loads(source)
    events = family.tools[0].parser([ToolSpec("find")]).feed(called["text"])
    assert [event.text for event in events if isinstance(event, ContentDelta)] == [called["expect"]["content"]]
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["find"]
    events = reasoning_parser(family.reasoning[0], armed=True).feed(thought["text"])
    assert [event.text for event in events if hasattr(event, "text")] == ["plan", "ok"]
