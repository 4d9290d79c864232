"""Making a connection: every address of a host is judged, and an address that was judged is dialled."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, TypeVar

from aiohappyeyeballs import start_connection  # pyright: ignore[reportUnknownVariableType] - a bare tuple in it

from outbox_relay.sinks.webhook.exchange import Exchange, NotConnected, exhausted_by
from outbox_relay.sinks.webhook.guard import AddressGuard, is_address, plain_address
from outbox_relay.sinks.webhook.proxy import Proxy
from outbox_relay.sinks.webhook.resolver import LOOKUP_SECONDS, Resolver

CONNECT_SECONDS = 5.0
"""Longest wait for a connection with its TLS handshake, after the lookup of the name."""
DIALLED = 8
"""Addresses of a name that are tried for one connection, at most."""
NEXT_SECONDS = 0.25
"""Time for which an address may answer before the next one is tried too (RFC 8305, section 5)."""
_UNREACHED = frozenset(("dns_error", "dns_timeout", "connection_refused", "connect_timeout"))
_NO_WAY = frozenset((errno.ENETUNREACH, errno.EAFNOSUPPORT))
"""Errors for addresses of a family that this machine does not use."""
_UNKNOWN_AUTHORITY = frozenset((2, 18, 19, 20))
"""OpenSSL's codes (X509_V_ERR_…) for an issuer that is missing, or a root or a certificate that is not trusted."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")

AddrInfo: TypeAlias = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]
"""An address as ``socket.getaddrinfo`` writes it."""
ProtocolT = TypeVar("ProtocolT", bound=asyncio.Protocol)


class Connector:
    """Connects to ``host`` and ``port``, to addresses that ``AddressGuard`` accepts.

    With ``tls`` the certificate must be that of ``host``. With ``proxy`` the proxy is looked up and dialled: it alone
    learns what ``host`` resolves to and judges that.
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
        self._host = host.rstrip(".")
        self._port = port
        self._tls = tls
        self._proxy = proxy
        self._guard = AddressGuard(host, port, denied, own)
        self._peer = (host, port) if proxy is None else (proxy.host, proxy.port)
        self._resolver = None if is_address(self._peer[0]) else Resolver(self._peer[0])

    @property
    def lookup_seconds(self) -> float:
        """The longest time that looking up the name takes; 0 for an address."""
        return 0.0 if self._resolver is None else LOOKUP_SECONDS

    def renew(self, tls: ssl.SSLContext) -> None:
        """Use ``tls`` for new connections, unless they are made without TLS."""
        if self._tls is not None:
            self._tls = tls

    async def connect(self, protocol: Callable[[], ProtocolT], exchange: Exchange) -> ProtocolT:
        """Return a protocol of its own on a new connection; ``exchange`` records how long the steps took.

        Raises NotConnected: dns_error, dns_timeout, ssrf_blocked, connection_refused, connect_timeout, proxy_error,
        tls_error or relay_exhausted. Leaves nothing open when it raises or is cancelled.
        """
        try:
            addresses = await self._addresses(exchange)
            async with asyncio.timeout(CONNECT_SECONDS):
                with exchange.timed("connect"):
                    dialled = await self._dial(addresses)
                return await self._start(protocol, dialled, exchange)
        except TimeoutError:
            missing = "the TLS handshake was not done" if exchange.phase == "tls" else "no connection was made"
            late = NotConnected("connect_timeout", f"{missing} within {CONNECT_SECONDS:g} s")
            raise self._with_proxy(late, exchange) from None
        except NotConnected as error:
            raise self._with_proxy(error, exchange) from None

    def _with_proxy(self, error: NotConnected, exchange: Exchange) -> NotConnected:
        if self._proxy is None or exchange.phase == "tls" or error.code not in _UNREACHED:
            return error
        return NotConnected("proxy_error", f"the proxy is not reached: {error.reason}")

    def forget(self) -> None:
        """Look the host's name up again for the next connection."""
        if self._resolver is not None:
            self._resolver.forget()

    async def _addresses(self, exchange: Exchange) -> Sequence[str]:
        """Return the addresses to dial, judged."""
        addresses: Sequence[str] = (self._peer[0],)
        if self._resolver is not None:
            with exchange.timed("dns"), exchange.unlimited():
                addresses = await self._resolver.addresses()
        if self._proxy is None:
            self._guard.judge(addresses)
        return addresses

    async def _dial(self, addresses: Sequence[str]) -> socket.socket:
        entries = [_addr_info(address, self._peer[1]) for address in addresses[:DIALLED]]
        try:
            dialled = await start_connection(entries, happy_eyeballs_delay=NEXT_SECONDS, interleave=1)
        except OSError as error:
            raise _not_connected(error) from None
        try:
            _check_peer(dialled, addresses)
            if self._proxy is not None:
                await self._proxy.tunnel(dialled, self._host, self._port)
        except BaseException:
            dialled.close()
            raise
        return dialled

    async def _start(self, protocol: Callable[[], ProtocolT], dialled: socket.socket, exchange: Exchange) -> ProtocolT:
        """Start the protocol, over TLS if there is a context."""
        create = asyncio.get_running_loop().create_connection
        if self._tls is None:
            return (await create(protocol, sock=dialled))[1]
        try:
            with exchange.timed("tls"):
                return (await create(protocol, sock=dialled, ssl=self._tls, server_hostname=self._host))[1]
        except ssl.SSLCertVerificationError as error:
            unknown = error.verify_code in _UNKNOWN_AUTHORITY
            advice = ": its authority is not one that the sink trusts (ca_file, or the system's)" if unknown else ""
            reason = f"the certificate is not accepted: {error.verify_message}{advice}"
        except ssl.SSLError as error:
            reason = f"the TLS handshake failed: {error.reason or 'closed'}"
        except OSError as error:
            reason = f"the TLS handshake was cut: {_system_text(error)}"
        raise NotConnected("tls_error", reason)


def _check_peer(dialled: socket.socket, judged: Sequence[str]) -> None:
    """Raise NotConnected unless the connection leads to an address that was judged, by the system's own word."""
    try:
        peer = str(dialled.getpeername()[0])
    except OSError as error:
        raise _not_connected(error) from None
    if plain_address(peer) not in {plain_address(address) for address in judged}:
        raise NotConnected("ssrf_blocked", "the connection leads to another address than the one dialled")


def _addr_info(address: str, port: int) -> AddrInfo:
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))


def _not_connected(error: OSError) -> NotConnected:
    numbers = _numbers(error)
    reached = [number for number in numbers if number not in _NO_WAY]
    if len(reached) == 1 and (own := exhausted_by(reached[0])) is not None:
        return own
    if numbers == (errno.ETIMEDOUT,):
        return NotConnected("connect_timeout", "no connection was made: the system gave up waiting")
    return NotConnected("connection_refused", f"no connection was made: {_system_text(error)}")


def _numbers(error: OSError) -> Sequence[int]:
    """Return the different errors of the system in ``error``, which has several if several addresses were dialled."""
    if error.errno:
        return (error.errno,)
    return tuple(dict.fromkeys(int(number) for number in _ERRNO.findall(str(error))))


def _system_text(error: OSError) -> str:
    """Return the system's messages for ``error``, without the addresses that its own text may hold."""
    return "; ".join(map(os.strerror, _numbers(error))) or type(error).__name__
