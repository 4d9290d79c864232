"""The pages: each reads what it shows, and renders it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from outbox_relay import admin
from outbox_relay.domain.errors import ConfigurationError, NotFound
from outbox_relay.ui import forms, view_events, view_log, view_sinks
from outbox_relay.ui.render import page, redirect, shows_payloads, site_of

STATIC: Final = Path(__file__).parent / "static"
STATIC_FILES: Final = ("htmx.min.js", "icon.svg", "page.css", "page.js")


async def static(request: Request) -> Response:
    """Send a file of the page."""
    if (name := request.path_params["name"]) not in STATIC_FILES:
        raise NotFound("there is no such file")
    return FileResponse(STATIC / name)


async def overview(request: Request) -> Response:
    """Show every sink, the findings of ``doctor`` and the relays."""
    return page(request, "overview.html", await view_sinks.overview(site_of(request)))


async def sink(request: Request) -> Response:
    """Show one sink."""
    period = request.query_params.get("period", "2h")
    found = await view_sinks.sink(site_of(request), request.path_params["name"], period)
    return page(request, "sink.html", {**found, "period": period, "errors": _linked(found["errors"], {})})


async def exceptions(request: Request) -> Response:
    """Show deliveries that a filter selects, as a list or grouped by error."""
    fields = forms.single(request.query_params.multi_items())
    forms.refuse_unknown(fields, (*forms.SHOWN_NAMES, "view", "before"))
    site = site_of(request)
    store = await site.store()
    wanted = forms.read_filter(await site.keys.resolve(store, fields))
    values: dict[str, Any] = {
        "fields": fields,
        "key": wanted.get("key"),
        "states": forms.LISTED,
        "shown_state": fields.get("state", "").strip() or admin.STATES[0],
        "query": forms.filter_query(fields),
        "query_of": partial(forms.filter_query, fields),
        "view": "groups" if fields.get("view") == "groups" else "list",
        "exports": shows_payloads(request),
    }
    if values["view"] == "groups":
        found = await view_events.summary(site, wanted)
        is_empty = found["groups"] == []
        values |= {**found, "groups": _linked(found["groups"], fields)}
    else:
        found = await view_events.exceptions(store, site.keys, wanted, forms.read_place(fields))
        is_empty = not (found["deliveries"] or found["next"] or "before" in fields)
        values |= {**found, "rows": found["deliveries"]}
    others = await view_events.other_states(store, wanted) if is_empty else {}
    return page(request, "exceptions.html", {**values, "others": others})


def _linked(groups: list[dict[str, Any]] | None, fields: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Return the groups of a summary with the queries that select each."""
    return groups and [{**group, "query": forms.group_query(fields, group)} for group in groups]


async def export(request: Request) -> Response:
    """Send the deliveries that a filter selects with their payloads, an object per line."""
    if not shows_payloads(request):
        raise HTTPException(403, "payloads are for operators, if the page was started with --show-payloads")
    fields = forms.single(request.query_params.multi_items())
    forms.refuse_unknown(fields, forms.SHOWN_NAMES)
    site = site_of(request)
    store = await site.store()
    wanted = forms.read_filter(await site.keys.resolve(store, fields))
    found = admin.export(store, wanted)
    first = await anext(found, None)  # an unknown sink or a missing right is refused before the answer begins

    async def lines() -> AsyncGenerator[str]:
        async with aclosing(found):
            if first is not None:
                yield json.dumps(first) + "\n"
            async for each in found:
                yield json.dumps(each) + "\n"

    headers = {"content-disposition": 'attachment; filename="exceptions.jsonl"'}
    return StreamingResponse(lines(), media_type="application/jsonl", headers=headers)


async def event(request: Request) -> Response:
    """Show what ``why`` says of an event, and its attempts."""
    shown = shows_payloads(request)
    store = await site_of(request).store()
    found = await view_events.event(store, forms.read_uid(request.path_params["uid"]), payload=shown)
    if found.get("key") is not None:
        site_of(request).keys.remember(found["key"])
    return page(request, "event.html", {**found, "shows_payloads": shown})


async def key(request: Request) -> Response:
    """Show the deliveries of a key in their order, and its events."""
    site = site_of(request)
    store = await site.store()
    wanted = await site.keys.find(store, request.path_params["hash"])
    before = forms.read_before(forms.single(request.query_params.multi_items()))
    found = await view_events.key(store, wanted, before, payload=shows_payloads(request))
    return page(request, "key.html", {**found, "before": before})


async def replays(request: Request) -> Response:
    """Show the replays."""
    return page(request, "replays.html", await view_log.replays(await site_of(request).store()))


async def schedules(request: Request) -> Response:
    """Show the schedules."""
    after = forms.read_after(forms.single(request.query_params.multi_items()))
    found = await view_log.schedules(await site_of(request).store(), after)
    return page(request, "schedules.html", {**found, "after": after})


async def relays(request: Request) -> Response:
    """Show the relays and what they deliver at the moment."""
    return page(request, "relays.html", await view_log.relays(await site_of(request).store()))


async def database(request: Request) -> Response:
    """Show the log's days, tables, transactions and the signals of degradation."""
    return page(request, "database.html", await view_log.database(await site_of(request).store()))


async def audit(request: Request) -> Response:
    """Show what people and relays changed."""
    since = request.query_params.get("since", "")
    found = await view_log.audit(await site_of(request).store(), forms.read_since(since))
    return page(request, "audit.html", {**found, "since": since})


async def search(request: Request) -> Response:
    """Lead to the event, the sink or the key that a text names. A POST, so that no URL contains a key."""
    text = forms.read_fields(await request.body()).get("q", "").strip()
    if not text:
        raise ConfigurationError("enter a uid, a key or the name of a sink")
    store = await site_of(request).store()
    if forms.is_uid(text) and (await store.named("is_known", {"uid": forms.read_uid(text)}))[0].known:
        return redirect(request, f"/events/{forms.read_uid(text)}")
    if text in {row.name for row in await store.named("sink_names", {})}:
        return redirect(request, f"/sinks/{text}")
    return redirect(request, f"/keys/{site_of(request).keys.remember(text)}")


async def job(request: Request) -> Response:
    """Show a requested action and its progress."""
    if (found := site_of(request).jobs.find(request.path_params["id"])) is None:
        raise NotFound("this process does not know such an action: the audit says what was done")
    return page(request, "job.html", {"job": found})
