"""Which addresses a webhook may be sent to: never into private networks, except those that are listed."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

_MAPPED = IPv6Network("::ffff:0:0/96")

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
        "translated or tunnelled": (*("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/23", "2002::/16"),),
    }.items()
    for network in networks
}
"""What no webhook goes to unless it is listed, and why: IANA's special-purpose registries and the tunnels into them."""


def denied(address: Address | str, allowed: Sequence[Network]) -> str | None:
    """Why no webhook goes to ``address``, in a word or two; nothing when it may.

    An IPv4 address in an IPv6 one (``::ffff:0:0/96``) is judged as the IPv4 address. Raises ValueError when the text is
    no address.
    """
    judged = ip_address(address) if isinstance(address, str) else address
    if isinstance(judged, IPv6Address) and judged in _MAPPED:
        judged = IPv4Address(int(judged) & 0xFFFFFFFF)
    if any(judged in network for network in allowed):
        return None
    return next((kind for network, kind in DENIED.items() if judged in network), None)


def opens(network: Network) -> list[str]:
    """The kinds of denied addresses that ``network`` allows beyond the one range it may lie in, sorted."""
    inside = {kind for other, kind in DENIED.items() if _within(other, network) and other != network}
    return sorted(inside)


def _within(inner: Network, outer: Network) -> bool:
    if isinstance(inner, IPv4Network):
        return isinstance(outer, IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, IPv6Network) and inner.subnet_of(outer)
