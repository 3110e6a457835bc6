"""Opens the right kind of connection for a worker."""

from __future__ import annotations

from pathlib import Path

from smg.engines.base import EngineClient
from smg.engines.grpc.channel import TlsOptions
from smg.engines.grpc.client import GrpcWorkerClient
from smg.engines.grpc.h2 import LeanTransport
from smg.engines.zmq.client import ZmqHost, ZmqWorkerClient
from smg.messages import WorkerRef
from smg.settings import Settings


def tls_options(settings: Settings) -> TlsOptions | None:
    """The TLS settings towards workers, None when none are given."""
    if not (settings.ca_cert_paths or settings.client_cert_path):
        return None
    authorities = b"\n".join(Path(path).read_bytes() for path in settings.ca_cert_paths)
    certificate, key = settings.client_cert_path, settings.client_key_path
    return TlsOptions(
        authorities or None,
        Path(certificate).read_bytes() if certificate else None,
        Path(key).read_bytes() if key else None,
    )


def connect(worker: WorkerRef, settings: Settings, host: ZmqHost) -> EngineClient:
    """A client for ``worker``. Raises ``ValueError`` for a transport or kind this gateway does not speak."""
    if worker.transport == "zmq":
        return ZmqWorkerClient(worker.url, worker.kind, host)
    if worker.transport != "grpc":
        raise ValueError(f"unknown transport '{worker.transport}' of worker {worker.url}")
    tls = tls_options(settings)
    transport = LeanTransport(worker.url, tls) if settings.grpc_transport == "lean" else None
    return GrpcWorkerClient(worker.url, worker.kind, tls=tls, transport=transport)
