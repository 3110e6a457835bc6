"""The machine for tool-call formats made of a section, invocations and tagged parameters.

All of them have this shape, in different clothes::

    SECTION_OPEN  INVOKE name>  PARAMETER key>value PARAMETER_CLOSE ...  INVOKE_CLOSE ...  SECTION_CLOSE

A ``TaggedFormat`` declares the markers and the few rules in which the formats differ; ``TaggedParser`` runs any of them
incrementally. A call is announced when its opening tag is complete. A value that is declared as a string is sent while
it arrives; every other value is converted as a whole when its closing tag is seen.

Text is looked at once: what can't be part of a marker is passed on at once, what might be one is shorter than the
longest marker, and a call that turns out to be none becomes content as a whole; scanning goes on behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smg.messages import ContentDelta, ParserEvent, ToolCallArguments, ToolCallEnd, ToolCallStart
from smg.models.family import ToolSpec
from smg.models.scan import Markers
from smg.models.typed_values import ParameterTypes, Types, ValueStyle, is_json, quote, to_json

_TAG_END = re.compile("[<>]")
_NOT_BLANK = re.compile(r"\S")
_NULL_WORDS = ("null", "None")

ATTRIBUTE_NAME = re.compile(r"""\s+name\s*=\s*(?P<quote>["'])(?P<name>(?:(?!(?P=quote))[^<])*)(?P=quote)\s*""")
"""Rest of an opening tag that carries the name as its only attribute."""


@dataclass(eq=False, slots=True)
class TaggedFormat:
    """Markers and rules of one format.

    ``openers`` and ``closer`` delimit a section of calls, ``invoke`` ... ``>`` and ``invoke_close`` a call,
    ``parameter`` ... ``>`` and ``parameter_close`` a value. ``invoke_header`` and ``parameter_header`` match the rest
    of the opening tag: group ``name``, and where the markup carries the type group ``string`` (``true``: text, else
    JSON).

    ``style``: how values are typed by the tool's schema; None when the markup carries the type.
    ``opener_needs_call``: the opener is ordinary text unless a call follows it directly, and text between the calls of
    a section is content. Otherwise the section is markup as a whole and other text in it is dropped.
    ``keep_empty``: a section without any call is content.
    ``close_required``: a call that lacks its own closing tag is broken.
    ``call_open``, ``call_lead``: a marker in front of every call and what must stand between the two.
    ``strip_before``: white space in front of a section is not content. ``blank_before``: exactly this much isn't.
    ``bare_calls``: a call outside a section counts.
    ``dropped``: control tokens that are removed from content and values.
    ``json_body``: a call may hold one JSON object instead of parameters.
    ``comma``, ``colon``: separators of the argument text.
    """

    openers: tuple[str, ...]
    closer: str
    invoke: str
    invoke_close: str
    parameter: str
    parameter_close: str
    invoke_header: re.Pattern[str]
    parameter_header: re.Pattern[str]
    style: ValueStyle | None = None
    opener_needs_call: bool = False
    keep_empty: bool = False
    close_required: bool = False
    call_open: str = ""
    call_lead: re.Pattern[str] | None = None
    call_stops: tuple[str, ...] = ()
    strip_before: bool = False
    blank_before: str = ""
    bare_calls: bool = False
    dropped: tuple[str, ...] = ()
    json_body: bool = False
    comma: str = ","
    colon: str = ":"
    in_content: Markers = field(init=False)
    in_section: Markers = field(init=False)
    in_call: Markers = field(init=False)
    in_value: Markers = field(init=False)
    in_json: Markers = field(init=False)

    def __post_init__(self) -> None:
        entries = (*self.openers, self.invoke) if self.bare_calls else self.openers
        blank = self.blank_before
        self.in_content = Markers([*entries, *(blank + each for each in entries if blank), *self.dropped])
        call_open = (self.call_open,) if self.call_open else ()
        reopened = self.openers if self.opener_needs_call else ()
        outside = (self.closer, self.invoke, *call_open, *reopened)
        self.in_section = Markers(outside)
        self.in_call = Markers([self.parameter, self.invoke_close, *outside, *self.call_stops])
        newline = self.style is not None and self.style.strip == "newline"
        closes = ["\n" + self.parameter_close] if newline else []
        self.in_value = Markers([self.parameter_close, *closes, *self.dropped])
        self.in_json = Markers([self.invoke_close, self.closer])


class TaggedParser:
    """Reads the output of one choice in a ``TaggedFormat``.

    ``_step`` is the current state: a method that takes the text and a position, handles what it can from there and
    returns where it stopped. ``_tail`` holds text that may be the beginning of a marker.

    ``broken`` lists the calls that were announced and turned out incomplete or invalid; they were closed to valid JSON.
    ``drops_broken``: a section is markup even when no call is left in it.
    """

    __slots__ = (
        "_after",
        "_bare",
        "_blank",
        "_fast",
        "_first",
        "_format",
        "_function",
        "_index",
        "_keep",
        "_key",
        "_lead",
        "_members",
        "_open",
        "_out",
        "_parts",
        "_raw",
        "_rest",
        "_seen",
        "_spaces",
        "_step",
        "_streaming",
        "_tail",
        "_types",
        "_undecided",
        "_value_types",
        "broken",
        "drops_broken",
    )

    def __init__(self, declared: TaggedFormat, tools: Sequence[ToolSpec]) -> None:
        self.broken: list[int] = []
        self.drops_broken = not (declared.opener_needs_call or declared.keep_empty)
        self._format = declared
        self._types = ParameterTypes(tools)
        self._out: list[ParserEvent] = []
        self._tail = ""
        self._step: Callable[[str, int], int] = self._content
        self._rest: Callable[[str, int], int] = self._content  # where text between calls is handled
        self._fast: Markers | None = None if declared.strip_before else declared.in_content
        self._index = -1
        self._open = False  # between the start and the end of a call
        self._after = False  # only white space since the last call
        self._bare = False  # the call stands outside a section
        self._keep = False  # the section is content unless a call turns up
        self._blank: list[str] = []  # white space that is content only when more content follows
        self._raw: list[str] = []  # a possible call as written
        self._lead: list[str] | None = None  # text since ``call_open``
        self._parts: list[str] = []  # pieces of a tag, or of a value that is converted as a whole
        self._function = ""
        self._key = ""  # argument text up to the value, until its first piece is sent
        self._first = True  # no parameter of the call was sent yet
        self._value_types: Types | None = None
        self._members: frozenset[str] = frozenset()
        self._streaming = False
        self._undecided = False
        self._seen = False
        self._spaces: list[str] = []  # trailing white space of a streamed value

    # ------------------------------------------------------------------------------------------
    # Input

    def feed(self, text: str) -> list[ParserEvent]:
        if self._tail:
            text = self._tail + text
            self._tail = ""
        elif self._fast is not None and text and not self._fast.may_start(text):
            if self._open:
                return [ToolCallArguments(self._index, quote(text)[1:-1])]
            return [ContentDelta(text)]
        out: list[ParserEvent] = []
        self._out = out
        self._fast = None
        pos, size = 0, len(text)
        while pos < size:
            pos = self._step(text, pos)
        self._choose_fast()
        return out

    def _choose_fast(self) -> None:
        """Names the markers whose first characters end plain text, when the state needs nothing but that."""
        if self._streaming:
            if not self._key and (self._format.style is None or self._format.style.strip != "all"):
                self._fast = self._format.in_value
        elif self._step == self._content and not (self._after or self._blank or self._format.strip_before):
            self._fast = self._format.in_content

    def finish(self) -> list[ParserEvent]:
        out: list[ParserEvent] = []
        self._out = out
        tail, self._tail = self._tail, ""
        if self._open:
            self._cut_call()
        elif self._raw:
            # A call cut off before its name: content, unless complete calls precede it.
            if self._index < 0:
                self._say("".join([*self._raw, *self._parts, tail]))
        elif self._step == self._content or self._step == self._between:
            self._say(tail)
        if self._blank and not self._after:
            out.append(ContentDelta("".join(self._blank)))
        self._blank, self._raw, self._parts, self._after = [], [], [], False
        self._step = self._rest = self._content
        return out

    # ------------------------------------------------------------------------------------------
    # Outside of calls

    def _say(self, text: str) -> None:
        if not text:
            return
        strip = self._format.strip_before
        if not (strip or self._after or self._blank):
            self._out.append(ContentDelta(text))
            return
        body = text.rstrip() if strip else text
        if not body or (self._after and body.isspace()):
            self._blank.append(text)
            return
        self._out.append(ContentDelta("".join(self._blank) + body))
        self._after = False
        self._blank = [text[len(body) :]] if len(body) < len(text) else []

    def _content(self, text: str, pos: int) -> int:
        declared = self._format
        at, marker = declared.in_content.search(text, pos)
        if at > pos:
            self._say(text[pos:at])
        if not marker:
            self._tail = text[at:]
            return len(text)
        if marker in declared.dropped:
            return at + len(marker)
        self._bare = marker.endswith(declared.invoke)
        if self._bare:
            self._raw, self._step = [marker], self._invoke_tag
        elif declared.opener_needs_call:
            self._raw, self._step = [marker], self._payload
        else:
            self._enter_section(marker)
        return at + len(marker)

    def _enter_section(self, marker: str) -> None:
        self._step, self._lead = self._section, None
        self._keep = self._format.keep_empty
        if self._keep:
            self._raw = [marker]
        else:
            self._blank = []

    def _reject(self) -> None:
        """What looked like a call is content."""
        raw, self._raw = self._raw, []
        self._say("".join(raw))

    def _payload(self, text: str, pos: int) -> int:
        """Behind an opener that counts only in front of a call."""
        found = _NOT_BLANK.search(text, pos)
        at = found.start() if found is not None else len(text)
        if at > pos:
            self._raw.append(text[pos:at])
        invoke = self._format.invoke
        if text.startswith(invoke, at):
            self._raw.append(invoke)
            self._step = self._invoke_tag
            return at + len(invoke)
        if invoke.startswith(text[at:]):
            self._tail = text[at:]
            return len(text)
        self._reject()
        self._step = self._rest
        return at

    def _between(self, text: str, pos: int) -> int:
        """Between the calls of a section, where other text is content."""
        declared = self._format
        at, marker = declared.in_section.search(text, pos)
        if at > pos:
            self._say(text[pos:at])
        if not marker:
            self._tail = text[at:]
            return len(text)
        if marker == declared.closer:
            self._blank = []
            self._step = self._rest = self._content
        else:
            self._raw = [marker]
            self._step = self._invoke_tag if marker == declared.invoke else self._payload
        return at + len(marker)

    def _section(self, text: str, pos: int) -> int:
        """Between the calls of a section that is markup as a whole."""
        declared = self._format
        at, marker = declared.in_section.search(text, pos)
        if at > pos:
            if self._keep:
                self._raw.append(text[pos:at])
            if self._lead is not None:
                self._lead.append(text[pos:at])
        if not marker:
            self._tail = text[at:]
            return len(text)
        if self._keep:
            self._raw.append(marker)
        if marker == declared.closer:
            self._reject()
            self._step = self._content
        elif marker == declared.call_open:
            self._lead = []
        else:
            lead, self._lead = self._lead, None
            if declared.call_lead is None or (lead is not None and declared.call_lead.fullmatch("".join(lead))):
                self._step = self._invoke_tag
        return at + len(marker)

    # ------------------------------------------------------------------------------------------
    # Tags

    def _header(self, text: str, pos: int) -> tuple[int, str | None]:
        """Collects the rest of an opening tag: (where it stopped, the text up to ``>``, or None while it is open).

        A ``<`` breaks the tag off; it is left to be read again and shows as the last character of the text.
        """
        found = _TAG_END.search(text, pos)
        if found is None:
            self._parts.append(text[pos:])
            return len(text), None
        broken = found.group() == "<"
        end = found.start() if broken else found.end()
        header = "".join([*self._parts, text[pos : found.start()], "<" if broken else ""])
        self._parts = []
        return end, header

    def _invoke_tag(self, text: str, pos: int) -> int:
        pos, header = self._header(text, pos)
        if header is None:
            return pos
        found = self._format.invoke_header.fullmatch(header)
        name = found["name"].strip() if found is not None else ""
        if name:
            self._start_call(name)
            return pos
        outside = self._bare or self._format.opener_needs_call
        if outside or self._keep:
            self._raw.append(header[:-1] if header.endswith("<") else header + ">")
        if outside:
            self._reject()
            self._step = self._rest
        else:
            self._step = self._section
        return pos

    def _start_call(self, name: str) -> None:
        declared = self._format
        self._raw, self._blank, self._parts = [], [], []
        self._keep = self._after = False
        self._index += 1
        self._open = self._first = True
        self._function = name
        self._out.append(ToolCallStart(self._index, name))
        if self._bare:
            self._rest = self._content
        else:
            self._rest = self._between if declared.opener_needs_call else self._section
        self._step = self._body if declared.json_body else self._parameters

    def _end_call(self, closing: str) -> None:
        if closing:
            self._out.append(ToolCallArguments(self._index, closing))
        self._out.append(ToolCallEnd(self._index))
        self._open, self._after = False, True
        self._step = self._rest

    # ------------------------------------------------------------------------------------------
    # Inside a call

    def _body(self, text: str, pos: int) -> int:
        found = _NOT_BLANK.search(text, pos)
        if found is None:
            return len(text)
        self._step = self._json_body if found.group() == "{" else self._parameters
        return found.start()

    def _json_body(self, text: str, pos: int) -> int:
        at, marker = self._format.in_json.search(text, pos)
        self._parts.append(text[pos:at])
        if not marker:
            self._tail = text[at:]
            return len(text)
        self._end_json_body()
        return at + len(marker) if marker == self._format.invoke_close else at

    def _end_json_body(self) -> None:
        arguments = "".join(self._parts).strip()
        self._parts = []
        valid = is_json(arguments)
        if not valid:
            self.broken.append(self._index)
        self._end_call(arguments if valid else "{}")

    def _parameters(self, text: str, pos: int) -> int:
        declared = self._format
        at, marker = declared.in_call.search(text, pos)
        if not marker:
            self._tail = text[at:]
            return len(text)
        if marker == declared.parameter:
            self._step = self._parameter_tag
            return at + len(marker)
        if declared.close_required and marker != declared.invoke_close:
            self.broken.append(self._index)
        self._end_call("{}" if self._first else "}")
        return at + len(marker) if marker == declared.invoke_close else at

    def _parameter_tag(self, text: str, pos: int) -> int:
        pos, header = self._header(text, pos)
        if header is None:
            return pos
        found = self._format.parameter_header.fullmatch(header)
        key = found["name"].strip() if found is not None else ""
        if found is None or not key:
            self._step = self._parameters
            return pos
        declared = self._format
        self._key = ("{" if self._first else declared.comma) + quote(key) + declared.colon
        if declared.style is None:
            self._value_types = None
            self._streaming = found["string"] == "true"
            self._undecided = False
            if self._streaming:
                self._key += '"'
        else:
            self._value_types, self._members = self._types.of(self._function, key)
            self._streaming = False
            may_stream = "string" in self._value_types and self._value_types <= {"string", "null"}
            self._undecided = may_stream and not self._members  # a member is only known at its end
        self._seen = False
        self._step = self._value
        return pos

    def _value(self, text: str, pos: int) -> int:
        declared = self._format
        at, marker = declared.in_value.search(text, pos)
        if at > pos:
            if self._streaming:
                self._send(text[pos:at])
            else:
                self._collect(text[pos:at])
        if not marker:
            self._tail = text[at:]
            return len(text)
        if marker not in declared.dropped:
            self._end_value(marker)
        return at + len(marker)

    def _collect(self, piece: str) -> None:
        self._parts.append(piece)
        if self._undecided and (self._seen or not piece.isspace()):
            self._seen = True
            self._decide("".join(self._parts))

    def _decide(self, text: str) -> None:
        """Starts sending a declared string as soon as it can be neither ``null`` nor a JSON string literal."""
        types, style = self._value_types, self._format.style
        start = text.lstrip()
        head = start[:5]
        if start[0] == '"':
            self._undecided = False
        elif types is not None and "null" in types and any(word.startswith(head.rstrip()) for word in _NULL_WORDS):
            self._undecided = len(start) < 5
        elif style is not None:
            self._undecided, self._streaming = False, True
            self._key += '"'
            self._parts = []
            self._send(start if style.strip == "all" else text.removeprefix("\n") if style.strip == "newline" else text)
            return
        self._parts = [text]

    def _send(self, piece: str) -> None:
        """A piece of a string value, as it arrives."""
        if self._format.style is not None and self._format.style.strip == "all":
            body = piece.rstrip()
            if not body:
                self._spaces.append(piece)
                return
            blank = piece[len(body) :]
            piece = "".join(self._spaces) + body
            self._spaces = [blank] if blank else []
        self._out.append(ToolCallArguments(self._index, self._key + quote(piece)[1:-1]))
        self._key = ""
        self._first = False

    def _end_value(self, marker: str) -> None:
        if self._streaming:
            fragment = self._key + '"'
        else:
            text = "".join(self._parts)
            if marker != self._format.parameter_close:
                text += "\n"
            fragment = self._key + self._whole(text)
        self._out.append(ToolCallArguments(self._index, fragment))
        self._first = self._streaming = self._undecided = False
        self._key, self._parts, self._spaces = "", [], []
        self._step = self._parameters

    def _whole(self, text: str) -> str:
        style = self._format.style
        if style is not None:
            return to_json(text, self._value_types or frozenset(), style, self._members)
        trimmed = text.strip()
        return trimmed if trimmed and is_json(trimmed) else quote(text)

    def _cut_call(self) -> None:
        """The output ends inside a call: what was sent stays, closed so that it is valid JSON."""
        if self._step == self._json_body:
            self._end_json_body()
            return
        self.broken.append(self._index)
        if self._streaming and not self._key:
            self._end_call('"}')
        else:
            self._end_call("{}" if self._first else "}")
        self._streaming = False
