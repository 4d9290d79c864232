"""The page as an ASGI application, to be served by ``outbox-relay ui`` or mounted by another application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from outbox_relay.domain.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    DatabaseUnusable,
    NotFound,
    RelayError,
    RightMissing,
    StatementFailed,
)
from outbox_relay.service.logs import logger
from outbox_relay.ui import delivery_views, endpoints, log_views
from outbox_relay.ui.access import Access, Authenticate, Host
from outbox_relay.ui.endpoints import PREFIX
from outbox_relay.ui.guard import Guard, is_api, path_of
from outbox_relay.ui.jobs import TooManyJobs
from outbox_relay.ui.render import ENVIRONMENT, error_page, root_of, site_of
from outbox_relay.ui.site import PageOptions, Site
from outbox_relay.ui.views import VIEWS, View

Endpoint: TypeAlias = Callable[[Request], Response]

PAGES: Final[Mapping[str, Endpoint]] = {
    "/": endpoints.shown(View(log_views.overview, "", "", template="overview.html")),
    "/exceptions": delivery_views.exceptions_page,
    "/exceptions/export": delivery_views.export,
    "/actions/{action}": endpoints.plan,
    **{path: endpoints.shown(view) for path, view in VIEWS.items() if view.template},
    **{PREFIX + path: endpoints.answered(view) for path, view in VIEWS.items()},
    PREFIX + "/exceptions/export": delivery_views.export,
    PREFIX + "/openapi.json": endpoints.openapi,
}
POSTS: Final[Mapping[str, Endpoint]] = {
    "/search": endpoints.search,
    "/actions/{action}": endpoints.act,
    PREFIX + "/actions/{action}": endpoints.answer_action,
}


def _threaded(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that is called in a thread."""

    async def answer(request: Request) -> Response:
        return await site_of(request).threads.run(endpoint, request)

    return answer


ROUTES: Final = (
    *(Route(path, _threaded(endpoint), methods=["GET"]) for path, endpoint in PAGES.items()),
    *(Route(path, _threaded(endpoint), methods=["POST"]) for path, endpoint in POSTS.items()),
    Route("/static/{name}", endpoints.static),
)


def create_app(
    dsn: str | Callable[[], str],
    authenticate: Authenticate,
    *,
    read_only: bool = False,
    show_payloads: bool = False,
    pooler: bool = False,
    label: str = "",
) -> Guard:
    """Return the page as an ASGI application, which FastAPI, Starlette or Django mount under any prefix.

    ``authenticate`` is called with each request, and returns its ``User``, or None, which is answered with 401. It may
    be a coroutine function. With ``read_only`` every action is refused. With ``show_payloads`` operators see payloads.
    ``pooler`` is True if ``dsn`` leads to a transaction-pooling proxy. ``label`` names the environment on every page.

    The database is connected to at the first request; ``await page.aclose()`` ends its connections. Nothing is read
    from the environment.
    """
    site = Site((lambda: dsn) if isinstance(dsn, str) else dsn, pooler, PageOptions(read_only, show_payloads, label))
    return build_app(site, Host(authenticate))


def build_app(
    site: Site, access: Access, *, tokens: Access | None = None, hosts: Collection[str] | None = None
) -> Guard:
    """Return the page of ``site`` behind its guard. See ``Guard`` for the parameters."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None]:
        yield
        await asyncio.to_thread(site.close)

    handlers: dict[Any, Any] = dict.fromkeys((RelayError, HTTPException, Exception), _failed)
    app = Starlette(routes=list(ROUTES), lifespan=lifespan, exception_handlers=handlers)
    app.state.site = site
    return Guard(app, access, _refuse, tokens=tokens, hosts=hosts, read_only=site.options.read_only, close=site.close)


def _failed(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed: JSON from the API, otherwise a page."""
    status, reason = _status_of(error)
    if status == 500:
        logger().error("ui.failed", path=path_of(request), exc_info=error)
    answer = JSONResponse({"error": reason}, status) if is_api(request) else error_page(request, status, reason)
    if isinstance(error, HTTPException):
        answer.headers.update(error.headers or {})
    return answer


def _status_of(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of ``error``, and what is said of it."""
    match error:
        case HTTPException():
            reasons = {404: "there is no such page", 405: "this path does not answer this method"}
            return error.status_code, reasons.get(error.status_code, error.detail)
        case NotFound():
            return 404, str(error)
        case ConfigurationError():
            return 400, str(error)
        case RightMissing():
            return 403, str(error)
        case TooManyJobs():
            return 429, str(error)
        case DatabaseUnavailable() | StatementFailed() | DatabaseUnusable():
            return 503, str(error)
        case _:
            return 500, "this request failed; the log of this process says why"


def _refuse(request: HTTPConnection, status: int, reason: str) -> ASGIApp:
    """Return the answer to a request that was refused before its user was known."""
    if is_api(request):
        return JSONResponse({"error": reason}, status)
    values = {"root": root_of(request), "status": status, "reason": reason}
    return HTMLResponse(ENVIRONMENT.get_template("refused.html").render(values), status)
