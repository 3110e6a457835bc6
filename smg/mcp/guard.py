"""What a client's request may make the gateway connect to.

A request can name an MCP server of its own, so its URL and headers are input to distrust: without a check it would
be a way into the network the gateway stands in. The checks are made on the parsed URL, on the addresses that its host
resolves to, and again on every redirect; the connection is then made to the checked address, never to the name, so
that a second answer of the name server changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import httpx2

__all__ = ["Guard", "RefusedTargetError", "Target", "address_class", "check_headers", "parse_target"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], Awaitable[list[str]]]

MAX_URL_CHARS = 2048
MAX_HEADERS = 32
MAX_HEADER_CHARS = 8192
MAX_ADDRESSES = 16
DEFAULT_PORTS = {"http": 80, "https": 443}

_HOST = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*\.?\Z"
)
_NUMBER_LABEL = re.compile(r"(0x[0-9a-f]*|[0-9]+)\Z")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}\Z")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*\Z")

# Headers that belong to the connection or to the protocol: a client that sets them could desynchronise either.
_RESERVED_HEADERS = frozenset(
    ("accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
     "keep-alive", "last-event-id", "mcp-protocol-version", "mcp-session-id", "te", "trailer", "transfer-encoding",
     "upgrade")
)  # fmt: skip

# Addresses at which clouds serve credentials to their machines. Link-local ones are refused as such.
_METADATA = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
# Reachable with --mcp-allow-private-hosts: loopback, private use, shared address space, unique local.
_PRIVATE = tuple(
    map(ipaddress.ip_network,
        ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7"))
)  # fmt: skip
# Never a server of the public internet (IANA special-purpose registries); beyond what ``is_global`` says.
_SPECIAL = tuple(
    map(ipaddress.ip_network,
        ("0.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15",
         "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "::/128", "100::/64", "2001::/23",
         "2001:db8::/32", "3fff::/20", "5f00::/16", "fe80::/10", "fec0::/10", "ff00::/8"))
)  # fmt: skip
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))


class RefusedTargetError(ValueError):
    """A server URL or header of a client that the gateway does not use; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads: ``scheme`` http or https, ``host`` lower-case without brackets or final dot."""

    url: httpx2.URL
    scheme: str
    host: str
    port: int


def parse_target(url: str) -> Target:
    """The parts of a server URL, from the parser that the connection uses as well.

    Raises ``RefusedTargetError`` for anything but an absolute http(s) URL without credentials whose host is a name or
    an address in its one canonical form (``2130706433``, ``0x7f.1`` and ``127.1`` are ways around a filter).
    """
    if len(url) > MAX_URL_CHARS:
        raise RefusedTargetError(f"the URL is longer than {MAX_URL_CHARS} characters")
    try:
        parsed = httpx2.URL(url)
        port = parsed.port
        host = parsed.raw_host.decode("ascii").lower()
    except (httpx2.InvalidURL, ValueError) as fault:
        raise RefusedTargetError(f"no valid URL: {fault}") from None
    if parsed.scheme not in DEFAULT_PORTS:
        raise RefusedTargetError("only http and https URLs are supported")
    if parsed.userinfo:
        raise RefusedTargetError("a URL with credentials is not accepted, use the authorization member")
    if _literal(host) is None:
        _check_name(host)
    if port is None:
        port = DEFAULT_PORTS[parsed.scheme]
    if not 0 < port < 65536:
        raise RefusedTargetError("the URL has no valid port")
    return Target(parsed, parsed.scheme, host.removesuffix("."), port)


def _check_name(host: str) -> None:
    if not host or not _HOST.match(host):
        raise RefusedTargetError("the URL has no valid host")
    if _NUMBER_LABEL.match(host.removesuffix(".").rpartition(".")[2]):
        raise RefusedTargetError("the host is a number, but no address in its usual form")


def _literal(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        raise RefusedTargetError("an address with a zone is not accepted")
    return address


def embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for (mapped, compatible, 6to4, NAT64), else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    number = int(address)
    if any(address in network for network in _NAT64) or 1 < number <= 0xFFFFFFFF:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return address


def address_class(address: Address) -> Literal["public", "private", "forbidden"]:
    """``forbidden`` addresses (link-local, metadata, multicast, unspecified, reserved) are no server's at all."""
    address = embedded(address)
    if address in _METADATA or any(address in network for network in _SPECIAL if network.version == address.version):
        return "forbidden"
    if any(address in network for network in _PRIVATE if network.version == address.version):
        return "private"
    return "public" if address.is_global and not address.is_multicast else "forbidden"


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """A client's headers for its server, names in lower case.

    Raises ``RefusedTargetError`` for a name or value that could end the header, for a header of the connection or the
    protocol, and for too many or too long ones.
    """
    if len(headers) > MAX_HEADERS:
        raise RefusedTargetError(f"more than {MAX_HEADERS} headers")
    checked: dict[str, str] = {}
    for name, value in headers.items():
        if not _HEADER_NAME.match(name):
            raise RefusedTargetError("a header has no valid name")
        lower = name.lower()
        if lower in _RESERVED_HEADERS or lower.startswith("proxy-"):
            raise RefusedTargetError(f"the header {lower} cannot be set")
        if lower in checked:
            raise RefusedTargetError(f"the header {lower} is given twice")
        if len(value) > MAX_HEADER_CHARS or not _HEADER_VALUE.match(value):
            raise RefusedTargetError(f"the value of the header {lower} is too long or has characters no header has")
        checked[lower] = value.strip()
    return checked


