"""The file of MCP servers, proxies, and the rules that choose a request's tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import mcp_types
import msgspec
import pytest

from smg.api.errors import ApiError
from smg.flags import ConfigError
from smg.mcp.config import (
    ArgMapping,
    DenyReason,
    McpConfig,
    McpConfigError,
    Policy,
    Proxy,
    ServerPolicy,
    SseServer,
    StdioServer,
    StreamableServer,
    load_config,
)
from smg.mcp.policy import check_rules, denial, is_allowed, needs_approval
from smg.mcp.proxies import bypassed, proxy_for
from smg.settings import Settings, check_settings

FULL = """
servers:
  - {name: files, protocol: stdio, command: files-server, args: [--root, /srv], envs: {A: b}, unknown: 1}
  - name: search
    protocol: streamable
    url: https://search.example.com/mcp
    token: secret
    headers: {X-Team: core}
    proxy: null
    required: true
    builtin_type: web_search_preview
    builtin_tool_name: find
    tools:
      find: {alias: web_find, response_format: web_search_call, arg_mapping: {renames: {q: query}, defaults: {n: 3}}}
    limits: {call_timeout_secs: 5, max_concurrent_calls: 2}
  - {name: old, protocol: sse, url: "http://old.example.com/sse", proxy: {http: "http://proxy:3128"}}
pool: {max_connections: 5, idle_timeout: 60}
proxy: {https: "proxy:8080", no_proxy: .internal, username: u, password: p}
warmup: [{url: "https://warm.example.com/", label: warm, token: t}]
inventory: {enable_refresh: false, tool_ttl: 10, refresh_interval: 5}
policy:
  default: deny
  servers: {search: {trust_level: untrusted, default: allow}}
  tools: {"files:rm": {deny_with_reason: never}, "files:ls": allow}
