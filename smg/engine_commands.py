"""How ``smg serve`` starts the engines it knows: one command line per backend and transport."""

from __future__ import annotations

import importlib.util
import os
import random
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smg.engines.zmq.addresses import handshake_port
from smg.flags import ConfigError

# Backend -> (importable package, distribution that brings it).
PACKAGES = {
    "sglang": ("sglang", "sglang"),
    "vllm": ("vllm", "vllm"),
    "trtllm": ("tensorrt_llm", "tensorrt-llm"),
    "tokenspeed": ("tokenspeed", "tokenspeed"),
}
MODEL_FLAGS = ("--model", "--model-path")
TENSOR_PARALLEL_FLAGS = ("--tensor-parallel-size", "--tp-size", "--tp", "--tp_size", "-tp")
ZMQ_ENGINES = ("vllm", "tokenspeed", "sglang")
PORT_STEP = (300, 400)


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine: its command, the URL the gateway reaches it at, additions to its environment."""

    name: str
    command: list[str]
    url: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the command line of ``smg serve`` says about engines. ``tail`` is passed to the engine unchanged."""

    backend: str
    mode: str
    replicas: int
    host: str
    base_port: int
    python: str
    tail: Sequence[str]
    servicer: str = "python"
    token_usage_details: bool = False


def check_request(request: EngineRequest) -> str | None:
    """Why the combination cannot work, or None."""
    backend, mode = request.backend, request.mode
    if backend == "sim" and mode != "grpc":
        return f"connection-mode {mode} is not supported for the sim backend"
    if mode == "zmq" and backend not in ZMQ_ENGINES:
        return f"connection-mode zmq is only supported for the vllm, tokenspeed and sglang backends, not {backend}"
    if backend == "trtllm" and mode != "grpc":
        return "the trtllm backend only supports connection-mode grpc"
    if backend == "tokenspeed" and mode != "zmq":
        return "the tokenspeed backend only supports connection-mode zmq"
    if request.servicer == "rust" and (backend, mode) != ("vllm", "grpc"):
        return (
            f"servicer-impl rust is only available for --backend vllm with --connection-mode grpc, not {backend}/{mode}"
        )
    if backend == "sglang" and mode == "zmq" and request.replicas > 1:
        return "the sglang backend does not support data-parallel-size > 1 with connection-mode zmq"
    if request.token_usage_details and backend not in ("vllm", "sglang"):
        return f"--enable-token-usage-details is not supported for the {backend} backend"
    return None


def missing_package(request: EngineRequest) -> str | None:
    """The error text when the backend's package cannot be imported by the engine's interpreter, else None."""
    if request.backend == "sim":
        return None
    module, distribution = PACKAGES[request.backend]
    if request.python == sys.executable:
        found = importlib.util.find_spec(module) is not None
    else:
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        try:
            found = subprocess.run([request.python, "-c", probe], check=False, timeout=60).returncode == 0  # noqa: S603
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"cannot run {request.python}: {error}"
    return None if found else f"{request.backend} is not installed. Install it with: pip install {distribution}"


def engine_model(tail: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model named among the engine's words, and the other words."""
    rest: list[str] = []
    model: str | None = None
    words = iter(tail)
    for word in words:
        name, equals, value = word.partition("=")
        if name in MODEL_FLAGS:
            model = value if equals else next(words, None)
        else:
            rest.append(word)
    return model, rest


def tensor_parallel_size(tail: Sequence[str]) -> int:
    """GPUs per replica as the engine's words say, 1 without a word."""
    for position, word in enumerate(tail):
        name, equals, value = word.partition("=")
        if name in TENSOR_PARALLEL_FLAGS:
            text = value if equals else tail[position + 1] if position + 1 < len(tail) else ""
            return int(text) if text.isdecimal() and int(text) > 0 else 1
    return 1


def gpu_slice(index: int, size: int, visible: str | None) -> str:
    """The visible-device list of replica ``index``. Raises ``ConfigError`` when there are too few devices."""
    if visible is None:
        return ",".join(str(index * size + offset) for offset in range(size))
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    chosen = devices[index * size : (index + 1) * size]
    if len(chosen) < size:
        raise ConfigError(f"replica {index} needs {size} GPU(s), but CUDA_VISIBLE_DEVICES names only {len(devices)}")
    return ",".join(chosen)


def zmq_socket_dir() -> Path:
    """The private directory of ZMQ worker sockets (``SMG_ZMQ_SOCKET_DIR``). Raises ``ConfigError`` if not private."""
    default = os.path.join(tempfile.gettempdir(), f"smg-zmq-{os.getuid()}")
    directory = Path(os.environ.get("SMG_ZMQ_SOCKET_DIR") or default)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"ZMQ socket directory {directory} does not belong to this user")
    directory.chmod(0o700)
    return directory


