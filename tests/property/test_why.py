"""Random histories of one sink: the answers of ``why`` are compared with the events that were received.

Readers claim shards, read under the patterns that they were started with, park events, crash, and settle late.
Some of them record their deliveries. Meanwhile the routes change, the sink is put at another place, renamed and
rebased, rows are delivered, retried and discarded, events are erased, and replays are started, read, settled, paused,
cancelled and ended. At any time, for every event:

- "delivered" and "settled" mean that the destination received it, from the sink or a replay;
- an event that was received and settled is never "not routed" or "passed over";
- only events that were emitted before the newest rebase, seek or change of the routes was completed are "unknown";
- it is "dead", "waiting" or "scheduled" exactly if it has such a row, "discarded" exactly if it has none and was
  discarded, and "erased" exactly if it was erased;
- "pending" comes "again" only if the destination received it, and always if that was settled after those changes;
- a replay says "delivered" only of what it delivered, and always of what it settled as delivered;
- the counts of a replay that is done add up.

Any state is allowed for an event that was received and whose settlement does not count: because a crash came first, the
shard had another owner of the same generation by then, or the sink another name.
"""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import psycopg
import pytest

from outbox_relay import admin
from outbox_relay.postgres.migrations import rebase
from outbox_relay.postgres.store import Store
from tests.property.broken_rules import (
    COVER_ALL,
    IGNORE_OWNERS,
    IGNORE_REPLAYS,
    IGNORE_ROUTES,
    KEEP_NOT,
    RECORD_NOT,
)
from tests.property.readers import Reader, Received
from tests.property.replaying import Replays
from tests.support.database import Database, query
from tests.support.erasing import Erasure
from tests.support.sink_actions import call, register, seek

HISTORIES = int(os.environ.get("OUTBOX_TEST_HISTORIES") or 4)
STEPS = 80
KEYS = ("a", "b", "c")
TYPES = ("order.created", "order.paid", "user.created", "odd_%")
ROUTES = (["*"], ["order.*"], ["user.*"], ["order.paid", "odd_*"], ["*.created"])
UNDELIVERED = ("not routed", "passed over")
SHARDS = "select distinct (hashtextextended(k, 0) & 63)::integer from unnest(%s::text[]) k"
EMIT = """
select e.id, e.uid, e.type from outbox.event e
 where e.uid = outbox.emit_raw(%s, '1', key => %s)"""
NEWEST = "select coalesce(pg_sequence_last_value('outbox.event_id_seq'), 0)"
LAPSE = "update outbox.session set lease_until = now() - interval '1 second' where owner = %s returning 1"
TAKE_ROW = """
delete from outbox.delivery d
 where (d.sink, d.id) in (select o.sink, o.id from outbox.delivery o
                           where o.sink = %s and o.state <> 'dead' order by random() limit 1)
returning d.id"""
RETRY = "update outbox.delivery set state = 'waiting' where sink = %s and state = 'dead' returning 1"
DISCARD = "select done from outbox.discard_deliveries(%s::jsonb, reason => 'no use')"


OFTEN = ("emit", "claim", "tick", "read", "read", "read", "finish", "settle", "settle")
SELDOM = ("late", "release", "crash", "zombie", "row", "retry", "discard", "routes", "seek", "trim")
REPLAYS = ("replay", "replay_claim", "replay_work", "replay_work", "replay_work", "replay_tend")
RARE = ("rebase", "erase", "replay_crash", "replay_act", "routes", "routes")
STEPS_OF_ALL = OFTEN * 4 + SELDOM * 2 + REPLAYS * 3 + RARE
STEPS_OF_CLAIMS = OFTEN * 4 + ("routes", "release", "crash", "zombie") * 3
"""Many claims under changed routes. Among all the other steps, few histories have what these do."""


