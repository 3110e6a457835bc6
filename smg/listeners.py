"""The TCP listeners of a gateway: bound by the supervisor before the first fork, served by the children that inherit
them.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from smg.settings import ConfigError, Settings

BACKLOG = 2048


@dataclass(slots=True)
class Listeners:
    """``api`` has one socket per frontend process (SO_REUSEPORT when there are several)."""

    api: list[socket.socket] = field(default_factory=list)
    metrics: socket.socket | None = None
    probes: socket.socket | None = None

    def close(self) -> None:
        for sock in [*self.api, self.metrics, self.probes]:
            if sock is not None:
                sock.close()


def bind_listeners(settings: Settings) -> Listeners:
    """Bind every TCP port of the gateway. Raises ``ConfigError`` when one is taken."""
    listeners = Listeners()
    try:
        what, where = "Failed to bind the HTTP listener", f"{settings.host}:{settings.port}"
        for _ in range(settings.frontend_procs):
            listeners.api.append(_bind(settings.host, settings.port, reuse_port=settings.frontend_procs > 1))
        host = settings.prometheus_host or ("::" if ":" in settings.host else "0.0.0.0")  # noqa: S104
        what, where = "failed to bind metrics server", f"{host}:{settings.prometheus_port}"
        listeners.metrics = _bind(host, settings.prometheus_port)
        if settings.health_check_port is not None:
            what, where = "failed to bind the health check listener", f"{settings.host}:{settings.health_check_port}"
            listeners.probes = _bind(settings.host, settings.health_check_port)
    except OSError as error:
        listeners.close()
        raise ConfigError(f"{what} on {where}: {error}") from error
    return listeners


def _bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(info[0], socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(info[4])
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


_inherited = Listeners()


def publish(listeners: Listeners) -> None:
    """Called by the supervisor before it forks."""
    global _inherited
    _inherited = listeners


def inherited() -> Listeners:
    """The sockets this process inherited."""
    return _inherited


def keep_for(role: str, index: int) -> None:
    """In a freshly forked child: close the sockets that other processes serve. A listener only ends when its last copy
    does.
    """
    for number, sock in enumerate(_inherited.api):
        if (role, index) != ("frontend", number):
            sock.close()
    if role != "telemetry":
        for other in (_inherited.metrics, _inherited.probes):
            if other is not None:
                other.close()