def is_free(host: str, port: int) -> bool:
    """Whether a TCP listener could bind there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(host: str, base: int, count: int) -> list[int]:
    """``count`` free ports from ``base`` upwards, spaced so that engines can use neighbours for themselves."""
    ports: list[int] = []
    port = base
    while len(ports) < count:
        if port > 65535:
            raise ConfigError(f"no {count} free worker ports from {base} upwards on {host}")
        if is_free(host, port):
            ports.append(port)
            port += random.randint(*PORT_STEP)
        else:
            port += 1
    return ports


def make_replicas(request: EngineRequest) -> list[Replica]:
    """The engines to start. Raises ``ConfigError``."""
    replicas = []
    taken: set[int] = set()
    for index, port in enumerate(free_ports(request.host, request.base_port, request.replicas)):
        environment = {"PYTHONUNBUFFERED": "1"}
        if request.replicas > 1 and request.backend != "sim":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = gpu_slice(index, tensor_parallel_size(request.tail), visible)
        if request.servicer == "rust":
            environment["SMG_VLLM_SERVICER_IMPL"] = "rust"
        if request.mode == "zmq":
            path = str(zmq_socket_dir() / f"engine-{port}")
            dial = handshake_port(path)
            if dial in taken:
                raise ConfigError(f"two replicas would share the handshake port {dial}: choose another base port")
            taken.add(dial)
            command, url = _headless_command(request, port, dial), f"ipc://{path}"
        else:
            scheme = "http" if request.mode == "http" else "grpc"
            host = f"[{request.host}]" if ":" in request.host else request.host
            command, url = _server_command(request, port), f"{scheme}://{host}:{port}"
        replicas.append(Replica(f"{request.backend}-{index}", command, url, environment))
    return replicas


def _server_command(request: EngineRequest, port: int) -> list[str]:
    model, rest = engine_model(request.tail)
    address = ["--host", request.host, "--port", str(port)]
    grpc = request.mode == "grpc"
    run = [request.python, "-m"]
    if request.backend == "sim":
        named = any(word.partition("=")[0] == "--model-name" for word in rest)
        chosen = ["--model-path", model] if model else []
        return [*run, "smg", "sim-engine", *address, *chosen, *([] if named else ["--model-name", "sim"]), *rest]
    if request.backend == "vllm":
        details = ["--enable-prompt-tokens-details"] if request.token_usage_details else []
        words = [*run, "vllm.entrypoints.cli.main", "serve", *([model] if model else [])]
        return [*words, *(["--grpc"] if grpc else []), *address, *details, *rest]
    if request.backend == "sglang":
        details = ["--enable-cache-report"] if request.token_usage_details else []
        words = [*run, "sglang.launch_server", *(["--model-path", model] if model else [])]
        return [*words, *(["--grpc-mode"] if grpc else []), *address, *details, *rest]
    return [*run, "tensorrt_llm.commands.serve", *([model] if model else []), "--grpc", *address, *rest]


def _headless_command(request: EngineRequest, port: int, dial: int) -> list[str]:
    model, rest = engine_model(request.tail)
    run = [request.python, "-m"]
    rpc = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(dial)]
    if request.backend == "vllm":
        ranks = ["--data-parallel-size", "1", "--data-parallel-size-local", "1"]
        words = [*run, "vllm.entrypoints.cli.main", "serve", *([model] if model else []), "--headless"]
        return [*words, *ranks, *rpc, *rest]
    if request.backend == "tokenspeed":
        words = [*run, "tokenspeed.cli", "serve", "--headless", *(["--model", model] if model else [])]
        own = ["--port", str(port), "--dist-init-addr", f"127.0.0.1:{port + 233}", *rpc, "--zmq-engine-index", "0"]
        return [*words, *own, "--grammar-backend", "xgrammar", "--enable-output-logprobs", *rest]
    words = [*run, "smg_grpc_servicer.sglang.headless", "--zmq-handshake-address", f"tcp://127.0.0.1:{dial}"]
    return [*words, "--zmq-engine-index", "0", *(["--model-path", model] if model else []), "--port", str(port), *rest]
