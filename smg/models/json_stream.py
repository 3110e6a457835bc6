"""Strict JSON (RFC 8259) read in pieces and written out again while it grows.

``JsonReader`` reads one value and appends its text to a sink as soon as a piece of it is certain, so that what was
written can at any time be completed to valid JSON by closing what is open (``close``). Names and separators wait until
the value behind them has begun; numbers and literals until they are complete; strings grow. ``CallReader`` reads an
object that may be a tool call and streams its arguments. Both look at every character once, never raise, and stop at
the first character that can't belong to the value, which is where the caller goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Protocol

MAX_DEPTH = 128
MAX_SCALAR = 1024

_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _AFTER, _STRING, _SCALAR = range(8)

_SPACE = re.compile(r"[ \t\n\r]*")
# A surrogate escape is only taken with its partner: half a character is no text.
_STRING_TEXT = re.compile(
    r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPE_PREFIX = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?|\\(?:u[0-9a-fA-F]{0,3})?"
)
_LONGEST_ESCAPE = len(r"\ud83d\ude80")
_SCALAR_TEXT = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR_START = frozenset("-0123456789tfn")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = frozenset({"true", "false", "null"})


class Sink(Protocol):
    """What a reader writes to: a list, or ``DISCARD``."""

    def append(self, text: str, /) -> None: ...


class _Discard:
    def append(self, text: str, /) -> None:
        return None


DISCARD = _Discard()


def decode_string(literal: str) -> str:
    """The text of a JSON string literal that ``JsonReader`` wrote (quotes included)."""
    if "\\" not in literal:
        return literal[1:-1]
    return str(json.loads(literal))


class JsonReader:
    """Reads one JSON value.

    ``done``: the value is complete (a number or literal outside any container needs the character behind it, or
    ``end``). ``failed``: the text is not JSON. ``compact`` leaves white space between tokens out. A lone surrogate
    escape is written as U+FFFD. Nesting is limited to ``MAX_DEPTH`` and a number to ``MAX_SCALAR`` characters; more is
    an error.
    """

    __slots__ = ("_carry", "_compact", "_in_key", "_pending", "_sink", "_stack", "_state", "done", "failed")

    def __init__(self, sink: Sink, *, compact: bool = True) -> None:
        self._compact = compact
        self.reset(sink)

    def reset(self, sink: Sink) -> None:
        """Start over with another value that goes to ``sink``."""
        self._sink = sink
        self._state = _VALUE
        self._stack: list[str] = []
        self._pending = ""
        self._carry = ""
        self._in_key = False
        self.done = False
        self.failed = False

    def feed(self, text: str, pos: int = 0) -> int:
        """Read ``text`` from ``pos`` on. Returns the index behind the last character that was used: ``len(text)``
        while the value goes on, else the place of the first character that isn't part of it."""
        size = len(text)
        while pos < size and not (self.done or self.failed):
            if self._state == _STRING:
                pos = self._read_string(text, pos, size)
            elif self._state == _SCALAR:
                pos = self._read_scalar(text, pos, size)
            else:
                char = text[pos]
                if char in " \t\n\r":
                    pos = self._skip_space(text, pos)
                else:
                    pos += self._step(char)
        return pos

    def end(self) -> None:
        """The text ended: a number or literal that is the whole value may be complete now."""
        if self._state == _SCALAR and not self._stack:
            self._end_scalar()

    def close(self) -> str:
        """What makes the text written so far valid JSON: open strings and containers closed. "" when nothing is open,
        which includes a value of which nothing was written yet."""
        if self._pending[:1] in ("{", "["):
            return ""
        tail = '"' if self._state == _STRING and not self._in_key else ""
        return tail + "".join(reversed(self._stack))

    def _skip_space(self, text: str, pos: int) -> int:
        end = _SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        if not self._compact and self._stack:
            self._pending += text[pos:end]
        return end

    def _step(self, char: str) -> int:
        """One structural character; the number of characters it used (0: not used, the state or ``failed`` changed)."""
        state = self._state
        if state == _AFTER:
            if char == ",":
                self._pending += ","
                self._state = _KEY if self._stack[-1] == "}" else _VALUE
                return 1
            return self._pop() if char == self._stack[-1] else self._fail()
        if state in (_KEY, _FIRST_KEY):
            if char == '"':
                self._pending += '"'
                self._in_key = True
                self._state = _STRING
                return 1
            return self._pop() if char == "}" and state == _FIRST_KEY else self._fail()
        if state == _COLON:
            if char == ":":
                self._pending += ":"
                self._state = _VALUE
                return 1
            return self._fail()
        return self._begin_value(char)

    def _begin_value(self, char: str) -> int:
        if char == '"':
            self._commit('"')
            self._in_key = False
            self._state = _STRING
            return 1
        if char == "{" or char == "[":
            if len(self._stack) == MAX_DEPTH:
                return self._fail()
            if self._stack:
                self._commit(char)
            else:
                self._pending = char  # a root bracket alone says nothing yet
            self._stack.append("}" if char == "{" else "]")
            self._state = _FIRST_KEY if char == "{" else _FIRST_ITEM
            return 1
        if char in _SCALAR_START:
            self._carry = ""
            self._state = _SCALAR
            return 0
        return self._pop() if char == "]" and self._state == _FIRST_ITEM else self._fail()

    def _fail(self) -> int:
        self.failed = True
        return 0

    def _pop(self) -> int:
        self._commit(self._stack.pop())
        self._after_value()
        return 1

    def _after_value(self) -> None:
        if self._stack:
            self._state = _AFTER
        else:
            self.done = True

    def _commit(self, text: str) -> None:
        if self._pending:
            text = self._pending + text
            self._pending = ""
        self._sink.append(text)

    def _write(self, text: str) -> None:
        if self._in_key:
            self._pending += text
        else:
            self._sink.append(text)

    def _read_string(self, text: str, pos: int, size: int) -> int:
        if self._carry:  # half an escape from the last piece
            return self._finish_escape(text, pos)
        end = _STRING_TEXT.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        if end > pos:
            self._write(text[pos:end])
        if end == size:
            return end
        char = text[end]
        if char == '"':
            self._write('"')
            if self._in_key:
                self._state = _COLON
            else:
                self._after_value()
            return end + 1
        if char != "\\":
            return end + self._fail()
        return end + self._odd_escape(text[end : end + _LONGEST_ESCAPE], end + _LONGEST_ESCAPE > size)

    def _odd_escape(self, text: str, at_end: bool) -> int:
        """``text`` begins with an escape that is incomplete, half a surrogate pair, or none. Returns what was used."""
        prefix = _ESCAPE_PREFIX.match(text)
        if prefix and at_end and prefix.end() == len(text):
            self._carry = text
            return len(text)
        if lone := _LONE_SURROGATE.match(text):
            self._write(r"\ufffd")
            return lone.end()
        self.failed = True
        return prefix.end() if prefix else 0

    def _finish_escape(self, text: str, pos: int) -> int:
        carry, self._carry = self._carry, ""
        piece = carry + text[pos : pos + _LONGEST_ESCAPE - len(carry)]
        end = _STRING_TEXT.match(piece).end()  # type: ignore[union-attr]  # matches the empty text too
        if end:
            self._write(piece[:end])
        else:
            end = self._odd_escape(piece, len(piece) < _LONGEST_ESCAPE)
            if not self._carry:  # of half a surrogate pair only the first escape was used
                self._carry = carry[end:]
        return pos + max(0, end - len(carry))

    def _read_scalar(self, text: str, pos: int, size: int) -> int:
        end = _SCALAR_TEXT.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        end = min(end, pos + MAX_SCALAR + 1 - len(self._carry))
        self._carry += text[pos:end]
        if end < size or len(self._carry) > MAX_SCALAR:
            self._end_scalar()
        return end

    def _end_scalar(self) -> None:
        scalar, self._carry = self._carry, ""
        if len(scalar) > MAX_SCALAR or not (scalar in _LITERALS or _NUMBER.fullmatch(scalar)):
            self.failed = True
            return
        self._commit(scalar)
        self._after_value()


