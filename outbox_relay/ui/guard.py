"""The outer layer of the page: every request passes it before anything else sees it.

It bounds the body, refuses foreign hosts and foreign origins, finds out who the user is, and gives every answer the
headers that keep a browser from framing, caching, or running anything that is not ours.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outbox_relay.domain.errors import RelayError
from outbox_relay.service.logs import logger
from outbox_relay.ui.access import Access, Refusal, TrustedProxy, is_bearer
from outbox_relay.ui.users import User

USER: Final = "outbox_relay.user"
"""The key of a request's scope that has the user."""
BY_TOKEN: Final = "outbox_relay.by_token"  # noqa: S105 - the name of a key
"""The key of a request's scope that is True if a bearer token has named the user."""
BODY: Final = "outbox_relay.body"
"""The key of a request's scope that has the body of a POST."""
BODY_BYTES: Final = 64 * 1024
"""Maximum size of a request's body: a form, or a filter of the API."""
BODY_SECONDS: Final = 10.0
"""Time limit for receiving it."""
TOO_LARGE: Final = Refusal(413, f"a request has at most {BODY_BYTES:,} bytes, within {BODY_SECONDS:g} s")
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]")
CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}
"""Headers of every answer."""

Refuse = Callable[[HTTPConnection, int, str], ASGIApp]
"""Returns the answer to a refused request: its status and the reason."""


class Guard:
    """An ASGI application in front of ``app``.

    ``hosts`` are the names in the header ``Host`` that are answered; None means any. ``tokens`` are for the paths below
    ``/api`` only. ``read_only`` refuses everything that changes something.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        refuse: Refuse,
        *,
        tokens: Access | None = None,
        hosts: Collection[str] | None = None,
        read_only: bool = False,
        close: Callable[[], None] | None = None,
    ) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse
        self._tokens = tokens
        self._hosts = hosts
        self._read_only = read_only
        self._close = close

    async def aclose(self) -> None:
        """Close what the page has opened. An application that mounts it may call this when it ends."""
        if self._close:
            await asyncio.to_thread(self._close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request = HTTPConnection(scope)
        refusal = self._refused(request) or await self._identify(request) or await _take_body(request, receive)
        app = self._app if refusal is None else self._refuse(request, refusal.status, refusal.reason)
        await app(scope, receive, _protected(send, refusal.headers if refusal else {}))

    def _refused(self, request: HTTPConnection) -> Refusal | None:
        """Return the refusal of a request whatever its user may do."""
        is_safe = _is_safe(request)
        if not is_safe and request.scope["method"] != "POST":
            return Refusal(405, "the methods are GET, HEAD and POST", {"allow": "GET, HEAD, POST"})
        if self._hosts is not None and _host_name(request.headers.get("host", "")) not in self._hosts:
            return Refusal(421, "the header Host names another server: open the page at the address that it printed")
        length = request.headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or len(length) > 10 or int(length) > BODY_BYTES:
            return TOO_LARGE
        if self._has_token(request):  # which no browser adds by itself
            return None
        is_foreign = request.headers.get("sec-fetch-site") == "cross-site"
        if (is_foreign and request.headers.get("sec-fetch-mode") != "navigate") or not (
            is_safe or is_same_origin(request)
        ):
            return Refusal(403, "this request comes from another site; open the page itself, and try again")
        return None

    async def _identify(self, request: HTTPConnection) -> Refusal | None:
        """Find out who the user is; return the refusal if there is none, or one who may not do this."""
        try:
            found = await self._user(request)
        except RelayError as error:  # its file cannot be read: who asks need not know which
            logger().error("ui.access_failed", reason=str(error))
            return Refusal(503, "the users cannot be read; the log of this process says why")
        if isinstance(found, Refusal):
            return found
        request.scope[USER] = found
        request.scope[BY_TOKEN] = self._has_token(request)
        if _is_safe(request) or path_of(request) == "/search":  # which only leads to another page
            return None
        if self._read_only:
            return Refusal(403, "this page is read-only: it was started with --read-only")
        if found.role != "operator":
            return Refusal(403, f"{found.name} is a viewer: only an operator may do this")
        return None

    async def _user(self, request: HTTPConnection) -> User | Refusal:
        if self._tokens and is_bearer(request):
            if is_api(request):
                return await self._tokens.user(request)
            if not isinstance(self._access, TrustedProxy):  # which may add a token of its own to each request
                return Refusal(401, "a token is for paths below /api/v1")
        return await self._access.user(request)

    def _has_token(self, request: HTTPConnection) -> bool:
        return self._tokens is not None and is_bearer(request) and is_api(request)


def _is_safe(request: HTTPConnection) -> bool:
    return request.scope["method"] in ("GET", "HEAD")


def path_of(request: HTTPConnection) -> str:
    """Return the path of a request below the place where the page is mounted."""
    root, path = request.scope.get("root_path", ""), request.scope["path"]
    return path.removeprefix(root) or "/" if root and path.startswith(root) else path


def is_api(request: HTTPConnection) -> bool:
    """Return True if a request is for the API."""
    return path_of(request).startswith("/api/")


def is_same_origin(request: HTTPConnection) -> bool:
    """Return True if a browser sends ``request`` for one of our own pages.

    Browsers add ``Sec-Fetch-Site`` to a POST, which no script can set, or at least ``Origin``. A proxy may have
    replaced the header ``Host`` that the latter is compared with. Without both, nothing says where it comes from.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site == "same-origin"
    if origin is None:
        return False
    return origin.partition("://")[2].lower() == request.headers.get("host", "").lower() != ""


def _host_name(header: str) -> str:
    """Return the name or address of a header ``Host``, without the port."""
    name = header.lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]


def host_names(address: str) -> list[str]:
    """Return the names under which a listener at the loopback address ``address`` is asked."""
    shown = f"[{address}]" if ":" in address else address
    return [*LOOPBACK_HOSTS, shown.lower()]


def is_loopback(address: str) -> bool:
    """Return True if only this machine reaches ``address``."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


async def _take_body(request: HTTPConnection, receive: Receive) -> Refusal | None:
    """Read the body of a POST into the scope; return the refusal if it is too large, too slow or cut off."""
    if _is_safe(request):
        return None
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while len(body) <= BODY_BYTES:
                message = await receive()
                if message["type"] != "http.request":  # it broke off: what came is not what was meant
                    break
                body += message.get("body", b"")
                if not message.get("more_body", False) and len(body) <= BODY_BYTES:
                    request.scope[BODY] = bytes(body)
                    return None
    except TimeoutError:
        pass
    return TOO_LARGE


def _protected(send: Send, more: Mapping[str, str]) -> Send:
    """Return ``send`` with the headers of every answer, and with ``more``."""

    async def protected(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in {**HEADERS, **more}.items():
                headers[name] = value
            if target := headers.get("location"):
                headers["location"] = _local(target)
        await send(message)

    return protected


def _local(target: str) -> str:
    """Return the path and the query of a redirection.

    A proxy may have changed the host, or ended TLS, so a whole address could lead to another server, or to one that
    the reader's password reaches in clear text.
    """
    found = urlsplit(target)
    return f"/{found.path.lstrip('/')}{f'?{found.query}' if found.query else ''}"
