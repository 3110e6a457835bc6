"""The file of ``--mcp-config-path``: MCP servers that the operator offers, and the rules for using them.

YAML (JSON is YAML too). Unknown keys are ignored. Tokens are taken literally. ``docs/mcp.md`` shows every key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

__all__ = [
    "HttpServer", "Inventory", "Limits", "McpConfig", "McpConfigError", "Policy", "Pool", "Proxy", "ServerPolicy",
    "SseServer", "StdioServer", "StreamableServer", "ToolConfig", "load_config",
]  # fmt: skip

MAX_CONFIG_BYTES = 4 * 1024 * 1024

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1024, le=64 * 1024 * 1024)]
ResponseFormat = Literal[
    "passthrough", "web_search_call", "code_interpreter_call", "file_search_call", "image_generation_call"
]
BuiltinType = Literal["web_search_preview", "code_interpreter", "file_search", "image_generation"]
TrustLevel = Literal["trusted", "standard", "untrusted", "sandboxed"]


class McpConfigError(ValueError):
    """The file cannot be used. The text says whether it could not be read or not be parsed."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one server. ``max_concurrent_calls`` calls run at once, the others wait within their time."""

    connect_timeout_secs: Seconds = 10.0
    call_timeout_secs: Seconds = 300.0
    max_concurrent_calls: Count = 16
    max_result_bytes: Bytes = 1024 * 1024
    max_tools: Count = 1024


class Proxy(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP proxy per scheme of the server. ``no_proxy`` is a comma list of hosts, suffixes and networks."""

    http: str | None = None
    https: str | None = None
    no_proxy: str | None = None
    username: str | None = None
    password: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Proxy:
        """``MCP_HTTP_PROXY``, ``MCP_HTTPS_PROXY``, ``MCP_NO_PROXY``, else the same names without ``MCP_``."""

        def first(name: str) -> str | None:
            return environment.get("MCP_" + name) or environment.get(name) or environment.get(name.lower()) or None

        return cls(http=first("HTTP_PROXY"), https=first("HTTPS_PROXY"), no_proxy=first("NO_PROXY"))


class ArgMapping(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to the arguments that a model wrote: ``renames`` (from the model's name to the server's), then
    ``defaults`` for absent ones, then ``overrides``."""

    renames: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    overrides: dict[str, Any] = {}

    def apply(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments to send."""
        renamed = {self.renames.get(name, name): value for name, value in arguments.items()}
        return {**self.defaults, **renamed, **self.overrides}


class ToolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One tool of a server: the name that models see, the output item type of its calls, its arguments."""

    alias: str | None = None
    response_format: ResponseFormat = "passthrough"
    arg_mapping: ArgMapping = ArgMapping()


class StdioServer(msgspec.Struct, frozen=True, kw_only=True, tag_field="protocol", tag="stdio"):
    """A child process that speaks over its standard streams. ``envs`` is added to a minimal environment."""

    name: str
    command: str
    args: list[str] = []
    envs: dict[str, str] = {}
    env: dict[str, str] = {}
    cwd: str | None = None
    required: bool = False
    internal: bool = False
    tools: dict[str, ToolConfig] = {}
    builtin_type: BuiltinType | None = None
    builtin_tool_name: str | None = None
    limits: Limits | None = None


class HttpServer(msgspec.Struct, frozen=True, kw_only=True, tag_field="protocol"):
    """Base of the servers behind a URL. An explicit ``proxy: null`` means a direct connection."""

    name: str
    url: str
    token: str | None = None
    headers: dict[str, str] = {}
    proxy: Proxy | msgspec.UnsetType | None = msgspec.UNSET
    required: bool = False
    internal: bool = False
    tools: dict[str, ToolConfig] = {}
    builtin_type: BuiltinType | None = None
    builtin_tool_name: str | None = None
    limits: Limits | None = None

    def all_headers(self) -> dict[str, str]:
        """Headers of every request, the bearer token included."""
        bearer = {"authorization": f"Bearer {self.token}"} if self.token else {}
        return {**{name.lower(): value for name, value in self.headers.items()}, **bearer}


class SseServer(HttpServer, frozen=True, kw_only=True, tag="sse"):
    """The older HTTP transport: one stream of events, messages go to an address it names."""


class StreamableServer(HttpServer, frozen=True, kw_only=True, tag="streamable"):
    """Streamable HTTP."""


Server = StdioServer | SseServer | StreamableServer


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Connections to servers that requests name; ``idle_timeout`` in seconds."""

    max_connections: Count = 100
    idle_timeout: Seconds = 300.0


class Warmup(msgspec.Struct, frozen=True, kw_only=True):
    """A pooled connection that is made at start."""

    url: str
    label: str = ""
    token: str | None = None


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of tool lists; times in seconds."""

    enable_refresh: bool = True
    tool_ttl: Seconds = 300.0
    refresh_interval: Seconds = 60.0
    refresh_on_error: bool = True


class DenyReason(msgspec.Struct, frozen=True, kw_only=True):
    """``{deny_with_reason: text}``; the reason goes to the log, never to the model."""

    deny_with_reason: str


Decision = Literal["allow", "deny"] | DenyReason


class ServerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for one server. ``default`` None means the policy's own."""

    trust_level: TrustLevel = "standard"
    default: Decision | None = None


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools may run. ``tools`` is keyed ``server:tool``; the most specific entry decides."""

    default: Decision = "allow"
    servers: dict[str, ServerPolicy] = {}
    tools: dict[str, Decision] = {}


class McpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. ``limits`` holds for servers without their own and for those that requests name."""

    servers: list[Server]
    pool: Pool = Pool()
    proxy: Proxy | None = None
    warmup: list[Warmup] = []
    inventory: Inventory = Inventory()
    policy: Policy = Policy()
    limits: Limits = Limits()


def load_config(path: str) -> McpConfig:
    """Read and check the file. Raises ``McpConfigError``."""
    try:
        size = Path(path).stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise McpConfigError(f"Failed to read MCP config from {path}: larger than {MAX_CONFIG_BYTES} bytes")
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else str(fault)
        raise McpConfigError(f"Failed to read MCP config from {path}: {reason}") from None
    try:
        config = msgspec.convert(yaml.safe_load(text), McpConfig)
        _check_names(config)
    except (yaml.YAMLError, msgspec.ValidationError, ValueError, RecursionError) as fault:
        raise McpConfigError(f"Failed to parse MCP config from {path}: {_one_line(fault)}") from None
    return config


def _check_names(config: McpConfig) -> None:
    names = [server.name for server in config.servers]
    for name in names:
        if not name:
            raise ValueError("a server has an empty name")
        if names.count(name) > 1:
            raise ValueError(f"two servers are named '{name}'")


def _one_line(fault: Exception) -> str:
    if isinstance(fault, yaml.MarkedYAMLError) and fault.problem_mark is not None:
        mark = fault.problem_mark
        return f"{fault.problem or 'syntax error'} at line {mark.line + 1} column {mark.column + 1}"
    return " ".join(str(fault).split())
