"""Which tools a request offers and which calls may run: filters, approval, the operator's policy."""

from __future__ import annotations

from typing import Any

import mcp_types

from smg.api.errors import ApiError, invalid
from smg.mcp.config import Decision, DenyReason, Policy, ServerPolicy

__all__ = ["check_rules", "denial", "is_allowed", "is_read_only", "needs_approval"]

MAX_FILTER_NAMES = 1024


def is_read_only(tool: mcp_types.Tool) -> bool:
    """The server's own word that the tool changes nothing."""
    return tool.annotations is not None and tool.annotations.read_only_hint is True


def check_rules(allowed_tools: Any, require_approval: Any) -> None:
    """Forms of the two filters of a request. Raises ``ApiError`` (``invalid_type``)."""
    if allowed_tools is not None and not _is_filter(allowed_tools):
        raise _wrong("allowed_tools", "a list of tool names or an object with tool_names and read_only")
    if require_approval is None or require_approval in ("always", "never"):
        return
    known = isinstance(require_approval, dict) and all(
        value is None or _is_filter(value) for key, value in require_approval.items() if key in ("always", "never")
    )
    if not known:
        raise _wrong("require_approval", "always, never or an object of filters under always and never")


def _wrong(member: str, expected: str) -> ApiError:
    return invalid("invalid_type", f"Invalid type for '{member}' of an mcp tool: expected {expected}", "tools")


def _is_filter(value: Any) -> bool:
    names = value.get("tool_names") if isinstance(value, dict) else value
    if isinstance(value, dict) and not isinstance(value.get("read_only"), bool | None):
        return False
    if names is None:
        return isinstance(value, dict)
    return isinstance(names, list) and len(names) <= MAX_FILTER_NAMES and all(isinstance(name, str) for name in names)


def matches(rule: Any, names: tuple[str, str], read_only: bool) -> bool:
    """Whether a checked filter has the tool; ``names`` are the server's name and the one that is shown. An object must
    agree in every member that it has."""
    if isinstance(rule, list):
        return any(name in rule for name in names)
    listed, wanted = rule.get("tool_names"), rule.get("read_only")
    if listed is not None and not any(name in listed for name in names):
        return False
    return wanted is None or wanted == read_only


def is_allowed(allowed_tools: Any, names: tuple[str, str], read_only: bool) -> bool:
    """Whether the request offers the tool."""
    return allowed_tools is None or matches(allowed_tools, names, read_only)


def needs_approval(require_approval: Any, names: tuple[str, str], read_only: bool) -> bool:
    """Whether a call needs the client's approval. What no filter names needs it, unless only ``always`` is given."""
    if require_approval is None or isinstance(require_approval, str):
        return require_approval == "always"
    always, never = require_approval.get("always"), require_approval.get("never")
    if always is not None and matches(always, names, read_only):
        return True
    if never is not None:
        return not matches(never, names, read_only)
    return always is None


def denial(policy: Policy, server: str, tool: mcp_types.Tool) -> str | None:
    """Why a call may not run, None if it may: the entry of the tool decides, else trust level and default of its
    server, else the policy's default. The text is for the log."""
    specific = policy.tools.get(f"{server}:{tool.name}")
    if specific is not None:
        return _reason(specific)
    rules = policy.servers.get(server, ServerPolicy())
    if (mistrust := _mistrust(rules, tool.annotations)) is not None:
        return mistrust
    return _reason(policy.default if rules.default is None else rules.default)


def _reason(decision: Decision) -> str | None:
    if isinstance(decision, DenyReason):
        return decision.deny_with_reason
    return "denied by policy" if decision == "deny" else None


def _mistrust(rules: ServerPolicy, hints: mcp_types.ToolAnnotations | None) -> str | None:
    """What a trust level forbids. A hint that a server leaves out has the protocol's default: a tool changes things,
    may destroy some, and reaches the open world."""
    read_only = hints is not None and hints.read_only_hint is True
    gentle = hints is not None and hints.destructive_hint is False
    closed = hints is not None and hints.open_world_hint is False
    if rules.trust_level == "untrusted" and not (read_only or gentle):
        return "a destructive tool of an untrusted server"
    if rules.trust_level == "sandboxed" and not (read_only and closed):
        return "a tool of a sandboxed server that is not read-only and closed"
    return None
