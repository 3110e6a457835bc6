"""Command lines in the conventions of ``argparse``, on top of click.

Existing command lines rely on list flags that take several words after one occurrence (``--worker-urls A B``, a later
occurrence replaces the list), on unambiguous abbreviations and on error texts such as
``argument --port: invalid int value: 'x'``. click has none of these, so the words are brought into click's form first
(``normalise``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import click
import msgspec

from smg.flags import Flag
from smg.settings import flag_of

WORD_SEPARATOR = "\x1f"
_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")


class IntType(click.ParamType):  # type: ignore[type-arg]
    """An int, with argparse's error text."""

    name = "int"

    def __init__(self, *, non_negative: bool = False) -> None:
        self.non_negative = non_negative

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"invalid int value: '{value}'", param, ctx)
        if self.non_negative and number < 0:
            self.fail(f"expected a non-negative integer, got '{value}'", param, ctx)
        return number


class FloatType(click.ParamType):  # type: ignore[type-arg]
    """A float, with argparse's error text."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            self.fail(f"invalid float value: '{value}'", param, ctx)


class ChoiceType(click.ParamType):  # type: ignore[type-arg]
    """One of a fixed list of names."""

    name = "choice"

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            listed = ", ".join(f"'{choice}'" for choice in self.choices)
            self.fail(f"invalid choice: '{value}' (choose from {listed})", param, ctx)
        return str(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "{" + ",".join(self.choices) + "}"


class IntCsvType(click.ParamType):  # type: ignore[type-arg]
    """Integers in one word, separated by commas."""

    name = "int,int,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            return [int(part) for part in value.split(",") if part.strip()]
        except ValueError:
            self.fail(f"invalid int list value: '{value}'", param, ctx)


class CsvType(click.ParamType):  # type: ignore[type-arg]
    """Names in one word, separated by commas."""

    name = "a,b,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        return value if isinstance(value, list) else [part.strip() for part in value.split(",") if part.strip()]


class FlagOption(click.Option):
    """The option of one setting. ``arity`` is "" (switch), "1", "*" or "+" words; ``appends`` keeps earlier ones."""

    def __init__(self, field: str, flag: Flag, hint: Any, default: Any) -> None:
        self.flag = flag
        self.field_default = default
        base = flag.option or "--" + field.replace("_", "-")
        names = [base, *flag.aliases]
        value_type, self.is_list = _value_type(hint, flag)
        self.is_switch = value_type is None
        self.appends = flag.form in ("words", "repeat")
        self.arity = self._arity(flag)
        if flag.negatable:
            names = [f"{name}/--no-{name[2:]}" for name in names]
        super().__init__(
            [field, *names],
            type=value_type or click.BOOL,
            is_flag=self.is_switch,
            multiple=self.is_list and flag.form != "comma",
            default=None if not self.is_switch or flag.negatable else False,
            envvar=flag.env or None,
            help=self._help(flag, default),
        )

    def _arity(self, flag: Flag) -> str:
        if self.is_switch:
            return ""
        if flag.form == "words":
            return "+"
        if not self.is_list or flag.form in ("repeat", "comma"):
            return "1"
        return "+" if flag.at_least_one else "*"

    @staticmethod
    def _help(flag: Flag, default: Any) -> str:
        notes = []
        if default not in (None, False, [], {}):
            notes.append(f"default {default}")
        if flag.env:
            notes.append(f"env {flag.env}")
        if flag.tier == "later":
            notes.append("accepted without effect")
        if flag.tier == "refused":
            notes.append("not supported: stops start-up")
        return flag.help + (f" [{'; '.join(notes)}]" if notes else "")


def _value_type(hint: Any, flag: Flag) -> tuple[Any, bool]:
    """click's type of one value (None for a switch) and whether the setting is a list."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(bare) in (Union, UnionType):
        bare = next(arm for arm in get_args(bare) if arm is not NoneType)
    is_list = get_origin(bare) in (list, dict)
    element = get_args(bare)[0] if get_origin(bare) is list else str if is_list else bare
    if element is bool:
        return None, False
    if flag.form == "comma":
        return IntCsvType() if element is int else CsvType(), True
    if flag.choices:
        return ChoiceType(flag.choices), is_list
    if element is int:
        return IntType(non_negative=flag.non_negative), is_list
    return FloatType() if element is float else click.STRING, is_list


def options_of(table: type[msgspec.Struct]) -> list[FlagOption]:
    """One option per field of a settings struct, in help order; derived defaults are shown as this machine has them."""
    shown = table()
    hints = get_type_hints(table, include_extras=True)
    ordered = sorted(hints.items(), key=lambda item: flag_of(item[1]).tier in ("later", "refused"))
    return [FlagOption(field, flag_of(hint), hint, getattr(shown, field)) for field, hint in ordered]