_OPEN, _FIRST_NAME, _NAME_START, _NAME, _NAME_END, _VALUE_START, _IN_VALUE, _VALUE_END = range(8)
_SKIP, _CALL_NAME, _ARGUMENTS, _HELD_ARGUMENTS = range(4)


class CallReader:
    """Reads one JSON object that may be a tool call.

    The name is under one of ``names``, the arguments under one of ``arguments``. Keys may come in any order and other
    keys are skipped; of several names or arguments the first counts. ``name`` is set when it is complete, trimmed and
    not empty. ``fragments`` collects argument text for the caller to take away; it stays empty until the arguments are
    known to stand as they are. ``null`` and missing arguments become ``{}`` at the end of the object, a string that
    holds a JSON object becomes that object. ``has_arguments``: the key was seen.
    """

    __slots__ = (
        "_arguments",
        "_literal",
        "_names",
        "_reader",
        "_role",
        "_started",
        "_state",
        "done",
        "failed",
        "fragments",
        "has_arguments",
        "name",
    )

    def __init__(
        self, names: Sequence[str] = ("name",), arguments: Sequence[str] = ("arguments", "parameters")
    ) -> None:
        self._names = names
        self._arguments = arguments
        self._literal: list[str] = []
        self._reader = JsonReader(self._literal)
        self._state = _OPEN
        self._role = _SKIP
        self._started = False
        self.name = ""
        self.fragments: list[str] = []
        self.has_arguments = False
        self.done = False
        self.failed = False

    def feed(self, text: str, pos: int = 0) -> int:
        """As ``JsonReader.feed``."""
        size = len(text)
        reader = self._reader
        while pos < size and not (self.done or self.failed):
            state = self._state
            if state in (_IN_VALUE, _NAME):
                pos = reader.feed(text, pos)
                if reader.failed:
                    self.failed = True
                elif reader.done:
                    self._end_value()
                continue
            char = text[pos]
            if char in " \t\n\r":
                pos += 1
            elif state == _VALUE_START:
                self._begin_value(char)
            else:
                pos += self._step(state, char)
        return pos

    def close(self) -> str:
        """What makes the arguments taken so far a valid JSON value, for a call that ends before its time."""
        if not self._started:
            return "{}"
        return self._reader.close() if self._state == _IN_VALUE and self._role == _ARGUMENTS else ""

    def _step(self, state: int, char: str) -> int:
        if char == '"' and state in (_FIRST_NAME, _NAME_START):
            self._literal.clear()
            self._reader.reset(self._literal)
            self._state = _NAME
            return 0
        if char == ":" and state == _NAME_END:
            self._state = _VALUE_START
        elif char == "," and state == _VALUE_END:
            self._state = _NAME_START
        elif char == "{" and state == _OPEN:
            self._state = _FIRST_NAME
        elif char == "}" and state in (_VALUE_END, _FIRST_NAME):
            self.done = True
            if not self._started:
                self.fragments.append("{}")
        else:
            self.failed = True
            return 0
        return 1

    def _begin_value(self, char: str) -> None:
        sink: Sink = DISCARD
        if self._role == _CALL_NAME and char == '"':
            sink = self._literal
        elif self._role == _ARGUMENTS:
            sink = self.fragments
            if char == '"' or char == "n":
                self._role = _HELD_ARGUMENTS
                sink = self._literal
            else:
                self._started = True
        self._literal.clear()
        self._reader.reset(sink)
        self._state = _IN_VALUE

    def _end_value(self) -> None:
        literal = "".join(self._literal)
        if self._state == _NAME:
            self._role = self._role_of(decode_string(literal))
            self._state = _NAME_END
            return
        self._state = _VALUE_END
        if self._role == _CALL_NAME and literal:
            self.name = decode_string(literal).strip()
        elif self._role == _HELD_ARGUMENTS and literal != "null":
            self._started = True
            self.fragments.append(unwrap_object(literal))

    def _role_of(self, key: str) -> int:
        if key in self._names and not self.name:
            return _CALL_NAME
        if key in self._arguments:
            self.has_arguments = True
            return _SKIP if self._started else _ARGUMENTS
        return _SKIP


