"""The fast engine for chat templates: MiniJinja, used only where it gives the text that Jinja2 gives.

It differs from Jinja2 in corners (how numbers print, methods it lacks, what may be iterated), so it has to earn its use
for every *shape* of conversation: the first one of a shape is rendered with both engines, and the shape belongs to the
fast engine only if the texts are equal. A shape is what decides which branches a template takes and how values print:
the kinds of messages, the types inside tool-call arguments, the tool list, the flags. A set of probe conversations is
tried when the template loads; a template on which the engines never agree is not given to the fast one at all.

Errors are never final here: the caller renders again with Jinja2.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import minijinja
import orjson
from xxhash import xxh3_128_digest

from smg.tokenizer_pool.environment import RenderLimits, raise_exception, tojson
from smg.tokenizer_pool.probes import probe_variables

logger = logging.getLogger(__name__)

_NAME = "chat"
_MAX_SHAPES = 4096
_FUEL_PER_STEP = 10
# Types without anything inside that could print in two ways.
_FLAT = frozenset({str, bool, type(None)})
_MAX_DEPTH = 16
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")

Reference = Callable[[Mapping[str, Any]], str]


class FastTemplate:
    """A template compiled for MiniJinja. ``reference`` renders the same template with Jinja2."""

    def __init__(self, source: str, now: Callable[[], datetime], limits: RenderLimits, reference: Reference) -> None:
        """Raises ``minijinja.TemplateError`` for a template that the engine cannot compile."""
        environment = minijinja.Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            debug=False,
            fuel=limits.steps * _FUEL_PER_STEP,
            auto_escape_callback=lambda name: False,
            filters={"tojson": tojson},
            globals={"raise_exception": raise_exception, "strftime_now": lambda format: now().strftime(format)},  # noqa: A006
        )
        environment.add_template(_NAME, _GENERATION.sub(_as_condition, source))
        self._environment = environment
        self._limit = limits.characters
        self._reference = reference
        self._shapes: dict[Any, bool] = {}

    @classmethod
    def checked(
        cls,
        source: str,
        now: Callable[[], datetime],
        limits: RenderLimits,
        reference: Reference,
        special_tokens: Mapping[str, str],
    ) -> FastTemplate | None:
        """The template with the shapes of the probe conversations settled; None when the engine cannot compile it or
        never agrees."""
        try:
            fast = cls(source, now, limits, reference)
        except Exception as error:
            logger.info("chat template: the fast engine cannot compile it (%s)", error)
            return None
        agreed = 0
        for probe in probe_variables():
            try:
                agreed += fast.render(probe | dict(special_tokens)) is not None
            except Exception as error:
                logger.debug("chat template: a probe fails (%s)", type(error).__name__)
        if agreed:
            return fast
        logger.info("chat template: the engines never agree on the probes, rendering with jinja2")
        return None

    def render(self, variables: Mapping[str, Any], tools_digest: bytes | None = None) -> str | None:
        """The text, or None when Jinja2 has to render. A conversation of a new shape is rendered by both; what Jinja2
        raises then is passed on. ``tools_digest`` stands for ``tools``, which then need not be looked at."""
        shape = _shape(variables, tools_digest)
        known = self._shapes.get(shape)
        if shape is None or known is False:
            return None
        try:
            text: str = self._environment.render_template(_NAME, **variables)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of native code is no Exception
            return None
        if len(text) > self._limit:
            return None
        if known is None:
            known = text == self._reference(variables)
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = known
        return text if known else None


def _as_condition(match: re.Match[str]) -> str:
    """A generation block renders its body, as a true condition does."""
    left, end, right = match.groups()
    return f"{{%{left} {'endif' if end else 'if true'} {right}%}}"


def _shape(variables: Mapping[str, Any], tools_digest: bytes | None) -> Any:
    """A hashable value that stands for the shape of a render, None for one that only Jinja2 may do."""
    kinds = set()
    try:
        for message in variables["messages"]:
            types: Any = tuple(map(type, message.values()))
            if not _FLAT.issuperset(types):
                types = tuple(_types(value, _MAX_DEPTH) for value in message.values())
            kinds.add((message.get("role"), not message.get("content"), tuple(message), types))
        rest = dict(variables)
        del rest["messages"]
        if tools_digest is not None:
            del rest["tools"]
        return frozenset(kinds), tools_digest, xxh3_128_digest(orjson.dumps(rest))
    except (TypeError, ValueError, RecursionError):
        return None


def _types(value: Any, depth: int) -> Any:
    """The types inside a value, with numbers told apart that engines print differently."""
    kind = type(value)
    if kind is str:
        return str
    if kind is dict:
        if depth == 0:
            raise RecursionError
        return dict, frozenset([_types(item, depth - 1) for item in value.values()])
    if kind is list:
        if depth == 0:
            raise RecursionError
        return list, frozenset([_types(item, depth - 1) for item in value])
    if kind is float:
        return float, value.is_integer(), "e" in repr(value)
    if kind is int:
        return int, -(2**63) <= value < 2**63
    return kind