class Guard:
    """The rules for servers that a request names.

    ``allowed`` restricts them to hosts: a name, ``*.suffix``, an address or a network, each with ``:port`` if only that
    port is meant. Without entries every public host is allowed. An address or network written out there may be
    private. ``allow_private`` opens loopback, private and unique local addresses for all allowed names.
    """

    def __init__(self, allowed: Sequence[str], *, allow_private: bool, resolve: Resolver | None = None) -> None:
        self.allow_private = allow_private
        self._resolve = resolve or system_resolve
        self._rules = [_Rule.parse(entry) for entry in allowed]

    def check(self, url: str) -> Target:
        """The checked target of a URL, before its name is resolved. Raises ``RefusedTargetError``."""
        target = parse_target(url)
        literal = _literal(target.host)
        if literal is not None:
            self._check_address(literal, target)
        elif self._rules and not any(rule.names(target) for rule in self._rules):
            raise RefusedTargetError(f"the host {target.host} is not allowed")
        return target

    async def addresses(self, target: Target) -> list[str]:
        """Addresses to connect to, every one checked. Raises ``RefusedTargetError`` if there is none or one that is
        not allowed: a name that mixes public and private addresses is no honest one."""
        literal = _literal(target.host)
        if literal is not None:
            self._check_address(literal, target)
            return [str(literal)]
        try:
            found = await self._resolve(target.host, target.port)
        except OSError as fault:
            raise RefusedTargetError(f"the host {target.host} cannot be resolved: {fault.strerror or fault}") from None
        addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in dict.fromkeys(found)][:MAX_ADDRESSES]
        if not addresses:
            raise RefusedTargetError(f"the host {target.host} has no address")
        for address in addresses:
            self._check_address(address, target, named=True)
        return [str(address) for address in addresses]

    def _check_address(self, address: Address, target: Target, *, named: bool = False) -> None:
        if any(rule.holds(address, target.port) for rule in self._rules):
            return
        kind = address_class(address)
        if kind == "forbidden" or (kind == "private" and not self.allow_private):
            # The address itself is not told: what internal names resolve to is nobody's business.
            raise RefusedTargetError(f"the host {target.host} is not a public address")
        if self._rules and not named:
            raise RefusedTargetError(f"the host {target.host} is not allowed")


@dataclass(frozen=True, slots=True)
class _Rule:
    """One entry of the allow-list: a network, or a name (``suffix`` if it stands for all names below it)."""

    network: Network | None
    name: str
    suffix: bool
    port: int | None

    @classmethod
    def parse(cls, entry: str) -> _Rule:
        """Raises ``ValueError`` for an entry that is neither a name nor an address nor a network."""
        host, port = _split_port(entry.strip().lower())
        try:
            return cls(ipaddress.ip_network(host), "", False, port)
        except ValueError:
            pass
        suffix = host.startswith("*.")
        name = host[2:] if suffix else host
        if not _HOST.match(name) or _NUMBER_LABEL.match(name.rpartition(".")[2]):
            raise ValueError(f"'{entry}' is no host name, *.suffix, address or network")
        return cls(None, name.removesuffix("."), suffix, port)

    def names(self, target: Target) -> bool:
        """Whether the entry allows the target's name."""
        if self.network is not None or self.port not in (None, target.port):
            return False
        return target.host.endswith("." + self.name) if self.suffix else target.host == self.name

    def holds(self, address: Address, port: int) -> bool:
        """Whether the entry is a network with this address."""
        if self.network is None or self.port not in (None, port):
            return False
        plain = embedded(address)
        return any(each in self.network for each in (address, plain) if each.version == self.network.version)


def _split_port(entry: str) -> tuple[str, int | None]:
    if entry.startswith("["):
        host, closed, rest = entry[1:].partition("]")
        if not closed:
            return entry, None
        if rest.startswith("/"):  # [fd00::]/8
            return host + rest, None
        tail = rest
    elif entry.count(":") == 1:
        host, _, number = entry.partition(":")
        tail = ":" + number
    else:
        return entry, None
    if not tail:
        return host, None
    if not tail[1:].isdecimal() or tail[0] != ":" or not 0 < int(tail[1:]) < 65536:
        raise ValueError(f"'{entry}' has no valid port")
    return host, int(tail[1:])


async def system_resolve(host: str, port: int) -> list[str]:
    """All addresses of a name, by the system's resolver. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [str(entry[4][0]) for entry in found]
