"""Channels to workers: addresses, options, TLS, and the mapping of gRPC failures to ``EngineError``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio

from smg.engines.base import EngineError

DEFAULT_PORTS = {"grpc": 80, "grpcs": 443}
SCHEMES = frozenset(DEFAULT_PORTS)

# One TCP connection per worker and channel. No message limit: prompts of any length go out, tokenizer bundles and
# non-streamed answers with logprobs come in. C-core servers allow one keepalive ping in five minutes without data and
# close the connection of a client that sends more. A worker that was down is dialled again within two seconds, and its
# calls fail at once meanwhile.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(slots=True, frozen=True)
class TlsOptions:
    """How ``grpcs://`` workers are verified and what the gateway shows them; all members are PEM bytes.

    ``ca`` None: the system's authorities. ``certificate`` and ``key``: the gateway's own, both or neither."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None


def target_of(url: str) -> str:
    """``host:port`` of a worker URL. Raises ``ValueError`` when it is no ``grpc://`` or ``grpcs://`` URL."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(f"not a gRPC worker URL: {url}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{parts.port or DEFAULT_PORTS[parts.scheme]}"


# ``grpc.aio.Channel``. The published type stubs demand serializers where the library takes raw bytes without.
Channel = Any


def open_channel(url: str, tls: TlsOptions | None = None) -> Channel:
    """A channel to the worker at ``url``. Nothing is dialled before the first call."""
    target = target_of(url)
    if not url.startswith("grpcs://"):
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    tls = tls or TlsOptions()
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)


def engine_error(error: grpc.aio.AioRpcError) -> EngineError:
    """The failure of a call in the gateway's own terms."""
    return EngineError(error.code().name, error.details() or "")


async def unary(channel: Channel, path: str, request: bytes, timeout: float) -> bytes:
    """One call with one answer, both as bytes. ``timeout`` in seconds. Raises ``EngineError``."""
    try:
        answer: bytes = await channel.unary_unary(path)(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        raise engine_error(error) from error
    return answer
