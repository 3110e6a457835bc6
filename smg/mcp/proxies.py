"""Which proxy a request to an MCP server goes through."""

from __future__ import annotations

import ipaddress

import httpx2

from smg.mcp.config import Proxy

DEFAULT_PORTS = {"http": 80, "https": 443}


def proxy_for(proxy: Proxy | None, url: httpx2.URL) -> httpx2.Proxy | None:
    """The proxy for a server URL, None for a direct connection. Raises ``ValueError`` for an unusable proxy URL."""
    if proxy is None:
        return None
    address = proxy.https if url.scheme == "https" else proxy.http
    if not address or bypassed(proxy.no_proxy or "", url):
        return None
    auth = (proxy.username, proxy.password or "") if proxy.username else None
    return httpx2.Proxy(address if "://" in address else "http://" + address, auth=auth)


def bypassed(no_proxy: str, url: httpx2.URL) -> bool:
    """Whether ``no_proxy`` (comma list: ``*``, hosts, ``.suffix``, addresses, networks, each with ``:port``) has the
    URL's host. A plain host stands for the names below it as well, as it does for other programs."""
    host = url.host.lower().rstrip(".")
    port = url.port or DEFAULT_PORTS.get(url.scheme, 0)
    for raw in no_proxy.lower().split(","):
        entry = raw.strip()
        if entry == "*":
            return True
        if entry.count(":") == 1:
            entry, _, number = entry.partition(":")
            if number != str(port):
                continue
        if entry and (
            _in_network(host, entry) or host == entry.lstrip("*.") or host.endswith("." + entry.lstrip("*."))
        ):
            return True
    return False


def _in_network(host: str, entry: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except (ValueError, TypeError):
        return False
