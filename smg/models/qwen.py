"""Qwen2.5 and Qwen3: JSON in ``<tool_call>`` tags (the Hermes format), ``<think>`` reasoning.

Format as written by the chat templates of Qwen2.5 and Qwen3: ``{"name": ..., "arguments": {...}}`` on a line of its own
between ``<tool_call>`` and ``</tool_call>``, blocks separated by a newline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from smg.messages import ContentDelta, ParserEvent
from smg.models.family import Family, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.json_stream import CallReader
from smg.models.machine import SPACE, ToolMachine, call_object
from smg.models.scan import Markers

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_OPENER = Markers([_OPEN])
_BEHIND_CALLS = Markers([_OPEN, "<|im_end|>"])
_EDGES = Markers([_OPEN, _CLOSE])

_BEHIND_OBJECT = re.compile(r"[\s}\]]*")

_TEXT, _OPENED, _CALL, _CLOSING, _MALFORMED = range(5)


class HermesParser(ToolMachine):
    """``<tool_call>`` counts as an opener only when a ``{`` follows.

    A block that holds no call is skipped when the text has any call, and content when it has none; so text behind such
    a block waits (``_doubt``) until the first call or the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state = _TEXT
        self._call = CallReader()
        self._doubt: list[tuple[bool, str]] = []
        self._steps = (self._in_text, self._opened, self._in_call, self._closing, self._malformed)

    def feed(self, text: str) -> list[ParserEvent]:
        if self._state == _TEXT and self._gap is None and not self._rest and not self._doubt and "<" not in text:
            return [ContentDelta(text)] if text else []
        return super().feed(text)

    def _end(self) -> None:
        state = self._state
        if state == _TEXT:
            self._text(self._rest)
        elif state == _CALL and self._settle(self._call):
            pass
        elif state in (_OPENED, _CALL) or state == _MALFORMED:
            self._skip_block(self._take_held() + self._rest)
        if not self._calls:
            self._flush_doubt(markup=True)
            self._release_gap()

    def _in_text(self, text: str, pos: int) -> int:
        found, marker = (_BEHIND_CALLS if self._calls else _OPENER).search(text, pos)
        self._text(text[pos:found])
        if not marker:
            self._rest = text[found:]
            return len(text)
        if marker == _OPEN:
            self._held = [marker]
            self._state = _OPENED
        return found + len(marker)

    def _opened(self, text: str, pos: int) -> int:
        end = SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        self._held.append(text[pos:end])
        if end < len(text):
            if text[end] == "{":
                self._call = CallReader()
                self._state = _CALL
            else:
                self._text(self._take_held())
                self._state = _TEXT
        return end

    def _in_call(self, text: str, pos: int) -> int:
        call = self._call
        end = call.feed(text, pos)
        if not self._progress(call):
            self._held.append(text[pos:end])
        if call.done or call.failed:
            announced = self._settle(call)
            if announced:
                self._held.clear()
            self._state = _CLOSING if announced and call.done else _MALFORMED
        return end

    def _closing(self, text: str, pos: int) -> int:
        """The object is complete. The closing tag may be missing; a bracket too many in front of it is a slip."""
        end = _BEHIND_OBJECT.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        self._held.append(text[pos:end])
        rest = text[end : end + len(_CLOSE)]
        if rest == _CLOSE:
            self._held.clear()
            self._state = _TEXT
            return end + len(_CLOSE)
        if _CLOSE.startswith(rest):
            self._rest = rest
            return len(text)
        self._state = _TEXT
        self._text(self._take_held())
        return end

    def _malformed(self, text: str, pos: int) -> int:
        found, marker = _EDGES.search(text, pos)
        self._held.append(text[pos:found])
        if not marker:
            self._rest = text[found:]
            return len(text)
        if marker == _CLOSE:
            self._held.append(marker)
            found += len(marker)
        self._skip_block(self._take_held())
        self._state = _TEXT
        return found

    # doubtful blocks

    def _skip_block(self, block: str) -> None:
        if not self._calls:
            if self._gap:
                self._doubt.append((True, "".join(self._gap)))
            self._doubt.append((True, block))
        self._gap = []

    def _content(self, text: str) -> None:
        if self._doubt:
            self._doubt.append((False, text))
        else:
            super()._content(text)

    def _begin_call(self, name: str) -> None:
        self._flush_doubt(markup=False)
        super()._begin_call(name)

    def _flush_doubt(self, *, markup: bool) -> None:
        doubt, self._doubt = self._doubt, []
        for is_markup, text in doubt:
            if markup or not is_markup:
                self._content(text)


def _parser(tools: Sequence[ToolSpec]) -> HermesParser:
    return HermesParser()


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    return text + "\n".join(f"{_OPEN}\n{call_object(call)}\n{_CLOSE}" for call in calls)


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": f'{_OPEN}\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": tool.parameters},
            "end": f"}}\n{_CLOSE}",
        }
        for tool in request.tools
        if tool.name
    ]
    return {"format": {"type": "triggered_tags", "triggers": [_OPEN], "tags": tags, "at_least_one": True}}


FAMILY: Family = Family(
    name="qwen",
    tools=(
        ToolFormat(
            name="qwen",
            parser=_parser,
            stems=("qwen",),
            openers=(_OPEN,),
            special_tokens=frozenset({_OPEN, _CLOSE}),
            structural_tag=_structural_tag,
            encode=_encode,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="qwen3_thinking",
            rank=5,
            patterns=("qwen3-thinking", "qwen-thinking"),
            open="<think>",
            close="</think>",
            starts_in_reasoning=True,
        ),
        ReasoningFormat(
            name="qwen3",
            rank=6,
            patterns=("qwen3", "qwen"),
            open="<think>",
            close="</think>",
            thinking_toggle=True,
        ),
    ),
)
