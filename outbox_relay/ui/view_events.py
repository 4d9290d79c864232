"""The content of the pages of exceptions, an event and a key, as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from outbox_relay import admin
from outbox_relay.admin.deliveries import Found, Place, deliveries_of_key, search_deliveries
from outbox_relay.domain.errors import DatabaseUnusable, NotFound, StatementFailed
from outbox_relay.postgres.store import Store
from outbox_relay.ui.keys import Keys
from outbox_relay.ui.site import Site

PAGE_ROWS: Final = 50
"""Number of deliveries on a page."""
SUMMARY_SECONDS: Final = 2.0
"""Time limit of a summary."""
UID_ROWS: Final = 1000
"""Maximum number of deliveries of events that are named by their uids."""
KEY_ROWS: Final = 500
"""Maximum number of deliveries of one key that are shown."""
PAYLOAD_CHARS: Final = 20_000
"""Length after which a payload is cut."""


async def exceptions(
    store: Store, keys: Keys, wanted: Mapping[str, Any], before: Place | None = None
) -> dict[str, Any]:
    """Return one page of the deliveries that ``wanted`` selects, newest event first, and where the next one begins."""
    found = await _search(store, wanted, before)
    for row in found.deliveries:
        row["key_hash"] = None if row["key"] is None else keys.remember(row["key"])
    after = None if found.after is None else {"id": found.after[0], "sink": found.after[1]}
    return {"deliveries": found.deliveries, "complete": found.complete, "next": after}


async def _search(store: Store, wanted: Mapping[str, Any], before: Place | None) -> Found:
    if "uids" not in wanted:
        return await search_deliveries(store, wanted, PAGE_ROWS, before)
    rows = await admin.list_deliveries(store, wanted, UID_ROWS)
    return Found(rows, len(rows), True, None)


async def event(store: Store, uid: UUID, *, payload: bool) -> dict[str, Any]:
    """Return what ``why`` says of an event, every recorded attempt, and, with ``payload``, its payload if it has a row.

    Raises ``NotFound``.
    """
    found = await admin.why(store, uid)
    recorded = await admin.attempts(store, uid)
    if not payload:
        _hide_answers(found, recorded["attempts"])
    has_row = any(each["state"] in admin.STATES for each in found["sinks"].values())
    content = await _content(store, uid) if payload and has_row else None
    return {**found, "attempts": recorded["attempts"], "content": content}


async def _content(store: Store, uid: UUID) -> dict[str, Any] | None:
    """Return payload and headers of an event with a row; None if the row has gone, or the role may not see them."""
    try:
        shown = await admin.show_deliveries(store, uid, None, payload=True)
    except (NotFound, DatabaseUnusable):
        return None
    content = {name: shown[name] for name in ("payload", "payload_encoding", "headers")}
    if isinstance(content["payload"], str) and len(content["payload"]) > PAYLOAD_CHARS:
        content |= {"payload": content["payload"][:PAYLOAD_CHARS], "payload_cut": True}
    return content


async def summary(site: Site, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the deliveries that ``wanted`` selects by sink, type and kind of error.

    If that takes too long, ``groups`` is None. One summary at a time is made, so that pages keep their connections.
    """
    store = await site.store()
    async with site.summaries:
        try:
            return await admin.summarize(store, wanted, SUMMARY_SECONDS)
        except StatementFailed:
            return {"groups": None, "exact": False}


def _hide_answers(found: dict[str, Any], attempts: list[dict[str, Any]]) -> None:
    """Remove the answers of destinations from what ``why`` and ``attempts`` returned: they may repeat the payload."""
    for attempt in attempts:
        attempt["detail"] = None
    for sink in found["sinks"].values():
        for attempt in sink.get("attempts_recorded", ()):
            attempt["detail"] = None
        if sink.get("last_attempt"):
            sink["last_attempt"].pop("answer", None)


async def key(store: Store, wanted: str) -> dict[str, Any]:
    """Return the deliveries of a key per sink, in their order, each with what is in its way."""
    rows, complete = await deliveries_of_key(store, wanted, KEY_ROWS)
    sinks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        sinks.setdefault(row["sink"], []).append(row)
    return {"key": wanted, "sinks": sinks, "complete": complete}
