"""The Prometheus listener and the probe port: small threaded HTTP servers on sockets that are already bound.

They run in threads of the telemetry process, so a scrape delays no stream.
"""

from __future__ import annotations

import http.server
import logging
import math
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "HttpListener", "mark_process_dead", "render", "serve_metrics", "serve_probes"]

log = logging.getLogger("smg.telemetry")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_TIMEOUT_SECS = 10
MAX_CONNECTIONS = 32
READ_ATTEMPTS = 3

Answer = tuple[int, str, bytes]


class _LivingCollector(Collector):
    """The sum over all processes, without the samples that were forgotten (NaN)."""

    def __init__(self, directory: str) -> None:
        self._files = MultiProcessCollector(None, path=directory)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        for metric in self._read():
            if metric.type == "gauge":
                metric.samples = [sample for sample in metric.samples if not math.isnan(sample.value)]
            if metric.samples:
                yield metric

    def _read(self) -> list[Metric]:
        # A process that is just creating its file leaves it empty for a moment.
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return list(self._files.collect())  # type: ignore[no-untyped-call]
            except (struct.error, FileNotFoundError, ValueError):
                continue
        return list(self._files.collect())  # type: ignore[no-untyped-call]


def render(directory: str) -> bytes:
    """The text exposition of everything the processes wrote under ``directory``."""
    registry = CollectorRegistry()
    registry.register(_LivingCollector(directory))
    return generate_latest(registry)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: HttpListener
    timeout = CLIENT_TIMEOUT_SECS
    protocol_version = "HTTP/1.1"
    server_version = "smg"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            status, content_type, body = self.server.answer(path)
        except Exception:
            log.exception("cannot answer %s", path)
            status, content_type, body = 500, "text/plain; charset=utf-8", b"internal error\n"
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """No access log: a scrape every few seconds is no news."""


class HttpListener(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves GET on a bound, listening socket until ``close``. ``answer`` maps a path to (status, type, body)."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, sock: socket.socket, answer: Callable[[str], Answer], name: str) -> None:
        address: tuple[str, int] = sock.getsockname()[:2]
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = sock
        self.server_name, self.server_port = address
        self.answer = answer
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.5}, name=name, daemon=True
        )
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or sent rubbish is no error of ours."""

    def close(self) -> None:
        """Stop serving and close the socket; running answers finish in their threads."""
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=2)


def serve_metrics(sock: socket.socket, directory: str) -> HttpListener:
    """Serve ``GET /metrics`` on ``sock`` (everything else is 404) with what is written under ``directory``."""

    def answer(path: str) -> Answer:
        if path != "/metrics":
            return 404, "text/plain; charset=utf-8", b"not found\n"
        return 200, CONTENT_TYPE, render(directory)

    return HttpListener(sock, answer, "metrics")


def serve_probes(sock: socket.socket, readiness: Callable[[], tuple[int, dict[str, Any]]]) -> HttpListener:
    """Serve ``/health``, ``/liveness`` (always 200) and ``/readiness`` (what the callable says) on ``sock``."""

    def answer(path: str) -> Answer:
        if path in ("/health", "/liveness"):
            return 200, "text/plain; charset=utf-8", b"OK"
        if path == "/readiness":
            status, body = readiness()
            return status, "application/json", orjson.dumps(body)
        return 404, "text/plain; charset=utf-8", b"not found\n"

    return HttpListener(sock, answer, "probes")