def unwrap_object(literal: str) -> str:
    """The JSON object that the string literal holds, compact, or the literal itself when it holds anything else."""
    held = decode_string(literal).strip()
    if held.startswith("{"):
        pieces: list[str] = []
        reader = JsonReader(pieces)
        if reader.feed(held) == len(held) and reader.done:
            return "".join(pieces)
    return literal


_ARRAY_OPEN, _FIRST_ELEMENT, _ELEMENT, _IN_CALL, _IN_OTHER, _ELEMENT_END = range(6)


class CallArrayReader:
    """Reads a JSON array whose objects may be tool calls.

    ``feed`` comes back at every object: when it begins (``element`` is new, nothing of it is read) and when it ends
    (``element.done``; the caller then sets ``element`` to None). Other elements are skipped. ``failed`` is set with the
    place of the error as for ``JsonReader``; an object that is no JSON fails the array.
    """

    __slots__ = ("_arguments", "_names", "_other", "_state", "done", "element", "failed")

    def __init__(
        self, names: Sequence[str] = ("name",), arguments: Sequence[str] = ("arguments", "parameters")
    ) -> None:
        self._names = names
        self._arguments = arguments
        self._other = JsonReader(DISCARD)
        self._state = _ARRAY_OPEN
        self.element: CallReader | None = None
        self.done = False
        self.failed = False

    def feed(self, text: str, pos: int = 0) -> int:
        size = len(text)
        while pos < size and not (self.done or self.failed):
            state = self._state
            if state == _IN_CALL and self.element is not None:
                pos = self.element.feed(text, pos)
                self.failed = self.element.failed
                if self.element.done:
                    self._state = _ELEMENT_END
                return pos
            if state == _IN_OTHER:
                pos = self._other.feed(text, pos)
                self.failed = self._other.failed
                if self._other.done:
                    self._state = _ELEMENT_END
                continue
            char = text[pos]
            if char in " \t\n\r":
                pos += 1
            elif char == "{" and state in (_FIRST_ELEMENT, _ELEMENT):
                self.element = CallReader(self._names, self._arguments)
                self._state = _IN_CALL
                return pos
            else:
                pos += self._step(state, char)
        return pos

    def _step(self, state: int, char: str) -> int:
        if state == _ARRAY_OPEN and char == "[":
            self._state = _FIRST_ELEMENT
        elif state == _ELEMENT_END and char == ",":
            self._state = _ELEMENT
        elif char == "]" and state in (_ELEMENT_END, _FIRST_ELEMENT):
            self.done = True
        elif state in (_FIRST_ELEMENT, _ELEMENT):
            self._other.reset(DISCARD)
            self._state = _IN_OTHER
            return 0
        else:
            self.failed = True
            return 0
        return 1
