"""Reads gpt-oss output: messages on channels become reasoning, content and tool calls.

The output continues the prompt's ``<|start|>assistant``. A message is a header (author, channel, recipient, content
type), the token ``<|message|>``, text, and an end token. No input is an error: what is no header is content.

* recipient ``functions.NAME``, on any channel: a tool call
* recipients ``python*``, ``browser*``, ``container*``, channels analysis and commentary: reasoning
* other channels, or none: content
* messages that the model writes in a tool's name: dropped

Several reasoning messages are joined with a line feed, several answers are not separated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from smg.messages import (
    ContentDelta,
    ParserEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from smg.models.harmony.tokens import CALL, CHANNEL, CONSTRAIN, CONTROL_TOKENS, END, MESSAGE, RETURN, START

_FUNCTIONS = "functions."
_BUILTIN = ("python", "browser", "container")
_ROLES = frozenset({"assistant", "user", "system", "developer"})
_THINKING_CHANNELS = frozenset({"analysis", "commentary"})
_ENDINGS = frozenset({END, CALL, RETURN})

# Longest header; a model that writes more without ``<|message|>`` is answering without one.
_MAX_HEADER = 512
_MAX_CHANNEL = 64

# Sinks of a message's text.
_CONTENT, _REASONING, _ARGUMENTS, _DROPPED = range(4)
# Sections of a header: in front of the channel, the channel, the content type.
_HEAD, _CHANNEL, _TYPE = range(3)


class TokenDecoder(Protocol):
    """Incremental detokenizer: text as soon as its characters are complete; ``finish`` gives what is left."""

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class StopStrings(Protocol):
    """Finds stop strings in the text of one message. ``feed`` gives the text that no stop string can claim any more, up
    to and with a match; ``matched`` is the string found; ``finish`` gives what is held back."""

    @property
    def matched(self) -> str | None: ...

    def feed(self, text: str) -> str: ...

    def finish(self) -> str: ...


class ChannelMachine:
    """The state machine behind the parsers: control tokens and text in, events out.

    ``calls`` counts the calls that are complete. ``thinking``: the position is inside the text of a message on the
    analysis or commentary channel.
    """

    __slots__ = (
        "_arguments",
        "_call",
        "_header_size",
        "_reasoned",
        "_said",
        "_section",
        "_sections",
        "_sink",
        "_started",
        "calls",
        "in_message",
        "thinking",
    )

    def __init__(self) -> None:
        self.calls = 0
        self.in_message = False
        self.thinking = False
        self._call = -1
        self._arguments: list[str] = []
        self._reasoned = False
        self._said = False
        self._sink = _CONTENT
        self._new_header(started=False)

    @property
    def in_reasoning(self) -> bool:
        """Whether text would be reasoning at the moment."""
        return self.in_message and self._sink == _REASONING

    @property
    def in_content(self) -> bool:
        """Whether text would be content at the moment."""
        return self.in_message and self._sink == _CONTENT

    def _new_header(self, *, started: bool) -> None:
        self._started = started
        self._section = _HEAD
        self._sections: tuple[list[str], list[str], list[str]] = ([], [], [])
        self._header_size = 0

    def control(self, token: str) -> list[ParserEvent]:
        """One control token."""
        if self.in_message:
            return self._close() if token in _ENDINGS else self.text(token)
        if token == MESSAGE:
            return self._open_by_header()
        if token == CHANNEL:
            self._section = _CHANNEL
            return []
        if token == CONSTRAIN:
            self._section = _TYPE
            return []
        return self._abandon_header(started=token == START)

    def text(self, text: str) -> list[ParserEvent]:
        """Ordinary text."""
        if not text:
            return []
        if self.in_message:
            return self._deliver(text)
        self._sections[self._section].append(text)
        self._header_size += len(text)
        return self._open_without_header() if self._header_size > _MAX_HEADER else []

    def finish(self) -> list[ParserEvent]:
        """The end of the output: a call cut off before its end token is complete if its arguments are."""
        if self.in_message:
            return self._close() if self._sink != _ARGUMENTS or self._arguments_complete() else []
        return self._abandon_header(started=False)

    def _deliver(self, text: str) -> list[ParserEvent]:
        sink = self._sink
        if sink == _CONTENT:
            return [ContentDelta(text)]
        if sink == _REASONING:
            if self._said:
                return [ReasoningDelta(text)]
            self._said = True
            joined = "\n" + text if self._reasoned else text
            self._reasoned = True
            return [ReasoningDelta(joined)]
        if sink == _ARGUMENTS:
            self._arguments.append(text)
            return [ToolCallArguments(self._call, text)]
        return []

    def _open_by_header(self) -> list[ParserEvent]:
        head, channel, rest = ("".join(section).split() for section in self._sections)
        author = "assistant"
        if self._started and head:
            author = head.pop(0).partition(":")[0]
        recipient = next((word[3:] for word in (*head, *channel, *rest) if word.startswith("to=")), "")
        return self._open(author, recipient, next((word for word in channel if not word.startswith("to=")), ""))

    def _open(self, author: str, recipient: str, channel: str) -> list[ParserEvent]:
        self.in_message = True
        self.thinking = channel in _THINKING_CHANNELS
        self._said = False
        if author not in _ROLES:
            self._sink = _DROPPED
            return []
        if recipient.startswith(_FUNCTIONS):
            self._sink = _ARGUMENTS
            self._call += 1
            self._arguments = []
            return [ToolCallStart(self._call, recipient[len(_FUNCTIONS) :])]
        self._sink = _REASONING if self.thinking or recipient.startswith(_BUILTIN) else _CONTENT
        return []

    def _close(self) -> list[ParserEvent]:
        self.in_message = False
        self.thinking = False
        self._new_header(started=False)
        if self._sink != _ARGUMENTS:
            return []
        self.calls += 1
        return [ToolCallEnd(self._call)]

    def _arguments_complete(self) -> bool:
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return False
        return True

    def _open_without_header(self) -> list[ParserEvent]:
        """Takes the text that should have been a header for a message; a short first word is still the channel."""
        head, channel_text, rest = ("".join(section) for section in self._sections)
        channel, _, said = channel_text.lstrip().partition(" ")
        if len(channel) > _MAX_CHANNEL:
            channel, said = "", channel_text
        author = "assistant"
        if self._started:
            author, _, head = head.partition(" ")
        return self._open(author, "", channel) + self.text(head + said + rest)

    def _abandon_header(self, *, started: bool) -> list[ParserEvent]:
        """A header without ``<|message|>``: text that no header starts with is content, header words are nothing."""
        events: list[ParserEvent] = []
        head = "".join(self._sections[_HEAD])
        if not self._started and self._section == _HEAD and head.strip() and not _HEADER_START.match(head):
            self._open("assistant", "", "")
            events = self.text(head)
            self.in_message = self.thinking = False
        self._new_header(started=started)
        return events


# How a header continues ``<|start|>assistant`` with a recipient.
_HEADER_START = re.compile(r"\s*(?:assistant\b\s*)?to=")


class HarmonyParser:
    """Token ids in, events out; one object per choice.

    ``new_decoder`` makes an incremental detokenizer for the text of one message or header; it never gets a control
    token. ``new_stops`` makes a matcher for the client's stop strings; ``matched_stop`` is the one found, everything
    after it is dropped. The ids must include the engine's end tokens where it reports them.
    """

    __slots__ = ("_decoder", "_machine", "_new_decoder", "_new_stops", "_stops", "matched_stop", "reasoning_tokens")

    def __init__(
        self, new_decoder: Callable[[], TokenDecoder], new_stops: Callable[[], StopStrings] | None = None
    ) -> None:
        self._machine = ChannelMachine()
        self._new_decoder = new_decoder
        self._decoder: TokenDecoder | None = None
        self._new_stops = new_stops
        self._stops: StopStrings | None = None
        self.matched_stop: str | None = None
        self.reasoning_tokens = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text would be reasoning."""
        return self._machine.in_reasoning

    @property
    def in_content(self) -> bool:
        """Whether the next text would be content."""
        return self._machine.in_content

    def feed(self, token_ids: Sequence[int]) -> list[ParserEvent]:
        """New tokens; the events they complete."""
        if self.matched_stop is not None:
            return []
        if self._new_stops is not None:
            return self._feed_singly(token_ids)
        if _CONTROL_IDS.isdisjoint(token_ids):
            return self._run(token_ids)
        events: list[ParserEvent] = []
        start = 0
        for position, token in enumerate(token_ids):
            if token in _CONTROL_IDS:
                if start < position:
                    events += self._run(token_ids[start:position])
                events += self._control(token)
                start = position + 1
        if start < len(token_ids):
            events += self._run(token_ids[start:])
        return events

    def _feed_singly(self, token_ids: Sequence[int]) -> list[ParserEvent]:
        """Token by token, so that tokens after a stop string count nowhere."""
        events: list[ParserEvent] = []
        for token in token_ids:
            events += self._control(token) if token in _CONTROL_IDS else self._run((token,))
            if self.matched_stop is not None:
                break
        return events

    def finish(self) -> list[ParserEvent]:
        """The end of the output; called once."""
        if self.matched_stop is not None:
            return []
        events = self._flush()
        if self.matched_stop is None:
            events += self._machine.finish()
        return events

    def finish_reason(self, engine_reason: str) -> str:
        """The reason for the client: "tool_calls" once a call is complete, "stop" at a stop string, else the engine's
        word."""
        if self._machine.calls:
            return "tool_calls"
        return "stop" if self.matched_stop is not None else engine_reason

    def _run(self, token_ids: Sequence[int]) -> list[ParserEvent]:
        decoder = self._decoder
        if decoder is None:
            decoder = self._decoder = self._new_decoder()
        if self._machine.thinking:
            self.reasoning_tokens += len(token_ids)
        return self._text(decoder.feed(token_ids))

    def _control(self, token_id: int) -> list[ParserEvent]:
        token = CONTROL_TOKENS[token_id]
        machine = self._machine
        is_text = machine.in_message and token not in _ENDINGS
        events = self._flush_decoder() if is_text else self._flush()
        if self.matched_stop is not None:
            return events
        events += self._text(token) if is_text else machine.control(token)
        if machine.thinking:
            self.reasoning_tokens += 1
        return events

    def _text(self, text: str) -> list[ParserEvent]:
        if self._new_stops is None or not self._machine.in_message:
            return self._machine.text(text)
        if self._stops is None:
            self._stops = self._new_stops()
        released = self._stops.feed(text)
        self.matched_stop = self._stops.matched
        return self._machine.text(released)

    def _flush_decoder(self) -> list[ParserEvent]:
        decoder, self._decoder = self._decoder, None
        return self._text(decoder.finish()) if decoder is not None else []

    def _flush(self) -> list[ParserEvent]:
        """Releases what the decoder and the stop matcher hold back."""
        events = self._flush_decoder()
        stops, self._stops = self._stops, None
        if stops is not None and self.matched_stop is None:
            events += self._machine.text(stops.finish())
        return events


