"""Command-R, Command-A and other Cohere models: actions, response and text markers, ``<|START_THINKING|>`` reasoning.

Format as written by the chat templates of Command-R7B and Command-A.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from smg.messages import ParserEvent
from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.json_stream import CallArrayReader, CallReader
from smg.models.machine import SPACE, TrimmedMachine
from smg.models.scan import Markers

_ACTION, _ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
_DROPPED = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

_IN_CONTENT = Markers([_ACTION, *_DROPPED])
_BEHIND_CALLS = Markers([_ACTION, *_DROPPED, "<|END_OF_TURN_TOKEN|>"])
_END_MARKER = Markers([_ACTION_END])

_NAMES, _ARGUMENTS = ("tool_name", "name"), ("parameters", "arguments")

_TEXT, _ACTION_START, _OBJECT, _ARRAY, _ACTION_CLOSE, _MALFORMED = range(6)


class CohereParser(TrimmedMachine):
    """An action counts when its end marker is there, so its calls are reported then. A malformed action is dropped, an
    unterminated one is text."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _TEXT
        self._array = CallArrayReader(_NAMES, _ARGUMENTS)
        self._object = CallReader(_NAMES, _ARGUMENTS)
        self._found: list[tuple[str, str]] = []
        self._steps = (
            self._in_text,
            self._action_start,
            self._in_object,
            self._in_array,
            self._action_close,
            self._malformed,
        )

    def feed(self, text: str) -> list[ParserEvent]:
        if self._state == _TEXT and not self._rest and "<" not in text:
            return self._only_text(text)
        return super().feed(text)

    def _end(self) -> None:
        self._text(self._take_held() + self._rest)

    def _in_text(self, text: str, pos: int) -> int:
        found, marker = (_BEHIND_CALLS if self._calls else _IN_CONTENT).search(text, pos)
        self._text(text[pos:found])
        if not marker:
            self._rest = text[found:]
            return len(text)
        if marker == _ACTION:
            self._held = [marker]
            self._found.clear()
            self._state = _ACTION_START
        return found + len(marker)

    def _action_start(self, text: str, pos: int) -> int:
        end = SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        self._held.append(text[pos:end])
        if end < len(text):
            if text[end] == "[":
                self._array = CallArrayReader(_NAMES, _ARGUMENTS)
                self._state = _ARRAY
            elif text[end] == "{":
                self._object = CallReader(_NAMES, _ARGUMENTS)
                self._state = _OBJECT
            else:
                self._state = _MALFORMED
        return end

    def _in_object(self, text: str, pos: int) -> int:
        end = self._object.feed(text, pos)
        self._held.append(text[pos:end])
        if self._object.done:
            self._collect(self._object)
            self._state = _ACTION_CLOSE
        elif self._object.failed:
            self._state = _MALFORMED
        return end

    def _in_array(self, text: str, pos: int) -> int:
        array = self._array
        end = array.feed(text, pos)
        self._held.append(text[pos:end])
        if array.element is not None and array.element.done:
            self._collect(array.element)
            array.element = None
        if array.done:
            self._state = _ACTION_CLOSE
        elif array.failed:
            self._state = _MALFORMED
        return end

    def _collect(self, call: CallReader) -> None:
        if call.name:
            self._found.append((call.name, "".join(call.fragments)))

    def _action_close(self, text: str, pos: int) -> int:
        """The JSON is complete; only white space may stand before the end marker."""
        end = SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        self._held.append(text[pos:end])
        rest = text[end : end + len(_ACTION_END)]
        if rest == _ACTION_END:
            for name, arguments in self._found:
                self._whole_call(name, arguments)
            self._held.clear()
            self._state = _TEXT
            return end + len(_ACTION_END)
        if _ACTION_END.startswith(rest):
            self._rest = rest
            return len(text)
        self._state = _MALFORMED
        return end

    def _malformed(self, text: str, pos: int) -> int:
        found, marker = _END_MARKER.search(text, pos)
        self._held.append(text[pos:found])
        if not marker:
            self._rest = text[found:]
            return len(text)
        self._held.clear()
        self._state = _TEXT
        return found + len(marker)


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return CohereParser()


_ID, _NAME = '{"tool_call_id": "', '", "tool_name": '


def _behind_id(name: str) -> str:
    return f'{_NAME}{json.dumps(name, ensure_ascii=False)}, "parameters": '


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    if text:
        text = f"<|START_RESPONSE|>{text}<|END_RESPONSE|>"
    if not calls:
        return text
    written = (
        f"{_ID}{number}{_behind_id(call.name)}{json.dumps(call.arguments, ensure_ascii=False)}}}"
        for number, call in enumerate(calls)
    )
    return f"{text}{_ACTION}[\n    " + ",\n    ".join(written) + f"\n]{_ACTION_END}"


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    calls = [
        {
            "type": "tag",
            "begin": _ID,
            "content": {
                "type": "sequence",
                "elements": [
                    {"type": "regex", "pattern": "[0-9]+"},
                    {"type": "const_string", "value": _behind_id(tool.name)},
                    {"type": "json_schema", "json_schema": tool.parameters},
                ],
            },
            "end": "}",
        }
        for tool in request.tools
        if tool.name
    ]
    action = {
        "type": "tag",
        "begin": f"{_ACTION}[\n    ",
        "content": {"type": "tags_with_separator", "tags": calls, "separator": ",\n    ", "at_least_one": True},
        "end": f"\n]{_ACTION_END}",
    }
    return {"format": {"type": "triggered_tags", "triggers": [_ACTION], "tags": [action], "at_least_one": True}}


FAMILY: Family = Family(
    name="cohere",
    tools=(
        ToolFormat(
            name="cohere",
            parser=_parser,
            stems=("command-r", "command-r-plus", "command-a", "c4ai-command", "cohere", "cohereforai"),
            openers=(_ACTION,),
            special_tokens=frozenset({_ACTION, _ACTION_END, *_DROPPED}),
            structural_tag=_structural_tag,
            encode=_encode,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="cohere_cmd",
            rank=15,
            patterns=("command-r", "command-a", "c4ai-command", "cohere"),
            open="<|START_THINKING|>",
            close="<|END_THINKING|>",
        ),
    ),
)
