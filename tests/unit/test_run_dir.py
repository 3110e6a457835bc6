"""The gateway's private directory: locked while its supervisor lives, removed when it is found left behind."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from smg.run_dir import run_dir


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="smgr-") as name:  # socket paths must be short
        yield Path(name)


def killed_owner(parent: Path) -> Path:
    """The directory of a process that was killed while it held it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with run_dir(str(parent)) as directory:
            os.write(write, bytes(directory))
            signal.pause()
    left = Path(os.fsdecode(os.read(read, 4096)))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    return left


def test_it_is_private_and_removed_at_the_end(parent: Path) -> None:
    with run_dir(str(parent)) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "socket").touch()
    assert list(parent.iterdir()) == []


def test_only_the_directory_of_a_killed_owner_is_removed(parent: Path) -> None:
    other = parent / "smg-of-something-else"
    other.mkdir()
    with run_dir(str(parent)) as living:
        left = killed_owner(parent)
        assert left.is_dir()
        with run_dir(str(parent)) as directory:
            assert sorted(parent.iterdir()) == sorted([other, living, directory])


def test_a_path_too_long_for_sockets_is_refused(parent: Path) -> None:
    deep = parent / ("d" * 90)
    deep.mkdir()
    with pytest.raises(OSError, match="too long"), run_dir(str(deep)):
        pass
    assert list(deep.iterdir()) == []
