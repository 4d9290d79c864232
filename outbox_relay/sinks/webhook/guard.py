"""The choice of addresses to dial: every address of a host is judged, those that are the relay's own included."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from outbox_relay.sinks.webhook.exchange import NotConnected, exhausted_by

_NAT64 = IPv6Network("64:ff9b::/96")
"""Such an address leads to the IPv4 address at its end (RFC 6052)."""


@dataclass(frozen=True, slots=True)
class AddressGuard:
    """The addresses that may be dialled for ``host`` and ``port``.

    ``denied`` returns why an address may not be dialled, or None. ``own`` lists the relay's own addresses and ports,
    which are never dialled, whatever ``denied`` returns.
    """

    host: str
    port: int
    denied: Callable[[str], str | None]
    own: Callable[[], Collection[tuple[str, int]]]

    def judge(self, addresses: Sequence[str]) -> None:
        """Raise NotConnected unless every one of ``addresses`` may be dialled.

        The reason names a kind and no address: it reaches people who must not learn what a name resolves to inside.
        """
        own = [address for address, port in self.own() if port == self.port]
        kinds = sorted({kind for address in addresses if (kind := self._refusal(address, own)) is not None})
        if kinds:
            raise NotConnected("ssrf_blocked", f"the host has an address that is not dialled: {kinds[0]}")

    def _refusal(self, address: str, own: Sequence[str]) -> str | None:
        try:
            kind, plain = self.denied(address), plain_address(address)
        except ValueError:
            raise NotConnected("dns_error", "the host's name resolves to something that is no address") from None
        return kind or ("the relay's own" if any(self._is_same(each, plain) for each in own) else None)

    def _is_same(self, own: str, plain: str) -> bool:
        """Return whether ``own`` is the address ``plain``; a wildcard is every address of this machine."""
        if not is_address(own):
            return own.rstrip(".").lower() == self.host.rstrip(".").lower()
        own = plain_address(own)
        return own == plain or (ip_address(own).is_unspecified and _is_here(plain))


def is_address(host: str) -> bool:
    """Return whether ``host`` is an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def plain_address(address: str) -> str:
    """Return one spelling of ``address``, that of the IPv4 address in an IPv6 one. Raises ValueError."""
    parsed = ip_address(address)
    if isinstance(parsed, IPv6Address):
        if parsed in _NAT64:
            return str(IPv4Address(int(parsed) & 0xFFFF_FFFF))
        parsed = parsed.ipv4_mapped or parsed
    return str(parsed)


def _is_here(address: str) -> bool:
    """Return whether ``address`` is one of this machine's: only those can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if (own := exhausted_by(error.errno)) is not None and error.errno != errno.EADDRNOTAVAIL:
            raise own from None
        return ip_address(address).is_unspecified
    return True
