"""What a command-line flag says about itself.

Every field of ``smg.settings.Settings`` carries one ``Flag`` in its annotation. The option's name follows from the
field's name, its kind from the field's type and its default from the field's default, so there is no second table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Tier = Literal["core", "own", "later", "refused"]


class ConfigError(ValueError):
    """A configuration value that stops start-up; the text names the field, the value and the reason."""


@dataclass(frozen=True)
class Flag:
    """The command-line side of one setting.

    ``tier``: "core" (compatible with the established flag set), "own" (this project's), "later" (accepted and stored,
    named in one start-up warning, without effect) or "refused" (its absence would weaken security: start-up stops).
    ``option`` replaces the name derived from the field. ``env`` is read when the flag is not given. ``at_least_one``
    marks a list flag that needs a value. ``form`` "words" keeps the words after each occurrence together, "repeat"
    takes one word per occurrence and may be repeated, "comma" is one comma-separated word.
    """

    help: str
    group: str
    tier: Tier = "core"
    option: str = ""
    aliases: tuple[str, ...] = ()
    env: str = ""
    choices: tuple[str, ...] = ()
    form: Literal["", "words", "repeat", "comma"] = ""
    at_least_one: bool = False
    non_negative: bool = False
    negatable: bool = False
    secret: bool = False


def group(name: str, tier: Tier = "core") -> Callable[..., Flag]:
    """A maker of the flags of one help section."""
    return functools.partial(Flag, group=name, tier=tier)