class History:
    """One sink from its registration on, and everything that its readers have done."""

    def __init__(self, database: Database, store: Store, seed: int, steps: Sequence[str]) -> None:
        self._database = database
        self._steps = steps
        self._store = store
        self.seed = seed
        self._drawn = random.Random(seed)
        self._apart = random.Random(seed)  # for what came later, so that histories with a known seed stay the same
        self._open = ExitStack()
        self._writers: list[psycopg.Connection[Any]] = []
        self._shards = {row[0] for row in query(database, SHARDS, list(KEYS))}
        self.name = "s"
        self.patterns: list[str] = ["*"]
        self.generation = 0
        self.changed_upto = 0
        """The newest id when the newest change of routes or place was completed."""
        self.readers: list[Reader] = []
        self.zombies: list[Reader] = []
        self.received = Received()
        self.replays = Replays(database, store, self._drawn, self.received)
        self.discarded = set[int]()
        self.erased = set[int]()
        self.events: dict[int, tuple[UUID, str]] = {}
        self.claims: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.log: list[str] = []

    def run(self) -> None:
        """Do random steps, and compare now and then and at the end."""
        for _ in range(self._drawn.randrange(4)):
            self._emit()
        self._register(self._drawn.choice(["beginning", "now"]))
        try:
            for _ in range(STEPS):
                name = self._drawn.choice(self._steps)
                self.log.append(name)
                getattr(self, f"step_{name}")()
                if self._drawn.random() < 0.05:
                    self.compare()
            self.compare()
        finally:
            self._open.close()

    # -- writers ----------------------------------------------------------------------------------------------

    def step_emit(self) -> None:
        for _ in range(self._drawn.choice([1, 1, 3])):
            self._emit()

    def _emit(self) -> None:
        with self._database.connect() as connection:
            self._emit_on(connection)

    def _emit_on(self, connection: psycopg.Connection[Any]) -> None:
        event_type, key = self._drawn.choice(TYPES), self._drawn.choice(KEYS)
        uid = connection.execute("select outbox.emit_raw(%s, '1', key => %s)", (event_type, key)).fetchone()
        assert uid is not None
        found = connection.execute("select id from outbox.event where uid = %s", uid).fetchone()
        assert found is not None
        self.events[found[0]] = (uid[0], event_type)

    def step_late(self) -> None:
        """Emit in a transaction that stays open, or commit one."""
        if self._writers and self._drawn.random() < 0.6:
            self._writers.pop().commit()
        elif len(self._writers) < 2:
            writer = self._open.enter_context(self._database.connect())
            self._emit_on(writer)
            self._writers.append(writer)

    # -- readers ----------------------------------------------------------------------------------------------

    def step_claim(self) -> None:
        """Claim under the generation in force, as a new reader or as one that serves it."""
        fresh = [r for r in self.readers if not r.draining and r.sink == self.name and r.generation == self.generation]
        if fresh and self._drawn.random() < 0.5:
            reader = self._drawn.choice(fresh)
        else:
            reader = Reader(self._store, self.name, self.generation, self.patterns, self._drawn)
        for shard, epoch in (reader.claim(self._shards)).items():
            self.claims[shard, self.generation] = max(epoch, self.claims[shard, self.generation])
        if reader.readings and reader not in self.readers:
            self.readers.append(reader)

    def _any(self) -> Reader | None:
        return self._drawn.choice(self.readers) if self.readers else None

    def step_tick(self) -> None:
        if reader := self._any():
            reader.tick()

    def step_read(self) -> None:
        if reader := self._any():
            reader.read(self.received)

    def step_finish(self) -> None:
        if reader := self._any():
            reader.finish(self.received)

    def step_settle(self) -> None:
        if reader := self._any():
            self._settle(reader)

    def _settle(self, reader: Reader) -> None:
        """Settle, and note what counts: not what an owner writes beside another one of its generation."""
        renamed = reader.sink != self.name
        for shard, ids in (reader.settle()).items():
            if not renamed and self.claims[shard, reader.generation] <= reader.readings[shard].epoch:
                self.received.settled.update(self.received.delivered & set(ids))

    def step_release(self) -> None:
        """Drain a reader: deliver, settle, release."""
        if reader := self._any():
            reader.finish(self.received)
            self._settle(reader)
            reader.release()
            self.readers.remove(reader)

    def step_crash(self) -> None:
        """Let the leases of a reader end. It may still settle."""
        if reader := self._any():
            query(self._database, LAPSE, reader.relay)
            self.readers.remove(reader)
            self.zombies.append(reader)

    def step_zombie(self) -> None:
        """Let a crashed reader finish its calls, and settle late."""
        if self.zombies:
            reader = self._drawn.choice(self.zombies)
            reader.finish(self.received)
            self._settle(reader)

    # -- rows -------------------------------------------------------------------------------------------------

    def step_row(self) -> None:
        for (event_id,) in query(self._database, TAKE_ROW, self.name):
            self.received.delivered.add(event_id)
            self.received.settled.add(event_id)

    def step_retry(self) -> None:
        query(self._database, RETRY, self.name)

    def step_discard(self) -> None:
        before = self._rows()
        query(self._database, DISCARD, f'{{"sink": "{self.name}"}}')
        self.discarded |= before.keys() - self._rows().keys()

    def _rows(self) -> dict[int, str]:
        return dict(query(self._database, "select id, state from outbox.delivery where sink = %s", self.name))

    # -- replays ----------------------------------------------------------------------------------------------

    def step_replay(self) -> None:
        """Start a replay, most often with a reader."""
        uids = [str(uid) for uid, _ in self.events.values()]
        if self.replays.start(self.name, uids, KEYS) and self._drawn.random() < 0.7:
            self.replays.claim(self.generation, self._shards)
            self.replays.work()

    def step_replay_claim(self) -> None:
        self.replays.claim(self.generation, self._shards)

    def step_replay_work(self) -> None:
        self.replays.work()

    def step_replay_tend(self) -> None:
        self.replays.row()
        self.replays.tend()

    def step_replay_crash(self) -> None:
        self.replays.crash()

    def step_replay_act(self) -> None:
        self.replays.act()

    # -- people -----------------------------------------------------------------------------------------------

    def _register(self, start: str) -> None:
        self.generation = register(self._database, self.name, *self.patterns, start=start)

    def step_routes(self) -> None:
        before, self.patterns = self.patterns, self._drawn.choice(ROUTES)
        self._register("beginning")
        self._changed(of_note=self.patterns != before)

    def step_seek(self) -> None:
        seek(self._database, self.name, self._drawn.choice(["now", "now", "beginning"]))
        [(self.generation,)] = query(self._database, "select generation from outbox.sink")
        self._changed()

    def _changed(self, *, of_note: bool = True) -> None:
        """Note a change, and most often have it completed at once."""
        if of_note:
            self.changed_upto = sys.maxsize
        if self._apart.random() < 0.7:
            self._trim_routes()

    def _trim_routes(self) -> None:
        self._store.value("trim_routes")
        if self.changed_upto == sys.maxsize:
            [(self.changed_upto,)] = query(self._database, NEWEST)

    def step_erase(self) -> None:
        """Erase an event, which is refused while it is undelivered."""
        committed = query(self._database, "select id, uid::text from outbox.event order by id")
        if committed:
            event_id, uid = self._drawn.choice(committed)
            if Erasure(self._database, {"uid": uid}).run()["phase"] == "done":
                self.erased.add(event_id)

    def step_trim(self) -> None:
        """Trim the routes, and often the ledger before."""
        if self._apart.random() < 0.7:
            self._store.value("trim_progress", {"most": 1000})
        self._trim_routes()

    def step_rebase(self) -> None:
        """Rebase the log without any relay and any open transaction."""
        while self._writers:
            self._writers.pop().commit()
        for reader in self.readers:
            query(self._database, LAPSE, reader.relay)
        self.readers.clear()
        self.zombies.clear()
        self.replays.rebase()
        rebase(self._database.dsn)
        self._changed()

    # -- judgement --------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Raise AssertionError if ``why`` says anything of an event that is not so."""
        committed = {row[0] for row in query(self._database, "select id from outbox.event")}
        rows = self._rows()
        settled = self.received.settled | self.replays.all_settled
        for event_id in committed:
            uid, event_type = self.events[event_id]
            found = (admin.why(self._store, uid))["sinks"][self.name]
            state = found["state"]
            told = f"event {event_id} ({event_type}) is {state!r} after {self.log}, seed {self.seed}"
            if state in ("delivered", "settled"):
                assert event_id in self.received.delivered, told
            if state in UNDELIVERED:
                assert event_id not in settled, told
            assert state != "unknown" or event_id <= self.changed_upto, told
            self._compare_exceptions(event_id, state, rows, told)
            if state == "pending":
                assert not found["again"] or event_id in self.received.delivered, told
                assert found["again"] or event_id not in settled or event_id <= self.changed_upto, told
            for entry in found.get("replays", ()):
                self.replays.judge(event_id, entry, told)
        self.replays.compare(f"{self.log}, seed {self.seed}")

    def _compare_exceptions(self, event_id: int, state: str, rows: dict[int, str], told: str) -> None:
        """Raise AssertionError unless the state is that of the erasure, the row or the mark, if there is one."""
        if event_id in self.erased:
            assert state == "erased", told
        elif event_id in rows:
            assert state == rows[event_id], told
        elif event_id in self.discarded:
            assert state == "discarded", told
        else:
            assert state not in ("erased", "dead", "waiting", "held", "scheduled", "discarded"), told


