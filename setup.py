"""Builds the wheel; with ``SMG_COMPILE=1`` the modules of the token path and the prompt path are compiled by mypyc.

The sources are the same Python either way, and everything works without the compiled modules: they save CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

# Modules that define msgspec structs stay interpreted: mypyc does not know keywords of class statements.
COMPILED = (
    "smg/ipc.py",
    "smg/vocab/decode.py",
    "smg/vocab/encoder.py",
    "smg/engines/base.py",
    "smg/engines/grpc/client.py",
    "smg/engines/grpc/transport.py",
    "smg/engines/grpc/codecs/*.py",
    "smg/engines/grpc/h2/*.py",
    "smg/engines/zmq/client.py",
    "smg/engines/zmq/calls.py",
    "smg/engines/zmq/steps.py",
    "smg/detok/[!p]*.py",
    "smg/frontend/cork.py",
    "smg/frontend/direct.py",
    "smg/frontend/exchange.py",
    "smg/frontend/sessions/turn.py",
    "smg/detok/render/*.py",
    "smg/models/output.py",
    "smg/models/reasoning*.py",
    "smg/tokenizer_pool/fast_template.py",
    "smg/tokenizer_pool/injection.py",
    "smg/tokenizer_pool/preparation.py",
    "smg/tokenizer_pool/renderer.py",
    "smg/api/chat_shape.py",
    "smg/api/mold.py",
)
OPTIONS = ["--config-file=", "--ignore-missing-imports", "--explicit-package-bases", "--follow-imports=silent"]


def compiled_modules() -> list[str]:
    """Paths of the modules to compile."""
    found = sorted({path for pattern in COMPILED for path in Path().glob(pattern)})
    return [path.as_posix() for path in found if path.name != "__init__.py"]


def extensions() -> list[Extension]:
    """The compiled modules, or none."""
    if os.environ.get("SMG_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    options = [*OPTIONS, *compiled_modules()]
    return list(mypycify(options, opt_level="2", debug_level="0", group_name="smg"))


setup(ext_modules=extensions())
