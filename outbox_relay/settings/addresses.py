"""URLs and addresses that a webhook may be sent to: never private networks, except those that are listed.

An IPv6 address that a router or a translator turns into an IPv4 one is judged by that one too. Messages repeat no URL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

REFUSED = "refused (deny_networks)"
"""The kind of an address in one of the networks that the settings refuse."""

DENIED: dict[Network, str] = {
    ip_network(network): kind
    for kind, networks in {
        "unspecified": "0.0.0.0/8 ::/128",
        "private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7 fec0::/10",
        "shared (carrier)": "100.64.0.0/10",
        "loopback": "127.0.0.0/8 ::1/128",
        "link-local": "169.254.0.0/16 fe80::/10",
        "cloud platform": "168.63.129.16/32",
        "multicast": "224.0.0.0/4 ff00::/8",
        "reserved": "192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4 "
        "100::/64 2001:db8::/32 3fff::/20 5f00::/16",
        "translated or tunnelled": "::/96 ::ffff:0:0:0/96 64:ff9b:1::/48 2001::/23 2002::/16",
    }.items()
    for network in networks.split()
}
"""Networks that no webhook goes to unless listed, by IANA's special-purpose registries and the tunnels into them."""

_GLOBAL = IPv6Network("2000::/3")
"""The only addresses of IPv6 that are given out for the Internet (RFC 4291, section 2.4, and IANA's registry)."""
_ALWAYS_IPV4 = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
"""Mapped addresses, and the well-known prefix of NAT64 (RFC 6052): never anything but the IPv4 address in them."""
_ISATAP = frozenset((0x0000_5EFE, 0x0200_5EFE))
"""The first half of an interface identifier of ISATAP (RFC 5214, section 6.1); the other half is the IPv4 address."""
_V4 = 0xFFFF_FFFF

_EMBEDDING: tuple[tuple[IPv6Network, tuple[Callable[[int], int], ...]], ...] = (
    *((network, (lambda bits: bits,)) for network in _ALWAYS_IPV4),
    (IPv6Network("::/96"), (lambda bits: bits,)),
    (IPv6Network("::ffff:0:0:0/96"), (lambda bits: bits,)),
    # The local prefix of NAT64 may have any length: one of four places (RFC 6052, section 2.2).
    (
        IPv6Network("64:ff9b:1::/48"),
        (
            lambda bits: bits,
            lambda bits: (bits >> 64 & 0xFFFF) << 16 | bits >> 40 & 0xFFFF,
            lambda bits: (bits >> 64 & 0xFF) << 24 | bits >> 32 & 0xFF_FFFF,
            lambda bits: bits >> 24,
        ),
    ),
    (IPv6Network("2002::/16"), (lambda bits: bits >> 80,)),
    # Teredo inverts the client's address (RFC 4380, section 4).
    (IPv6Network("2001::/32"), (lambda bits: ~bits, lambda bits: bits >> 64)),
)
"""The places of IPv4 addresses in IPv6 ones, by the networks of the transition mechanisms."""

URL_CHARS = 2048
"""Longest URL, in characters."""
EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
"""The networks of all addresses."""
LOOPBACK = "127.0.0.1"
"""The canonical name of this machine."""

_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMERIC = re.compile(r"\d+|0[xX][0-9a-fA-F]*")


def denied(address: Address | str, allowed: Sequence[Network], refused: Sequence[Network] = ()) -> str | None:
    """Return in a word or two why no webhook goes to ``address``, or None if one may.

    ``refused`` are further networks that are never addressed; they take precedence over ``allowed``. Raises ValueError
    if the text is not an address.
    """
    whole = ip_address(address) if isinstance(address, str) else address
    judged = _readings(whole)
    if any(each in network for each in (whole, *judged, *_embedded(whole)) for network in refused):
        return REFUSED
    if any(whole in network for network in allowed):
        return None
    return next((kind for each in judged if (kind := _kind(each, allowed)) is not None), None)


def _kind(address: Address, allowed: Sequence[Network]) -> str | None:
    if any(address in network for network in allowed):
        return None
    if kind := next((kind for network, kind in DENIED.items() if address in network), None):
        return kind
    return "not global" if isinstance(address, IPv6Address) and address not in _GLOBAL else None


def _readings(address: Address) -> tuple[Address, ...]:
    """Return the addresses that must all be allowed: what a host or a router may make of ``address``."""
    if isinstance(address, IPv4Address):
        return (address,)
    if any(address in network for network in _ALWAYS_IPV4):
        return (IPv4Address(int(address) & _V4),)
    return (address, *_isatap(address))


def _embedded(address: Address) -> tuple[IPv4Address, ...]:
    """Return the IPv4 addresses in one of IPv6, by every transition mechanism whose form it has."""
    if isinstance(address, IPv4Address):
        return ()
    places = [place for network, places in _EMBEDDING if address in network for place in places]
    return (*_isatap(address), *(IPv4Address(place(int(address)) & _V4) for place in places))


