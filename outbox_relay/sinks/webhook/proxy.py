"""A forward proxy: asking it for a connection to the destination (CONNECT, RFC 9110, section 9.3.6)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import h11

from outbox_relay.sinks.webhook.exchange import NotConnected
from outbox_relay.sinks.webhook.response import status_text

HEAD_BYTES = 16 * 1024
"""Longest status line and headers of a proxy's response."""
_AUTHENTICATION_REQUIRED = 407
_TOO_LONG = 431
"""The status that h11 suggests for a head that is too long."""


def _no_authorization() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Proxy:
    """A forward proxy, which looks destinations up and decides which of them are reached.

    ``authorization`` is asked for each connection: the value of ``proxy-authorization``, or None.
    """

    host: str
    port: int
    authorization: Callable[[], str | None] = field(default=_no_authorization, repr=False)

    async def tunnel(self, connected: socket.socket, host: str, port: int) -> None:
        """Ask over ``connected`` for ``host`` and ``port``; what is sent then reaches the destination.

        Raises NotConnected, with proxy_error and nothing of the proxy's response but its status. The caller limits
        the time.
        """
        try:
            status, extra = await self._ask(connected, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except h11.RemoteProtocolError as error:
            long = f"the proxy's response has a head longer than {HEAD_BYTES // 1024} KiB"
            unread = "the proxy's response is no answer to CONNECT"
            raise NotConnected("proxy_error", long if error.error_status_hint == _TOO_LONG else unread) from None
        except OSError:
            raise NotConnected("proxy_error", "the connection to the proxy was reset") from None
        if not 200 <= status <= 299:
            advice = ": it wants proxy_authorization_file" if status == _AUTHENTICATION_REQUIRED else ""
            raise NotConnected("proxy_error", f"the proxy answered {status_text(status)}{advice}")
        if extra:  # the destination has been told nothing yet
            raise NotConnected("proxy_error", "the proxy's response is no answer to CONNECT")

    async def _ask(self, connected: socket.socket, target: str) -> tuple[int, bytes]:
        """Return the status of the response and the bytes that follow its head."""
        loop = asyncio.get_running_loop()
        parser = h11.Connection(h11.CLIENT, HEAD_BYTES)
        headers = [("host", target)]
        if (authorization := self.authorization()) is not None:
            headers.append(("proxy-authorization", authorization))
        request = parser.send(h11.Request(method="CONNECT", target=target, headers=headers))
        await loop.sock_sendall(connected, request + parser.send(h11.EndOfMessage()))
        while not isinstance(event := parser.next_event(), h11.Response):
            if event is h11.NEED_DATA:
                data = await loop.sock_recv(connected, HEAD_BYTES)
                if not data:
                    raise NotConnected("proxy_error", "the proxy closed the connection without a response")
                parser.receive_data(data)
        return event.status_code, parser.trailing_data[0]
