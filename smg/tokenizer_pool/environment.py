"""The Jinja environment of chat templates.

The settings are those that checkpoints are written against (transformers' ``apply_chat_template``): immutable
sandbox, ``trim_blocks`` and ``lstrip_blocks``, no autoescape, loop controls, a ``generation`` block that renders its
body, and the functions ``raise_exception`` and ``strftime_now`` beside a ``tojson`` that is Python's ``json.dumps``.

A render is bounded in three ways: every loop iteration and macro call is counted and looks at the clock now and then,
the output is counted as it is produced, and operators that make long values out of short ones are checked. The sandbox
itself limits ``range`` to 100000.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NamedTuple, NoReturn

import jinja2
import orjson
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# A name that no template can spell, so that none can call or replace the counter.
_TICK = "(tick)"
_DICT_ATTRIBUTES = frozenset(dir(dict))
# Attributes that the sandbox always grants; str.format is left to it, because a format string reaches attributes.
_GRANTED: dict[type, frozenset[str]] = {
    str: frozenset(name for name in dir(str) if name[0] != "_" and name not in ("format", "format_map")),
    LoopContext: frozenset(name for name in dir(LoopContext) if name[0] != "_"),
}
_CLOCK_EVERY = 64
_MAX_EXPONENT = 4096
_dumps = json.JSONEncoder(ensure_ascii=False).encode


class RenderLimits(NamedTuple):
    """Bounds of one render: wall-clock seconds, loop iterations and macro calls, characters of output."""

    seconds: float = 10.0
    steps: int = 1_000_000
    characters: int = 64 << 20


DEFAULT_LIMITS = RenderLimits()


class _JsonMemo:
    """Texts of JSON objects by their compact form, which a much faster encoder gives: tool declarations come with every
    request of a conversation."""

    def __init__(self, max_bytes: int = 8 << 20) -> None:
        self._texts: dict[bytes, str] = {}
        self._bytes = 0
        self._max_bytes = max_bytes

    def text(self, value: dict[str, Any]) -> str:
        """What ``json.dumps`` with raw non-ASCII text gives."""
        try:
            key = orjson.dumps(value, option=_ONLY_JSON)
        except (TypeError, ValueError):  # integers beyond 64 bits, keys that are no strings, other types
            return _dumps(value)
        if b"null" in key and key.count(b"null") != key.count(b'"null"'):  # a bare null may stand for NaN
            return _dumps(value)
        found = self._texts.get(key)
        if found is None:
            found = _dumps(value)
            self._bytes += 4 * len(key)
            if self._bytes > self._max_bytes:
                self._texts.clear()
                self._bytes = 4 * len(key)
            self._texts[key] = found
        return found


_ONLY_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
_memo = _JsonMemo()


class TemplateRefusal(Exception):  # noqa: N818 (a template says no; nothing went wrong)
    """The template called ``raise_exception``."""


class LimitExceeded(Exception):  # noqa: N818
    """A render ran into one of its limits."""


class _Budget:
    """What is left for the render in progress. One render at a time per environment."""

    __slots__ = ("deadline", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.deadline = 0.0

    def start(self, limits: RenderLimits) -> None:
        self.steps = limits.steps
        self.deadline = time.monotonic() + limits.seconds

    def check_clock(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitExceeded("the template takes too long")


class GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}``: marks assistant text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Reads the block up to its end tag."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the settings above. ``limits`` bound every render; not for concurrent renders."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, limits: RenderLimits = DEFAULT_LIMITS, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, LoopControlExtension])
        self.limits = limits
        self.budget = budget = _Budget()
        self.filters["tojson"] = tojson

        @pass_context
        def tick(context: Context, value: None) -> None:
            budget.steps = steps = budget.steps - 1
            if not steps % _CLOCK_EVERY:
                if steps < 0:
                    raise LimitExceeded("the template takes too many steps")
                budget.check_clock()

        def strftime_now(format: str) -> str:  # noqa: A002 (templates may name the parameter)
            return now().strftime(format)

        self.filters[_TICK] = tick
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The text of a template. Raises ``TemplateRefusal``, ``LimitExceeded``, or whatever a fault in it raises."""
        budget, limit = self.budget, self.limits.characters
        budget.start(self.limits)
        parts: list[str] = []
        size = 0
        for part in template.root_render_func(template.new_context(dict(variables))):
            parts.append(part)
            size += len(part)
            if size > limit:
                raise LimitExceeded("the prompt is too long")
        return "".join(parts)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Attribute access; the usual case, a key of a plain dict, skips the checks that are about objects."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                if attribute in obj:
                    return obj[attribute]
                return self.undefined(obj=obj, name=attribute)
        elif kind is Namespace and attribute[0] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        elif kind in _GRANTED and attribute in _GRANTED[kind]:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in the base)
        """Calls; methods of built-in types were checked when they were looked up."""
        if type(__obj) is BuiltinMethodType:
            if kwargs:  # the compiler adds these two for calls inside loops and blocks
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators whose result may be much larger than their operands."""
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(sequence, str | list | tuple):
                    self._check_size(len(sequence) * count)
        elif operator == "**":
            if isinstance(right, int | float) and abs(right) > _MAX_EXPONENT:
                raise LimitExceeded("an exponent in the template is too large")
        elif isinstance(left, str) and any(len(digits) > 5 for digits in _digit_runs(left)):
            raise LimitExceeded("a width in the template is too large")
        return super().call_binop(context, operator, left, right)

    def _check_size(self, size: int) -> None:
        if size > self.limits.characters:
            raise LimitExceeded("a value in the template is too large")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        repeated: list[nodes.For | nodes.Macro | nodes.CallBlock] = []
        for kind in (nodes.For, nodes.Macro, nodes.CallBlock):
            repeated += template.find_all(kind)
        for node in repeated:
            lineno = node.lineno
            count = nodes.Filter(nodes.Const(None, lineno=lineno), _TICK, [], [], None, None, lineno=lineno)
            node.body.insert(0, nodes.ExprStmt(count, lineno=lineno))
        return template


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` filter: Python's ``json.dumps`` with its defaults except ``ensure_ascii``; no HTML escaping."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _memo.text(value) if type(value) is dict else _dumps(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any = "") -> NoReturn:
    """What templates call to refuse a conversation."""
    raise TemplateRefusal(str(message))


def _digit_runs(text: str) -> list[str]:
    return "".join(character if character.isdigit() else " " for character in text).split()
