"""The page served by uvicorn, in a process of its own."""

from __future__ import annotations

import re
import signal
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.service.http import ANY, listen
from outbox_relay.service.logs import logger
from outbox_relay.ui.access import Access, Anyone, Basic, Tokens, TrustedProxy, read_networks
from outbox_relay.ui.app import build_app
from outbox_relay.ui.guard import host_names, is_loopback
from outbox_relay.ui.site import PageOptions, Site
from outbox_relay.ui.users import FileContent, User, read_tokens, read_users

T = TypeVar("T")
CONNECTIONS_MOST: Final = 256
"""Maximum number of connections. More are answered with 503."""
IDLE_SECONDS: Final = 15
"""Time after which a connection without a request is closed."""
WATCH_SECONDS: Final = 1.0
STOP_SECONDS: Final = 5
HEAD_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Serving:
    """The options of ``outbox-relay ui``, as they were given."""

    address: tuple[str, int]
    auth: str
    users: Path | None = None
    tokens: Path | None = None
    proxy_header: str | None = None
    trusted_proxies: str | None = None
    read_only: bool = False
    show_payloads: bool = False
    root_path: str = ""
    label: str = ""


HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
OF_CLIENTS: Final = frozenset(("authorization", "cookie", "host", "origin", "referer", "user-agent"))
"""Names of headers that browsers send by themselves."""


def application(serving: Serving, dsn: Callable[[], str], *, pooler: bool) -> ASGIApp:
    """Return the page as the options say. Raises ``ConfigurationError``."""
    access = access_of(serving)
    site = Site(dsn, pooler, PageOptions(serving.read_only, serving.show_payloads, serving.label))
    tokens = _read_now(serving.tokens, read_tokens)
    hosts = host_names(serving.address[0]) if serving.auth == "none" else None
    return build_app(site, access, tokens=tokens and Tokens(tokens), hosts=hosts)


def access_of(serving: Serving) -> Access:
    """Return how users are found out.

    Raises ``ConfigurationError`` if options are missing or do not fit, or would open the page to any client.
    """
    header, proxies = serving.proxy_header, serving.trusted_proxies
    if serving.auth != "proxy" and (header or proxies):
        raise ConfigurationError("--proxy-header and --trusted-proxies are for --auth proxy")
    if serving.auth == "none" and not is_loopback(serving.address[0]):
        raise ConfigurationError(
            f"--auth none would open the page to every client that reaches {serving.address[0]}: choose --auth basic "
            "or proxy, or listen on 127.0.0.1"
        )
    if serving.auth == "none" and serving.users is not None:
        raise ConfigurationError("--users is for --auth basic or proxy")
    if serving.auth == "none":
        return Anyone(User("local", "operator"))
    if serving.auth == "proxy":
        if not (header and proxies):
            raise ConfigurationError("--auth proxy needs --proxy-header and --trusted-proxies")
        if not HEADER_NAME.fullmatch(header) or header.lower() in OF_CLIENTS:
            raise ConfigurationError(f"--proxy-header: {header!r} is no name of a header, such as X-User")
        return TrustedProxy(header, read_networks(proxies), _read_now(serving.users, read_users))
    if (users := _read_now(serving.users, read_users)) is None:
        raise ConfigurationError("--auth basic needs --users FILE; outbox-relay ui-user NAME ROLE prints a line of it")
    return Basic(users)


def _read_now(path: Path | None, read: Callable[[Path], T]) -> FileContent[T] | None:
    """Return the content of a file with secrets. Raises ``ConfigurationError`` if it cannot be read.

    Warns if every user of this machine may read it.
    """
    if path is None:
        return None
    content = FileContent(path, read)
    content.current()
    if path.stat().st_mode & stat.S_IROTH:
        logger().warning("ui.readable_secrets", file=str(path))
    return content


def serve(serving: Serving, dsn: Callable[[], str], *, pooler: bool, say: Callable[[str], None]) -> None:
    """Serve the page until SIGTERM or SIGINT. ``say`` is called with its address.

    Raises ``ConfigurationError``, also if the address cannot be listened on.
    """
    app = application(serving, dsn, pooler=pooler)
    host, port = serving.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if host == ANY:
            listening = listen(ANY, port, CONNECTIONS_MOST)
        else:
            listening = socket.create_server((host, port), family=family, backlog=CONNECTIONS_MOST)
    except OSError as error:
        raise ConfigurationError(f"--listen {host}:{port}: {error.strerror or error}") from None
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{listening.getsockname()[1]}/")
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn stops at them, and raises them again when it has stopped
        signal.signal(number, _end)
    uvicorn.Server(configuration(app, serving.root_path)).run(sockets=[listening])


def _end(_number: int, _frame: FrameType | None) -> None:
    """End with exit code 0 at a signal that comes before uvicorn has taken over, or after it has stopped."""
    raise SystemExit(0)


class TimedProtocol(H11Protocol):
    """A connection of uvicorn that is closed if it has no request under way for ``IDLE_SECONDS``.

    uvicorn itself waits without a limit for the first request, and for the rest of a head that comes byte by byte.
    """

    def connection_made(self, transport: Any) -> None:
        """Begin to watch the connection."""
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._watch()

    def _watch(self) -> None:
        if self.transport.is_closing():
            return
        now = time.monotonic()
        if self.cycle and not self.cycle.response_complete:
            self._idle_since = now
        elif now - self._idle_since > IDLE_SECONDS:
            self.transport.close()
            return
        self.loop.call_later(WATCH_SECONDS, self._watch)


def configuration(app: ASGIApp, root_path: str = "") -> uvicorn.Config:
    """Return the settings of uvicorn, which bound connections and times.

    ``root_path`` is the path that a proxy has removed from each request.
    """
    return uvicorn.Config(
        app,
        root_path=root_path,
        http=TimedProtocol,
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MOST,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
