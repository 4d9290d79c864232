"""Which addresses a webhook may be sent to: never into private networks, except those that are listed.

An IPv6 address that a router or a translator turns into an IPv4 one is judged by that one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_MAPPED = IPv6Network("::ffff:0:0/96")
_COMPATIBLE = IPv6Network("::/96")
_TRANSLATED = IPv6Network("64:ff9b::/96")
"""The well-known prefix of NAT64 (RFC 6052): where a network has IPv6 only, this is how its hosts reach IPv4."""
_GLOBAL = IPv6Network("2000::/3")
"""The only addresses of IPv6 that are given out for the Internet (RFC 4291, section 2.4, and IANA's registry)."""
_SIIT = IPv6Network("::ffff:0:0:0/96")
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
_ISATAP = frozenset((0x0000_5EFE, 0x0200_5EFE))
"""The first half of an interface identifier of ISATAP (RFC 5214, section 6.1); the other half is the IPv4 address."""
_V4 = 0xFFFF_FFFF

REFUSED = "refused (deny_networks)"
"""The kind of an address in one of the networks that the settings refuse."""

DENIED: dict[Network, str] = {
    ip_network(network): kind
    for kind, networks in {
        "unspecified": ("0.0.0.0/8", "::/128"),
        "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"),
        "shared (carrier)": ("100.64.0.0/10",),
        "loopback": ("127.0.0.0/8", "::1/128"),
        "link-local": ("169.254.0.0/16", "fe80::/10"),
        "cloud platform": ("168.63.129.16/32",),
        "multicast": ("224.0.0.0/4", "ff00::/8"),
        "reserved": (
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24"),
            *("203.0.113.0/24", "240.0.0.0/4"),
            *("100::/64", "2001:db8::/32", "3fff::/20", "5f00::/16"),
        ),
        "translated or tunnelled": (*("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "2001::/23", "2002::/16"),),
    }.items()
    for network in networks
}
"""What no webhook goes to unless it is listed, and why: IANA's special-purpose registries and the tunnels into them."""


def denied(address: Address | str, allowed: Sequence[Network], refused: Sequence[Network] = ()) -> str | None:
    """Return in a word or two why no webhook goes to ``address``; None when it may.

    ``refused`` are further networks that are never addressed; they count for more than ``allowed``. Raises ValueError
    when the text is no address.
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
    """Return the addresses that all have to be allowed: what a host or a router may make of ``address``.

    A mapped address and one of the well-known NAT64 prefix are never anything but the IPv4 address in them.
    """
    if isinstance(address, IPv4Address):
        return (address,)
    if address in _MAPPED or address in _TRANSLATED:
        return (IPv4Address(int(address) & _V4),)
    return (address, *_isatap(address))


def _embedded(address: Address) -> tuple[IPv4Address, ...]:
    """Return the IPv4 addresses in one of IPv6, by every transition mechanism whose form it has.

    The local prefix of NAT64 may be used at any length, so the IPv4 address stands in one of four places
    (RFC 6052, section 2.2). Teredo holds it inverted (RFC 4380, section 4).
    """
    if isinstance(address, IPv4Address):
        return ()
    bits = int(address)
    found = list(_isatap(address))
    if any(address in network for network in (_MAPPED, _COMPATIBLE, _TRANSLATED, _SIIT, _LOCAL_NAT64)):
        found.append(IPv4Address(bits & _V4))
    if address in _LOCAL_NAT64:
        found += [
            IPv4Address((bits >> 64 & 0xFFFF) << 16 | bits >> 40 & 0xFFFF),
            IPv4Address((bits >> 64 & 0xFF) << 24 | bits >> 32 & 0xFF_FFFF),
            IPv4Address(bits >> 24 & _V4),
        ]
    if address in _SIX_TO_FOUR:
        found.append(IPv4Address(bits >> 80 & _V4))
    if address in _TEREDO:
        found += [IPv4Address(bits & _V4 ^ _V4), IPv4Address(bits >> 64 & _V4)]
    return tuple(found)


def _isatap(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """Return the IPv4 address that a router of ISATAP would tunnel to, if ``address`` has such an identifier."""
    bits = int(address)
    return (IPv4Address(bits & _V4),) if bits >> 32 & _V4 in _ISATAP else ()


def opens(network: Network) -> list[str]:
    """The kinds of denied addresses that ``network`` allows beyond the one range it may lie in, sorted."""
    inside = {kind for other, kind in DENIED.items() if _within(other, network) and other != network}
    return sorted(inside)


def _within(inner: Network, outer: Network) -> bool:
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)
