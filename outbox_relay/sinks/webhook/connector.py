"""Making a connection: an address that was judged is dialled, directly or by way of a proxy, and TLS is started."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import ssl
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from socket import AI_NUMERICHOST, SOCK_STREAM, getaddrinfo
from urllib.parse import urlsplit
from weakref import WeakSet

from aiohappyeyeballs import start_connection  # pyright: ignore[reportUnknownVariableType] - a bare tuple in it

from outbox_relay.sinks.tls import Tls
from outbox_relay.sinks.webhook.addresses import LOOKUP_SECONDS, Resolver, judge, plain_address
from outbox_relay.sinks.webhook.connection import Exchange, ExchangeFailed, HttpConnection
from outbox_relay.sinks.webhook.http_client import Endpoint, status_text

CONNECT_SECONDS = 5.0
"""Longest wait for a connection with its TLS handshake, after the lookup of the name."""
DIALLED = 8
"""Addresses of a name that are tried for one connection, at most."""
NEXT_SECONDS = 0.25
"""Time for which an address may answer before the next one is tried too (RFC 8305, section 5)."""
LISTEN_SECONDS = 1.0
"""Time for which a check waits after the handshake: a server with TLS 1.3 asks for a certificate only then."""
_UNKNOWN_AUTHORITY = frozenset((2, 18, 19, 20))
"""OpenSSL's codes (X509_V_ERR_…) for an issuer that is missing, or a root or a certificate that is not trusted."""
_OF_THIS_MACHINE = frozenset((errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Errors of a machine without free ports, files or memory, which say nothing about the destination."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")


class Connector:
    """Connects to the host of ``endpoint``, whose certificate must be that of the host."""

    def __init__(self, endpoint: Endpoint) -> None:
        parts = urlsplit(endpoint.url)
        https = parts.scheme == "https"
        host, proxy = parts.hostname or "", endpoint.proxy
        self._endpoint = endpoint
        self._host, self._port = host.rstrip("."), parts.port or (443 if https else 80)
        self._tls = (endpoint.tls or Tls().context()) if https else None
        self._peer = (host, self._port) if proxy is None else (proxy.host, proxy.port)
        self._resolver = Resolver(self._peer[0]) if plain_address(self._peer[0]) is None else None
        self.lookup_seconds = LOOKUP_SECONDS if self._resolver else 0.0
        """The longest time that looking up the name takes."""
        self._made: WeakSet[HttpConnection] = WeakSet()

    async def check(self) -> None:
        """Connect, shake hands and listen for a while. Raises ExchangeFailed; each step has a limit."""
        connection = await self.connect(await self.look_up(Exchange()), Exchange())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LISTEN_SECONDS if self._tls else 0):
                    await connection.listen()
        finally:
            connection.abort()

    def reset(self) -> None:
        """End every connection, at once, and look the host's name up again for the next one."""
        for connection in self._made:
            connection.abort()
        if self._resolver is not None:
            self._resolver.forget()

    async def look_up(self, exchange: Exchange) -> Sequence[str]:
        """Return the addresses to dial, judged, in ``lookup_seconds``. Raises ExchangeFailed, such as ssrf_blocked."""
        addresses: Sequence[str] = (self._peer[0],)
        if self._resolver is not None:
            with exchange.timed("dns"), self._reaching_peer():
                addresses = await self._resolver.addresses()
        if self._endpoint.proxy is None:
            judge(addresses, self._port, self._endpoint.denied, self._endpoint.own())
        return addresses

    async def connect(
        self, addresses: Sequence[str], exchange: Exchange, seconds: float = CONNECT_SECONDS
    ) -> HttpConnection:
        """Return a new connection to one of ``addresses``, made within ``seconds`` or ``CONNECT_SECONDS``.

        ``exchange`` records how long the steps took. Raises ExchangeFailed: connection_refused, connect_timeout,
        proxy_error, tls_error or internal. Leaves nothing open when it raises or is cancelled.
        """
        seconds = min(seconds, CONNECT_SECONDS)
        ends_at = asyncio.get_running_loop().time() + seconds
        with ExitStack() as undo:
            with exchange.timed("connect"), self._reaching_peer():
                async with _limited(ends_at, f"no connection was made within {seconds:.2g} s"):
                    connection = await self._dial(addresses)
                    undo.callback(connection.abort)
                    await self._tunnel(connection)
            if self._tls is not None:
                with exchange.timed("tls"):
                    async with _limited(ends_at, f"the TLS handshake was not done within {seconds:.2g} s"):
                        await self._secure(connection, self._tls)
            undo.pop_all()
            return connection

    @contextmanager
    def _reaching_peer(self) -> Generator[None]:
        """Raise failures to reach the peer as failures of the proxy if it is one."""
        try:
            yield
        except ExchangeFailed as error:
            if self._endpoint.proxy is None or error.code in ("internal", "proxy_error"):
                raise
            raise ExchangeFailed("proxy_error", f"the proxy is not reached: {error.reason}") from None

    async def _dial(self, addresses: Sequence[str]) -> HttpConnection:
        port = self._peer[1]
        try:
            entries = [getaddrinfo(each, port, 0, SOCK_STREAM, 0, AI_NUMERICHOST)[0] for each in addresses[:DIALLED]]
            dialled = await start_connection(entries, happy_eyeballs_delay=NEXT_SECONDS, interleave=1)
        except OSError as error:  # it has several errors of the system if several addresses were dialled
            numbers = [error.errno] if error.errno else [int(number) for number in _ERRNO.findall(str(error))]
            names = dict.fromkeys(map(os.strerror, numbers))  # its own text may hold addresses
            reason = "; ".join(names) or type(error).__name__
            if numbers and _OF_THIS_MACHINE.issuperset(numbers):
                raise ExchangeFailed("internal", f"this machine can make no connection: {reason}") from None
            raise ExchangeFailed("connection_refused", f"no connection was made: {reason}") from None
        _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, sock=dialled)
        self._made.add(connection)
        return connection

    async def _tunnel(self, connection: HttpConnection) -> None:
        """Ask the proxy, if there is one, for the destination by CONNECT (RFC 9110, 9.3.6).

        Raises ExchangeFailed, with proxy_error and nothing of the proxy's response but its status.
        """
        if (proxy := self._endpoint.proxy) is None:
            return
        target = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        own = [("proxy-authorization", proxy.authorization)] if proxy.authorization else []
        request = f"CONNECT {target} HTTP/1.1\r\n{header_lines([('host', target), *own])}\r\n"
        try:
            status = (await connection.send(Exchange(), request.encode("ascii"), head_only=True)).status
        except ExchangeFailed as error:
            raise ExchangeFailed("proxy_error", f"the proxy gave no answer to CONNECT: {error.reason}") from None
        if not 200 <= status <= 299:
            advice = ": it wants a user and a password in proxy" if status == 407 else ""
            raise ExchangeFailed("proxy_error", f"the proxy answered {status_text(status)}{advice}")
        if connection.buffer:  # the destination has been told nothing yet
            raise ExchangeFailed("proxy_error", "the proxy gave no answer to CONNECT: more follows it")

    async def _secure(self, connection: HttpConnection, context: ssl.SSLContext) -> None:
        try:
            return await connection.secure(context, self._host)
        except ssl.SSLCertVerificationError as error:
            unknown = error.verify_code in _UNKNOWN_AUTHORITY
            advice = ": its authority is not one that the sink trusts (ca_file, or the system's)" if unknown else ""
            reason = f"the certificate is not accepted: {error.verify_message}{advice}"
        except OSError as error:
            reason = f"the TLS handshake failed: {getattr(error, 'reason', None) or 'the connection was closed'}"
        raise ExchangeFailed("tls_error", reason)


def header_lines(headers: Sequence[tuple[str, str]]) -> str:
    """Return ``headers`` as they are sent. Raises ExchangeFailed if one would end before its line does."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if not (lines.count("\r") == lines.count("\n") == len(headers)) or "\0" in lines or not lines.isascii():
        raise ExchangeFailed("internal", "the request cannot be written: a header holds a line break or no ASCII")
    return lines


@asynccontextmanager
async def _limited(ends_at: float, late: str) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout_at(ends_at):
            yield
    except TimeoutError:
        raise ExchangeFailed("connect_timeout", late) from None
