"""Deliveries that a filter selects: list, number, summary, and the rows of one event."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from outbox_relay.admin.actions import require_sink, unknown_sink
from outbox_relay.admin.attempts import recorded_attempts
from outbox_relay.admin.text import iso_time
from outbox_relay.domain.errors import NotFound
from outbox_relay.domain.window import MAX_ID
from outbox_relay.postgres.store import Store

Filter = Mapping[str, Any]
"""A filter of deliveries, as ``outbox_internal.read_filter`` in the schema reads it."""
Place = tuple[int, str]
"""The id and the sink of a delivery, after which a page of a list begins."""
STATES = ("dead", "waiting", "held", "scheduled")
"""The states of deliveries, as people see them."""
SEARCH_SECONDS = 60.0
"""Time limit of a statement that searches the deliveries."""
LOOKS, FEWEST_LOOKS = 50_000, 500
"""Number of rows that a search looks at, and how many of each sink at least."""
EXPORT_ROWS, EXPORT_BYTES = 500, 8 << 20
"""Maximum number of deliveries that an export reads at once, and the bytes of payload after which a read ends."""


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
    rows = _page(store, "dead_list", wanted, {"most": most})
    return [_listed(row) for row in rows]


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
    looks = LOOKS if wanted["states"] != ["dead"] or "sink" in wanted else max(FEWEST_LOOKS, LOOKS // max(1, sinks))
    place = {"before_id": before[0] if before else MAX_ID, "before_sink": before[1] if before else ""}
    given = {"filter": json.dumps(wanted), **place, "looks": looks, "most": most + 1}
    rows = store.by_index("search_deliveries", given, "read")
    floor, matched, at = rows[0].floor, rows[0].matched, rows[0].at.isoformat()
    found = [row for row in rows if row.id is not None]
    after = (
        (found[most - 1].id, found[most - 1].sink)
        if len(found) > most
        else (floor, rows[0].floor_sink)
        if floor
        else None
    )
    return Found([_listed(row) for row in found[:most]], matched, not floor, after, at)


def _search_scheduled(store: Store, wanted: Filter, most: int, before: Place | None) -> Found:
    """Search scheduled deliveries, or those in every state. They are in two tables, so every row is looked at."""
    found = _page(store, "dead_list", wanted, {"most": most + 1}, before or (None, None))
    after = (found[most - 1].id, found[most - 1].sink) if len(found) > most else None
    shown = [_listed(row) for row in found[:most]]
    if len(wanted["states"]) > 1:
        return Found(shown, len(shown), after is None, after)
    matched = count_deliveries(store, wanted)
    return Found(shown, matched.count, matched.exact, after, matched.at)


def deliveries_of_key(store: Store, key: str, most: int) -> tuple[list[dict[str, Any]], bool]:
    """Return up to ``most`` deliveries that take part in the order of ``key``, in that order for each sink.

    Return also True if these are all. Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    rows = store.named("deliveries_of_key", {"key": key, "most": most})
    return [_listed(row) for row in rows[:most]], len(rows) <= most


def summarize(store: Store, wanted: Filter, seconds: float = SEARCH_SECONDS) -> dict[str, Any]:
    """Return the deliveries that ``wanted`` selects, grouped by sink, type and kind of error, within ``seconds``.

    ``exact`` is False if there are more than were looked at. Raises as ``count_deliveries``.
    """
    rows = _search(store, "dead_summary", wanted, seconds=seconds)
    return {"groups": [_group(row) for row in rows], "exact": all(row.exact for row in rows)}


def show_deliveries(store: Store, uid: UUID, sink: str | None, *, payload: bool) -> dict[str, Any]:
    """Return the event ``uid`` and its deliveries to ``sink``, or to all sinks, for ``dead show --json``.

    Each has every recorded attempt. With ``payload``, the event's payload and headers are included.

    Raises ``NotFound`` if it has no such delivery, otherwise as ``count_deliveries``.
    """
    rows = store.call("dead_show", {"uid": uid, "sink": sink}, "read")
    if not rows:
        require_sink(store, sink)
        raise NotFound(
            f"event {uid} has no delivery of its own{'' if sink is None else f' to sink {sink}'}: "
            f"outbox-relay why {uid} shows its state"
        )
    event, recorded = rows[0], recorded_attempts(store, uid)
    return {
        "uid": event.uid,
        "type": event.type,
        "key": event.key,
        "id": event.id,
        "shard": event.shard,
        "content_type": event.content_type,
        "created_at": event.created_at.isoformat(),
        "deliver_at": iso_time(event.deliver_at),
        **(_content(store, uid) if payload else {}),
        "deliveries": [{**_shown(row), "attempts_recorded": recorded.get(row.sink, [])} for row in rows],
    }


