"""How far every sink is, which relays are alive, and what nobody takes."""

from __future__ import annotations

from typing import Any

from outbox_relay.domain.routing import Routes, like
from outbox_relay.postgres.store import Store

EXACT_EVENTS = 10_000
"""A backlog of up to this many events of the log is counted, a larger one is estimated."""
LOOK_SECONDS = 10.0
"""How long one sink's part of the log is looked through, at most; then too its backlog is estimated."""
ANSWER_SECONDS = 30.0
"""Longest wait for the figures of one sink."""
ALIVE_SECONDS = 45.0
"""A relay seen within this time is alive: three leases of the default length. So is one that owns a shard."""
NEWEST_EVENTS = 10_000
"""Events among which types without a route are looked for."""


async def status(store: Store) -> dict[str, Any]:
    """How the relays and sinks of this database are, as ``status --json`` prints it.

    ``backlog`` counts committed events whose delivery to the sink is not settled: those of the log beyond the position
    of their shard, and rows that wait or are held. Dead ones and those not due yet by their own time are left out.
    Up to ``EXACT_EVENTS`` events of the log are counted; beyond that, or when ``LOOK_SECONDS`` did not suffice,
    ``backlog_exact`` is False and the rest is estimated by how dense the events were in the ids that were counted.
    A position is written up to 0.1 s after a delivery: what was delivered since still counts.

    ``oldest_seconds`` is the age of the oldest of the backlog, by the database's clock, or how long ago it became due
    if that is later; 0.0 when there is none. ``scheduled`` counts rows and events of the log, ``waiting``, ``held`` and
    ``dead`` rows. ``unowned`` is how many shards of the sink no relay owns. ``circuit_seconds`` is for how long
    the circuit has not been closed, ``in_flight_limit`` how many requests a relay makes at once since the destination
    asked for less, None when as many as the settings say, ``paused_reason`` why a relay paused the sink by itself.

    ``relays`` are those that were seen within ``ALIVE_SECONDS`` or own a shard, with the shards they own of every
    sink they serve. ``missing_positions`` is how many shards have no position, so that no relay serves them; all of
    the log counts as their backlog. ``unrouted`` are the types among the newest ``NEWEST_EVENTS`` events that no sink's
    patterns match. ``in_default_partition`` counts events, up to ``EXACT_EVENTS``, for whose day no partition had been
    made.

    Raises ``Unusable`` or ``DatabaseLost``.
    """
    sinks = await store.named("status_sinks", {})
    missing = await store.missing_positions()
    return {
        "relays": await _relays(store),
        "sinks": {
            sink.name: {**await _sink(store, sink), "missing_positions": len(missing.get(sink.name, ()))}
            for sink in sinks
        },
        "unrouted": await _unrouted(store, sinks),
        "in_default_partition": await _in_default_partition(store),
    }


def too_old(found: dict[str, Any], most_seconds: float) -> list[str]:
    """A line for each sink of ``status`` whose oldest event is older than ``most_seconds``."""
    return [
        f"sink {name}: its oldest event has waited for {sink['oldest_seconds']:.1f} s, more than {most_seconds:g} s"
        for name, sink in found["sinks"].items()
        if sink["oldest_seconds"] > most_seconds
    ]


async def _relays(store: Store) -> list[dict[str, Any]]:
    relays: dict[Any, dict[str, Any]] = {}
    for row in await store.named("status_relays", {"seconds": ALIVE_SECONDS}):
        relay = relays.setdefault(
            row.id,
            {
                "name": row.name,
                "version": row.version,
                "seen_seconds_ago": round(max(0.0, row.seen_seconds_ago), 3),
                "shards": {},
            },
        )
        if row.sink is not None:
            relay["shards"][row.sink] = row.shards
    return list(relays.values())


async def _sink(store: Store, sink: Any) -> dict[str, Any]:
    parameters = {"sink": sink.name, "types": _types(sink.patterns), "most": EXACT_EVENTS, "seconds": LOOK_SECONDS}
    [found] = await store.named("status_backlog", parameters, ANSWER_SECONDS)
    return {
        "backlog": found.backlog,
        "backlog_exact": found.exact,
        "oldest_seconds": round(found.oldest_seconds, 3),
        "waiting": found.waiting,
        "held": found.held,
        "dead": found.dead,
        "scheduled": found.scheduled,
        "circuit": sink.circuit,
        "circuit_seconds": None if sink.circuit_seconds is None else round(sink.circuit_seconds, 3),
        "in_flight_limit": sink.in_flight_limit,
        "paused": sink.paused,
        "paused_reason": sink.paused_reason,
        "last_error": sink.last_error,
        "unowned": sink.unowned,
    }


def _types(patterns: list[str]) -> list[str] | None:
    """``patterns`` as SQL LIKE patterns; nothing when they match every type."""
    return None if "*" in patterns else [like(pattern) for pattern in patterns]


async def _unrouted(store: Store, sinks: list[Any]) -> list[str]:
    routes = Routes({pattern: ("some",) for sink in sinks for pattern in sink.patterns})
    types = await store.named("status_types", {"most": NEWEST_EVENTS})
    return [row.type for row in types if not routes.routed(row.type)]


async def _in_default_partition(store: Store) -> int:
    [row] = await store.named("status_default_partition", {"most": EXACT_EVENTS})
    return row.events
