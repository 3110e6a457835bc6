"""Reasoning formats whose thought is not just a pair of tags: DeepSeek-V4.1, MiniMax-M3, Kimi-K3 and Inkling.

Each is a table for the machine of ``smg.models.reasoning``; the family modules name these factories in their
``ReasoningFormat``.
"""

from __future__ import annotations

import re
from typing import ClassVar

from smg.messages import ContentDelta, ReasoningDelta
from smg.models.family import ReasoningParser
from smg.models.reasoning import BlockParser, Found, Move, Rules, State, link

# --------------------------------------------------------------------------------------------------
# DeepSeek-V4.1: think tags, any number of thoughts, and a tool block that ends the thought by itself.

_CALLS = "<｜DSML｜ calls>"


def _deepseek_v41_states() -> dict[str, State]:
    return link(
        {
            "content": Rules(
                ContentDelta,
                {"<think>": Move("reason"), "</think>": Move("content"), _CALLS: Move("tool", keep=True)},
            ),
            "reason": Rules(
                ReasoningDelta,
                {"<think>": Move("reason"), "</think>": Move("content"), _CALLS: Move("tool", keep=True)},
            ),
            "tool": Rules(ContentDelta),
        }
    )


_DEEPSEEK_V41 = _deepseek_v41_states()


def deepseek_v41_parser(armed: bool) -> ReasoningParser:
    """Only the complete spaced opener of a call block counts; behind it all is text. A stray close tag is dropped."""
    return BlockParser(_DEEPSEEK_V41["reason" if armed else "content"])


# --------------------------------------------------------------------------------------------------
# MiniMax-M3

# The Unicode property White_Space. ``str.isspace`` and ``\s`` are not it: they also take U+001C to U+001F.
WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_MM_OPEN, _MM_CLOSE = "<mm:think>", "</mm:think>"

_MINIMAX_M3 = link(
    {
        # White space does not end the leading phase, in which stray close markers vanish; other text does.
        "before": Rules(
            ContentDelta,
            {_MM_OPEN: Move("start"), _MM_CLOSE: Move("before")},
            other="text",
            blank=WHITE_SPACE,
        ),
        "text": Rules(ContentDelta, {_MM_OPEN: Move("start")}),
        # Open markers are dropped only in front of the first character of the thought.
        "start": Rules(ReasoningDelta, {_MM_OPEN: Move("start"), _MM_CLOSE: Move("after")}, other="reason"),
        "reason": Rules(ReasoningDelta, {_MM_CLOSE: Move("after")}),
        "after": Rules(ContentDelta, {_MM_CLOSE: Move("after")}, other="answer", blank=WHITE_SPACE),
        "answer": Rules(ContentDelta),
    }
)


def minimax_m3_parser(armed: bool) -> ReasoningParser:
    """``<mm:think>`` blocks; the thought is entered once."""
    return BlockParser(_MINIMAX_M3["start" if armed else "before"])


# --------------------------------------------------------------------------------------------------
# Kimi-K3 (XTML channels)

# White space around the channel name is tolerated. The bound keeps the held text, and so the work per delta, small.
_PAD = 64
_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_CHANNELS = ("think", "response", "message", "tools")


class _ChannelTags:
    """The eight tags ``<|open|>NAME<|sep|>`` and ``<|close|>NAME<|sep|>``; keys are "open think", "close tools" ..."""

    __slots__ = ()

    first = "<"
    _pattern: ClassVar[re.Pattern[str]] = re.compile(
        rf"<\|(open|close)\|>\s{{0,{_PAD}}}({'|'.join(_CHANNELS)})\s{{0,{_PAD}}}<\|sep\|>"
    )
    _longest: ClassVar[int] = len(_CLOSE) + _PAD + max(map(len, _CHANNELS)) + _PAD + len(_SEP)

    def find(self, text: str, start: int) -> Found | None:
        match = self._pattern.search(text, start)
        return Found(match.start(), match.end(), f"{match[1]} {match[2]}") if match else None

    def hold(self, text: str, start: int) -> int:
        at = text.find("<", max(start, len(text) - self._longest + 1))
        while at >= 0:
            if self._unfinished(text[at:]):
                return at
            at = text.find("<", at + 1)
        return len(text)

    def _unfinished(self, tail: str) -> bool:
        """Whether ``tail`` is a proper prefix of a tag."""
        if _OPEN.startswith(tail) or _CLOSE.startswith(tail):
            return True
        start = _OPEN if tail.startswith(_OPEN) else _CLOSE if tail.startswith(_CLOSE) else ""
        if not start:
            return False
        rest = tail[len(start) :]
        name = rest.lstrip()
        if len(rest) - len(name) > _PAD:
            return False
        for channel in _CHANNELS:
            if channel.startswith(name):
                return True
            if name.startswith(channel):
                end = name[len(channel) :]
                separator = end.lstrip()
                return len(end) - len(separator) <= _PAD and _SEP.startswith(separator)
        return False

    def residue(self, tail: str) -> str:
        # The structural tokens are atomic: a whole one was never the model's text, a piece of one was.
        return "" if tail.startswith((_OPEN, _CLOSE)) else tail


