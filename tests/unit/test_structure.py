"""Rules of the source tree: who may import whom, where messages live, how long a file may be, flags in the docs."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

import smg.messages
from smg.messages import ControlMessage, Message, RingMessage
from smg.settings import flags

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "smg"
# What runs as a process of its own. Modules directly in smg/ start processes and belong to none.
PROCESSES = (
    "smg.frontend",
    "smg.tokenizer_pool",
    "smg.router",
    "smg.detok",
    "smg.simengine",
    "smg.telemetry.process",
)
MAX_LINES = 560
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if not path.stem.endswith("_pb2"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> set[str]:
    """Dotted names of everything a module imports, inside functions and for type checking too."""
    found: set[str] = set()
    package = module_name(path).split(".")
    if path.stem != "__init__":
        package = package[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return found


def process_of(name: str) -> str:
    """The process a module belongs to; "" for libraries and starters."""
    return next((process for process in PROCESSES if name == process or name.startswith(process + ".")), "")


def is_starter(path: Path) -> bool:
    return path.parent == PACKAGE


def test_the_rule_sees_imports() -> None:
    assert "smg.detok.choice" in imported(PACKAGE / "detok" / "run.py")
    assert "smg.frontend.process" in imported(PACKAGE / "supervisor.py")
    assert process_of("smg.detok.choice") == "smg.detok"
    assert process_of("smg.telemetry.metrics") == ""


@pytest.mark.parametrize("path", [path for path in SOURCES if not is_starter(path)], ids=module_name)
def test_no_folder_imports_the_folder_of_another_process(path: Path) -> None:
    own = process_of(module_name(path))
    foreign = {name for name in imported(path) if process_of(name) not in ("", own)}
    assert foreign == set()


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


# ---- messages


def test_every_message_is_defined_in_one_place_and_belongs_to_a_link() -> None:
    defined = {
        (module_name(path), node.name)
        for path in SOURCES
        if module_name(path) == "smg.messages" or "smg.messages.Message" in imported(path)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "Message" for b in node.bases)
    }
    sent = {(kind.__module__, kind.__name__) for kind in (*get_args(RingMessage), *get_args(ControlMessage))}
    assert sent == defined
    assert {module for module, _ in defined} == {"smg.messages"}


def test_messages_carry_only_structs_of_the_same_module() -> None:
    def structs(hint: Any) -> set[type]:
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return {hint}
        return {found for argument in get_args(hint) for found in structs(argument)}

    seen: set[type] = set()
    waiting = [kind for kind in vars(smg.messages).values() if isinstance(kind, type) and issubclass(kind, Message)]
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        for hint in get_type_hints(kind, include_extras=True).values():
            waiting += structs(hint)
    assert len(seen) > 20
    assert {kind.__module__ for kind in seen} == {"smg.messages"}


def test_only_the_links_and_zmq_engines_use_zmq() -> None:
    users = {module_name(path) for path in SOURCES if "zmq" in imported(path)}
    assert {name for name in users if "zmq" not in name} == {"smg.ipc", "smg.process"}


# ---- flags


def test_every_flag_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "flags.md").read_text()
    missing = [name for name, flag in flags().items() if f"`{flag.option or '--' + name.replace('_', '-')}" not in text]
    assert missing == []


def test_the_list_of_flags_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gen_flags.py"), "--check"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