CLAIMS = (RECORD_NOT.format("routes"), IGNORE_OWNERS)
"""Rules that histories with many claims break."""


def histories(database: Database, seeds: range, steps: Sequence[str] = STEPS_OF_ALL) -> None:
    """Run histories one after another, each in an empty log."""
    store = Store(lambda: database.dsn, pooler=False, connections=2)
    store.open()
    try:
        for seed in seeds:
            History(database, store, seed, steps).run()
            clear(database)
    finally:
        store.close()


def clear(database: Database) -> None:
    """Remove the sink, its rows and all events."""
    for row in call(database, "select name from outbox.sink"):
        call(database, "select * from outbox.drop_sink(%s, true, 1000, 'tester', null)", row["name"])
    call(database, "delete from outbox.former_sink")
    call(database, "delete from outbox.replay")
    call(database, "delete from outbox.shard")
    call(database, "truncate outbox.event")


@pytest.mark.fence("an event counts as delivered that only later or earlier routes match")
@pytest.mark.fence("an event that a replay leaves out counts as delivered, or one that it delivers as passed by")
@pytest.mark.parametrize(
    "seeds",
    [range(HISTORIES), *(pytest.param(range(n, n + 20), marks=pytest.mark.thorough) for n in range(1000, 1200, 20))],
    ids=str,
)
def test_why_tells_what_was_received(database: Database, seeds: range) -> None:
    histories(database, seeds)


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        (IGNORE_ROUTES, 12),
        (RECORD_NOT.format("end"), 2),
        *((broken, 0) for broken in CLAIMS),
        (IGNORE_REPLAYS, 5),
        pytest.param(KEEP_NOT.format("passed by"), 9, marks=pytest.mark.thorough),
        pytest.param(KEEP_NOT.format("failed"), 43, marks=pytest.mark.thorough),
        pytest.param(COVER_ALL, 2, marks=pytest.mark.thorough),
    ],
    ids=["patterns", "seeks", "routes", "owners", "replays", "passed by", "failed", "positions"],
)
def test_a_rule_that_is_broken_is_found(database: Database, broken: str, first: int) -> None:
    """Goes red when the comparison no longer sees it. The first seeds are of histories that do."""
    call(database, broken)
    with pytest.raises(AssertionError, match=r"is '[a-z ]+' after"):
        histories(database, range(first, first + 100), STEPS_OF_CLAIMS if broken in CLAIMS else STEPS_OF_ALL)