class FlagCommand(click.Command):
    """A command whose options are ``FlagOption``; its parameters are the raw values of the flags that were given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [param for param in self.params if isinstance(param, FlagOption)]
        try:
            words, emptied, unknown = normalise(options, args, abbreviations=True)
        except click.UsageError as error:
            error.ctx = ctx
            raise
        if unknown:
            raise click.UsageError(f"unrecognized arguments: {' '.join(unknown)}", ctx)
        ctx.meta["smg.emptied"] = emptied
        return super().parse_args(ctx, words)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[-h]", "[flags ...]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                name = param.flag.group if isinstance(param, FlagOption) else "Options"
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def given_values(ctx: click.Context) -> dict[str, Any]:
    """Raw values of the flags that were given on the command line or in the environment, by field."""
    chosen = {
        name: value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) not in (click.core.ParameterSource.DEFAULT, None)
    }
    chosen.update({name: [] for name in ctx.meta.get("smg.emptied", ())})
    return chosen


def normalise(
    options: Iterable[FlagOption], args: Sequence[str], *, abbreviations: bool, prefix: str = "--"
) -> tuple[list[str], list[str], list[str]]:
    """Bring ``args`` into click's form.

    Returns the words for click (``--flag=value``), the fields whose list was given empty, and what is no known flag, in
    order. With another ``prefix`` (``--router-``) only flags spelled with it are taken. Raises ``click.UsageError`` for
    a missing value or an ambiguous abbreviation.
    """
    reader = _Reader({prefix + name[2:]: option for option in options for name in _spellings(option)}, abbreviations)
    at = 0
    while at < len(args):
        at = reader.take(args, at, prefix)
    lists = {id(option): option for option in reader.values if option.arity in ("*", "+")}
    emptied = [str(option.name) for option in lists.values() if option.arity == "*" and not reader.values.get(option)]
    words = [*reader.words]
    for option, values in reader.values.items():
        words += [f"{option.opts[0]}={value}" for value in values]
    return words, emptied, reader.unknown


def _spellings(option: FlagOption) -> list[str]:
    return [*option.opts, *option.secondary_opts]


class _Reader:
    """One pass over the words; ``values`` collects what options that take values were given."""

    def __init__(self, known: dict[str, FlagOption], abbreviations: bool) -> None:
        self.known = known
        self.abbreviations = abbreviations
        self.words: list[str] = []
        self.values: dict[FlagOption, list[str]] = {}
        self.unknown: list[str] = []

    def take(self, args: Sequence[str], at: int, prefix: str) -> int:
        """Read one flag with its values, or one foreign word; returns the index behind it."""
        word = args[at]
        if word in ("-h", "--help") and prefix == "--":
            self.words.append("--help")
            return at + 1
        name, equals, attached = word.partition("=")
        option = self._find(name) if name.startswith("--") else None
        if option is None:
            self.unknown.append(word)
            return at + 1
        spelled = "/".join(option.opts)
        if option.arity == "":
            if equals:
                raise click.UsageError(f"argument {spelled}: ignored explicit argument '{attached}'")
            self.words.append("--" + self._full(name)[len(prefix) :])
            return at + 1
        values, at = [attached] if equals else [], at + 1
        limit = 0 if equals else 1 if option.arity == "1" else len(args)
        while at < len(args) and len(values) < limit and not _is_flag(args[at]):
            values.append(args[at])
            at += 1
        if not values and option.arity != "*":
            raise click.UsageError(
                f"argument {spelled}: expected {'one' if option.arity == '1' else 'at least one'} argument"
            )
        if option.arity == "+" and option.appends:
            values = [WORD_SEPARATOR.join(values)]
        self.values[option] = self.values.get(option, []) + values if option.appends else values
        return at

    def _full(self, name: str) -> str:
        if name in self.known or not self.abbreviations:
            return name
        return next(spelled for spelled in self.known if spelled.startswith(name))

    def _find(self, name: str) -> FlagOption | None:
        exact = self.known.get(name)
        if exact is not None or not self.abbreviations or len(name) < 3:
            return exact
        matches = [spelled for spelled in self.known if spelled.startswith(name)]
        if len(matches) > 1:
            raise click.UsageError(f"ambiguous option: {name} could match {', '.join(matches)}")
        return self.known[matches[0]] if matches else None


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NEGATIVE_NUMBER.match(word)
