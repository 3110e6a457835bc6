"""Builds the wheel. The modules of the token path and the prompt path are compiled by mypyc where that is possible.

The sources are the same Python either way, and everything works without the compiled modules: they save CPU.
``SMG_COMPILE`` decides:

* not set: compiled if there is a C compiler and all goes well, else a wheel of plain Python; never for an editable
  install, where changes of the sources would go unnoticed.
* ``1``: compiled, or the build fails.
* ``0``: plain Python.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

# Modules that define msgspec structs stay interpreted: mypyc does not know keywords of class statements.
COMPILED = (
    "smg/ipc.py",
    "smg/vocab/decode.py",
    "smg/vocab/encoder.py",
    "smg/engines/base.py",
    "smg/engines/grpc/client.py",
    "smg/engines/grpc/receiver.py",
    "smg/engines/grpc/transport.py",
    "smg/engines/grpc/codecs/*.py",
    "smg/engines/grpc/h2/*.py",
    "smg/engines/zmq/client.py",
    "smg/engines/zmq/calls.py",
    "smg/engines/zmq/steps.py",
    "smg/detok/[!p]*.py",
    "smg/detok/render/*.py",
    "smg/frontend/cork.py",
    "smg/frontend/direct.py",
    "smg/frontend/exchange.py",
    "smg/models/output.py",
    "smg/models/reasoning*.py",
    "smg/tokenizer_pool/fast_template.py",
    "smg/tokenizer_pool/injection.py",
    "smg/tokenizer_pool/preparation.py",
    "smg/tokenizer_pool/renderer.py",
    "smg/api/chat_shape.py",
    "smg/api/mold.py",
)
# Without the packages of whoever builds: what comes out shall depend on these sources alone.
OPTIONS = [
    "--config-file=",
    "--no-site-packages",
    "--ignore-missing-imports",
    "--explicit-package-bases",
    "--follow-imports=silent",
]
CHOICE = os.environ.get("SMG_COMPILE", "")


def compiled_modules() -> list[str]:
    """Paths of the modules to compile."""
    found = sorted({path for pattern in COMPILED for path in Path().glob(pattern)})
    return [path.as_posix() for path in found if path.name != "__init__.py"]


def wanted() -> bool:
    """Whether this run of the build should compile. Most runs only ask for the name and the version."""
    if CHOICE == "0" or not {"build", "build_ext", "bdist_wheel", "install", "editable_wheel"}.intersection(sys.argv):
        return False
    return CHOICE == "1" or ("editable_wheel" not in sys.argv and has_c_compiler())


def has_c_compiler() -> bool:
    """There is a compiler, and the headers it needs."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return bool(shutil.which(shlex.split(command)[0])) and Path(sysconfig.get_path("include"), "Python.h").exists()


def extensions() -> list[Extension]:
    """The compiled modules, or none."""
    if not wanted():
        return []
    try:
        from mypyc.build import mypycify

        options = [*OPTIONS, *compiled_modules()]
        return list(mypycify(options, opt_level="2", debug_level="0", group_name="smg"))
    except (Exception, SystemExit) as error:  # mypycify ends the program where a module does not compile
        go_without(error)
        return []


def go_without(error: BaseException) -> None:
    """Build plain Python because of ``error``, unless compiled modules were demanded."""
    if CHOICE == "1":
        raise error
    warnings.warn(f"built without compiled modules: {error!r}", stacklevel=2)


class BuildCompiled(build_ext):
    """All compiled modules or none: each of them needs the library that the others are in as well."""

    def run(self) -> None:
        try:
            super().run()
        except (BaseError, CompileError, LinkError) as error:
            go_without(error)
            for output in self.get_outputs():
                Path(output).unlink(missing_ok=True)
            self.extensions = []


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildCompiled})
