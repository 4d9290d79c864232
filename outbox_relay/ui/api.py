"""The API: everything that the pages show and do, as JSON below ``/api/v1``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outbox_relay.domain.errors import ConfigurationError, NotFound
from outbox_relay.ui import act, forms, pages, view_events, view_log, view_sinks
from outbox_relay.ui.guard import BY_TOKEN
from outbox_relay.ui.openapi import document
from outbox_relay.ui.render import CSRF_FIELD, has_token, root_of, shows_payloads, site_of

PREFIX: Final = "/api/v1"
DRY_RUN: Final = "dry_run"


async def sinks(request: Request) -> Response:
    """Answer with every sink."""
    return _json(await view_sinks.sinks(await site_of(request).store()))


async def sink(request: Request) -> Response:
    """Answer with one sink."""
    period = request.query_params.get("period", "2h")
    return _json(await view_sinks.sink(site_of(request), request.path_params["name"], period))


async def doctor(request: Request) -> Response:
    """Answer with the newest findings of ``doctor``."""
    site = site_of(request)
    store = await site.store()
    if site.findings.current(store)["findings"] is None:
        await site.findings.finish()
    return _json(site.findings.current(store))


async def exceptions(request: Request) -> Response:
    """Answer with one page of the deliveries that a filter selects."""
    fields = forms.single(request.query_params.multi_items())
    site = site_of(request)
    forms.refuse_unknown(fields, (*forms.SHOWN_NAMES, "before"))
    forms.refuse_empty(fields)
    store = await site.store()
    wanted = forms.read_filter(await site.keys.resolve(store, fields))
    return _json(await view_events.exceptions(store, site.keys, wanted, forms.read_place(fields)))


async def summary(request: Request) -> Response:
    """Answer with the deliveries that a filter selects, by sink, type and kind of error."""
    fields = forms.single(request.query_params.multi_items())
    forms.refuse_unknown(fields, forms.SHOWN_NAMES)
    forms.refuse_empty(fields)
    site = site_of(request)
    wanted = forms.read_filter(await site.keys.resolve(await site.store(), fields))
    return _json(await view_events.summary(site, wanted))


async def event(request: Request) -> Response:
    """Answer with what ``why`` says of an event."""
    uid = forms.read_uid(request.path_params["uid"])
    return _json(await view_events.event(await site_of(request).store(), uid, payload=shows_payloads(request)))


async def key(request: Request) -> Response:
    """Answer with the deliveries of a key, and its events."""
    site = site_of(request)
    store = await site.store()
    wanted = await site.keys.find(store, request.path_params["hash"])
    before = forms.read_before(forms.single(request.query_params.multi_items()))
    return _json(await view_events.key(store, wanted, before, payload=shows_payloads(request)))


async def replays(request: Request) -> Response:
    """Answer with the replays."""
    return _json(await view_log.replays(await site_of(request).store()))


async def replay(request: Request) -> Response:
    """Answer with one replay."""
    number = forms.read_integer("id", request.path_params["id"], 1, 10**18 - 1)
    return _json(await view_log.replay(await site_of(request).store(), number))


async def schedules(request: Request) -> Response:
    """Answer with one page of the schedules."""
    after = forms.read_after(forms.single(request.query_params.multi_items()))
    return _json(await view_log.schedules(await site_of(request).store(), after))


async def relays(request: Request) -> Response:
    """Answer with the relays and what they deliver at the moment."""
    return _json(await view_log.relays(await site_of(request).store()))


async def database(request: Request) -> Response:
    """Answer with the days of the log and what the database says."""
    return _json(await view_log.database(await site_of(request).store()))


async def audit(request: Request) -> Response:
    """Answer with the newest actions."""
    since = forms.read_since(request.query_params.get("since", ""))
    return _json(await view_log.audit(await site_of(request).store(), since))


async def action(request: Request) -> Response:
    """Plan an action with ``dry_run``, or begin it and answer with its job.

    Raises what the plan raises, and the same if the action refuses a value at once.
    """
    fields, dry_run = _body(await request.body())
    if not request.scope[BY_TOKEN] and not has_token(request, {CSRF_FIELD: request.headers.get("x-csrf-token", "")}):
        return JSONResponse({"error": "without a bearer token, X-CSRF-Token must have the token of a form"}, 403)
    if dry_run:
        forms.refuse_unknown(fields, (*act.action_of(request).names, "reason"))
        planned = await act.action_of(request).plan(await site_of(request).store(), fields)
        names = ("title", "effects", "possible", "fields", "reason_required")
        return _json({name: value for name, value in asdict(planned).items() if name in names})
    job = await act.start(request, fields)
    if job.refusal is not None:
        raise job.refusal
    return _json(job.as_dict(), 202 if job.state == "running" else 200)


async def job(request: Request) -> Response:
    """Answer with a requested action and its progress."""
    if (found := site_of(request).jobs.find(request.path_params["id"])) is None:
        raise NotFound("this process does not know such an action: the audit says what was done")
    return _json(found.as_dict())


async def openapi(request: Request) -> Response:
    """Answer with the description of this API."""
    return _json(document(root_of(request) + PREFIX))


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content, default=str), status, media_type="application/json")


def _body(body: bytes) -> tuple[dict[str, str], bool]:
    """Return the fields of an action as texts, and ``dry_run``. Raises ``ConfigurationError``."""
    try:
        given = json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise ConfigurationError("the body should be a JSON object") from None
    if not isinstance(given, dict):
        raise ConfigurationError("the body should be a JSON object")
    values = cast("dict[str, object]", given)
    dry_run = values.pop(DRY_RUN, False)
    if not isinstance(dry_run, bool):
        raise ConfigurationError(f"{DRY_RUN} should be true or false")
    fields = forms.single((name, _text(name, value)) for name, value in values.items())
    forms.refuse_empty(fields)
    return fields, dry_run


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the members of a JSON object. Raises ``ConfigurationError`` for a name that is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ConfigurationError("a field is given twice")
    return found


def _text(name: str, value: object) -> str:
    """Return the value of a field as the text that a form would have."""
    if not name.isascii():
        raise ConfigurationError(f"{name[:40]!a} means nothing here")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigurationError(f"{name[:40]} should be a text or an integer")
    return str(value)


ROUTES: Final = (
    Route(PREFIX + "/openapi.json", openapi),
    Route(PREFIX + "/sinks", sinks),
    Route(PREFIX + "/sinks/{name}", sink),
    Route(PREFIX + "/doctor", doctor),
    Route(PREFIX + "/exceptions", exceptions),
    Route(PREFIX + "/exceptions/export", pages.export),
    Route(PREFIX + "/exceptions/summary", summary),
    Route(PREFIX + "/events/{uid}", event),
    Route(PREFIX + "/keys/{hash}", key),
    Route(PREFIX + "/replays", replays),
    Route(PREFIX + "/replays/{id}", replay),
    Route(PREFIX + "/schedules", schedules),
    Route(PREFIX + "/relays", relays),
    Route(PREFIX + "/database", database),
    Route(PREFIX + "/audit", audit),
    Route(PREFIX + "/jobs/{id}", job),
    Route(PREFIX + "/actions/{action}", action, methods=["POST"]),
)