_TAGS = _ChannelTags()


def _kimi_k3_states() -> dict[str, State]:
    drop, keep = Move("done"), Move("done", keep=True)
    stay = Move("reason", keep=True)
    plain = {
        "open think": Move("reason"),
        "close think": Move("plain"),
        "open response": drop,
        "open tools": keep,
        "close response": Move("plain"),
        "open message": Move("plain"),
        "close message": Move("plain"),
        "close tools": Move("plain", keep=True),
    }
    reason = {
        "open think": Move("reason"),
        "close think": drop,
        "open response": drop,
        "open tools": keep,
        "close response": stay,
        "open message": stay,
        "close message": stay,
        "close tools": stay,
    }
    done = dict.fromkeys(("open response", "close response", "open message", "close message"), drop) | dict.fromkeys(
        ("open think", "close think", "open tools", "close tools"), keep
    )
    return link(
        {
            "plain": Rules(ContentDelta, plain, _TAGS),
            "reason": Rules(ReasoningDelta, reason, _TAGS),
            "done": Rules(ContentDelta, done, _TAGS),
        }
    )


_KIMI_K3 = _kimi_k3_states()


def kimi_k3_parser(armed: bool) -> ReasoningParser:
    """The think channel; response and message tags vanish, the tools channel stays in the content for the tool parser.

    At the end of the output a cut-off tag is dropped once its first structural token is complete.
    """
    return BlockParser(_KIMI_K3["reason" if armed else "plain"])


def encode_kimi_k3(reasoning: str, content: str, armed: bool) -> str:
    """A turn as the model writes it; ``armed``: the prompt holds the open think tag."""
    think = f"{'' if armed else '<|open|>think<|sep|>'}{reasoning}<|close|>think<|sep|>"
    answer = f"<|open|>response<|sep|>{content}<|close|>response<|sep|><|close|>message<|sep|>"
    return (think if reasoning or armed else "") + answer


# --------------------------------------------------------------------------------------------------
# Inkling (typed blocks)

_INKLING_ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")
_INKLING_MODEL = "<|message_model|>"
_INKLING_JSON = "<|content_invoke_tool_json|>"
_INKLING_TEXT = "<|content_invoke_tool_text|>"

# Control tokens that carry nothing for a reader of text.
_INKLING_IGNORED = (
    "<|endoftext|>",
    "<|audio_end|>",
    "<|message_user|>",
    "<|message_system|>",
    "<|message_tool|>",
    "<|content_image|>",
    "<|content_audio_input|>",
    "<|content_tool_error|>",
    "<|content_xml|>",
)

_INKLING_SIDES = ("<|content_text|>", "<|content_thinking|>")
INKLING_TOKENS = frozenset(
    (*_INKLING_ENDS, *_INKLING_IGNORED, *_INKLING_SIDES, _INKLING_MODEL, _INKLING_JSON, _INKLING_TEXT)
)


def _inkling_states() -> dict[str, State]:
    always = {
        _INKLING_MODEL: Move("header"),
        _INKLING_JSON: Move("tool", keep=True),
        _INKLING_TEXT: Move("text tool"),
    }

    def block(name: str) -> dict[str, Move]:
        return (
            dict.fromkeys(_INKLING_IGNORED, Move(name))
            | dict.fromkeys(_INKLING_ENDS, Move("none"))
            | dict(zip(_INKLING_SIDES, (Move("content"), Move("reason")), strict=True))
            | always
        )

    inside = (*_INKLING_SIDES, *_INKLING_IGNORED)
    tool = dict.fromkeys(inside, Move("tool", keep=True)) | dict.fromkeys(_INKLING_ENDS, Move("none", keep=True))
    text_tool = dict.fromkeys(inside, Move("text tool")) | dict.fromkeys(_INKLING_ENDS, Move("none"))
    return link(
        {
            "none": Rules(ContentDelta, block("none")),
            "header": Rules(None, block("header")),
            "reason": Rules(ReasoningDelta, block("reason")),
            "content": Rules(ContentDelta, block("content")),
            "tool": Rules(ContentDelta, tool | always),
            "text tool": Rules(None, text_tool | always),
        }
    )


_INKLING = _inkling_states()


def inkling_parser(armed: bool) -> ReasoningParser:
    """Typed blocks: headers and text-form calls vanish, JSON calls stay in the content with their control tokens."""
    return BlockParser(_INKLING["reason" if armed else "none"])


def encode_inkling(reasoning: str, content: str, armed: bool) -> str:
    """A turn as the model writes it; ``armed``: the prompt holds the open thinking block."""
    think = f"{'' if armed else '<|message_model|><|content_thinking|>'}{reasoning}<|end_message|>"
    answer = f"<|message_model|><|content_text|>{content}<|end_message|><|content_model_end_sampling|>"
    return (think if reasoning or armed else "") + answer
