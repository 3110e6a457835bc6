"""Kimi-K3: a message of channels (XTML), calls in the ``tools`` channel.

::

    <|open|>response<|sep|>text<|close|>response<|sep|>
    <|open|>tools<|sep|>
    <|open|>call tool="NAME" index="1"<|sep|>
    <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>
    <|close|>call<|sep|>
    <|close|>tools<|sep|>
    <|close|>message<|sep|>

(without the line breaks). The prompt may end behind the opening of the response, so text counts from the start. The
type of a value is in the markup: ``string`` is text as it stands, anything else JSON. A call counts when it is closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from smg.models.family import Family, OutputParser, ReasoningFormat, TagRequest, ToolCall, ToolFormat, ToolSpec
from smg.models.machine import ToolMachine
from smg.models.reasoning_blocks import encode_kimi_k3, kimi_k3_parser
from smg.models.scan import Markers
from smg.models.typed_values import dump, is_json, marker_free, quote
from smg.models.xtml_tag import kimi_k3_tag

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
# White space around the word of a tag is tolerated; the bound keeps what is held back, and so the work, small.
_PAD = 32
_WORD_TAG = re.compile(rf"<\|(open|close)\|>\s{{0,{_PAD}}}([a-z]+)\s{{0,{_PAD}}}<\|sep\|>")
_WORD_PREFIX = re.compile(rf"<\|(open|close)\|>\s{{0,{_PAD}}}(?:([a-z]+)(\s{{0,{_PAD}}})(<[|sep>]{{0,5}})?)?")
_ATTRIBUTE = re.compile(r'([a-z]+)\s*=\s*"([^"]*)"')
_TEXT_TAGS = frozenset(("open tools", "open response", "close tools", "close response", "close message"))
_VALUE_TAGS = frozenset(("close argument",))

_EDGES = Markers([_OPEN, _CLOSE])
_TAG_ENDS = Markers([_OPEN, _CLOSE, _SEP])


def _could_grow(tail: str, allowed: frozenset[str]) -> bool:
    """Whether ``tail``, which begins with a complete edge marker, can become one of the tags."""
    found = _WORD_PREFIX.fullmatch(tail)
    if found is None:
        return False
    edge, word, blank, separator = found.groups()
    written = f"{edge} {word or ''}"
    if blank or separator:
        return written in allowed and _SEP.startswith(separator or "")
    return any(each.startswith(written) for each in allowed)


def _attributes(header: str) -> dict[str, str]:
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(header)}


class KimiK3Parser(ToolMachine):
    """Text is sent at once, a call when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._tail = ""
        self._step: Callable[[str, int], int] = self._outside
        self._parts: list[str] = []  # pieces of a tag or of a value
        self._opens = False  # the tag that is being read is an opening one
        self._name = ""
        self._values: dict[str, str] | None = None  # JSON text by key; None outside of a call
        self._key = ""
        self._is_text = False

    def _run(self, text: str) -> None:
        if self._tail:
            text = self._tail + text
            self._tail = ""
        pos, size = 0, len(text)
        while pos < size:
            pos = self._step(text, pos)

    def _end(self) -> None:
        tail, self._tail = self._tail, ""
        if self._step == self._outside:
            self._text(tail)
        self._step = self._outside

    def _word_tag(self, text: str, pos: int, allowed: frozenset[str], keep: Callable[[str], None]) -> tuple[int, str]:
        """The next tag of ``allowed`` from ``pos`` on: (where reading goes on, "open WORD" or "close WORD"). The text
        in front of it goes to ``keep``; the word is empty when the text is used up."""
        start = pos
        while True:
            at, marker = _EDGES.search(text, pos)
            found = _WORD_TAG.match(text, at) if marker else None
            word = f"{found.group(1)} {found.group(2)}" if found is not None else ""
            if word in allowed and found is not None:
                keep(text[start:at])
                return found.end(), word
            if not marker or _could_grow(text[at : at + 2 * _PAD + 40], allowed):
                keep(text[start:at])
                self._tail = text[at:]
                return len(text), ""
            pos = at + len(marker)

    def _outside(self, text: str, pos: int) -> int:
        pos, word = self._word_tag(text, pos, _TEXT_TAGS, self._text)
        if word == "open tools":
            self._values = None
            self._step = self._in_section
        elif word == "close response":
            self._gap = []
        return pos

    def _in_section(self, text: str, pos: int) -> int:
        """Between the tags of the tools channel, where other text means nothing."""
        at, marker = _EDGES.search(text, pos)
        if not marker:
            self._tail = text[at:]
            return len(text)
        return self._begin_tag(at, marker)

    def _begin_tag(self, at: int, marker: str) -> int:
        self._opens = marker == _OPEN
        self._parts = []
        self._step = self._in_tag
        return at + len(marker)

    def _in_tag(self, text: str, pos: int) -> int:
        at, marker = _TAG_ENDS.search(text, pos)
        self._parts.append(text[pos:at])
        if not marker:
            self._tail = text[at:]
            return len(text)
        if marker != _SEP:
            return self._begin_tag(at, marker)
        header = "".join(self._parts).strip()
        self._parts = []
        self._step = self._in_section
        self._tag(header)
        return at + len(marker)

    def _tag(self, header: str) -> None:
        word = header.split(None, 1)[0] if header else ""
        if not self._opens:
            if word == "call":
                self._end_of_call()
            elif word == "tools":
                self._step = self._outside
            return
        attributes = _attributes(header)
        if word == "call":
            self._name = attributes.get("tool", "").strip()
            self._values = {}
        elif word == "argument" and self._values is not None and "key" in attributes:
            self._key = attributes["key"]
            self._is_text = attributes.get("type") == "string"
            self._step = self._in_value

    def _in_value(self, text: str, pos: int) -> int:
        pos, word = self._word_tag(text, pos, _VALUE_TAGS, self._parts.append)
        if word and self._values is not None:
            value = "".join(self._parts)
            trimmed = value.strip()
            is_value = not self._is_text and trimmed != "" and is_json(trimmed)
            self._values[self._key] = trimmed if is_value else quote(value)
            self._step = self._in_section
        return pos

    def _end_of_call(self) -> None:
        values, self._values = self._values, None
        if values is not None and self._name:
            pairs = ",".join(f"{quote(key)}:{value}" for key, value in values.items())
            self._whole_call(self._name, "{" + pairs + "}")