"""


def load(tmp_path: Path, text: str) -> McpConfig:
    path = tmp_path / "mcp.yaml"
    path.write_text(text)
    return load_config(str(path))


def test_every_key(tmp_path: Path) -> None:
    config = load(tmp_path, FULL)
    files, search, old = config.servers
    assert isinstance(files, StdioServer) and files.args == ["--root", "/srv"] and files.envs == {"A": "b"}
    assert isinstance(search, StreamableServer) and search.required and search.proxy is None
    assert search.all_headers() == {"x-team": "core", "authorization": "Bearer secret"}
    assert search.limits is not None and search.limits.max_concurrent_calls == 2
    assert search.tools["find"].alias == "web_find" and search.tools["find"].response_format == "web_search_call"
    assert isinstance(old, SseServer) and isinstance(old.proxy, Proxy)
    assert config.policy.tools == {"files:rm": DenyReason(deny_with_reason="never"), "files:ls": "allow"}
    assert (config.pool.max_connections, config.pool.idle_timeout, config.inventory.tool_ttl) == (5, 60, 10)


def test_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, "servers: []")
    assert (config.pool.max_connections, config.pool.idle_timeout) == (100, 300)
    assert (config.inventory.enable_refresh, config.inventory.tool_ttl, config.inventory.refresh_interval) == (
        True,
        300,
        60,
    )
    assert config.policy.default == "allow"


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "servers: 1", "servers: [", "servers: [{name: a, protocol: ws, url: x}]",
        "servers: [{name: a, protocol: stdio}]", "servers: [{protocol: sse, url: x}]", "servers: [{name: a, url: x}]",
        "servers: [{name: a, protocol: sse, url: x}, {name: a, protocol: stdio, command: x}]",
        "servers: [{name: '', protocol: stdio, command: x}]", "servers: []\npool: {max_connections: 0}",
        "servers: []\npolicy: {default: maybe}", "servers: !!python/object/apply:os.getcwd []",
        "servers: []\npolicy: {servers: {a: {trust_level: big}}}",
    ],
)  # fmt: skip
def test_files_that_stop_start_up(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mcp.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as fault:
        check_settings(Settings(mcp_config_path=str(path)))
    start = f"Configuration error: Validation failed: Failed to parse MCP config from {path}: "
    assert str(fault.value).startswith(start) and "\n" not in str(fault.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = str(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError) as fault:
        check_settings(Settings(mcp_config_path=path))
    assert str(fault.value).startswith(
        f"Configuration error: Validation failed: Failed to read MCP config from {path}: "
    )
    with pytest.raises(McpConfigError, match="Failed to read"):
        load_config(str(tmp_path))


def test_a_bad_entry_of_the_allow_list_stops_start_up() -> None:
    with pytest.raises(ConfigError, match="Invalid value for field 'mcp_allowed_hosts': exa mple - "):
        check_settings(Settings(mcp_allowed_hosts=["fine.example.com", "exa mple"]))


def test_arguments_are_renamed_completed_and_overridden() -> None:
    mapping = ArgMapping(renames={"q": "query"}, defaults={"query": "d", "n": 3}, overrides={"safe": True})
    assert mapping.apply({"q": "x", "safe": False}) == {"query": "x", "n": 3, "safe": True}
    assert ArgMapping().apply({"a": 1}) == {"a": 1}


# Proxies ---------------------------------------------------------------------------------------------


def test_the_proxy_comes_from_the_environment() -> None:
    environment = {
        "MCP_HTTPS_PROXY": "http://mcp:1", "HTTPS_PROXY": "http://all:1", "HTTP_PROXY": "http://all:2", "no_proxy": "a"
    }  # fmt: skip
    assert Proxy.from_environment(environment) == Proxy(https="http://mcp:1", http="http://all:2", no_proxy="a")
    assert Proxy.from_environment({}) == Proxy()


def test_which_proxy() -> None:
    proxy = Proxy(https="proxy:8080", no_proxy=".internal", username="u", password="p")
    found = proxy_for(proxy, httpx2.URL("https://a.example/"))
    assert found is not None and str(found.url) == "http://proxy:8080" and found.raw_auth == (b"u", b"p")
    assert proxy_for(proxy, httpx2.URL("http://a.example/")) is None
    assert proxy_for(proxy, httpx2.URL("https://a.internal/")) is None
    assert proxy_for(None, httpx2.URL("https://a.example/")) is None


@pytest.mark.parametrize(
    ("no_proxy", "url", "expected"),
    [
        ("*", "http://x/", True), ("", "http://x/", False), ("a.com", "http://a.com/", True),
        ("a.com", "http://b.a.com/", True), ("a.com", "http://ba.com/", False), (".a.com", "http://a.com/", True),
        ("x, 10.0.0.0/8", "http://10.1.1.1/", True), ("10.0.0.0/8", "http://11.1.1.1/", False),
        ("a.com:81", "http://a.com/", False), ("a.com:80", "http://a.com/", True), ("::1", "http://[::1]/", True),
    ],
)  # fmt: skip
def test_hosts_without_proxy(no_proxy: str, url: str, expected: bool) -> None:
    assert bypassed(no_proxy, httpx2.URL(url)) is expected


# Filters, approval, policy ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "plain", "read_only"),
    [
        (None, True, True), ([], False, False), (["t"], True, True), (["shown"], True, True), (["x"], False, False),
        ({"tool_names": ["t"]}, True, True), ({"read_only": True}, False, True), ({"read_only": False}, True, False),
        ({"tool_names": ["t"], "read_only": True}, False, True),
        ({"tool_names": ["x"], "read_only": True}, False, False),
        ({}, True, True), ({"tool_names": None}, True, True),
    ],
)  # fmt: skip
def test_allowed_tools(rule: Any, plain: bool, read_only: bool) -> None:
    check_rules(rule, None)
    assert is_allowed(rule, ("t", "shown"), False) is plain
    assert is_allowed(rule, ("t", "shown"), True) is read_only


@pytest.mark.parametrize(
    ("rule", "plain", "read_only"),
    [
        (None, False, False), ("never", False, False), ("always", True, True),
        ({"never": {"tool_names": ["t"]}}, False, False), ({"never": {"tool_names": ["x"]}}, True, True),
        ({"always": {"tool_names": ["t"]}}, True, True), ({"always": {"tool_names": ["x"]}}, False, False),
        ({"never": {"read_only": True}}, True, False), ({"always": {"read_only": False}}, True, False),
        ({"always": {"tool_names": ["t"]}, "never": {"read_only": True}}, True, True), ({}, True, True),
        ({"always": {"tool_names": ["x"]}, "never": {"tool_names": ["y"]}}, True, True),
        ({"never": ["t"]}, False, False),
    ],
)  # fmt: skip
def test_require_approval(rule: Any, plain: bool, read_only: bool) -> None:
    check_rules(None, rule)
    assert needs_approval(rule, ("t", "shown"), False) is plain
    assert needs_approval(rule, ("t", "shown"), True) is read_only


@pytest.mark.parametrize(
    ("allowed", "approval"),
    [
        ("t", None), (5, None), ([1], None), ({"tool_names": "t"}, None), ({"read_only": "yes"}, None),
        (["t"] * 2000, None), (None, "sometimes"), (None, True), (None, ["t"]), (None, {"never": "t"}),
    ],
)  # fmt: skip
def test_filters_of_a_wrong_form(allowed: Any, approval: Any) -> None:
    with pytest.raises(ApiError) as fault:
        check_rules(allowed, approval)
    assert (fault.value.status, fault.value.code, fault.value.param) == (400, "invalid_type", "tools")


def tool(name: str = "t", **hints: bool) -> mcp_types.Tool:
    return mcp_types.Tool(name=name, input_schema={}, annotations=mcp_types.ToolAnnotations(**hints) if hints else None)


def policy(**fields: Any) -> Policy:
    return msgspec.convert(fields, Policy)


def test_the_most_specific_rule_decides() -> None:
    rules = policy(
        default="deny", servers={"a": {"default": "allow"}, "b": {}}, tools={"a:no": "deny", "b:yes": "allow"}
    )
    assert denial(rules, "a", tool()) is None and denial(rules, "a", tool("no")) is not None
    assert denial(rules, "b", tool()) is not None and denial(rules, "b", tool("yes")) is None
    assert denial(rules, "c", tool()) is not None and denial(Policy(), "c", tool()) is None
    assert denial(policy(default={"deny_with_reason": "no"}), "a", tool()) == "no"


@pytest.mark.parametrize(
    ("level", "denied"),
    [
        ("trusted", []),
        ("standard", []),
        ("untrusted", ["silent", "destructive"]),
        ("sandboxed", ["silent", "destructive", "gentle", "reading"]),
    ],
)
def test_trust_levels(level: str, denied: list[str]) -> None:
    tools = {
        "silent": tool(), "destructive": tool(destructive_hint=True), "gentle": tool(destructive_hint=False),
        "reading": tool(read_only_hint=True), "closed": tool(read_only_hint=True, open_world_hint=False),
    }  # fmt: skip
    rules = Policy(servers={"s": msgspec.convert({"trust_level": level}, ServerPolicy)})
    assert [name for name, each in tools.items() if denial(rules, "s", each) is not None] == denied
