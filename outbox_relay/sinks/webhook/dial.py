"""Making a connection: every address that a host stands for is judged, and one that was judged is dialled."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias, TypeVar

from aiohappyeyeballs import start_connection  # pyright: ignore[reportUnknownVariableType] - a bare tuple in it

from outbox_relay.sinks.webhook.resolver import Resolver
from outbox_relay.sinks.webhook.trip import NotConnected, Trip
from outbox_relay.sinks.webhook.tunnel import Proxy, ask

CONNECT_SECONDS = 5.0
"""Longest wait for a connection, its TLS handshake included, the lookup of the name not."""
DIALLED = 8
"""Addresses of a name that are tried for one connection, at most."""
NEXT_SECONDS = 0.25
"""How long an address has to answer before the next one is tried beside it (RFC 8305, section 5)."""
_TRANSLATED = IPv6Network("64:ff9b::/96")
"""NAT64 (RFC 6052): such an address leads to the IPv4 address at its end."""
_UNREACHED = frozenset(("dns_error", "dns_timeout", "connection_refused", "connect_timeout"))
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

Entry: TypeAlias = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]
"""An address as ``socket.getaddrinfo`` writes it."""
P = TypeVar("P", bound=asyncio.Protocol)


class Dialler:
    """Connects to ``host`` and ``port``.

    ``denied`` tells why an address may not be dialled, ``own`` lists addresses and ports that are the relay's own and
    never dialled, whatever ``denied`` says. Both are asked for each connection. With ``tls`` the certificate must be
    that of ``host``. With ``proxy`` it is the proxy that is looked up and dialled: it alone learns what ``host`` stands
    for, so judging that is its business.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        denied: Callable[[str], str | None],
        own: Callable[[], Collection[tuple[str, int]]],
        tls: ssl.SSLContext | None,
        proxy: Proxy | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._proxy = proxy
        self._near = (host, port) if proxy is None else (proxy.host, proxy.port)
        self._denied = denied
        self._own = own
        self._tls = tls
        self._resolver = None if _is_address(self._near[0]) else Resolver(self._near[0])

    def renew(self, tls: ssl.SSLContext) -> None:
        """Use ``tls`` for new connections, unless they are made without TLS."""
        if self._tls is not None:
            self._tls = tls

    async def connect(self, protocol: Callable[[], P], trip: Trip) -> P:
        """A connection with a protocol of its own; ``trip`` learns how long the parts took.

        Raises NotConnected: dns_error, dns_timeout, ssrf_blocked, connection_refused, connect_timeout, proxy_error,
        tls_error or internal. Leaves nothing open when it raises or is cancelled.
        """
        try:
            return await self._connect(protocol, trip)
        except NotConnected as error:
            if self._proxy is not None and trip.phase != "tls" and error.code in _UNREACHED:
                raise NotConnected("proxy_error", f"the proxy is not reached: {error.reason}") from None
            raise

    async def _connect(self, protocol: Callable[[], P], trip: Trip) -> P:
        addresses = await self._addresses(trip)
        if self._proxy is None:
            self._judge(addresses)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                trip.enter("connect")
                dialled = await self._dial(addresses)
                trip.leave()
                return await self._talk(protocol, dialled, trip)
        except TimeoutError:
            missing = "the TLS handshake was not done" if trip.phase == "tls" else "no connection was made"
            raise NotConnected("connect_timeout", f"{missing} within {CONNECT_SECONDS:g} s") from None

    def forget(self) -> None:
        """Look the host's name up anew for the next connection."""
        if self._resolver is not None:
            self._resolver.forget()

    async def _addresses(self, trip: Trip) -> Sequence[str]:
        if self._resolver is None:
            return (self._near[0],)
        trip.enter("dns")
        addresses = await self._resolver.addresses()
        trip.leave()
        return addresses

    def _judge(self, addresses: Sequence[str]) -> None:
        """Raise NotConnected unless every one of ``addresses`` may be dialled. Reasons never name an address."""
        own = self._own()
        kinds = sorted({kind for address in addresses if (kind := self._refusal(address, own)) is not None})
        if kinds:
            # Kinds, and not addresses: reasons reach people who must not learn what a name stands for inside.
            raise NotConnected("ssrf_blocked", f"the host stands for an address that is not dialled: {kinds[0]}")

    def _refusal(self, address: str, own: Collection[tuple[str, int]]) -> str | None:
        try:
            if (kind := self._denied(address)) is not None:
                return kind
            plain = _plain(address)
        except ValueError:
            raise NotConnected("dns_error", "the host's name stands for something that is no address") from None
        for theirs, port in own:
            if port == self._port and _same(theirs, plain, self._host):
                return "the relay's own"
        return None

    async def _dial(self, addresses: Sequence[str]) -> socket.socket:
        entries = [_entry(address, self._near[1]) for address in addresses[:DIALLED]]
        try:
            dialled = await start_connection(entries, happy_eyeballs_delay=NEXT_SECONDS, interleave=1)
        except OSError as error:
            raise _not_connected(error) from None
        try:
            self._check_peer(dialled, addresses)
            if self._proxy is not None:
                await ask(self._proxy, dialled, self._host.rstrip("."), self._port)
        except BaseException:
            dialled.close()
            raise
        return dialled

    def _check_peer(self, dialled: socket.socket, judged: Sequence[str]) -> None:
        """What was judged is what was reached, by the system's own word."""
        try:
            peer = str(dialled.getpeername()[0])
        except OSError as error:
            raise _not_connected(error) from None
        if _plain(peer) not in {_plain(address) for address in judged}:
            raise NotConnected("ssrf_blocked", "the connection leads to another address than the one dialled")

    async def _talk(self, protocol: Callable[[], P], dialled: socket.socket, trip: Trip) -> P:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            _, talking = await loop.create_connection(protocol, sock=dialled)
            return talking
        trip.enter("tls")
        try:
            _, talking = await loop.create_connection(
                protocol, sock=dialled, ssl=self._tls, server_hostname=self._host.rstrip(".")
            )
        except ssl.SSLCertVerificationError as error:
            raise NotConnected("tls_error", f"the certificate is not accepted: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise NotConnected("tls_error", f"the TLS handshake failed: {error.reason or 'closed'}") from None
        except OSError as error:
            raise NotConnected("tls_error", f"the TLS handshake was cut: {_said(error)}") from None
        trip.leave()
        return talking


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _plain(address: str) -> str:
    """One spelling for each address; an IPv4 one in an IPv6 one is the IPv4 one. Raises ValueError when it is none."""
    parsed = ip_address(address)
    if isinstance(parsed, IPv6Address):
        if parsed in _TRANSLATED:
            return str(IPv4Address(int(parsed) & 0xFFFF_FFFF))
        parsed = parsed.ipv4_mapped or parsed
    return str(parsed)


def _same(theirs: str, plain: str, host: str) -> bool:
    """Whether an address of the relay's own is the one that would be dialled; a wildcard is all of this machine's."""
    if not _is_address(theirs):
        return theirs.rstrip(".").lower() == host.rstrip(".").lower()
    own = _plain(theirs)
    return own == plain or (ip_address(own).is_unspecified and _is_here(plain))


def _is_here(address: str) -> bool:
    """Whether ``address`` is one of this machine's: only those can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return ip_address(address).is_unspecified
    return True


def _entry(address: str, port: int) -> Entry:
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))


def _not_connected(error: OSError) -> NotConnected:
    if error.errno in _EXHAUSTED:
        return NotConnected("internal", f"no socket to connect with: {_said(error)}")
    if error.errno == errno.ETIMEDOUT:
        return NotConnected("connect_timeout", "no connection was made: the system gave up waiting")
    return NotConnected("connection_refused", f"no connection was made: {_said(error)}")


def _said(error: OSError) -> str:
    """What the system says of ``error``, without the address that its own text may hold."""
    return os.strerror(error.errno) if error.errno else type(error).__name__
