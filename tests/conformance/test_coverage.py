"""Every registered format has recorded cases, and every family module is registered."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import smg.models
from smg.models.family import Family
from smg.models.registry import FAMILIES, REASONING_PARSERS, TOOL_PARSERS


def cases(value: Any) -> Iterator[dict[str, Any]]:
    """The cases in a data file, whatever it is grouped by."""
    if isinstance(value, dict) and "parser" in value and "expect" in value:
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from cases(inner)


def test_every_format_has_cases() -> None:
    tools, reasoning = set(), set()
    for path in sorted(Path(__file__).parent.rglob("*.json")):
        for case in cases(json.loads(path.read_text())):
            (reasoning if "reasoning" in case["expect"] else tools).add(case["parser"])
    assert set(TOOL_PARSERS) - tools == set()
    assert set(REASONING_PARSERS) - reasoning == set()


def test_every_family_module_is_registered() -> None:
    found = []
    for module in pkgutil.iter_modules(smg.models.__path__, "smg.models."):
        if not module.ispkg:
            family = getattr(importlib.import_module(module.name), "FAMILY", None)
            if isinstance(family, Family):
                found.append(family.name)
    assert sorted(found) == sorted(family.name for family in FAMILIES)
    assert len(set(found)) == len(found)
