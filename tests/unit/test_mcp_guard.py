"""What a client's request may make the gateway connect to."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smg.mcp.guard import Guard, RefusedTargetError, address_class, check_headers, parse_target

PUBLIC = "93.184.216.34"


def resolver(*addresses: str):
    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    return resolve


def guard(*allowed: str, private: bool = False, to: tuple[str, ...] = (PUBLIC,)) -> Guard:
    return Guard(allowed, allow_private=private, resolve=resolver(*to))


def addresses(of: Guard, url: str) -> list[str]:
    return asyncio.run(of.addresses(of.check(url)))


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "169.254.170.2", "0.0.0.0", "0.1.2.3", "224.0.0.1", "239.255.255.250", "255.255.255.255",
        "240.0.0.1", "198.18.0.1", "192.0.0.192", "192.0.2.1", "100.100.100.200", "168.63.129.16", "::", "fe80::1",
        "fec0::1", "ff02::1", "fd00:ec2::254", "fd20:ce::254", "2001:db8::1", "2001::1", "100::1",
        "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "::169.254.169.254", "::ffff:0.0.0.0",
    ],
)  # fmt: skip
def test_addresses_that_are_no_servers(address: str) -> None:
    assert address_class(ipaddress.ip_address(address)) == "forbidden"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "::1",
        "fc00::1", "fdff::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1",
        "2002:7f00:1::", "2002:c0a8:101::1", "::127.0.0.1",
    ],
)  # fmt: skip
def test_private_addresses(address: str) -> None:
    assert address_class(ipaddress.ip_address(address)) == "private"


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", PUBLIC, "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"],
)
def test_public_addresses(address: str) -> None:
    assert address_class(ipaddress.ip_address(address)) == "public"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_ways_to_write_an_ipv4_address_in_ipv6_change_nothing(number: int) -> None:
    plain = ipaddress.IPv4Address(number)
    if number <= 1:  # ::0 and ::1 are addresses of their own
        return
    for prefix in ("::ffff:0:0", "64:ff9b::", "::"):
        wrapped = ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) | number)
        assert address_class(wrapped) == address_class(plain)
    sixtofour = ipaddress.IPv6Address((0x2002 << 112) | (number << 80))
    assert address_class(sixtofour) == address_class(plain)


@pytest.mark.parametrize(
    "url",
    [
        "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://127.1/", "http://0177.0.0.1/",
        "http://127.0.0.1./", "http://1.2.3.4.5/", "http://127.0.0.0x1/", "http://host.0x10/",
        "ftp://example.com/", "file:///etc/passwd", "unix:///run/x", "gopher://example.com/", "//example.com", "",
        "http://", "http:///mcp", "example.com/mcp", "http://user@example.com/", "http://u:p@example.com/",
        "http://127.0.0.1\\@example.com/", "http://exa mple.com/", "http://example.com\r\nx: y/", "http://exa\tmple.com",
        "http://[fe80::1%25eth0]/", "http://[::1/", "http://example.com:99999/", "http://a.com:0/",
        "http://-x.com/", "http://a..b/",
        "http://" + "a" * 64 + ".com/", "http://example.com/" + "a" * 3000, "http://１２７.0.0.1/", "http://%31%32/",
    ],
)  # fmt: skip
def test_urls_that_are_not_used(url: str) -> None:
    with pytest.raises(RefusedTargetError):
        guard(private=True).check(url)


@pytest.mark.parametrize(
    ("url", "scheme", "host", "port"),
    [
        ("https://Example.COM/mcp?x=1", "https", "example.com", 443),
        ("http://example.com:8080", "http", "example.com", 8080),
        ("http://example.com./", "http", "example.com", 80),
        ("http://[2606:4700::1111]:81/", "http", "2606:4700::1111", 81),
        ("https://bücher.example/", "https", "xn--bcher-kva.example", 443),
        ("http://my_host/", "http", "my_host", 80),
        ("HTTP://1.1.1.1/", "http", "1.1.1.1", 80),
    ],
)
def test_parts_of_a_url(url: str, scheme: str, host: str, port: int) -> None:
    target = parse_target(url)
    assert (target.scheme, target.host, target.port) == (scheme, host, port)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    for url in (text, "http://" + text):
        try:
            target = parse_target(url)
        except RefusedTargetError:
            continue
        assert target.scheme in ("http", "https") and target.host


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "http://[::1]/", "http://[::ffff:7f00:1]/", "http://10.1.2.3/"])
def test_private_literals_need_the_flag(url: str) -> None:
    with pytest.raises(RefusedTargetError, match="not a public address"):
        guard().check(url)
    assert len(addresses(guard(private=True), url)) == 1


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "http://[fe80::1]/", "http://224.0.0.1/", "http://0.0.0.0/"]
)
def test_forbidden_literals_are_refused_with_the_flag_as_well(url: str) -> None:
    with pytest.raises(RefusedTargetError, match="not a public address"):
        guard(private=True).check(url)


def test_a_name_counts_as_what_it_resolves_to() -> None:
    url = "https://mcp.example.com/"
    assert addresses(guard(to=(PUBLIC, "1.1.1.1", PUBLIC)), url) == [PUBLIC, "1.1.1.1"]
    for answer in (("127.0.0.1",), (PUBLIC, "10.0.0.1"), ("::ffff:192.168.0.1",), ("fe80::1%eth0",), ("169.254.1.1",)):
        with pytest.raises(RefusedTargetError, match="not a public address") as refused:
            addresses(guard(to=answer), url)
        assert answer[0] not in str(refused.value)
    assert addresses(guard(private=True, to=("10.0.0.1",)), url) == ["10.0.0.1"]
    with pytest.raises(RefusedTargetError):
        addresses(guard(private=True, to=("169.254.169.254",)), url)
    with pytest.raises(RefusedTargetError, match="no address"):
        addresses(guard(to=()), url)


def test_a_name_that_does_not_resolve() -> None:
    async def fails(host: str, port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    with pytest.raises(RefusedTargetError, match="cannot be resolved"):
        addresses(Guard((), allow_private=True, resolve=fails), "http://nowhere.example/")


def test_the_systems_resolver_is_used_for_names() -> None:
    with pytest.raises(RefusedTargetError, match="not a public address"):
        addresses(Guard((), allow_private=False), "http://localhost/")
    assert "127.0.0.1" in addresses(Guard((), allow_private=True), "http://localhost/")


@pytest.mark.parametrize(
    ("entry", "good", "bad"),
    [
        ("mcp.example.com", "https://mcp.example.com/", "https://x.mcp.example.com/"),
        ("mcp.example.com", "https://MCP.example.com./", "https://example.com/"),
        ("*.example.com", "https://a.b.example.com/", "https://example.com/"),
        ("*.example.com", "https://a.example.com/", "https://aexample.com/"),
        ("example.com:8443", "https://example.com:8443/", "https://example.com/"),
        ("example.com:443", "https://example.com/", "http://example.com/"),
        ("1.1.1.1", "http://1.1.1.1/", "http://1.1.1.2/"),
        ("127.0.0.0/8", "http://127.9.9.9/", "http://10.0.0.1/"),
        ("127.0.0.1:81", "http://127.0.0.1:81/", "http://127.0.0.1:82/"),
        ("[::1]:81", "http://[::1]:81/", "http://[::1]/"),
        ("fd00::/8", "http://[fd12::1]/", "http://[fc00::1]/"),
        ("10.0.0.0/8", "http://[::ffff:10.0.0.1]/", "http://[::ffff:127.0.0.1]/"),
        ("169.254.10.1", "http://169.254.10.1/", "http://169.254.10.2/"),
    ],
)
def test_the_allow_list(entry: str, good: str, bad: str) -> None:
    assert addresses(guard(entry), good)
    with pytest.raises(RefusedTargetError):
        addresses(guard(entry), bad)


def test_an_allowed_name_may_not_be_private_unless_the_network_is_allowed_too() -> None:
    url = "http://mcp.internal/"
    with pytest.raises(RefusedTargetError):
        addresses(guard("mcp.internal", to=("10.0.0.5",)), url)
    assert addresses(guard("mcp.internal", "10.0.0.0/24", to=("10.0.0.5",)), url) == ["10.0.0.5"]
    with pytest.raises(RefusedTargetError):  # an allowed network does not allow names
        addresses(guard("10.0.0.0/24", to=("10.0.0.5",)), url)


@pytest.mark.parametrize(
    "entry", ["", "exa mple", "http://example.com", "1.2.3", "*.", "a:b", "a:0", "10.0.0.1/8", "[::1"]
)
def test_entries_that_mean_nothing(entry: str) -> None:
    with pytest.raises(ValueError, match=r"no host name|no valid port"):
        Guard([entry], allow_private=False)


def test_headers_of_a_client() -> None:
    assert check_headers({"X-Key": " a b ", "Authorization": "Bearer x"}) == {
        "x-key": "a b",
        "authorization": "Bearer x",
    }


@pytest.mark.parametrize(
    "headers",
    [
        {"x": "a\r\nhost: b"}, {"x": "a\nb"}, {"x": "a\0b"}, {"x\r\ny": "a"}, {"x y": "a"}, {"": "a"}, {"x:": "a"},
        {"Host": "internal"}, {"content-length": "0"}, {"Transfer-Encoding": "chunked"}, {"connection": "close"},
        {"Proxy-Authorization": "x"}, {"mcp-session-id": "stolen"}, {"MCP-Protocol-Version": "1"}, {"TE": "x"},
        {"x": "a" * 9000}, {"X": "a", "x": "b"}, {"x": "€"}, {f"x{n}": "a" for n in range(40)},
    ],
)  # fmt: skip
def test_headers_that_are_not_sent(headers: dict[str, str]) -> None:
    with pytest.raises(RefusedTargetError):
        check_headers(headers)
