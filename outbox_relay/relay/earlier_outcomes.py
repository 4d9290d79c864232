"""Outcomes of earlier sessions that concern the events of a read: marks of discarded events, and rows of their keys.

There may be very many marks, and with when_dead = "hold" very many keys of dead rows, so a takeover loads none of them.
A read that they may concern asks for those of its own events before it is handed over.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from uuid import UUID

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import InFlight
from outbox_relay.postgres.store import Store
from outbox_relay.relay.sink_spec import SinkSpec

LOOK_SECONDS = 10.0
"""Interval at which a sink with dead rows is asked whether there are any left. Keys count as free for as long."""
MOST_FREE = 50_000
"""Maximum number of keys that are known to be free."""


class EarlierOutcomes:
    """Screens the events that are read for one sink in one session.

    While dead rows block keys, the keys of live rows in memory are not all that are blocked: a dead row may be retried,
    which makes it a live one of a key that was never loaded. Reads ask for their keys until no dead row is left and the
    keys of live rows were loaded by that same statement. A key without rows stays free while its shard is owned, except
    for rows of this session, which block it. So a read does not ask again for keys that were free a short time ago.

    An event is discarded only after the position of its shard has passed it. Marks that are written after a take-over
    are therefore of events that this session does not read again.
    """

    def __init__(self, store: Store, spec: SinkSpec, in_flight: InFlight, server: str | None) -> None:
        self._store = store
        self._spec = spec
        self._in_flight = in_flight
        self._server = server
        self._dead_rows = False
        self._looked_at = 0.0
        self._free = set[str]()
        self._highest_discarded = 0

    def take_over(self, shards: Collection[int]) -> None:
        """Load the keys of live rows of claimed shards, and find out for what else reads must ask."""
        self._free.clear()
        if self._spec.ordered and self._load_keys(shards):
            self._dead_rows = True
        highest = self._store.highest_discarded(self._spec.name, server=self._server)
        self._highest_discarded = max(self._highest_discarded, highest or 0)

    def screen(self, events: list[StoredEvent]) -> list[StoredEvent]:
        """Block the keys of ``events``, in id order, that have rows. Return the events that are not discarded."""
        if events and self._dead_rows:
            self._block_keys(events)
        if events and events[0].id <= self._highest_discarded:
            return self._without_discarded(events)
        return events

    def _load_keys(self, shards: Collection[int]) -> bool:
        """Load the keys of live rows. Return True if there are dead rows that block their keys."""
        sink, hold = self._spec.name, self._spec.hold
        keys, dead_rows = self._store.blocked_keys(sink, shards, hold, server=self._server)
        self._in_flight.blocked.load(keys)
        return dead_rows

    def _block_keys(self, events: list[StoredEvent]) -> None:
        """Ask for the keys that are not known to be blocked.

        An answer stays true: only the owner of a shard adds rows, and it blocks their keys.
        """
        self._look_again()
        blocked, free = self._in_flight.blocked, self._free
        asked = (event for event in events if event.key not in free and event.key not in blocked)
        keys = {event.key: event.shard for event in asked if event.key is not None}
        if self._dead_rows and keys:
            sink, hold = self._spec.name, self._spec.hold
            still = self._store.still_blocked(sink, list(keys), hold, server=self._server)
            blocked.load((key, keys[key]) for key in still)
            if len(free) + len(keys) > MOST_FREE:
                free.clear()
            free.update(keys.keys() - still)

    def _look_again(self) -> None:
        """Find out whether dead rows are left, at most every ``LOOK_SECONDS``."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._free.clear()
            self._dead_rows = self._load_keys(()) or self._load_keys(self._in_flight.shards)

    def _without_discarded(self, events: list[StoredEvent]) -> list[StoredEvent]:
        asked = [(event.id, UUID(event.uid)) for event in events if event.id <= self._highest_discarded]
        discarded = self._store.discarded(self._spec.name, asked, server=self._server)
        return [event for event in events if event.id not in discarded] if discarded else events
