"""The replays of a random history: their readers, what they delivered, and what `why` may say of that."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import psycopg

from outbox_relay.postgres.store import Store
from tests.property.readers import Received, ReplayReader
from tests.support.database import Database, query
from tests.support.replays import act, show, start, tend
from tests.support.sink_actions import call

MOST = 3
"""Number of replays of a history."""
TAKE_ROW = """
delete from outbox.delivery d
 where d.ctid = (select o.ctid from outbox.delivery o
                  where o.sink = %s and o.state <> 'dead' order by random() limit 1)
returning d.id, d.id <= (select p.last_id from outbox_internal.replay_places(%s) p where p.shard = d.shard) as passed"""
LAPSE = "update outbox.shard set owner = null where owner = %s returning 1"
ACTIONS = ("pause", "resume", "resume", "cancel")


class Replays:
    """The replays of one history, and the events that the destination received and that were settled, by replay."""

    def __init__(self, database: Database, store: Store, drawn: random.Random, received: Received) -> None:
        self._database = database
        self._store = store
        self._drawn = drawn
        self._all = received
        self.readers: list[ReplayReader] = []
        self.numbers: list[int] = []
        self.delivered: defaultdict[int, set[int]] = defaultdict(set)
        self.settled: defaultdict[int, set[int]] = defaultdict(set)
        self.rebased = set[int]()
        """The replays that a rebase found."""

    def start(self, sink: str, uids: Collection[str], keys: Collection[str]) -> bool:
        """Start a replay by time, key or uids, to the sink itself or as if to another one; return False if not."""
        if len(self.numbers) >= MOST or not uids:
            return False
        wanted: dict[str, Any] = self._drawn.choice(
            [
                {"since": "PT1H"},
                {"key": self._drawn.choice(sorted(keys))},
                {"uids": self._drawn.sample(sorted(uids), min(3, len(uids)))},
            ]
        )
        to = sink if self._drawn.random() < 0.3 else None
        self.numbers.append(start(self._database, sink, to=to, **wanted))
        return True

    def claim(self, generation: int, shards: Collection[int]) -> None:
        """Claim the free shards of a replay by a new reader."""
        if not self.numbers:
            return
        number = self.numbers[-1] if self._drawn.random() < 0.6 else self._drawn.choice(self.numbers)
        reader = ReplayReader(self._store, number, generation, self._drawn)
        reader.claim(shards)
        if reader.readings:
            self.readers.append(reader)

    def work(self) -> None:
        """Let a reader read, and perhaps finish its calls and settle."""
        if not self.readers:
            return
        reader = self._drawn.choice(self.readers)
        mine = Received(self.delivered[reader.number])
        for _ in range(self._drawn.randrange(1, 10)):
            reader.read(mine)
        if self._drawn.random() < 0.5:
            reader.finish(mine)
        self._all.delivered |= mine.delivered
        if self._drawn.random() < 0.7:
            self._settle(reader)

    def _settle(self, reader: ReplayReader) -> None:
        for ids in (reader.settle()).values():
            self.settled[reader.number] |= set(ids) - reader.parked

    def crash(self) -> None:
        """Let the leases of a reader end. It may still settle."""
        if self.readers:
            query(self._database, LAPSE, self._drawn.choice(self.readers).relay)

    def row(self) -> None:
        """Deliver a row of a replay."""
        for number in self.numbers:
            for event_id, passed in query(self._database, TAKE_ROW, f"~{number}", number):
                self.delivered[number].add(event_id)
                self._all.delivered.add(event_id)
                if passed:
                    self.settled[number].add(event_id)

    def act(self) -> None:
        """Pause, resume or cancel a replay; release the shards of one that has ended."""
        if not self.numbers:
            return
        number = self._drawn.choice(self.numbers)
        try:
            act(self._database, self._drawn.choice(ACTIONS), number)
        except psycopg.Error:  # it has ended
            call(self._database, "update outbox.shard set owner = null where sink = %s", f"~{number}")

    def tend(self) -> None:
        """Count, move dead letters, end and clear."""
        tend(self._database)

    def rebase(self) -> None:
        """Forget what was settled: `why` leaves out replays that ended before a rebase."""
        for reader in self.readers:
            query(self._database, LAPSE, reader.relay)
        self.readers.clear()
        self.rebased |= set(self.numbers)
        self.settled.clear()

    @property
    def all_settled(self) -> set[int]:
        """The events that any replay has settled as delivered."""
        return {event_id for ids in self.settled.values() for event_id in ids}

    def judge(self, event_id: int, entry: Mapping[str, Any], told: str) -> None:
        """Raise AssertionError if the outcome of an event in a replay is not so."""
        number, outcome = entry["id"], entry["outcome"]
        told = f"{told}: replay {number} says {outcome!r}"
        if outcome == "delivered":
            assert event_id in self.delivered[number], told
        elif outcome != "unknown":
            assert event_id not in self.settled[number], told
        assert outcome != "unknown" or number in self.rebased, told
        assert ("reason" in entry) == (outcome == "passed by"), told

    def compare(self, told: str) -> None:
        """Raise AssertionError if the numbers of a replay that is done do not add up."""
        for number in self.numbers:
            found = show(self._database, number)
            parts = found["delivered"] + found["failed"] + (found["passed_by"] or 0)
            if found["state"] == "done" and number not in self.rebased:
                assert found["total"] == parts, f"replay {number} has {found} after {told}"