_CONTROL_IDS = frozenset(CONTROL_TOKENS)


class HarmonyTextParser:
    """Text in, events out, for output that comes as text with its control tokens spelled out. An ``OutputParser``."""

    __slots__ = ("_held", "_machine")

    def __init__(self) -> None:
        self._machine = ChannelMachine()
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text would be reasoning."""
        return self._machine.in_reasoning

    def feed(self, text: str) -> list[ParserEvent]:
        text = self._held + text
        machine = self._machine
        events: list[ParserEvent] = []
        position = 0
        for match in _CONTROL.finditer(text):
            events += machine.text(text[position : match.start()])
            events += machine.control(match.group())
            position = match.end()
        end = _partial_start(text, position)
        self._held = text[end:]
        return events + machine.text(text[position:end])

    def finish(self) -> list[ParserEvent]:
        held, self._held = self._held, ""
        return self._machine.text(held) + self._machine.finish()

    def finish_reason(self, engine_reason: str) -> str:
        """The reason for the client: "tool_calls" once a call is complete, else the engine's word."""
        return "tool_calls" if self._machine.calls else engine_reason


_CONTROL = re.compile("|".join(map(re.escape, CONTROL_TOKENS.values())))
_LONGEST = max(map(len, CONTROL_TOKENS.values()))


def _partial_start(text: str, position: int) -> int:
    """Where a control token that is not complete yet may begin, ``len(text)`` if nowhere after ``position``."""
    start = max(position, len(text) - _LONGEST + 1)
    while (start := text.find("<", start)) >= 0:
        tail = text[start:]
        if any(token.startswith(tail) for token in CONTROL_TOKENS.values()):
            return start
        start += 1
    return len(text)
