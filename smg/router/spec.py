"""The bodies of the workers API: what may be said about a worker, checked before anything is registered."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from smg.router.urls import IPC, check_handshake_address, check_worker_url, worker_url
from smg.router.worker import ModelCard

# The shortest interval and timeout of a worker: below it probing would be a busy loop.
MIN_SECS = 0.05

Priority = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Seconds = Annotated[float, msgspec.Meta(ge=MIN_SECS)]
Key = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]*\Z")]  # nothing else can be in a header
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
    api_key: Key | None = None
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


def read_worker(body: dict[str, Any], clients: int = 1, ranks: int = 1) -> WorkerSpec:
    """A checked registration body, the URL in its one form. ``clients`` are the gateway's detok processes, ``ranks``
    the engines of a worker that does not say how many it has. Raises ``RegistrationError``."""
    spec = _convert(body, WorkerSpec)
    spec = msgspec.structs.replace(spec, url=worker_url(spec.url))
    try:
        check_worker_url(spec.url, clients, spec.dp_size or ranks)
    except ValueError as error:
        raise RegistrationError(f"url: {error}") from error
    if spec.zmq_handshake_address is not None:
        try:
            check_handshake_address(spec.zmq_handshake_address)
        except ValueError as error:
            raise RegistrationError(f"zmq_handshake_address: {error}") from error
    _check_kind(spec)
    names = [card.id for card in spec.models or ()]
    if len(set(names)) < len(names):
        raise RegistrationError("models: two cards have the same id")
    return spec


def _check_kind(spec: WorkerSpec) -> None:
    """What only other gateways serve, and a connection that the URL contradicts."""
    if spec.url.startswith(("http://", "https://")) or spec.connection_mode == "http":
        raise RegistrationError(f"HTTP workers are not supported by this gateway: {spec.url}")
    if spec.worker_type not in (None, "regular"):
        raise RegistrationError(f"{spec.worker_type} workers are not supported by this gateway: {spec.url}")
    mode = "zmq" if spec.url.startswith(IPC) else "grpc"
    if spec.connection_mode not in (None, mode):
        raise RegistrationError(f"connection_mode: {spec.url} is a {mode} worker, not {spec.connection_mode}")


def read_update(body: dict[str, Any]) -> UpdateSpec:
    """A checked PATCH body. Raises ``RegistrationError``, also for members that only a registration can set."""
    fixed = [name for name in body if name in _ONLY_REGISTERED]
    if fixed:
        changeable = ", ".join(UpdateSpec.__struct_fields__)
        raise RegistrationError(f"PATCH cannot change {', '.join(fixed)}, only {changeable}; PUT registers again")
    return _convert(body, UpdateSpec)


# What a worker shows and PATCH does not take; the model's id is in the cards or in the label of that name.
_SHOWN = {"id", "status", "model_id", "bootstrap_port", "kv_connector"}
_ONLY_REGISTERED = frozenset(WorkerSpec.__struct_fields__) - frozenset(UpdateSpec.__struct_fields__) | _SHOWN

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
