"""From the raw values of flags to ``Settings``. Errors are ``ConfigError`` with the text that start-up prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from smg.argv import WORD_SEPARATOR
from smg.flags import ConfigError
from smg.settings import ControlPlaneKey, Settings


def build_settings(values: dict[str, Any]) -> Settings:
    """Settings from what was given; everything else keeps its default. Does not run ``check_settings``."""
    converted = dict(values)
    for name, convert in _CONVERTERS.items():
        if name in converted:
            converted[name] = convert(converted[name])
    for name, value in converted.items():
        if isinstance(value, tuple):
            converted[name] = list(value)
    return Settings(**converted)


def _urls_with_ports(entries: Sequence[str]) -> list[tuple[str, int | None]]:
    found: list[tuple[str, int | None]] = []
    for entry in entries:
        url, *rest = entry.split(WORD_SEPARATOR)
        if len(rest) > 1:
            raise ConfigError(f"Expected a URL and at most a bootstrap port, got: {entry.replace(WORD_SEPARATOR, ' ')}")
        found.append((url, _bootstrap_port(rest[0]) if rest else None))
    return found


def _bootstrap_port(word: str) -> int | None:
    if word.lower() == "none":
        return None
    if not word.isdecimal() or not 0 < int(word) < 65536:
        raise ConfigError(f"Invalid bootstrap port: {word}. Must be a number or 'none'")
    return int(word)


def _tenant_keys(entries: Sequence[str]) -> list[tuple[str, str]]:
    keys = []
    for entry in entries:
        tenant, colon, key = entry.partition(":")
        if not colon:
            raise ConfigError("Invalid --tenant-api-key value: expected 'tenant_id:key' (missing ':' separator)")
        keys.append((tenant, key))
    return keys


def _control_plane_keys(entries: Sequence[str]) -> list[ControlPlaneKey]:
    keys = []
    for entry in entries:
        parts = entry.split(":", 3)
        if len(parts) < 4 or not parts[0] or not parts[3]:
            raise ConfigError("Invalid control-plane API key entry: expected 'id:name:role:key'")
        keys.append(ControlPlaneKey(parts[0], parts[1], _role(parts[2]), parts[3]))
    return keys


def _role(word: str) -> Literal["admin", "user"]:
    if word == "admin":
        return "admin"
    if word == "user":
        return "user"
    raise ConfigError("Invalid control-plane API key role: must be 'admin' or 'user'")


def _aliases(entries: Sequence[str]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for entry in entries:
        alias, equals, canonical = (part.strip() for part in entry.partition("="))
        if not equals or not alias or not canonical:
            raise ConfigError(f"Invalid model alias '{entry}'. Expected format: <alias>=<canonical>")
        if aliases.setdefault(alias, canonical) != canonical:
            raise ConfigError(f"--model-alias: '{alias}' stands for both '{aliases[alias]}' and '{canonical}'")
    return aliases


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "prefill": _urls_with_ports,
    "encode": _urls_with_ports,
    "tenant_api_keys": _tenant_keys,
    "control_plane_api_keys": _control_plane_keys,
    "model_aliases": _aliases,
}
