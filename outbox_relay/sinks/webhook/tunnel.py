"""Through a forward proxy: asking it for a connection to the destination (CONNECT, RFC 9110, section 9.3.6)."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from outbox_relay.sinks.webhook.trip import NotConnected

HEAD_BYTES = 16 * 1024
"""Longest status line and headers of a proxy's answer."""
_READ_BYTES = 4096
_END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})[ \r]")


def _no_authorization() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Proxy:
    """A forward proxy, which looks destinations up and decides which of them are reached.

    ``authorization`` is asked for each connection: the value of ``proxy-authorization``, nothing when there is none.
    """

    host: str
    port: int
    authorization: Callable[[], str | None] = field(default=_no_authorization, repr=False)


async def ask(proxy: Proxy, connected: socket.socket, host: str, port: int) -> None:
    """Ask ``proxy`` over ``connected`` for ``host`` and ``port``; then what is sent over it reaches the destination.

    Raises NotConnected, with proxy_error and nothing of what the proxy said but its status. The caller limits the time.
    """
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_sendall(connected, _request(proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
        head, rest = await _head(loop, connected)
    except OSError:
        raise NotConnected("proxy_error", "the connection to the proxy was reset") from None
    status = int(found[1]) if (found := _STATUS.match(head)) else 0
    if status and not 200 <= status <= 299:
        raise NotConnected("proxy_error", f"the proxy answered {_named(status)}")
    if not status or rest:  # behind the head of a 2xx comes what the destination says, and nothing was said to it yet
        raise NotConnected("proxy_error", "the proxy's answer is no answer to CONNECT")


def _request(proxy: Proxy, target: str) -> bytes:
    lines = [f"CONNECT {target} HTTP/1.1", f"host: {target}"]
    if (authorization := proxy.authorization()) is not None:
        lines.append(f"proxy-authorization: {authorization}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _head(loop: asyncio.AbstractEventLoop, connected: socket.socket) -> tuple[bytes, bytes]:
    """The head of an answer, and what came behind it."""
    read = b""
    while _END not in read:
        piece = await loop.sock_recv(connected, _READ_BYTES)
        if not piece:
            raise NotConnected("proxy_error", "the proxy closed the connection without an answer")
        read += piece
        if len(read) > HEAD_BYTES:
            raise NotConnected("proxy_error", f"the proxy's answer has a head longer than {HEAD_BYTES // 1024} KiB")
    head, _, rest = read.partition(_END)
    return head + _END, rest


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
