"""The delivery state of events by sink, with their attempts, and the deliveries that are running."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from outbox_relay.admin.values import plain, seconds
from outbox_relay.domain.errors import NotFound
from outbox_relay.postgres.store import Store

MOST_PER_SINK: Final = 50
"""Number of recorded attempts that ``why`` shows for each sink."""
OUTSTANDING: Final = ("pending", "waiting", "held")
"""The states of an event that is still to be delivered."""
STEP_IDS: Final = 100_000
"""Number of ids of the log that one statement searches for events of a key."""
SEARCH_SECONDS: Final = 10.0
"""Time limit for the search, after which no further step begins."""


def why(store: Store, uid: UUID) -> dict[str, Any]:
    """Return the event ``uid`` and its state in each sink, for ``why --json``.

    ``outbox.why`` finds the states out, which docs/commands.md describes with their fields. ``attempts_recorded`` are
    the newest recorded attempts at the sink, oldest first. No payload and no header value is read.

    Raises ``NotFound`` if neither the log, ``delivery``, a mark of a discard nor a record has the event,
    ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    found = _found(store, uid)
    if found is None:
        raise _unknown(uid)
    recorded = attempts_by_sink(store.named("newest_attempts", {"uid": uid, "most": MOST_PER_SINK}))
    if any(sink.get("sink_error") for sink in found["sinks"].values()):
        errors = {sink.name: sink.last_error for sink in store.named("status_sinks", {})}  # without those that are over
        for name, sink in found["sinks"].items():
            if "sink_error" in sink:
                sink["sink_error"] = errors.get(name)
    found["sinks"] = {
        name: {"state": sink["state"], **sink, "attempts_recorded": recorded.get(name, [])}
        for name, sink in found["sinks"].items()
    }
    return found


def why_key(store: Store, key: str, most: int) -> dict[str, Any]:
    """Return the newest events of ``key`` in the log, at most ``most``, newest first, for ``why --key --json``.

    Each event is as ``why`` returns it. ``complete`` is False if the search ended after ``SEARCH_SECONDS`` before it
    had found ``most`` events or read the whole log; ``searched_since`` is then the time of the oldest event that it
    came to, otherwise None.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    until = time.monotonic() + SEARCH_SECONDS
    [(first, upto)] = store.named("log_ends", {})
    uids: list[UUID] = []
    while upto >= first and len(uids) < most:
        after = max(upto - STEP_IDS, first - 1)
        wanted = {"key": key, "after": after, "upto": upto, "most": most - len(uids)}
        uids += [row.uid for row in store.named("events_of_key", wanted)]
        upto = after
        if time.monotonic() >= until:
            break
    complete = upto < first or len(uids) == most
    oldest = [] if complete else store.named("event_time", {"id": upto})
    events: list[dict[str, Any]] = []
    for uid in uids:
        with suppress(NotFound):  # its day was emptied meanwhile
            events.append(why(store, uid))
    since = oldest[0].at.isoformat() if oldest else None
    return {"key": key, "events": events, "complete": complete, "searched_since": since}


def attempts(store: Store, uid: UUID) -> dict[str, Any]:
    """Return every recorded attempt of the event ``uid``, oldest first, for ``attempts --json``.

    ``outstanding`` has the sinks to which the event is not delivered yet, with the last error: attempts at a
    destination that is not available are neither counted nor recorded. The fields are described in docs/commands.md. No
    payload and no header value is stored with an attempt.

    Raises as ``why``.
    """
    rows, found = store.named("attempts", {"uid": uid}), _found(store, uid)
    if found is None and not rows:
        raise _unknown(uid)
    delivered = {row.sink for row in rows if row.outcome == "delivered"}  # a position may be written a moment later
    states: Mapping[str, Any] = {} if found is None else found["sinks"]
    waits = {n: state for n, state in states.items() if state["state"] in OUTSTANDING and n not in delivered}
    sinks = store.named("status_sinks", {}) if waits else ()
    outstanding = [_outstanding(sink, waits[sink.name]) for sink in sinks if sink.name in waits]
    return {"uid": str(uid), "attempts": [plain(row) for row in rows], "outstanding": outstanding}


def _found(store: Store, uid: UUID) -> dict[str, Any] | None:
    return store.named("why", {"uid": uid})[0].found


def _unknown(uid: UUID) -> NotFound:
    return NotFound(
        f"no event {uid} is known: its transaction is not committed yet or was rolled back, or it was delivered "
        "and is past retention"
    )


def _outstanding(sink: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return why an event is not delivered to a sink, from its state in ``why`` and the row of the sink."""
    error = state.get("last_error")
    attempt: Mapping[str, Any] = state.get("last_attempt") or {}
    age = attempt.get("seconds_ago") if error else sink.error_seconds if sink.last_error else None
    return {
        "sink": sink.name,
        "state": state["state"],
        "behind": state["behind"],
        "attempts": state.get("attempts", 0),
        "error": error or sink.last_error,
        "error_seconds_ago": seconds(age),
        "circuit": sink.circuit,
        "down_seconds": seconds(sink.circuit_seconds) if sink.circuit != "closed" else None,
    }


def attempts_by_sink(rows: Sequence[Any]) -> Mapping[str, list[dict[str, Any]]]:
    """Return recorded attempts by sink, in their order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        attempt = plain(row)
        found.setdefault(attempt.pop("sink"), []).append(attempt)
    return found


def running(store: Store, longer_than: float) -> dict[str, Any]:
    """Return the leased rows whose delivery began at least ``longer_than`` seconds ago, for ``running --json``.

    The fields are described in docs/commands.md. A delivery becomes a row when it has lasted a second. Rows whose
    beginning is not known are always included.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    rows = store.named("running", {"longer_than": longer_than})
    return {
        "running": [
            {
                **plain(row, "uid", "sink", "type", "key", "relay"),
                "attempt": row.attempts + 1,
                **plain(row, "since"),
                "running_seconds": seconds(row.running_for),
                "lease_seconds": seconds(row.leased_for),
            }
            for row in rows
        ]
    }
