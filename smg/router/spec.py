"""The bodies of the workers API: what may be said about a worker, checked before anything is registered."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from smg.router.worker import ModelCard

SCHEMES = ("http://", "https://", "grpc://", "grpcs://", "ipc://")

Priority = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Cost = Annotated[float, msgspec.Meta(ge=0)]


class RegistrationError(Exception):
    """A worker description that cannot be used. ``code`` is the error code of the workers API."""

    def __init__(self, message: str, code: str = "BAD_REQUEST") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class HealthSpec(msgspec.Struct, frozen=True):
    """Health probing of one worker; what is absent follows the gateway's flags."""

    timeout_secs: Seconds | None = None
    check_interval_secs: Seconds | None = None
    success_threshold: Count | None = None
    failure_threshold: Count | None = None
    disable_health_check: bool | None = None


class CardSpec(msgspec.Struct, frozen=True):
    """The fields of a model card that the gateway reads."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    display_name: str | None = None
    aliases: list[str] | None = None
    context_length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tokenizer_path: str | None = None
    chat_template: str | None = None
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    architectures: list[str] | None = None
    hf_model_type: str | None = None


class UpdateSpec(msgspec.Struct, frozen=True):
    """Body of PATCH: what may change while the worker runs."""

    labels: dict[str, str] | None = None
    priority: Priority | None = None
    cost: Cost | None = None
    api_key: str | None = None
    health: HealthSpec | None = None


class WorkerSpec(UpdateSpec, frozen=True, kw_only=True):
    """Body of POST and PUT. Unknown keys are ignored."""

    url: str
    models: list[CardSpec] | None = None
    worker_type: Literal["regular", "prefill", "decode", "encode"] | None = None
    connection_mode: Literal["http", "grpc", "zmq"] | None = None
    runtime_type: (
        Literal["unspecified", "sglang", "vllm", "trtllm", "mlx", "tokenspeed", "generic", "external"] | None
    ) = None
    runtime: Literal["unspecified", "sglang", "vllm", "trtllm", "mlx", "tokenspeed", "generic", "external"] | None = (
        None
    )
    zmq_handshake_address: str | None = None
    dp_size: Count | None = None
    max_connection_attempts: Count | None = None
    load_monitor_interval_secs: Seconds | None = None

    @property
    def kind(self) -> str:
        """The engine kind, "" when it is to be found out."""
        kind = self.runtime_type or self.runtime or ""
        return "" if kind in ("unspecified", "generic", "external") else kind


def worker_url(url: str) -> str:
    """The one form of a worker's URL: no slash at its end. What cannot be read stays as it is."""
    return url if url.startswith("ipc://") else url.rstrip("/")


def _check_address(url: str) -> None:
    if url.startswith("ipc://"):
        if not url.removeprefix("ipc://").startswith("/"):
            raise RegistrationError(f"an ipc:// URL needs an absolute path: {url}")
        return
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RegistrationError(f"the URL {url} cannot be read: {error}") from error
    if not parts.hostname or port == 0:
        raise RegistrationError(f"the URL {url} needs a host and a port between 1 and 65535")
    if parts.path or parts.query or parts.fragment:
        raise RegistrationError(f"the URL {url} may have nothing behind its port")


def read_worker(body: dict[str, Any]) -> WorkerSpec:
    """A checked registration body, the URL in its one form. Raises ``RegistrationError``."""
    spec = _convert(body, WorkerSpec)
    spec = msgspec.structs.replace(spec, url=worker_url(spec.url))
    if not spec.url.startswith(SCHEMES):
        raise RegistrationError(
            "URL must start with a lowercase http://, https://, grpc://, grpcs://, or ipc:// scheme"
        )
    if spec.url.startswith(("http://", "https://")) or spec.connection_mode == "http":
        raise RegistrationError(f"HTTP workers are not supported by this gateway: {spec.url}")
    if spec.worker_type not in (None, "regular"):
        raise RegistrationError(f"{spec.worker_type} workers are not supported by this gateway: {spec.url}")
    _check_address(spec.url)
    return spec


def read_update(body: dict[str, Any]) -> UpdateSpec:
    """A checked PATCH body. Raises ``RegistrationError``, also for members that only a registration can set."""
    fixed = [name for name in body if name in _ONLY_REGISTERED]
    if fixed:
        changeable = ", ".join(UpdateSpec.__struct_fields__)
        raise RegistrationError(f"PATCH cannot change {', '.join(fixed)}, only {changeable}; PUT registers again")
    return _convert(body, UpdateSpec)


_ONLY_REGISTERED = frozenset(WorkerSpec.__struct_fields__) - frozenset(UpdateSpec.__struct_fields__) | {"id", "status"}

T = TypeVar("T")


def _convert(body: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise RegistrationError(str(error)) from error


def model_card(raw: dict[str, Any]) -> ModelCard:
    """The card of a checked body; keys the gateway does not read are kept and shown."""
    names = CardSpec.__struct_fields__
    known = {name: raw[name] for name in names if raw.get(name) is not None}
    return ModelCard(**known, extra={name: value for name, value in raw.items() if name not in names})