def _isatap(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """Return the IPv4 address that a router of ISATAP would tunnel to, if ``address`` has such an identifier."""
    bits = int(address)
    return (IPv4Address(bits & _V4),) if bits >> 32 & _V4 in _ISATAP else ()


def opens(network: Network) -> list[str]:
    """Return the kinds of denied addresses that ``network`` allows beyond one range of them, sorted."""
    first, last = int(network[0]), int(network[-1])
    inside = (other for other in DENIED if other.version == network.version and other != network)
    return sorted({DENIED[other] for other in inside if first <= int(other[0]) <= int(other[-1]) <= last})


def canonical_host(host: str) -> str:
    """Return one spelling for all spellings of a host; every address of this machine is ``LOOPBACK``."""
    name = host.rstrip(".").lower()
    try:
        address = ip_address(name)
    except ValueError:
        return LOOPBACK if name == "localhost" or name.endswith(".localhost") else name
    plain = getattr(address, "ipv4_mapped", None) or address
    return LOOPBACK if plain.is_loopback or plain.is_unspecified else str(plain)


def check_url(url: str, *, allow_http: bool, allowed: Sequence[Network], refused: Sequence[Network] = ()) -> None:
    """Raise ValueError, with the fix and without the URL, unless a webhook may be sent to ``url``.

    ``allowed`` are the networks that may be addressed although they are private, ``refused`` those that never are.
    """
    parts = _split(url)
    if parts.scheme == "http" and not allow_http:
        raise ValueError("plain http is refused: use https, or set allow_http = true")
    if parts.scheme not in ("http", "https"):
        raise ValueError("should begin with https://")
    if "@" in parts.netloc:
        raise ValueError("holds credentials before the host: remove them, requests are signed")
    if "#" in url:
        raise ValueError("holds a fragment (#…), which is never sent: remove it")
    _check_host(parts, allowed, refused)


class Proxy(NamedTuple):
    """A forward proxy. ``credentials`` are "USER:PASSWORD", or empty."""

    host: str
    port: int
    credentials: str


def parse_proxy(url: str) -> Proxy:
    """Return the proxy at ``url``. Raises ValueError, with the fix and without the URL, if it is wrong."""
    parts = _split(url)
    if parts.scheme != "http" or parts.path not in ("", "/") or "?" in url or "#" in url:
        raise ValueError("should be http://HOST:PORT: the connection to a proxy has no TLS and no path")
    credentials, _, address = parts.netloc.rpartition("@")
    _check_host(parts._replace(netloc=address), EVERYWHERE, ())
    if parts.hostname is None or parts.port is None:
        raise ValueError("has no port: write http://HOST:PORT")
    return Proxy(parts.hostname, parts.port, unquote(credentials))


def _split(url: str) -> SplitResult:
    if not url or len(url) > URL_CHARS:
        raise ValueError(f"should be a URL of 1 to {URL_CHARS} characters")
    if not re.fullmatch(r"[!-\[\]-~]+", url):
        raise ValueError("holds a space, a control character, a backslash or a letter beyond ASCII: percent-encode it")
    try:
        return urlsplit(url)
    except ValueError:
        raise ValueError("has a host between [ and ] that is no IPv6 address") from None


def _check_host(parts: SplitResult, allowed: Sequence[Network], refused: Sequence[Network]) -> None:
    try:
        wrong_port = parts.port == 0 or parts.netloc.endswith(":")
    except ValueError:
        wrong_port = True
    if wrong_port:
        raise ValueError("has a wrong port: 1 to 65535, or none")
    host = (parts.hostname or "").removesuffix(".")
    if not host:
        raise ValueError("has no host")
    if parts.netloc.startswith("[") or _NUMERIC.fullmatch(host.rpartition(".")[2]):
        _check_address(host, allowed, refused, in_brackets=parts.netloc.startswith("["))
    else:
        _check_name(host, allowed, refused)


def _check_name(host: str, allowed: Sequence[Network], refused: Sequence[Network]) -> None:
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in host.split(".")):
        raise ValueError(
            "has a host that is no name: letters, digits, hyphens and dots, at most 63 between dots; "
            "international names in their xn-- form"
        )
    if canonical_host(host) == LOOPBACK and all(denied(address, allowed, refused) for address in (LOOPBACK, "::1")):
        raise ValueError('leads to this machine: list "127.0.0.0/8" in allow_networks if it should')


def _check_address(host: str, allowed: Sequence[Network], refused: Sequence[Network], *, in_brackets: bool) -> None:
    if "%" in host:
        raise ValueError("has an address with a zone: write it without")
    try:
        address = IPv6Address(host) if in_brackets else IPv4Address(host)
    except ValueError:
        raise ValueError(
            "has a host between [ and ] that is no IPv6 address"
            if in_brackets
            else "has a host that is neither a name nor an address: write all four decimal numbers"
        ) from None
    kind = denied(address, allowed, refused)
    if kind == REFUSED:
        raise ValueError(f"leads to the address {address}, which lies in a network of deny_networks")
    if kind:
        raise ValueError(f"leads to the {kind} address {address}: list its network in allow_networks if it should")
