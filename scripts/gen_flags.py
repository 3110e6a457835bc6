"""Generate ``docs/flags.md`` from the flag tables of ``smg launch`` and ``smg serve``.

``python scripts/gen_flags.py`` writes the file, ``--check`` only says whether the one in the tree is current.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from smg.argv import FlagOption, options_of  # noqa: E402 - the checkout this script belongs to, installed or not
from smg.serve import ServeSettings  # noqa: E402
from smg.settings import Settings  # noqa: E402

TARGET = ROOT / "docs" / "flags.md"
HEAD = """# Flags

Generated from the flag tables by `python scripts/gen_flags.py`; do not edit.

A flag that is not given is read from its environment variable where the table names one. A list takes several words
after one occurrence (`--worker-urls A B`); a later occurrence replaces it, unless the flag says that it may be
repeated. Unambiguous abbreviations work. `smg launch --help` prints the same list.
"""
LAUNCH = """
# smg launch
"""
LATER = """
# Accepted without effect

These flags belong to the established flag set. They are accepted, so that existing command lines start, and named in
one warning at start-up; this version does nothing with them.
"""
REFUSED = """
# Refused

Ignoring one of these would weaken security: start-up stops when it is set.
"""
SERVE = """
# smg serve

Gateway flags are given with the prefix `--router-` (`--router-policy random`); every word that is neither a flag of
this table nor a gateway flag goes to the engine unchanged.
"""


def derived(field: Any) -> str:
    """The default of a flag that depends on the machine; "" for every other."""
    factory = field.default_factory
    if not isinstance(factory, functools.partial):
        return ""
    divisor, most = factory.args
    return f"cores / {divisor}, between 1 and {most}"


def shown(option: FlagOption, field: Any) -> str:
    """The default as the table shows it."""
    text = derived(field)
    if text:
        return text
    value = option.field_default
    if value is None or value in ([], {}):
        return ""
    if value is False:
        return "off"
    if value == sys.executable:
        return "the interpreter that runs the gateway"
    return "on" if value is True else f"`{value}`"


def meaning(option: FlagOption) -> str:
    """Help text, choices, forms and environment."""
    flag = option.flag
    parts = [flag.help]
    if flag.choices:
        parts.append("one of " + ", ".join(f"`{choice}`" for choice in flag.choices))
    if flag.form in ("repeat", "words"):
        parts.append("may be repeated")
    if flag.form == "comma":
        parts.append("comma-separated")
    if flag.env:
        parts.append(f"environment `{flag.env}`")
    return "; ".join(parts).replace("|", "\\|")


def names(option: FlagOption) -> str:
    spelled = [*option.opts, *option.secondary_opts]
    value = {"": "", "1": " V", "*": " V ...", "+": " V ..."}[option.arity]
    return "<br>".join(f"`{name}{value if number == 0 else ''}`" for number, name in enumerate(spelled))


def tables(settings: type[msgspec.Struct], tiers: Iterable[str]) -> str:
    """One table per group of the flags of these tiers."""
    fields = {field.name: field for field in msgspec.structs.fields(settings)}
    groups: dict[str, list[str]] = {}
    for option in options_of(settings):
        if option.flag.tier in tiers:
            row = f"| {names(option)} | {shown(option, fields[str(option.name)])} | {meaning(option)} |"
            groups.setdefault(option.flag.group, []).append(row)
    head = "| Flag | Default | Meaning |\n|---|---|---|\n"
    return "".join(f"\n## {name}\n\n{head}" + "\n".join(rows) + "\n" for name, rows in groups.items())


def document() -> str:
    """The whole file."""
    return (
        HEAD + LAUNCH + tables(Settings, ("core", "own")) + SERVE + tables(ServeSettings, ("core", "own"))
        + LATER + tables(Settings, ("later",)) + REFUSED + tables(Settings, ("refused",))
    )  # fmt: skip


def main() -> int:
    text = document()
    if "--check" in sys.argv[1:]:
        current = TARGET.exists() and TARGET.read_text() == text
        if not current:
            sys.stderr.write("docs/flags.md is out of date: python scripts/gen_flags.py\n")
        return 0 if current else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