def _parser(tools: Sequence[ToolSpec]) -> OutputParser:
    return KimiK3Parser()


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, dict):
        return "object"
    return "array" if isinstance(value, list) else "number"


def _argument(key: str, value: Any) -> str:
    kind, written = _type_of(value), value
    if not isinstance(value, str):
        written = marker_free(value) if "<|" in dump(value) else dump(value)
    elif "<|" in value or value.endswith("<"):
        kind, written = "any", marker_free(value)
    return f'{_OPEN}argument key="{_escape(key)}" type="{kind}"{_SEP}{written}{_CLOSE}argument{_SEP}'


def _encode(text: str, calls: Sequence[ToolCall]) -> str:
    said = f"{_OPEN}response{_SEP}{text}{_CLOSE}response{_SEP}" if text else ""
    if not calls:
        return said
    written = "".join(
        f'{_OPEN}call tool="{_escape(call.name)}" index="{number}"{_SEP}'
        f"{''.join(_argument(key, value) for key, value in call.arguments.items())}"
        f"{_CLOSE}call{_SEP}"
        for number, call in enumerate(calls, 1)
    )
    return f"{said}{_OPEN}tools{_SEP}{written}{_CLOSE}tools{_SEP}"


def _structural_tag(request: TagRequest) -> dict[str, Any]:
    return kimi_k3_tag(request)


_SPECIAL = frozenset((_OPEN, _CLOSE, _SEP))

FAMILY: Family = Family(
    name="kimi_k3",
    tools=(
        ToolFormat(
            name="kimi_k3",
            parser=_parser,
            stems=("kimi-k3", "kimi_k3"),
            special_tokens=_SPECIAL,
            structural_tag=_structural_tag,
            tag_by_default=True,
            encode=_encode,
        ),
    ),
    reasoning=(
        ReasoningFormat(
            name="kimi_k3",
            rank=10,
            patterns=("kimi-k3", "kimi_k3"),
            open="<|open|>think<|sep|>",
            close="<|close|>think<|sep|>",
            needs_special_tokens=True,
            thinking_toggle=True,
            special_tokens=_SPECIAL,
            parser=kimi_k3_parser,
            encode=encode_kimi_k3,
        ),
    ),
)
