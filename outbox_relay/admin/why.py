"""The delivery state of one event, or of the newest ones of a key, sink by sink."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any
from uuid import UUID

from outbox_relay.admin.attempts import newest_attempts, unknown_event
from outbox_relay.domain.errors import NotFound
from outbox_relay.postgres.store import Store

STEP_IDS = 100_000
"""Number of ids of the log that one statement searches for events of a key."""
SEARCH_SECONDS = 10.0
"""Time limit for the search, after which no further step begins."""


def why(store: Store, uid: UUID) -> dict[str, Any]:
    """Return the event ``uid`` and its state in each sink, for ``why --json``.

    ``outbox.why`` finds the states out, which docs/commands.md describes with their fields. ``attempts_recorded`` are
    the newest recorded attempts at the sink, oldest first. No payload and no header value is read.

    Raises ``NotFound`` if neither the log, ``delivery``, a mark of a discard nor a record has the event,
    ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    found: dict[str, Any] | None = (store.named("why", {"uid": uid}))[0].found
    if found is None:
        raise unknown_event(uid)
    recorded = newest_attempts(store, uid)
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


def why_key(
    store: Store, key: str, most: int, before: int | None = None, seconds: float | None = None
) -> dict[str, Any]:
    """Return the newest events of ``key`` in the log, at most ``most``, newest first, for ``why --key --json``.

    With ``before``, only events with lower ids are returned. No step of the search begins after ``seconds``, by default
    ``SEARCH_SECONDS``. Each event is as ``why`` returns it.

    ``complete`` is False if the search ended before it had found ``most`` events or read the whole log;
    ``searched_since`` is then the time of the oldest event that it came to, otherwise None.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    until = time.monotonic() + (SEARCH_SECONDS if seconds is None else seconds)
    [(first, upto)] = store.named("log_ends", {})
    upto = upto if before is None else min(upto, before - 1)
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
    return {
        "key": key,
        "events": events,
        "complete": complete,
        "searched_since": oldest[0].at.isoformat() if oldest else None,
    }
