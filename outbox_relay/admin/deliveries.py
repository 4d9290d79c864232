"""Deliveries that a filter selects: list, number, summary, export, and the rows of one event."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from uuid import UUID

from outbox_relay.admin.actions import naming_sinks, require_sink
from outbox_relay.admin.values import plain, seconds
from outbox_relay.admin.why import attempts_by_sink
from outbox_relay.domain.errors import NotFound
from outbox_relay.domain.window import MAX_ID
from outbox_relay.postgres.store import Store

Filter = Mapping[str, Any]
"""A filter of deliveries, as ``outbox_internal.read_filter`` in the schema reads it."""
Place = tuple[int, str]
"""The id and the sink of a delivery, after which a page of a list begins."""
STATES: Final = ("dead", "waiting", "held", "scheduled")
"""The states of deliveries, as people see them."""
SEARCH_SECONDS: Final = 60.0
"""Time limit of a statement that searches the deliveries."""
LOOKS, FEWEST_LOOKS = 50_000, 500
"""Number of rows that a search looks at, and how many of each sink at least."""
EXPORT_ROWS, EXPORT_BYTES = 500, 8 << 20
"""Maximum number of deliveries that an export reads at once, and the bytes of payload after which a read ends."""
LISTED: Final = (
    "uid", "sink", "type", "key", "state", "attempts", "error", "status", "since", "due_at", "last_attempt_at",
)  # fmt: skip
"""The values of a delivery in a list."""
EXPORTED: Final = (
    "uid", "sink", "type", "key", "state", "attempts", "error", "status", "content_type", "since", "created_at",
    "deliver_at", "headers",
)  # fmt: skip
"""The values of a delivery in an export, without its payload."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The number of matching deliveries. It is a lower bound unless it is ``exact``.

    ``at`` is the time of the count by the database's clock. An action with the filter's field ``as_of`` of this time
    changes no delivery that came, died or failed after it.
    """

    count: int
    exact: bool
    at: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return the number for people."""
        return f"{self.count:,}" if self.exact else f"at least {self.count:,}"


