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
KEY_EVENTS: Final = 50
"""Number of events of a key on a page."""
KEY_SECONDS: Final = 3.0
"""Time after which the search for them takes no further step."""
PAYLOAD_CHARS: Final = 20_000
"""Length after which a payload is cut."""


def exceptions(store: Store, keys: Keys, wanted: Mapping[str, Any], before: Place | None = None) -> dict[str, Any]:
    """Return one page of the deliveries that ``wanted`` selects, newest event first, and where the next one begins."""
    found = _search(store, wanted, before)
    for row in found.deliveries:
        row["key_hash"] = None if row["key"] is None else keys.remember(row["key"])
    after = None if found.after is None else {"id": found.after[0], "sink": found.after[1]}
    return {"deliveries": found.deliveries, "complete": found.complete, "next": after}


def count_matching(store: Store, wanted: Mapping[str, Any]) -> admin.Matched:
    """Return the number of deliveries of one state that match: a lower bound if it takes too many rows to count all."""
    if "uids" in wanted:
        return admin.count_deliveries(store, wanted)
    found = search_deliveries(store, wanted, 1)
    return admin.Matched(found.matched, found.complete, found.at)


def other_states(store: Store, wanted: Mapping[str, Any]) -> dict[str, admin.Matched]:
    """Return how many deliveries match in each state that ``wanted`` leaves out, if any does."""
    left_out = (state for state in admin.STATES if state not in wanted["states"])
    counts = {state: count_matching(store, {**wanted, "states": [state]}) for state in left_out}
    return {state: matched for state, matched in counts.items() if matched.count or not matched.exact}


def _search(store: Store, wanted: Mapping[str, Any], before: Place | None) -> Found:
    if "uids" not in wanted:
        return search_deliveries(store, wanted, PAGE_ROWS, before)
    rows = admin.list_deliveries(store, wanted, UID_ROWS)
    return Found(rows, len(rows), True, None)


def event(store: Store, uid: UUID, *, payload: bool) -> dict[str, Any]:
    """Return what ``why`` says of an event, every recorded attempt, and, with ``payload``, its payload if it has a row.

    Raises ``NotFound``.
    """
    found = admin.why(store, uid)
    recorded = admin.attempts(store, uid)
    if not payload:
        _hide_answers(found, recorded["attempts"])
    has_row = any(each["state"] in admin.STATES for each in found["sinks"].values())
    content = _content(store, uid) if payload and has_row else None
    return {**found, "attempts": recorded["attempts"], "content": content}


def _content(store: Store, uid: UUID) -> dict[str, Any] | None:
    """Return payload and headers of an event with a row; None if the row has gone, or the role may not see them."""
    try:
        shown = admin.show_deliveries(store, uid, None, payload=True)
    except (NotFound, DatabaseUnusable):
        return None
    content = {name: shown[name] for name in ("payload", "payload_encoding", "headers")}
    if isinstance(content["payload"], str) and len(content["payload"]) > PAYLOAD_CHARS:
        content |= {"payload": content["payload"][:PAYLOAD_CHARS], "payload_cut": True}
    return content


def summary(site: Site, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the deliveries that ``wanted`` selects by sink, type and kind of error.

    If that takes too long, ``groups`` is None. One summary at a time is made, so that pages keep their connections.
    """
    store = site.store()
    states = wanted["states"]
    parts = [states] if len(states) == 1 else [[each for each in states if each != "scheduled"], ["scheduled"]]
    if not site.summaries.acquire(timeout=SUMMARY_SECONDS):
        return {"groups": None, "exact": False}
    try:
        found = [admin.summarize(store, {**wanted, "states": part}, SUMMARY_SECONDS) for part in parts]
    except StatementFailed:
        return {"groups": None, "exact": False}
    finally:
        site.summaries.release()
    groups = [group for each in found for group in each["groups"]]
    return {"groups": groups, "exact": all(each["exact"] for each in found)}


def _hide_answers(found: dict[str, Any], attempts: list[dict[str, Any]]) -> None:
    """Remove the answers of destinations from what ``why`` and ``attempts`` returned: they may repeat the payload."""
    for attempt in attempts:
        attempt["detail"] = None
    for sink in found["sinks"].values():
        for attempt in sink.get("attempts_recorded", ()):
            attempt["detail"] = None
        if sink.get("last_attempt"):
            sink["last_attempt"].pop("answer", None)


def key(store: Store, wanted: str, before: int | None = None, *, payload: bool) -> dict[str, Any]:
    """Return the deliveries of a key per sink, in their order, and its events in the log as ``why --key`` has them.

    Events are the newest ones with ids below ``before``, and ``next`` is the id from which older ones may follow. Only
    with ``payload`` do they have the answers of destinations.
    """
    rows, complete = deliveries_of_key(store, wanted, KEY_ROWS)
    found = admin.why_key(store, wanted, KEY_EVENTS, before, KEY_SECONDS)
    for each in found["events"] if not payload else ():
        _hide_answers(each, [])
    sinks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        sinks.setdefault(row["sink"], []).append(row)
    is_full = len(found["events"]) == KEY_EVENTS
    return {
        "key": wanted,
        "sinks": sinks,
        "complete": complete,
        "events": found["events"],
        "next": found["events"][-1]["id"] if is_full else None,
        "searched_since": found["searched_since"],
    }
