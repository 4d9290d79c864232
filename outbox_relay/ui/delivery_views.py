"""The views of deliveries: lists, summaries and exports that a filter selects, and an event."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import Any, Final
from uuid import UUID

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outbox_relay import admin
from outbox_relay.admin.deliveries import Found, search_deliveries
from outbox_relay.domain.errors import DatabaseUnusable, NotFound, StatementFailed
from outbox_relay.postgres.store import Store
from outbox_relay.ui import forms
from outbox_relay.ui.render import fields_of, page, shows_payloads, site_of
from outbox_relay.ui.site import Site

PAGE_ROWS: Final = 50
"""Number of deliveries on a page."""
SUMMARY_SECONDS: Final = 2.0
"""Time limit of a summary."""
UID_ROWS: Final = 1000
"""Maximum number of deliveries of events that are named by their uids."""
PAYLOAD_CHARS: Final = 20_000
"""Length after which a payload is cut."""
PORTION_CHARS: Final = 1 << 16
"""Length after which a portion of an export is sent."""

Values = dict[str, Any]
Fields = Mapping[str, str]


def filter_of(request: Request, fields: Fields) -> Values:
    """Return the filter that ``fields`` describe, which may select a key by its hash."""
    return forms.read_filter(site_of(request).keys.resolve(fields))


def exceptions(request: Request, fields: Fields) -> Values:
    """Return one page of the deliveries that a filter selects, newest event first, and where the next one begins."""
    site, wanted, before = site_of(request), filter_of(request, fields), forms.read_place(fields)
    if "uids" in wanted:
        rows = admin.list_deliveries(site.store(), wanted, UID_ROWS)
        found = Found(rows, len(rows), complete=True, after=None)
    else:
        found = search_deliveries(site.store(), wanted, PAGE_ROWS, before)
    for row in found.deliveries:
        row["key_hash"] = None if row["key"] is None else site.keys.hash(row["key"])
    after = None if found.after is None else {"id": found.after[0], "sink": found.after[1]}
    return {"deliveries": found.deliveries, "complete": found.complete, "next": after}


def summary(request: Request, fields: Fields) -> Values:
    """Return the deliveries that a filter selects by sink, type and kind of error."""
    return summarize(site_of(request), filter_of(request, fields))


def summarize(site: Site, wanted: Mapping[str, Any]) -> Values:
    """Return the deliveries that ``wanted`` selects by sink, type and kind of error.

    If that takes too long, ``groups`` is None. One summary at a time is made, so that pages keep their connections.
    """
    states: list[str] = wanted["states"]
    parts = [states] if len(states) == 1 else [[each for each in states if each != "scheduled"], ["scheduled"]]
    if not site.summaries.acquire(timeout=SUMMARY_SECONDS):
        return {"groups": None, "exact": False}
    try:
        found = [admin.summarize(site.store(), {**wanted, "states": part}, SUMMARY_SECONDS) for part in parts]
    except StatementFailed:
        return {"groups": None, "exact": False}
    finally:
        site.summaries.release()
    groups = [group for each in found for group in each["groups"]]
    return {"groups": groups, "exact": all(each["exact"] for each in found)}


def exceptions_page(request: Request) -> Response:
    """Show deliveries that a filter selects, as a list or grouped by error."""
    fields = fields_of(request, (*forms.SHOWN_NAMES, "view", "before"))
    wanted = filter_of(request, fields)
    is_grouped = fields.get("view") == "groups"
    values = (summary if is_grouped else exceptions)(request, fields)
    is_empty = (
        values["groups"] == [] if is_grouped else not (values["deliveries"] or values["next"] or "before" in fields)
    )
    shown = {
        "fields": fields,
        "key": wanted.get("key"),
        "states": forms.LISTED,
        "shown_state": fields.get("state", "").strip() or admin.STATES[0],
        "query_of": partial(forms.filter_query, fields),
        "view": "groups" if is_grouped else "list",
        "others": _other_states(site_of(request).store(), wanted) if is_empty else {},
    }
    return page(request, "exceptions.html", {**values, **shown})


def count_matching(store: Store, wanted: Mapping[str, Any]) -> admin.Matched:
    """Return the number of deliveries of one state that match: a lower bound if it takes too many rows to count all."""
    if "uids" in wanted:
        return admin.count_deliveries(store, wanted)
    found = search_deliveries(store, wanted, 1)
    return admin.Matched(found.matched, found.complete, found.at)


def _other_states(store: Store, wanted: Mapping[str, Any]) -> dict[str, admin.Matched]:
    """Return how many deliveries match in each state that ``wanted`` leaves out, if any does."""
    left_out = (state for state in admin.STATES if state not in wanted["states"])
    counts = {state: count_matching(store, {**wanted, "states": [state]}) for state in left_out}
    return {state: matched for state, matched in counts.items() if matched.count or not matched.exact}


def export(request: Request) -> Response:
    """Send the deliveries that a filter selects with their payloads, an object per line."""
    if not shows_payloads(request):
        raise HTTPException(403, "payloads are for operators, if the page was started with --show-payloads")
    site, fields = site_of(request), fields_of(request, forms.SHOWN_NAMES)
    found = admin.export(site.store(), filter_of(request, fields))
    first = _portion(found)  # an unknown sink or a missing right is refused before the answer begins

    async def portions() -> AsyncGenerator[str]:
        portion = first
        while portion:
            yield portion
            portion = await site.threads.run(_portion, found)

    headers = {"content-disposition": 'attachment; filename="exceptions.jsonl"'}
    return StreamingResponse(portions(), media_type="application/jsonl", headers=headers)


def _portion(found: Iterator[Values]) -> str:
    """Return the next lines of an export; empty at its end."""
    lines, chars = list[str](), 0
    for each in found:
        lines.append(json.dumps(each) + "\n")
        chars += len(lines[-1])
        if chars > PORTION_CHARS:
            break
    return "".join(lines)


def event(request: Request, _fields: Fields) -> Values:
    """Return what ``why`` says of an event, every recorded attempt, and its payload if it has a row and may be shown.

    Raises ``NotFound``.
    """
    store, uid = site_of(request).store(), forms.read_uid(request.path_params["uid"])
    found, attempts = admin.why(store, uid), admin.attempts(store, uid)["attempts"]
    if not shows_payloads(request):
        _hide_answers(found, attempts)
        return {**found, "attempts": attempts, "content": None}
    has_row = any(each["state"] in admin.STATES for each in found["sinks"].values())
    return {**found, "attempts": attempts, "content": _content(store, uid) if has_row else None}


def _content(store: Store, uid: UUID) -> Values | None:
    """Return payload and headers of an event with a row; None if the row has gone, or the role may not see them."""
    try:
        shown = admin.show_deliveries(store, uid, None, payload=True)
    except (NotFound, DatabaseUnusable):
        return None
    content = {name: shown[name] for name in ("payload", "payload_encoding", "headers")}
    if len(content["payload"] or "") > PAYLOAD_CHARS:
        content |= {"payload": content["payload"][:PAYLOAD_CHARS], "payload_cut": True}
    return content


def _hide_answers(found: Values, attempts: list[Values]) -> None:
    """Remove the answers of destinations from what ``why`` and ``attempts`` returned: they may repeat the payload."""
    sinks = found["sinks"].values()
    for attempt in (*attempts, *(each for sink in sinks for each in sink["attempts_recorded"])):
        attempt["detail"] = None
    for sink in sinks:
        if sink.get("last_attempt"):
            sink["last_attempt"].pop("answer", None)
