"""A proxy that notes every request and the status of its answer."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_OWN = ("host", "connection", "transfer-encoding", "content-length", "date", "server")


@dataclass(frozen=True)
class Seen:
    """One request: method, path without query, body, and what came back."""

    method: str
    path: str
    body: bytes
    status: int
    answer: bytes


@contextmanager
def recording(target: str) -> Iterator[tuple[str, list[Seen]]]:
    """Address of a proxy in front of ``target`` until the end of the block, and what it has seen."""
    seen: list[Seen] = []
    host = urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            upstream = http.client.HTTPConnection(host, timeout=60)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            upstream.request(self.command, self.path, body, kept)
            answer = upstream.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OWN:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            pieces = []
            while piece := answer.read1(65536):
                pieces.append(piece)
                self.wfile.write(piece)
                self.wfile.flush()
            upstream.close()
            path = urlsplit(self.path).path
            seen.append(Seen(self.command, path, body, answer.status, b"".join(pieces)))
            self.close_connection = True

        do_GET = do_HEAD = do_POST = do_DELETE = relay

        def log_message(self, *_: object) -> None:
            """No log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
