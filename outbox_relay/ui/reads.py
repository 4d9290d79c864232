"""Reads of requests: each function returns the JSON value that the API answers with and that a page shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request

from outbox_relay.domain.errors import NotFound
from outbox_relay.postgres.store import Store
from outbox_relay.ui import forms, view_events, view_log, view_sinks
from outbox_relay.ui.jobs import Job
from outbox_relay.ui.render import shows_payloads, site_of

Values = dict[str, Any]
EXAMINED_SECONDS: Final = 30.0
"""Longest wait of the API for the first findings."""


def store_of(request: Request) -> Store:
    """Return the connected store of the page."""
    return site_of(request).store()


def fields_of(request: Request) -> dict[str, str]:
    """Return the fields of a query. Raises ``ConfigurationError`` if one is given twice."""
    return forms.single(request.query_params.multi_items())


def filter_of(request: Request, fields: Mapping[str, str]) -> Values:
    """Return the filter that ``fields`` describe, which may select a key by its hash."""
    return forms.read_filter(site_of(request).keys.resolve(store_of(request), fields))


def overview(request: Request) -> Values:
    """Return every sink, the live relays, and the findings of ``doctor``."""
    store = store_of(request)
    return {**view_sinks.sinks(store), **view_log.live(store), "doctor": site_of(request).findings.recent(store)}


def sinks(request: Request) -> Values:
    """Return every sink."""
    return view_sinks.sinks(store_of(request))


def sink(request: Request) -> Values:
    """Return one sink."""
    period = request.query_params.get("period", "2h")
    return view_sinks.sink(site_of(request), request.path_params["name"], period)


def doctor(request: Request) -> Values:
    """Return the newest findings of ``doctor``."""
    findings, store = site_of(request).findings, store_of(request)
    if findings.current(store)["findings"] is None:
        findings.finish(EXAMINED_SECONDS)
    return findings.current(store)


def exceptions(request: Request) -> Values:
    """Return one page of the deliveries that a filter selects."""
    fields = fields_of(request)
    forms.refuse_unknown(fields, (*forms.SHOWN_NAMES, "before"))
    forms.refuse_empty(fields)
    wanted = filter_of(request, fields)
    return view_events.exceptions(store_of(request), site_of(request).keys, wanted, forms.read_place(fields))


def summary(request: Request) -> Values:
    """Return the deliveries that a filter selects, by sink, type and kind of error."""
    fields = fields_of(request)
    forms.refuse_unknown(fields, forms.SHOWN_NAMES)
    forms.refuse_empty(fields)
    return view_events.summary(site_of(request), filter_of(request, fields))


def event(request: Request) -> Values:
    """Return what ``why`` says of an event, and its attempts."""
    uid = forms.read_uid(request.path_params["uid"])
    found = view_events.event(store_of(request), uid, payload=shows_payloads(request))
    if found.get("key") is not None:
        site_of(request).keys.remember(found["key"])
    return found


def key(request: Request) -> Values:
    """Return the deliveries of a key in their order, and its events."""
    store = store_of(request)
    wanted = site_of(request).keys.find(store, request.path_params["hash"])
    return view_events.key(store, wanted, forms.read_before(fields_of(request)), payload=shows_payloads(request))


def replays(request: Request) -> Values:
    """Return the replays."""
    return view_log.replays(store_of(request))


def replay(request: Request) -> Values:
    """Return one replay."""
    return view_log.replay(store_of(request), forms.read_integer("id", request.path_params["id"], 1, 10**18 - 1))


def schedules(request: Request) -> Values:
    """Return one page of the schedules."""
    return view_log.schedules(store_of(request), forms.read_after(fields_of(request)))


def relays(request: Request) -> Values:
    """Return the relays and what they deliver at the moment."""
    return view_log.relays(store_of(request))


def database(request: Request) -> Values:
    """Return the days of the log and what the database says."""
    return view_log.database(store_of(request))


def audit(request: Request) -> Values:
    """Return what people and relays changed."""
    return view_log.audit(store_of(request), forms.read_since(request.query_params.get("since", "")))


def job(request: Request) -> Job:
    """Return a requested action and its progress."""
    if (found := site_of(request).jobs.find(request.path_params["id"])) is None:
        raise NotFound("this process does not know such an action: the audit says what was done")
    return found
