"""Replays: start, list, pause, resume and cancel. Each action is a function of the schema."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from outbox_relay.admin.actions import naming_sinks
from outbox_relay.admin.sinks import EXACT_EVENTS, SEARCH_SECONDS, again_if_outdated
from outbox_relay.admin.thresholds import ALIVE_SECONDS
from outbox_relay.admin.values import plain
from outbox_relay.domain.errors import ConfigurationError, NotFound
from outbox_relay.domain.routing import matches
from outbox_relay.postgres.store import Store

SETTLE_SECONDS: Final = 0.3
"""Pause before a replay is planned. Positions are stored up to 0.1 s after the deliveries that they cover."""
MOST_LISTED: Final = 1000
"""Maximum number of replays in a list."""
STATE_AFTER: Final = {"pause": "paused", "resume": "running", "cancel": "cancelled"}
"""The state of a replay after each action."""
ENDED: Final = ("done", "cancelled")
"""The states of a replay that has ended."""


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
    [found] = _act(store, "preview_replay", wanted, to, limits)
    return Preview(*found, unrouted=_unrouted(store, wanted))


def _unrouted(store: Store, wanted: Mapping[str, Any]) -> list[str]:
    """Return the types of the events that ``wanted`` names and that no route of its sink matches."""
    if "uids" not in wanted:
        return []
    types = [row.type for row in store.call("event_types", {"uids": wanted["uids"]}, "read")]
    [patterns] = [row.patterns for row in store.named("status_sinks", {}) if row.name == wanted["sink"]] or [()]
    return [each for each in types if not any(matches(pattern, each) for pattern in patterns)]


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
    parameters = {"rate": rate, "actor": actor, "reason": reason}
    [found] = again_if_outdated(lambda: _act(store, "start_replay", wanted, to, parameters))
    return found.id


def change(store: Store, number: int, action: str, *, actor: str, reason: str | None = None) -> str | None:
    """Pause, resume or cancel a replay; return None, or the state that it had if there was nothing to change.

    Raises ``NotFound``, and ``ConfigurationError`` if a replay is to be resumed that has ended.
    """
    parameters = {"replay": number, "action": action, "actor": actor, "reason": reason}
    try:
        [found] = store.action("set_replay", parameters)
    except ConfigurationError:
        if action == "resume" or (state := replay(store, number)["state"]) not in ENDED:
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
    counts = ("total", "total_exact", "delivered", "failed", "waiting", "dropped", "passed_by")
    selection = ("rate", "type", "key", "tenant", "since", "until", "uids")
    return {
        **plain(row, "id", "sink", "state", *counts, *selection, "ended_at", "reason"),
        "to": row.target if row.redirected else None,
        "waits_for": _waits_for(row),
        "started_at": row.created_at.isoformat(),
        "actor": row.actor or row.role_name,
    }


def _waits_for(row: Any) -> str | None:
    if row.state != "running":
        return None
    if row.target_paused:
        return f"sink {row.target} is paused"
    if not row.relays:
        return f"no relay serves it: 8 replays of a sink run at once; otherwise start a relay with sink {row.target}"
    return None


def _act(
    store: Store, name: str, wanted: Mapping[str, Any], to: str | None, parameters: Mapping[str, Any]
) -> list[Any]:
    with naming_sinks(store, to, wanted["sink"]):
        return store.action(name, {"filter": json.dumps(wanted), "to": to, **parameters})
