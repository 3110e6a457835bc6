"""Addresses of workers: their one form, and what can never be one. Start-up and the workers API ask here."""

from __future__ import annotations

from urllib.parse import urlsplit

from smg.engines.zmq.addresses import SCHEME, check_paths, path_of

IPC = SCHEME
SCHEMES = ("http://", "https://", "grpc://", "grpcs://", IPC)
# What --backend must name for workers whose engine is not in their registration.
ZMQ_BACKENDS = ("vllm", "tokenspeed")
MAX_HOST = 253  # of a name in DNS


def worker_url(url: str) -> str:
    """The one form of a worker's URL: no slash at its end. What cannot be read stays as it is."""
    return url if url.startswith(IPC) else url.rstrip("/")


def check_worker_url(url: str, clients: int = 1, ranks: int = 1) -> None:
    """Raises ``ValueError`` for a URL behind which no worker can be; a password in the URL is not in its text.
    ``clients`` (detok processes) and ``ranks`` decide how long the socket names of an ``ipc://`` URL are."""
    if not url.startswith(SCHEMES):
        raise ValueError("URL must start with a lowercase http://, https://, grpc://, grpcs://, or ipc:// scheme")
    _check_characters(url)
    if url.startswith(IPC):
        check_paths(path_of(url), clients, ranks)
    else:
        _check_host(url)


def check_handshake_address(address: str) -> None:
    """Raises ``ValueError`` unless engines can dial ``address``."""
    _check_characters(address)
    if not address.startswith("tcp://") or _check_host(address) is None:
        raise ValueError("the address must be tcp://host:port")


def _check_characters(url: str) -> None:
    """``urlsplit`` takes out line ends and tabs in silence, so they are looked for first."""
    if any(char.isspace() or not char.isprintable() for char in url):
        raise ValueError("white space and control characters cannot be in an address")


def _check_host(url: str) -> int | None:
    """The port, if there is one."""
    rest = url.partition("://")[2]
    if "@" in rest:
        raise ValueError("a user name or password cannot be in a worker's address")
    if any(char in rest for char in "/?#"):
        raise ValueError("a worker's address may have nothing behind its port")
    parts = urlsplit(url)
    if not parts.hostname or parts.port == 0:
        raise ValueError("a worker's address needs a host and a port between 1 and 65535")
    if len(parts.hostname) > MAX_HOST:
        raise ValueError(f"the host name is longer than {MAX_HOST} characters")
    return parts.port