def export(store: Store, wanted: Filter) -> Generator[dict[str, Any]]:
    """Yield the deliveries that ``wanted`` selects with their events, newest event first.

    They are read in steps of bounded size, each in a transaction of its own. Raises as ``count_deliveries``.
    """
    before: tuple[int | None, str | None] = (None, None)
    limits = {"most": EXPORT_ROWS, "most_bytes": EXPORT_BYTES}
    while rows := _page(store, "dead_export", wanted, limits, before, grant="payloads"):
        for row in rows:
            yield _exported(row)
        before = (rows[-1].id, rows[-1].sink)


def _page(
    store: Store,
    name: str,
    wanted: Filter,
    limits: Mapping[str, int],
    before: tuple[int | None, str | None] = (None, None),
    grant: str = "read",
) -> list[Any]:
    place = {"before_id": before[0], "before_sink": before[1]}
    return _search(store, name, wanted, {**limits, **place}, grant)


def _search(
    store: Store,
    name: str,
    wanted: Filter,
    parameters: Mapping[str, Any] | None = None,
    grant: str = "read",
    seconds: float = SEARCH_SECONDS,
) -> list[Any]:
    given = {"filter": json.dumps(wanted), **(parameters or {})}
    try:
        return store.call(name, given, grant, seconds)
    except NotFound:
        raise NotFound(unknown_sink(store, wanted["sink"])) from None


def _content(store: Store, uid: UUID) -> dict[str, Any]:
    rows = store.call("dead_payload", {"uid": uid}, "payloads")
    if not rows:
        raise NotFound(f"event {uid} has no delivery of its own any more")
    return {"headers": rows[0].headers, **encoded(rows[0].payload)}


def encoded(payload: bytes | None) -> dict[str, Any]:
    """Return a payload as text if it is UTF-8, otherwise as base64, with the name of its encoding."""
    if payload is None:
        return {"payload": None, "payload_encoding": None}
    try:
        return {"payload": payload.decode(), "payload_encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"payload": b64encode(payload).decode(), "payload_encoding": "base64"}


def _listed(row: Any) -> dict[str, Any]:
    names: Sequence[str] = ("sink", "type", "key", "state", "attempts", "error", "status")
    return {
        "uid": str(row.uid),
        **{name: getattr(row, name) for name in names},
        "since": iso_time(row.since),
        "due_at": iso_time(row.due_at),
        "last_attempt_at": iso_time(row.last_attempt_at),
    }


def _group(row: Any) -> dict[str, Any]:
    names = ("sink", "type", "state", "error", "status", "example", "count")
    return {**{name: getattr(row, name) for name in names}, "first": iso_time(row.first), "last": iso_time(row.last)}


def _shown(row: Any) -> dict[str, Any]:
    return {
        "sink": row.sink,
        "state": row.state,
        "attempts": row.attempts,
        "error": row.error,
        "status": row.status,
        "last_attempt": row.last_attempt and {**row.last_attempt, "seconds_ago": round(max(0.0, row.tried_seconds), 3)},
        "since": iso_time(row.since),
        "due_at": iso_time(row.due_at),
        "relay": row.relay,
    }


def _exported(row: Any) -> dict[str, Any]:
    names = ("sink", "type", "key", "state", "attempts", "error", "status", "content_type")
    times = ("since", "created_at", "deliver_at")
    return {
        "uid": str(row.uid),
        **{name: getattr(row, name) for name in names},
        **{name: iso_time(getattr(row, name)) for name in times},
        "headers": row.headers,
        **encoded(row.payload),
    }
