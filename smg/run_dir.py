"""The private directory of one gateway: the sockets of its ring, its saved worker list, its metrics.

Rules:

* It belongs to the supervisor, which holds a lock on the file ``lock`` in it as long as it lives, and removes the
  directory when it ends.
* A supervisor that was killed leaves its directory behind, unlocked. The next gateway that starts beside it (same
  parent directory, same user) removes it.
* The lock is taken before the file gets its name, so that a directory in the making is never taken for a left one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MAX_IPC_PATH = 107

_PREFIX = "smg-"
_LOCK = "lock"


@contextlib.contextmanager
def run_dir(base: str | None = None) -> Iterator[Path]:
    """A new directory (0700) under ``base`` (None: the system's place for temporary files), removed at the end.

    Raises ``OSError`` if the paths of its sockets would be too long.
    """
    parent = Path(base or tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        longest = directory / "frontend99.999999"
        if len(str(longest).encode()) > MAX_IPC_PATH:
            raise OSError(f"socket directory {directory} is too long: {longest} exceeds {MAX_IPC_PATH} bytes")
        with _locked(directory):
            _remove_left(parent)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    unnamed = directory / f"{_LOCK}.new"
    with unnamed.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unnamed.rename(directory / _LOCK)
        yield


def _remove_left(parent: Path) -> None:
    """Remove the directories of supervisors that are gone."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            if lock.parent.lstat().st_uid != os.getuid() or lock.parent.is_symlink():
                continue
            descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held: that gateway is running
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
