"""The pages: each renders what ``reads`` has read."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from outbox_relay import admin
from outbox_relay.domain.errors import ConfigurationError, NotFound
from outbox_relay.ui import forms, reads, view_events
from outbox_relay.ui.guard import BODY
from outbox_relay.ui.render import page, redirect, shows_payloads, site_of

STATIC: Final = Path(__file__).parent / "static"
STATIC_FILES: Final = ("htmx.min.js", "icon.svg", "page.css", "page.js")
PORTION_CHARS: Final = 1 << 16
"""Length after which a portion of an export is sent."""


async def static(request: Request) -> Response:
    """Send a file of the page."""
    if (name := request.path_params["name"]) not in STATIC_FILES:
        raise NotFound("there is no such file")
    return FileResponse(STATIC / name)


def shown(template: str, read: Callable[[Request], Mapping[str, Any]]) -> Callable[[Request], Response]:
    """Return the endpoint of a page that shows what ``read`` returns, as it is."""
    return lambda request: page(request, template, read(request))


def sink(request: Request) -> Response:
    """Show one sink."""
    found = reads.sink(request)
    return page(request, "sink.html", {**found, "errors": _linked(found["errors"], {})})


def exceptions(request: Request) -> Response:
    """Show deliveries that a filter selects, as a list or grouped by error."""
    fields = reads.fields_of(request)
    forms.refuse_unknown(fields, (*forms.SHOWN_NAMES, "view", "before"))
    site, store, wanted = site_of(request), reads.store_of(request), reads.filter_of(request, fields)
    values: dict[str, Any] = {
        "fields": fields,
        "key": wanted.get("key"),
        "states": forms.LISTED,
        "shown_state": fields.get("state", "").strip() or admin.STATES[0],
        "query": forms.filter_query(fields),
        "query_of": partial(forms.filter_query, fields),
        "view": "groups" if fields.get("view") == "groups" else "list",
    }
    if values["view"] == "groups":
        found = view_events.summary(site, wanted)
        is_empty = found["groups"] == []
        values |= {**found, "groups": _linked(found["groups"], fields)}
    else:
        found = view_events.exceptions(store, site.keys, wanted, forms.read_place(fields))
        is_empty = not (found["deliveries"] or found["next"] or "before" in fields)
        values |= {**found, "rows": found["deliveries"]}
    others = view_events.other_states(store, wanted) if is_empty else {}
    return page(request, "exceptions.html", {**values, "others": others})


def _linked(groups: list[dict[str, Any]] | None, fields: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """Return the groups of a summary with the queries that select each."""
    return groups and [{**group, "query": forms.group_query(fields, group)} for group in groups]


def export(request: Request) -> Response:
    """Send the deliveries that a filter selects with their payloads, an object per line."""
    if not shows_payloads(request):
        raise HTTPException(403, "payloads are for operators, if the page was started with --show-payloads")
    fields = reads.fields_of(request)
    forms.refuse_unknown(fields, forms.SHOWN_NAMES)
    threads, found = site_of(request).threads, admin.export(reads.store_of(request), reads.filter_of(request, fields))
    first = _portion(found)  # an unknown sink or a missing right is refused before the answer begins

    async def portions() -> AsyncGenerator[str]:
        portion = first
        while portion:
            yield portion
            portion = await threads.run(_portion, found)

    headers = {"content-disposition": 'attachment; filename="exceptions.jsonl"'}
    return StreamingResponse(portions(), media_type="application/jsonl", headers=headers)


def _portion(found: Iterator[dict[str, Any]]) -> str:
    """Return the next lines of an export; empty at its end."""
    lines, chars = list[str](), 0
    for each in found:
        lines.append(json.dumps(each) + "\n")
        chars += len(lines[-1])
        if chars > PORTION_CHARS:
            break
    return "".join(lines)


def search(request: Request) -> Response:
    """Lead to the event, the sink or the key that a text names. A POST, so that no URL contains a key."""
    text = forms.read_fields(request.scope[BODY]).get("q", "").strip()
    if not text:
        raise ConfigurationError("enter a uid, a key or the name of a sink")
    store = reads.store_of(request)
    if forms.is_uid(text) and store.named("is_known", {"uid": forms.read_uid(text)})[0].known:
        return redirect(request, f"/events/{forms.read_uid(text)}")
    if text in {row.name for row in store.named("sink_names", {})}:
        return redirect(request, f"/sinks/{text}")
    return redirect(request, f"/keys/{site_of(request).keys.remember(text)}")


def job(request: Request) -> Response:
    """Show a requested action and its progress."""
    return page(request, "job.html", {"job": reads.job(request)})
