"""Making a connection: every address of a host is judged, and an address that was judged is dialled."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

from aiohappyeyeballs import start_connection  # pyright: ignore[reportUnknownVariableType] - a bare tuple in it

from outbox_relay.sinks.webhook.connection import Exchange, ExchangeFailed, HttpConnection, NotConnected
from outbox_relay.sinks.webhook.resolver import LOOKUP_SECONDS, Resolver
from outbox_relay.sinks.webhook.response import NotHttp, ResponseReader
from outbox_relay.sinks.webhook.results import status_text

CONNECT_SECONDS = 5.0
"""Longest wait for a connection with its TLS handshake, after the lookup of the name."""
DIALLED = 8
"""Addresses of a name that are tried for one connection, at most."""
NEXT_SECONDS = 0.25
"""Time for which an address may answer before the next one is tried too (RFC 8305, section 5)."""
_UNREACHED = frozenset(("dns_error", "dns_timeout", "connection_refused", "connect_timeout"))
_UNKNOWN_AUTHORITY = frozenset((2, 18, 19, 20))
"""OpenSSL's codes (X509_V_ERR_…) for an issuer that is missing, or a root or a certificate that is not trusted."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_NAT64 = IPv6Network("64:ff9b::/96")
"""Such an address leads to the IPv4 address at its end (RFC 6052)."""

AddrInfo: TypeAlias = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]
"""An address as ``socket.getaddrinfo`` writes it."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A forward proxy, which looks destinations up and decides which of them are reached.

    ``authorization`` is the value of ``proxy-authorization``, or None.
    """

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)


