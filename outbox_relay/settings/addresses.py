"""Addresses that a webhook may be sent to: never private networks, except those that are listed.

An IPv6 address that a router or a translator turns into an IPv4 one is judged by that one too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

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
