"""Replays: start, list, pause, resume and cancel. Each action is a function of the schema."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, NamedTuple

from outbox_relay.admin.actions import unknown_sink
from outbox_relay.admin.alive import ALIVE_SECONDS
from outbox_relay.admin.text import iso_time
from outbox_relay.domain.errors import ConfigurationError, NotFound, StatementFailed
from outbox_relay.domain.routing import matches
from outbox_relay.postgres.store import Store

EXACT_EVENTS = 10_000
"""Largest number of events that is counted before a replay."""
SEARCH_SECONDS = 6.0
"""Time limit for counting them. The server ends a statement after 9 s."""
SETTLE_SECONDS = 0.3
"""Pause before a replay is planned. Positions are stored up to 0.1 s after the deliveries that they cover."""
MOST_LISTED = 1000
"""Maximum number of replays in a list."""
TRIES = 3
"""Attempts to start a replay while the configuration changes."""
STATE_AFTER = {"pause": "paused", "resume": "running", "cancel": "cancelled"}
"""The state of a replay after each action."""
ENDED = ("done", "cancelled")
"""The states of a replay that has ended."""
SERIALIZATION_FAILURE = "40001"
"""The SQLSTATE of a start whose tick is older than the configuration."""


class Preview(NamedTuple):
    """The events that a replay would deliver.

    ``unknown`` are uids that the log does not have, and ``oldest`` is the time of its oldest event if the range has no
    beginning. ``paused`` is True if the target is paused, and ``relays`` is the number of live relays that serve it.
    ``unrouted`` are the types of named events that no route of the sink matches.
    """

    matched: int
    exact: bool
    unknown: list[str]
    oldest: datetime | None
    paused: bool
    relays: int
    unrouted: Sequence[str] = ()


def preview(store: Store, wanted: Mapping[str, Any], to: str | None) -> Preview:
    """Return what a replay would deliver. ``wanted`` has sink, type, key, tenant, since, until and uids.

    Raises ``NotFound``, which names the nearest sink, ``ConfigurationError``, ``DatabaseUnusable`` or
    ``DatabaseUnavailable``.
    """
    time.sleep(SETTLE_SECONDS)
    limits = {"most": EXACT_EVENTS, "seconds": SEARCH_SECONDS, "alive": ALIVE_SECONDS}
    [found] = _act(store, "preview_replay", {**_filter(wanted, to), **limits})
    return Preview(*found, unrouted=_unrouted(store, wanted))


def _unrouted(store: Store, wanted: Mapping[str, Any]) -> list[str]:
    """Return the types of the events that ``wanted`` names and that no route of its sink matches."""
    if "uids" not in wanted:
        return []
    types = [row.type for row in store.call("event_types", {"uids": wanted["uids"]}, "read")]
    patterns = [row.patterns for row in store.named("status_sinks", {}) if row.name == wanted["sink"]]
    return [each for each in types if not any(matches(pattern, each) for pattern in chain.from_iterable(patterns))]


def start(
    store: Store,
    wanted: Mapping[str, Any],
    to: str | None,
    rate: int | None,
    *,
    actor: str,
    reason: str | None = None,
) -> int:
    """Start a replay, and return its number. Raises as ``preview``."""
    parameters = {**_filter(wanted, to), "rate": rate, "actor": actor, "reason": reason}
    for attempt in range(1, TRIES + 1):
        try:
            [found] = _act(store, "start_replay", parameters)
        except StatementFailed as error:
            if error.sqlstate != SERIALIZATION_FAILURE or attempt == TRIES:
                raise
        else:
            return found.id
    raise AssertionError("unreachable")


def change(store: Store, number: int, action: str, *, actor: str, reason: str | None = None) -> str | None:
    """Pause, resume or cancel a replay; return None, or the state that it had if there was nothing to change.

    Raises ``NotFound``, and ``ConfigurationError`` if a replay is to be resumed that has ended.
    """
    parameters = {"replay": number, "action": action, "actor": actor, "reason": reason}
    try:
        [found] = store.action("set_replay", parameters)
    except ConfigurationError:
        if action == "resume" or (state := (replay(store, number))["state"]) not in ENDED:
            raise
        return state
    return None if found.changed else STATE_AFTER[action]


def replays(store: Store, *, unfinished: bool = False) -> list[dict[str, Any]]:
    """Return the replays, newest first, for ``replay list --json``; with ``unfinished``, those that have not ended.

    ``total`` is the number of events that the filter matches, so far until ``total_exact``. Each of them is delivered,
    ``failed`` (a dead letter of the target), ``waiting`` (a row), ``dropped`` (a row of a cancelled replay), or, at the
    end, ``passed_by``: it had a row or a discard mark in the target, or was erased. ``waits_for`` says why a running
    replay does not advance, or is None.
    """
    found = store.named("replays", {"replay": None, "unfinished": unfinished, "most": MOST_LISTED})
    return [_plain(row) for row in found]


def replay(store: Store, number: int) -> dict[str, Any]:
    """Return one replay as ``replays`` does. Raises ``NotFound``."""
    found = store.named("replays", {"replay": number, "unfinished": False, "most": 1})
    if not found:
        raise NotFound(f"there is no replay {number}; outbox-relay replay list shows them")
    return _plain(found[0])


def _plain(row: Any) -> dict[str, Any]:
    return {
        "id": row.id,
        "sink": row.sink,
        "to": row.target if row.redirected else None,
        "state": row.state,
        "total": row.total,
        "total_exact": row.total_exact,
        "delivered": row.delivered,
        "failed": row.failed,
        "waiting": row.waiting,
        "dropped": row.dropped,
        "passed_by": row.passed_by,
        "waits_for": _waits_for(row),
        "rate": row.rate,
        "type": row.type,
        "key": row.key,
        "tenant": row.tenant,
        "since": iso_time(row.since),
        "until": iso_time(row.until),
        "uids": row.uids,
        "started_at": iso_time(row.created_at),
        "ended_at": iso_time(row.ended_at),
        "actor": row.actor or row.role_name,
        "reason": row.reason,
    }


def _waits_for(row: Any) -> str | None:
    if row.state != "running":
        return None
    if row.target_paused:
        return f"sink {row.target} is paused"
    if not row.relays:
        return f"no relay serves it: 8 replays of a sink run at once; otherwise start a relay with sink {row.target}"
    return None


def _filter(wanted: Mapping[str, Any], to: str | None) -> dict[str, Any]:
    return {"filter": json.dumps(wanted), "to": to}


def _act(store: Store, name: str, parameters: Mapping[str, Any]) -> list[Any]:
    try:
        return store.action(name, parameters)
    except NotFound as error:
        sinks = [parameters["to"], json.loads(parameters["filter"])["sink"]]
        known = {row.name for row in store.named("sink_names", {})}
        missing = [sink for sink in sinks if sink is not None and sink not in known]
        raise NotFound(unknown_sink(store, missing[0]) if missing else str(error)) from None
