"""Python literals, and lists of calls with keyword arguments, read in pieces.

``LiteralReader`` reads one literal into the value that JSON would give it; ``CallListReader`` reads
``[name(key=value, ...), ...]``. Both look at every character once, never raise, and stop at the first character that
can't belong to what they read. What they accept is what ``ast.literal_eval`` accepts, with JSON's spelling of constants
and bare words as strings, and without sets, complex numbers and ``+`` between strings.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any

MAX_DEPTH = 128
MAX_WORD = 1024

_CONSTANTS: dict[str, Any] = {
    "True": True,
    "true": True,
    "False": False,
    "false": False,
    "None": None,
    "null": None,
}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_PREFIXES = frozenset({"r", "u", "b", "br", "rb"})

_SPACE = re.compile(r"[ \t\r\n\f]*")
_WORD = re.compile(r"[\w.]*")
_NAME = re.compile(r"[^\W\d]\w*")
_DECIMAL = re.compile(r"0(?:_?0)*|[1-9](?:_?[0-9])*")
_FLOAT = re.compile(
    r"(?:[0-9](?:_?[0-9])*)?\.[0-9](?:_?[0-9])*(?:[eE][-+]?[0-9](?:_?[0-9])*)?"
    r"|[0-9](?:_?[0-9])*(?:\.(?:[eE][-+]?[0-9](?:_?[0-9])*)?|[eE][-+]?[0-9](?:_?[0-9])*)"
)
_RADIX = re.compile(r"0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+")
_EXPONENT = re.compile(r"[0-9._]*[eE]")

_BODY = {
    "'": re.compile(r"(?:[^'\\\n]+|\\.)*+", re.DOTALL),
    '"': re.compile(r'(?:[^"\\\n]+|\\.)*+', re.DOTALL),
    "'''": re.compile(r"(?:[^'\\]+|\\.)*+", re.DOTALL),
    '"""': re.compile(r'(?:[^"\\]+|\\.)*+', re.DOTALL),
}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|N\{([^}]*)\}|([0-7]{1,3})|(\r?\n)|([\\'\"abfnrtv]))"
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_BYTE_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|(\r?\n)|([\\'\"abfnrtv]))")
_CONTROLS = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True))


def _escaped(match: re.Match[str]) -> str:
    hex2, hex4, hex8, name, octal, newline, control = match.groups()
    if control:
        return _CONTROLS[control]
    if newline:
        return ""
    if octal:
        return chr(int(octal, 8))
    if name is not None:
        try:
            return unicodedata.lookup(name)
        except KeyError:
            return match.group()
    code = int(hex2 or hex4 or hex8, 16)
    return chr(code) if code <= 0x10FFFF else match.group()


def _escaped_byte(match: re.Match[str]) -> str:
    hex2, octal, newline, control = match.groups()
    if control:
        return _CONTROLS[control]
    return "" if newline else chr(int(hex2, 16) if hex2 else int(octal, 8) & 0xFF)


def decode_body(body: str, prefix: str) -> str:
    """The text of a string literal.

    ``body`` is what stands between the quotes, ``prefix`` the letters in front of them in lower case. Bytes are read as
    UTF-8. Surrogate pairs are joined, what is no character becomes U+FFFD, unknown escapes stay as they are.
    """
    if "\\" not in body or "r" in prefix:
        return body
    if "b" in prefix and body.isascii():
        return _BYTE_ESCAPE.sub(_escaped_byte, body).encode("latin-1").decode("utf-8", "replace")
    text = _ESCAPE.sub(_escaped, body)
    if _SURROGATE.search(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _number(word: str) -> int | float | None:
    """The number that ``word`` spells, None when it spells none or one that JSON has no form for."""
    plain = word.replace("_", "")
    if _DECIMAL.fullmatch(word):
        return int(plain)
    if _RADIX.fullmatch(word):
        return int(plain, 0)
    if _FLOAT.fullmatch(word) and math.isfinite(value := float(plain)):
        return value
    return None


class _Frame:
    """One open container. ``key`` is None while a dict waits for its next key."""

    __slots__ = ("closer", "comma", "items", "key", "members")

    def __init__(self, opener: str) -> None:
        self.closer = _CLOSERS[opener]
        self.items: list[Any] = []
        self.members: dict[str, Any] = {}
        self.key: str | None = None
        self.comma = False

    def value(self) -> Any:
        if self.closer == "}":
            return self.members
        if self.closer == ")" and len(self.items) == 1 and not self.comma:
            return self.items[0]
        return self.items


_VALUE, _VALUE_OR_END, _AFTER, _SIGN, _IN_WORD, _OPENING, _IN_STRING, _CLOSING = range(8)


class LiteralReader:
    """Reads one literal. ``done``: ``value`` is complete; outside containers that takes the character behind it."""

    __slots__ = (
        "_body",
        "_is_text",
        "_prefix",
        "_quote",
        "_quotes",
        "_sign",
        "_stack",
        "_state",
        "_word",
        "done",
        "failed",
        "value",
    )

    def __init__(self) -> None:
        self.value: Any = None
        self.done = False
        self.failed = False
        self._state = _VALUE
        self._stack: list[_Frame] = []
        self._is_text = False  # ``value`` is a string, which another one may follow
        self._sign = ""
        self._word = ""
        self._prefix = ""
        self._quote = ""
        self._quotes = 0
        self._body: list[str] = []

    def feed(self, text: str, pos: int = 0) -> int:
        """Read ``text`` from ``pos`` on; returns the index behind the last character that was used."""
        size = len(text)
        while pos < size and not (self.done or self.failed):
            state = self._state
            if state == _IN_STRING:
                pos = self._read_body(text, pos)
            elif state == _IN_WORD:
                pos = self._read_word(text, pos)
            elif state == _OPENING:
                pos += self._open_quote(text[pos])
            elif state == _CLOSING:
                pos += self._close_quote(text[pos])
            else:
                pos = _SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
                if pos < size:
                    pos += self._step(text[pos])
        return pos

    def _fail(self) -> int:
        self.failed = True
        return 0

    def _step(self, char: str) -> int:
        if self._state == _AFTER:
            return self._after(char)
        if self._state == _SIGN:
            return self._begin_word(char) if char.isdigit() or char == "." else self._fail()
        if char in _CLOSERS:
            if len(self._stack) == MAX_DEPTH:
                return self._fail()
            self._stack.append(_Frame(char))
            self._state = _VALUE_OR_END
            return 1
        if self._stack and char == self._stack[-1].closer:
            return self._pop() if self._state == _VALUE_OR_END else self._fail()
        self._sign = ""
        self._is_text = False
        if char in "+-":
            self._sign = char
            self._state = _SIGN
            return 1
        if char in "'\"":
            return self._begin_string(char, "")
        return self._begin_word(char)

    # what follows a value

    def _after(self, char: str) -> int:
        if self._is_text:
            if char in "'\"":
                return self._begin_string(char, "")
            if char.isalpha():
                return self._begin_word(char)
        if not self._stack:
            self.done = True
            return 0
        frame = self._stack[-1]
        if frame.closer == "}" and frame.key is None:
            return self._take_key(frame) if char == ":" else self._fail()
        if frame.closer == "}":
            frame.members[frame.key or ""] = self.value
            frame.key = None
        else:
            frame.items.append(self.value)
        if char == ",":
            frame.comma = True
            self._state = _VALUE_OR_END
            return 1
        return self._pop() if char == frame.closer else self._fail()

    def _take_key(self, frame: _Frame) -> int:
        key = self.value
        if isinstance(key, list | dict):
            return self._fail()
        frame.key = key if isinstance(key, str) else json.dumps(key)
        self._state = _VALUE
        return 1

    def _pop(self) -> int:
        self._complete(self._stack.pop().value())
        self.done = not self._stack
        return 1

    def _complete(self, value: Any, *, is_text: bool = False) -> None:
        self.value = value
        self._is_text = is_text
        self._state = _AFTER

    # numbers, constants, bare words, string prefixes

    def _begin_word(self, char: str) -> int:
        if not (char.isalnum() or char in "_."):
            return self._fail()
        self._word = ""
        self._state = _IN_WORD
        return 0

    def _read_word(self, text: str, pos: int) -> int:
        end = _WORD.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        end = min(end, pos + MAX_WORD + 1 - len(self._word))
        self._word += text[pos:end]
        if len(self._word) > MAX_WORD:
            return end + self._fail()
        if end == len(text):
            return end
        char = text[end]
        if char in "+-" and _EXPONENT.fullmatch(self._word):
            self._word += char
            return end + 1
        if char in "'\"" and self._word.lower() in _PREFIXES and not self._sign:
            return end + self._begin_string(char, self._word.lower())
        self._end_word(self._word)
        return end

    def _end_word(self, word: str) -> None:
        number = _number(word)
        if self._is_text:  # only another string may follow a string
            self.failed = True
        elif number is not None:
            self._complete(-number if self._sign == "-" else number)
        elif self._sign or not _NAME.fullmatch(word):
            self.failed = True
        else:
            self._complete(_CONSTANTS.get(word, word))

    # strings

    def _begin_string(self, char: str, prefix: str) -> int:
        self._quote = char
        self._quotes = 1
        self._prefix = prefix
        self._body.clear()
        self._state = _OPENING
        return 1

    def _open_quote(self, char: str) -> int:
        """The character behind the opening quotes so far: one quote opens, two are an empty string, three open."""
        if char == self._quote:
            self._quotes += 1
            if self._quotes == 3:
                self._quote = char * 3
                self._state = _IN_STRING
            return 1
        if self._quotes == 2:
            self._end_string()
        else:
            self._state = _IN_STRING
        return 0

    def _read_body(self, text: str, pos: int) -> int:
        if self._body and self._body[-1] == "\\":  # the last piece ended behind a backslash
            self._body[-1] += text[pos]
            return pos + 1
        end = _BODY[self._quote].match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        if end > pos:
            self._body.append(text[pos:end])
        if end == len(text):
            return end
        if text[end] == "\\":
            self._body.append("\\")
            return end + 1
        if text[end] == "\n":
            return end + self._fail()
        if len(self._quote) == 1:
            self._end_string()
        else:
            self._quotes = 1
            self._state = _CLOSING
        return end + 1

    def _close_quote(self, char: str) -> int:
        """The character behind one or two quotes in a string with triple quotes."""
        if char == self._quote[0]:
            self._quotes += 1
            if self._quotes == 3:
                self._end_string()
            return 1
        self._body.append(self._quote[0] * self._quotes)
        self._state = _IN_STRING
        return 0

    def _end_string(self) -> None:
        text = decode_body("".join(self._body), self._prefix)
        self._complete(self.value + text if self._is_text else text, is_text=True)


_LIST_OPEN, _NAME_START, _NEXT_NAME, _CALL_NAME, _PAREN, _FIRST_KEYWORD, _KEYWORD, _EQUALS, _ARGUMENT, _CALL_END = (
    range(10)
)
_CALL_NAME_TEXT = re.compile(r"[\w.\-]*")
_CALL_NAME_FORM = re.compile(r"[^\W\d][\w\-]*(?:\.[^\W\d][\w\-]*)*")


class CallListReader:
    """Reads ``[name(key=value, ...), ...]`` into ``calls``. Names may be dotted and hyphenated. Positional arguments,
    repeated keywords and elements that are no calls fail the list."""

    __slots__ = ("_arguments", "_literal", "_name", "_state", "_word", "calls", "done", "failed")

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.done = False
        self.failed = False
        self._state = _LIST_OPEN
        self._name = ""
        self._word = ""
        self._arguments: dict[str, Any] = {}
        self._literal = LiteralReader()

    def feed(self, text: str, pos: int = 0) -> int:
        """As ``LiteralReader.feed``."""
        size = len(text)
        while pos < size and not (self.done or self.failed):
            state = self._state
            if state == _ARGUMENT:
                pos = self._literal.feed(text, pos)
                self.failed = self._literal.failed
                if self._literal.done:
                    pos = _SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
                    pos += self._end_argument(text[pos]) if pos < size else 0
            elif state in (_CALL_NAME, _KEYWORD):
                pos = self._read_word(text, pos)
            else:
                pos = _SPACE.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
                if pos < size:
                    pos += self._step(state, text[pos])
        return pos

    def _read_word(self, text: str, pos: int) -> int:
        end = _CALL_NAME_TEXT.match(text, pos).end()  # type: ignore[union-attr]  # matches the empty text too
        end = min(end, pos + MAX_WORD + 1 - len(self._word))
        self._word += text[pos:end]
        form = _CALL_NAME_FORM if self._state == _CALL_NAME else _NAME
        if len(self._word) > MAX_WORD or (end < len(text) and not form.fullmatch(self._word)):
            self.failed = True
        elif end < len(text):
            self._state = _PAREN if self._state == _CALL_NAME else _EQUALS
        return end

    def _step(self, state: int, char: str) -> int:
        if state in (_NAME_START, _NEXT_NAME, _FIRST_KEYWORD) and (char.isalpha() or char == "_"):
            self._word = ""
            self._state = _KEYWORD if state == _FIRST_KEYWORD else _CALL_NAME
            return 0
        if state == _LIST_OPEN and char == "[":
            self._state = _NAME_START
        elif state == _PAREN and char == "(":
            self._name = self._word
            self._arguments = {}
            self._state = _FIRST_KEYWORD
        elif state == _FIRST_KEYWORD and char == ")":
            self._end_call()
        elif state == _EQUALS and char == "=" and self._word not in self._arguments:
            self._literal = LiteralReader()
            self._state = _ARGUMENT
        elif state == _CALL_END and char == ",":
            self._state = _NEXT_NAME
        elif state in (_CALL_END, _NEXT_NAME) and char == "]":
            self.done = True
        else:
            self.failed = True
            return 0
        return 1

    def _end_argument(self, char: str) -> int:
        self._arguments[self._word] = self._literal.value
        if char == ",":
            self._state = _FIRST_KEYWORD  # a trailing comma is allowed
        elif char == ")":
            self._end_call()
        else:
            self.failed = True
            return 0
        return 1

    def _end_call(self) -> None:
        self.calls.append((self._name, self._arguments))
        self._state = _CALL_END