def count_deliveries(store: Store, wanted: Filter) -> Matched:
    """Count the deliveries that ``wanted`` selects, exactly up to 10,000.

    Raises ``ConfigurationError`` for a filter that the schema refuses, ``NotFound`` for an unknown sink,
    ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    [row] = _search(store, "dead_count", wanted)
    return Matched(row.matched, row.exact, row.at.isoformat())


def list_deliveries(store: Store, wanted: Filter, most: int) -> list[dict[str, Any]]:
    """Return up to ``most`` deliveries that ``wanted`` selects, newest event first, for ``dead list --json``.

    Raises as ``count_deliveries``.
    """
    return [plain(row, *LISTED) for row in _page(store, "dead_list", wanted, None, most=most)]


class Found(NamedTuple):
    """A page of a search: deliveries as ``dead list --json`` has them, and the place from which it can go on, or None.

    ``matched`` is the number of matching rows among those that were looked at. ``complete``: these were all. ``at`` is
    as that of ``Matched``.
    """

    deliveries: list[dict[str, Any]]
    matched: int
    complete: bool
    after: Place | None
    at: str = ""


def search_deliveries(store: Store, wanted: Filter, most: int, before: Place | None = None) -> Found:
    """Return up to ``most`` deliveries in the states of ``wanted``, newest event first, from ``before`` on.

    About ``LOOKS`` rows are looked at, so the answer is quick however many there are, and may have fewer deliveries
    than there are further on.

    Raises as ``count_deliveries``.
    """
    sinks = require_sink(store, wanted.get("sink"))
    if "scheduled" in wanted["states"]:
        return _search_scheduled(store, wanted, most, before)
    is_spread = wanted["states"] == ["dead"] and "sink" not in wanted
    looks = max(FEWEST_LOOKS, LOOKS // max(1, sinks)) if is_spread else LOOKS
    before_id, before_sink = before or (MAX_ID, "")
    given = {"before_id": before_id, "before_sink": before_sink, "looks": looks, "most": most + 1}
    rows = store.by_index("search_deliveries", {"filter": json.dumps(wanted), **given}, "read")
    first, found = rows[0], [row for row in rows if row.id is not None]
    after = _after(found, most) or ((first.floor, first.floor_sink) if first.floor else None)
    shown = [plain(row, *LISTED) for row in found[:most]]
    return Found(shown, first.matched, not first.floor, after, first.at.isoformat())


def _search_scheduled(store: Store, wanted: Filter, most: int, before: Place | None) -> Found:
    """Search scheduled deliveries, or those in every state. They are in two tables, so every row is looked at."""
    found = _page(store, "dead_list", wanted, before, most=most + 1)
    after, shown = _after(found, most), [plain(row, *LISTED) for row in found[:most]]
    if len(wanted["states"]) > 1:
        return Found(shown, len(shown), after is None, after)
    matched = count_deliveries(store, wanted)
    return Found(shown, matched.count, matched.exact, after, matched.at)


def _after(found: list[Any], most: int) -> Place | None:
    """Return the place of the last row of a page, or None if there is no further row."""
    return (found[most - 1].id, found[most - 1].sink) if len(found) > most else None


def summarize(store: Store, wanted: Filter, limit: float = SEARCH_SECONDS) -> dict[str, Any]:
    """Return the deliveries that ``wanted`` selects, by sink, type and kind of error, within ``limit`` seconds.

    ``exact`` is False if there are more than were looked at. Raises as ``count_deliveries``.
    """
    rows = _search(store, "dead_summary", wanted, limit=limit)
    names = ("sink", "type", "state", "error", "status", "example", "count", "first", "last")
    return {"groups": [plain(row, *names) for row in rows], "exact": all(row.exact for row in rows)}


def show_deliveries(store: Store, uid: UUID, sink: str | None, *, payload: bool) -> dict[str, Any]:
    """Return the event ``uid`` and its deliveries to ``sink``, or to all sinks, for ``dead show --json``.

    Each has every recorded attempt. With ``payload``, the event's payload and headers are included.

    Raises ``NotFound`` if it has no such delivery, otherwise as ``count_deliveries``.
    """
    rows = store.call("dead_show", {"uid": uid, "sink": sink}, "read")
    if not rows:
        require_sink(store, sink)
        to = "" if sink is None else f" to sink {sink}"
        raise NotFound(f"event {uid} has no delivery of its own{to}: outbox-relay why {uid} shows its state")
    recorded = attempts_by_sink(store.named("attempts", {"uid": uid}))
    return {
        **plain(rows[0], "uid", "type", "key", "id", "shard", "content_type", "created_at", "deliver_at"),
        **(_content(store, uid) if payload else {}),
        "deliveries": [{**_shown(row), "attempts_recorded": recorded.get(row.sink, [])} for row in rows],
    }


def _shown(row: Any) -> dict[str, Any]:
    attempt = row.last_attempt and {**row.last_attempt, "seconds_ago": seconds(row.tried_seconds)}
    shown = plain(row, "sink", "state", "attempts", "error", "status", "last_attempt", "since", "due_at", "relay")
    return {**shown, "last_attempt": attempt}


def _content(store: Store, uid: UUID) -> dict[str, Any]:
    rows = store.call("dead_payload", {"uid": uid}, "payloads")
    if not rows:
        raise NotFound(f"event {uid} has no delivery of its own any more")
    return {"headers": rows[0].headers, **_encoded(rows[0].payload)}


def export(store: Store, wanted: Filter) -> Generator[dict[str, Any]]:
    """Yield the deliveries that ``wanted`` selects with their events, newest event first.

    They are read in steps of bounded size, each in a transaction of its own. Raises as ``count_deliveries``.
    """
    before: Place | None = None
    limits = {"most": EXPORT_ROWS, "most_bytes": EXPORT_BYTES}
    while rows := _page(store, "dead_export", wanted, before, grant="payloads", **limits):
        for row in rows:
            yield {**plain(row, *EXPORTED), **_encoded(row.payload)}
        before = (rows[-1].id, rows[-1].sink)


def _encoded(payload: bytes | None) -> dict[str, Any]:
    """Return a payload as text if it is UTF-8, otherwise as base64, with the name of its encoding."""
    if payload is None:
        return {"payload": None, "payload_encoding": None}
    try:
        return {"payload": payload.decode(), "payload_encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"payload": b64encode(payload).decode(), "payload_encoding": "base64"}


def _page(
    store: Store, name: str, wanted: Filter, before: Place | None, *, grant: str = "read", **limits: int
) -> list[Any]:
    before_id, before_sink = before or (None, None)
    return _search(store, name, wanted, grant, before_id=before_id, before_sink=before_sink, **limits)


def _search(
    store: Store, name: str, wanted: Filter, grant: str = "read", limit: float = SEARCH_SECONDS, **parameters: Any
) -> list[Any]:
    with naming_sinks(store, wanted.get("sink")):
        return store.call(name, {"filter": json.dumps(wanted), **parameters}, grant, limit)
