"""Names of the sockets of a ZMQ worker.

The worker's URL ``ipc://<path>`` is a prefix, not a socket. Engines dial one TCP port derived from it for the
handshake; the handshake tells them the data sockets: one output per client (detok process), and one input per client
and rank. The first ones are ``<path>-in.sock`` and ``<path>-out.sock``. The names depend on nothing but the URL and the
indices, so a restarted process, and a restarted gateway, bind the same ones and the engine finds them again.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from smg.run_dir import MAX_IPC_PATH

SCHEME = "ipc://"
FIRST_HANDSHAKE_PORT = 20000
HANDSHAKE_PORTS = 10000
MAX_RANKS = 1024
_FNV_BASIS, _FNV_PRIME, _FNV_MASK = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1


def path_of(url: str) -> str:
    """The path of a worker URL. Raises ``ValueError`` for anything but ``ipc://<absolute path>``."""
    path = url.removeprefix(SCHEME)
    if path == url or not path.startswith("/") or path.endswith("/"):
        raise ValueError(f"ZMQ worker URL must be ipc://<path>, got '{url}'")
    return path


def handshake_port(path: str) -> int:
    """TCP port where engines of ``ipc://<path>`` are answered: FNV-1a (64 bits) of the path, modulo 10000."""
    value = _FNV_BASIS
    for byte in path.encode():
        value = (value ^ byte) * _FNV_PRIME & _FNV_MASK
    return FIRST_HANDSHAKE_PORT + value % HANDSHAKE_PORTS


def handshake_address(path: str, override: str | None = None) -> str:
    """Where engines dial. Raises ``ValueError`` for an ``override`` that is no TCP address."""
    if override is None:
        return f"tcp://127.0.0.1:{handshake_port(path)}"
    if not override.startswith("tcp://"):
        raise ValueError(f"zmq_handshake_address must start with tcp://, got '{override}'")
    return override


def input_path(path: str, client: int, rank: int) -> str:
    """Socket file through which ``client`` sends requests to engine ``rank``."""
    number = str(client or "") if not rank else f"{client}r{rank}"
    return f"{path}-in{number}.sock"


def output_path(path: str, client: int) -> str:
    """Socket file where ``client`` receives the output of all ranks."""
    return f"{path}-out{client or ''}.sock"


def identity(rank: int) -> bytes:
    """The ZMQ identity of an engine: its rank, two bytes little-endian."""
    return rank.to_bytes(2, "little")


def rank_of(name: bytes) -> int:
    """The rank behind an identity, -1 for something else."""
    return int.from_bytes(name, "little") if len(name) == 2 else -1


def check_paths(path: str, clients: int, ranks: int) -> None:
    """Raises ``ValueError`` when a socket path would exceed what the system allows."""
    longest = output_path(path, max(clients - 1, 1))
    other = input_path(path, max(clients - 1, 0), max(ranks - 1, 0))
    longest = max(longest, other, key=lambda name: len(name.encode()))
    if len(longest.encode()) > MAX_IPC_PATH:
        raise ValueError(f"socket path {longest} exceeds {MAX_IPC_PATH} bytes")


def prepare_directory(path: str) -> None:
    """Make the private directory of the sockets, or check an existing one. Raises ``ValueError`` or ``OSError``."""
    directory = Path(path).parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{directory} is not a directory")
    if status.st_uid != os.getuid():
        raise ValueError(f"directory {directory} of a ZMQ worker belongs to another user")


def remove_stale(name: str) -> None:
    """Remove the socket file a dead process left. Raises ``ValueError`` when something else is there."""
    try:
        status = os.lstat(name)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ValueError(f"{name} is in the way: it is not a socket")
    os.unlink(name)