class Connector:
    """Connects to ``host`` and ``port``.

    ``denied`` returns why an address may not be dialled, or None. ``own`` lists the relay's own addresses and ports,
    which are never dialled, whatever ``denied`` returns. With ``tls`` the certificate must be that of ``host``. With
    ``proxy`` the proxy is looked up and dialled: it alone learns what ``host`` resolves to and judges that.
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
        self._denied, self._own = denied, own
        self._tls = tls
        self._proxy = proxy
        self._peer = (host, port) if proxy is None else (proxy.host, proxy.port)
        self._resolver = None if _is_address(self._peer[0]) else Resolver(self._peer[0])

    @property
    def lookup_seconds(self) -> float:
        """The longest time that looking up the name takes; 0 for an address."""
        return 0.0 if self._resolver is None else LOOKUP_SECONDS

    def forget(self) -> None:
        """Look the host's name up again for the next connection."""
        if self._resolver is not None:
            self._resolver.forget()

    async def look_up(self, exchange: Exchange) -> Sequence[str]:
        """Return the addresses to dial, judged. Raises NotConnected: dns_error, dns_timeout, proxy_error, ssrf_blocked.

        It takes ``lookup_seconds`` at most; ``exchange`` records how long it took.
        """
        addresses: Sequence[str] = (self._peer[0],)
        if self._resolver is not None:
            try:
                with exchange.timed("dns"):
                    addresses = await self._resolver.addresses()
            except NotConnected as error:
                raise self._with_proxy(error, exchange) from None
        if self._proxy is None:
            self._judge(addresses)
        return addresses

    async def connect(self, addresses: Sequence[str], exchange: Exchange) -> HttpConnection:
        """Return a new connection to one of ``addresses``; ``exchange`` records how long the steps took.

        Raises NotConnected: connection_refused, connect_timeout, proxy_error or tls_error. Leaves nothing open when it
        raises or is cancelled.
        """
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                with exchange.timed("connect"):
                    dialled = await self._dial(addresses)
                return await self._start(dialled, exchange)
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

    # -- judging ------------------------------------------------------------------------------------------------

    def _judge(self, addresses: Sequence[str]) -> None:
        """Raise NotConnected unless every one of ``addresses`` may be dialled.

        The reason names a kind and no address: it reaches people who must not learn what a name resolves to inside.
        """
        own = [address for address, port in self._own() if port == self._port]
        kinds = sorted({kind for address in addresses if (kind := self._refusal(address, own)) is not None})
        if kinds:
            raise NotConnected("ssrf_blocked", f"the host has an address that is not dialled: {kinds[0]}")

    def _refusal(self, address: str, own: Sequence[str]) -> str | None:
        try:
            kind, plain = self._denied(address), _plain_address(address)
        except ValueError:
            raise NotConnected("dns_error", "the host's name resolves to something that is no address") from None
        return kind or ("the relay's own" if any(self._is_same(each, plain) for each in own) else None)

    def _is_same(self, own: str, plain: str) -> bool:
        """Return whether ``own`` is the address ``plain``; a wildcard is every address of this machine."""
        if not _is_address(own):
            return own.rstrip(".").lower() == self._host.lower()
        own = _plain_address(own)
        return own == plain or (ip_address(own).is_unspecified and _is_here(plain))

    # -- dialling -----------------------------------------------------------------------------------------------

    async def _dial(self, addresses: Sequence[str]) -> socket.socket:
        entries = [_addr_info(address, self._peer[1]) for address in addresses[:DIALLED]]
        try:
            dialled = await start_connection(entries, happy_eyeballs_delay=NEXT_SECONDS, interleave=1)
        except OSError as error:
            raise _not_connected(error) from None
        try:
            if self._proxy is not None:
                await self._tunnel(self._proxy, dialled)
        except BaseException:
            dialled.close()
            raise
        return dialled

    async def _tunnel(self, proxy: Proxy, connected: socket.socket) -> None:
        """Ask ``proxy`` for the destination by CONNECT (RFC 9110, 9.3.6); what is sent then reaches the destination.

        Raises NotConnected, with proxy_error and nothing of the proxy's response but its status.
        """
        target = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        own = [] if proxy.authorization is None else [("proxy-authorization", proxy.authorization)]
        request = f"CONNECT {target} HTTP/1.1\r\n{header_lines([('host', target), *own])}\r\n"
        source = _SocketSource(connected)
        response = ResponseReader(source)
        try:
            await asyncio.get_running_loop().sock_sendall(connected, request.encode("ascii"))
            if not await response.read_head():
                raise NotConnected("proxy_error", "the proxy closed the connection without a response")
        except NotHttp as error:
            raise NotConnected("proxy_error", f"the proxy's response is no answer to CONNECT: {error}") from None
        except OSError:
            raise NotConnected("proxy_error", "the connection to the proxy was reset") from None
        if not 200 <= response.status <= 299:
            advice = ": it wants a user and a password in proxy" if response.status == 407 else ""
            raise NotConnected("proxy_error", f"the proxy answered {status_text(response.status)}{advice}")
        if source.buffer:  # the destination has been told nothing yet
            raise NotConnected("proxy_error", "the proxy's response is no answer to CONNECT: more follows it")

    async def _start(self, dialled: socket.socket, exchange: Exchange) -> HttpConnection:
        """Start the protocol, over TLS if there is a context."""
        create = asyncio.get_running_loop().create_connection
        if self._tls is None:
            return (await create(HttpConnection, sock=dialled))[1]
        try:
            with exchange.timed("tls"):
                return (await create(HttpConnection, sock=dialled, ssl=self._tls, server_hostname=self._host))[1]
        except ssl.SSLCertVerificationError as error:
            unknown = error.verify_code in _UNKNOWN_AUTHORITY
            advice = ": its authority is not one that the sink trusts (ca_file, or the system's)" if unknown else ""
            reason = f"the certificate is not accepted: {error.verify_message}{advice}"
        except ssl.SSLError as error:
            reason = f"the TLS handshake failed: {error.reason or 'closed'}"
        except OSError as error:
            reason = f"the TLS handshake was cut: {_system_text(error)}"
        raise NotConnected("tls_error", reason)


class _SocketSource:
    """A response that comes over a socket."""

    def __init__(self, connected: socket.socket) -> None:
        self.buffer = bytearray()
        self._connected = connected

    async def more(self) -> bool:
        """See ``Source``."""
        data = await asyncio.get_running_loop().sock_recv(self._connected, 64 * 1024)
        self.buffer += data
        return bool(data)


def header_lines(headers: Sequence[tuple[str, str]]) -> str:
    """Return ``headers`` as they are sent. Raises ExchangeFailed if one would end before its line does."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if not (lines.count("\r") == lines.count("\n") == len(headers)) or "\0" in lines or not lines.isascii():
        raise ExchangeFailed("internal", "the request cannot be written: a header holds a line break or no ASCII")
    return lines


def _addr_info(address: str, port: int) -> AddrInfo:
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _plain_address(address: str) -> str:
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
    except OSError:
        return ip_address(address).is_unspecified
    return True


def _not_connected(error: OSError) -> NotConnected:
    numbers = _numbers(error)
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
