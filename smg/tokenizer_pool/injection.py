"""Keep control-token text that a client supplied from becoming control tokens.

A prompt is one text; the tokenizer turns every control token's text in it into the control token, no matter whether
the template wrote it or a user did. So where supplied text contains such text (a cheap test on every request), the
prompt is rendered once more to learn where that text went, and those places are encoded as ordinary text:

1. a private mark is put in front of every occurrence. If the marked rendering without its marks is the plain
   rendering, the marks tell the places exactly;
2. else the template works on the text (splits at it, escapes it, measures it). Every occurrence is replaced by a
   private character that stands for it while the template runs: the template cannot act on it, and the places are
   known;
3. else (the template escapes private characters) a space is put behind the first character of every occurrence.

What counts as control-token text: special tokens; tokens with a bar in them (``<|user|>``, also full-width); and other
added tokens that the template itself writes (``<think>``, ``<tool_call>``). The last group may stand in system,
developer and assistant messages: there they are part of instructions and of what the model itself wrote.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import orjson

from smg.models.prompt import Piece, PromptError
from smg.tokenizer_pool.template import FAILED, Messages, Rendered, TemplateInput
from smg.vocab.controls import AddedToken, JsonFinder, TextFinder

_BARS = ("|", "\uff5c")
_PRIVATE = range(0xE000, 0xF8FF)
_MAX_STAND_INS = 256
_MAX_BREAKS = 4
_SPEAKERS_OF_MARKERS = frozenset({"system", "developer", "root", "assistant"})

Render = Callable[[TemplateInput], Rendered]
Change = Callable[[str], str]


@dataclass(slots=True)
class _Marks:
    """Private characters that occur nowhere in a request or its prompt."""

    mark: str
    stand_ins: list[str]


class ControlGuard:
    """The control tokens of one vocabulary under one template."""

    def __init__(self, added_tokens: Sequence[AddedToken], template_source: str) -> None:
        hard, soft = [], []
        for token in added_tokens:
            if len(token.text) < 2:
                continue  # cannot be told from the character itself
            if token.special or any(bar in token.text for bar in _BARS):
                hard.append(token.text)
            elif token.text.strip() and token.text in template_source:
                soft.append(token.text)
        self._everywhere = TextFinder(hard)
        self._in_user_text = TextFinder([*hard, *soft])
        self._in_json = JsonFinder([*hard, *soft])
        self._tokens = TextFinder([token.text for token in added_tokens])

    def suspects(self, supplied: bytes, messages: Messages) -> bool:
        """Whether supplied text may contain control-token text. ``supplied`` is the JSON form of what a
        client supplied."""
        return self._in_json.search(supplied) or any(
            self._everywhere.search("".join(texts)) for texts in map(_part_texts, messages) if len(texts) > 1
        )

    def pieces(self, given: TemplateInput, plain: Rendered, render: Render) -> list[Piece]:
        """The pieces of a prompt whose supplied text contains control-token text. Raises ``PromptError`` when no way
        of keeping it apart renders."""
        marks = _private_characters(given, plain.text)
        if marks is not None:
            marked = self._render(given, render, lambda finder: _prefixed(finder, marks.mark), marks.mark)
            if marked is not None and marked.replace(marks.mark, "") == plain.text:
                return self._cut(plain.text, _places(marked, marks.mark, self._in_user_text.pattern))
            replaced = self._with_stand_ins(given, render, marks)
            if replaced is not None:
                return replaced
        broken = self._render(given, render, _broken, "")
        if broken is None:
            raise PromptError(FAILED + "control-token text in a message cannot be kept apart")
        return [Piece(broken)]

    def _render(
        self, given: TemplateInput, render: Render, make: Callable[[re.Pattern[str]], Change], seam: str
    ) -> str | None:
        """The prompt with supplied text changed, None when the template cannot render that. ``seam`` goes in front of
        every text part but the first of a message: parts may be joined without anything between."""
        hard, soft = self._everywhere.pattern, self._in_user_text.pattern
        if soft is None:
            return None
        everywhere = make(hard) if hard is not None else _unchanged
        changed = _change(given, everywhere, make(soft), seam)
        try:
            return render(changed).text
        except Exception:  # the plain conversation did render; this one need not
            return None

    def _with_stand_ins(self, given: TemplateInput, render: Render, marks: _Marks) -> list[Piece] | None:
        """Render with one private character in place of every occurrence, then put the text back."""
        assigned: dict[str, str] = {}

        def stand_in(match: re.Match[str]) -> str:
            if len(assigned) >= len(marks.stand_ins):
                return _break(match)
            return assigned.setdefault(match.group(), marks.stand_ins[len(assigned)])

        text = self._render(given, render, lambda pattern: lambda value: pattern.sub(stand_in, value), marks.mark)
        if text is None or any(_escape(character) in text.lower() for character in (marks.mark, *assigned.values())):
            return None
        originals = {character: token for token, character in assigned.items()}
        pattern = re.compile("|".join([marks.mark, *originals]))
        parts: list[str] = []
        places: list[tuple[int, int]] = []
        size = position = 0
        for match in pattern.finditer(text):
            before = text[position : match.start()]
            token = originals.get(match.group(), "")
            places.append((size + len(before), size + len(before) + len(token)))
            parts += (before, token)
            size = places[-1][1]
            position = match.end()
        parts.append(text[position:])
        return self._cut("".join(parts), places)

    def _cut(self, text: str, places: list[tuple[int, int]]) -> list[Piece]:
        """Cut a prompt at the added tokens that the template wrote. A run between two of them that holds supplied
        control-token text is not trusted as a whole: a tokenizer splits there anyway, so other ids do not change."""
        ends = [end for _, end in places]
        pieces: list[Piece] = []
        start = 0  # of the trusted text that is not yet in a piece
        run = 0  # of the run behind the last token that counts
        tainted = False
        matches = self._tokens.pattern.finditer(text) if self._tokens.pattern is not None else iter(())
        for match in matches:
            if _touches(match, places, ends):
                tainted = True
                continue
            if tainted:
                pieces += (Piece(text[start:run]), Piece(text[run : match.start()], trusted=False))
                start, tainted = match.start(), False
            run = match.end()
        if tainted:
            pieces += (Piece(text[start:run]), Piece(text[run:], trusted=False))
        else:
            pieces.append(Piece(text[start:]))
        return [piece for piece in pieces if piece.text]


def json_form(value: Any) -> bytes:
    """Something that the client supplied as UTF-8 JSON without escapes for non-ASCII."""
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):  # integers beyond 64 bits, odd keys
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
        return text.encode("utf-8", "replace")  # a lone surrogate is no part of any token


def _touches(match: re.Match[str], places: list[tuple[int, int]], ends: list[int]) -> bool:
    """Whether a match overlaps a place. A place without length, a seam, counts when it is inside the match."""
    for start, end in places[bisect_left(ends, match.start()) :]:
        if start >= match.end():
            return False
        if end > match.start() and (start < end or start > match.start()):
            return True
    return False


def _places(marked: str, mark: str, pattern: re.Pattern[str] | None) -> list[tuple[int, int]]:
    """Where, in the text without marks, the marked occurrences are."""
    places = []
    parts = marked.split(mark)
    position = len(parts[0])
    for part in parts[1:]:
        match = pattern.match(part) if pattern is not None else None
        places.append((position, position + (match.end() if match else 0)))
        position += len(part)
    return places


def _prefixed(pattern: re.Pattern[str], mark: str) -> Change:
    return lambda text: pattern.sub(lambda match: mark + match.group(), text)


def _broken(pattern: re.Pattern[str]) -> Change:
    def change(text: str) -> str:
        for _ in range(_MAX_BREAKS):
            if not pattern.search(text):
                return text
            text = pattern.sub(_break, text)
        raise PromptError(FAILED + "control-token text in a message cannot be kept apart")

    return change


def _break(match: re.Match[str]) -> str:
    return match.group()[0] + " " + match.group()[1:]


def _unchanged(text: str) -> str:
    return text


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _private_characters(given: TemplateInput, prompt: str) -> _Marks | None:
    """Characters of the private use area that nothing here contains, None when there are too few."""
    supplied = json_form((given.messages, given.tools, given.documents, given.kwargs))
    used = set(supplied.decode()) | set(prompt)
    free = list(islice((chr(code) for code in _PRIVATE if chr(code) not in used), _MAX_STAND_INS + 1))
    return _Marks(free[0], free[1:]) if len(free) > 1 else None


def _part_texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _change(given: TemplateInput, trusted_voice: Change, other_voice: Change, seam: str) -> TemplateInput:
    """The input with every supplied string changed: ``trusted_voice`` for speakers whose markers count, ``other_voice``
    for all else."""
    voices = [
        trusted_voice if message.get("role") in _SPEAKERS_OF_MARKERS else other_voice for message in given.messages
    ]
    messages = [_changed_message(message, voice, seam) for message, voice in zip(given.messages, voices, strict=True)]
    texts = {place: voices[place[0]](text) for place, text in given.argument_texts.items()}
    return replace(
        given,
        messages=messages,
        argument_texts=texts,
        tools=_walk(given.tools, other_voice),
        documents=_walk(given.documents, other_voice),
        kwargs={name: _walk(value, other_voice) for name, value in (given.kwargs or {}).items()},
        fast=False,
    )


def _changed_message(message: dict[str, Any], change: Change, seam: str) -> dict[str, Any]:
    changed = {}
    for name, value in message.items():
        if name == "role":
            changed[name] = value
        elif name == "content" and isinstance(value, list):
            changed[name] = list(_changed_parts(value, change, seam))
        else:
            changed[name] = _walk(value, change)
    return changed


def _changed_parts(parts: list[Any], change: Change, seam: str) -> Iterable[Any]:
    later = False
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text = change(part["text"])
            yield part | {"text": seam + text if later else text}
            later = True
        else:
            yield _walk(part, change)


def _walk(value: Any, change: Change) -> Any:
    """A JSON value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_walk(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key) if isinstance(key, str) else key: _walk(item, change) for key, item in value.items()}
    return value
