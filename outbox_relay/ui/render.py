"""Templates, and how values are shown in them. Every value is escaped."""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse

from outbox_relay import __version__
from outbox_relay.admin.text import duration, state_text
from outbox_relay.admin.thresholds import LATE_SECONDS
from outbox_relay.relay.measures import BOUNDS
from outbox_relay.retention.wording import keepers_text
from outbox_relay.ui import charts, forms
from outbox_relay.ui.guard import USER, path_of
from outbox_relay.ui.site import Site
from outbox_relay.ui.users import User

CSRF_COOKIE: Final = "outbox_relay_csrf"
CSRF_FIELD: Final = "csrf"
CUT_CHARS: Final = 160
ISO_TIME: Final = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
SIZES: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


def _number(value: float | None) -> str:
    """Return a number with its thousands separated; a dash for None."""
    return "–" if value is None else f"{value:,.0f}"  # noqa: RUF001 - a dash


def _seconds(value: float | None) -> str:
    """Return a duration, in milliseconds if it is short; a dash for None."""
    if value is None:
        return "–"  # noqa: RUF001 - a dash
    return f"{value * 1000:.0f} ms" if value < 1 else duration(value)


def _percentile(value: float | None) -> str:
    """Return a percentile of the history, which is at most the last bound of its histogram."""
    return f"more than {duration(value)}" if value is not None and value >= BOUNDS[-1] else _seconds(value)


def _bytes(value: float | None) -> str:
    """Return a number of bytes in the unit that fits; a dash for None."""
    if value is None:
        return "–"  # noqa: RUF001 - a dash
    size, unit = float(value), 0
    while size >= 1024 and unit < len(SIZES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {SIZES[unit]}" if unit == 0 or size >= 10 else f"{size:.1f} {SIZES[unit]}"


def _time(value: str | datetime | None) -> str | Markup:
    """Return a time as an element that the reader's browser shows in its own zone; in UTC without JavaScript."""
    if value is None:
        return "–"  # noqa: RUF001 - a dash
    try:
        at = (datetime.fromisoformat(value) if isinstance(value, str) else value).astimezone(UTC)
    except (ValueError, OverflowError):
        return str(value)
    return Markup('<time datetime="{0}" title="{0}">{1}</time>').format(at.isoformat(), charts.time_text(at))


def _with_times(text: str) -> Markup:
    """Return a text whose times are shown as ``_time`` shows them."""
    return Markup(ISO_TIME.sub(lambda found: str(_time(found[0])), str(escape(text))))  # noqa: S704 - it is escaped


def _cut(value: object, most: int = CUT_CHARS) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _plain_json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def environment() -> Environment:
    """Return the environment of the templates. An unknown name in a template is an error."""
    made = Environment(
        loader=PackageLoader("outbox_relay.ui", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "number": _number, "seconds": _seconds, "percentile": _percentile, "duration": duration, "size": _bytes,
        "time": _time, "with_times": _with_times, "cut": _cut, "json": _plain_json, "keepers": keepers_text,
    }  # fmt: skip
    shared: dict[str, Any] = {
        "bars": charts.bars, "line": charts.line, "steps": charts.steps_of, "step_times": charts.step_times,
        "shown_number": _number, "shown_percentile": _percentile, "state_text": state_text, "version": __version__,
        "group_query": forms.group_query, "LATE_SECONDS": LATE_SECONDS,
    }  # fmt: skip
    cast("dict[str, Any]", made.globals).update(shared)
    return made


ENVIRONMENT: Final = environment()


def site_of(request: Request) -> Site:
    """Return what all requests of this page share."""
    return request.app.state.site


def user_of(request: Request) -> User:
    """Return the user, whom the guard has found."""
    return request.scope[USER]


def may_act(request: Request) -> bool:
    """Return True if the user may change something."""
    return user_of(request).role == "operator" and not site_of(request).options.read_only


def shows_payloads(request: Request) -> bool:
    """Return True if the user may see payloads."""
    return user_of(request).role == "operator" and site_of(request).options.show_payloads


def fields_of(request: Request, known: Collection[str]) -> dict[str, str]:
    """Return the fields of a query. Those of a path without any are ignored: the application around it may add some.

    Raises ``ConfigurationError`` if one is given twice, or means nothing.
    """
    if not known:
        return {}
    fields = forms.single(request.query_params.multi_items())
    forms.refuse_unknown(fields, known)
    return fields


def root_of(request: HTTPConnection) -> str:
    """Return the path at which the page is mounted, without a slash at its end."""
    return request.scope.get("root_path", "").rstrip("/")


def page(request: Request, template: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
    """Return a page, or only its live part if the page itself asks for that."""
    is_part = request.headers.get("hx-request") == "true"
    cookie = request.cookies.get(CSRF_COOKIE, "") or secrets.token_urlsafe(32)
    query = request.scope.get("query_string", b"").decode("latin-1")
    root = root_of(request)
    site = site_of(request)
    shared = {
        "layout": "part.html" if is_part else "base.html",
        "root": root,
        "path": path_of(request),
        "here": root + path_of(request) + (f"?{query}" if query else ""),
        "user": user_of(request),
        "may_act": may_act(request),
        "csrf": csrf_token(request, cookie),
        "key_hash": site.keys.hash,
        "shows_payloads": shows_payloads(request),
        "asked": request.query_params,
        "label": site.options.label,
        "place": site.database(),
    }
    html = ENVIRONMENT.get_template(template).render({**values, **shared})
    answer = HTMLResponse(html, status)
    answer.headers["vary"] = "HX-Request"
    if not request.cookies.get(CSRF_COOKIE) and not is_part:
        secure = request.url.scheme == "https"
        answer.set_cookie(CSRF_COOKIE, cookie, path=root or "/", secure=secure, httponly=True, samesite="strict")
    return answer


def error_page(request: Request, status: int, reason: str) -> HTMLResponse:
    """Return a page that says what went wrong."""
    return page(request, "error.html", {"status": status, "reason": reason}, status)


def csrf_token(request: Request, cookie: str) -> str:
    """Return the token that a form of this user must contain: a keyed digest of its user and cookie."""
    parts = "\0".join(("csrf", user_of(request).name, cookie))
    return hmac.digest(site_of(request).secret, parts.encode(errors="surrogatepass"), "sha256").hex()


def has_token(request: Request, token: str) -> bool:
    """Return True if ``token`` is that of the user and the cookie of ``request``."""
    cookie = request.cookies.get(CSRF_COOKIE, "")
    return bool(cookie) and hmac.compare_digest(token.encode(), csrf_token(request, cookie).encode())


def redirect(request: Request, path: str) -> RedirectResponse:
    """Return the answer that leads to ``path`` of the page by GET."""
    return RedirectResponse(root_of(request) + path, 303)
