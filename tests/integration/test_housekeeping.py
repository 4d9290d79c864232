"""The ledger of positions: trimmed as fast as it grows, and whatever stands still in it."""

from __future__ import annotations

import time
from functools import partial

from structlog.testing import capture_logs

from outbox_relay.domain.event import SHARDS
from outbox_relay.relay.chores import LEDGER_ROWS, Chore
from tests.support.chores import doing
from tests.support.database import Database, query
from tests.support.ledger import ledger
from tests.support.relay_harness import CountingStore
from tests.support.wait import until

IDLE_SINKS = 80
"""Their shards stand apart, in more rows than one trim looked at when it looked at those of all sinks together."""
WRITTEN = 6000
SINKS = """
select outbox_internal.register_sinks(
         jsonb_agg(jsonb_build_object('name', 'idle-' || n, 'patterns', '{*}'::text[])), 0, '3:3:', 3)
  from generate_series(1, %s) n"""
APART = """
insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id)
select k.name, array[n], array[1::bigint << 41], 1, '3:3:', 3, 0 from outbox.sink k cross join generate_series(0, 63) n
returning 1"""
BUSY = """
insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id)
select 'idle-1', array(select generate_series(0, 63)), array_fill(1::bigint << 42, array[64]), n, '3:3:', 3, 0
  from generate_series(1, %s) n
returning 1"""


def test_a_ledger_that_has_grown_is_trimmed_at_once_whatever_sinks_stand_still(database: Database) -> None:
    query(database, SINKS, IDLE_SINKS)
    query(database, APART)
    query(database, BUSY, WRITTEN)
    store = CountingStore(database.dsn)
    store.open()
    with doing(store):

        def trimmed() -> bool:
            return query(database, "select count(*) from outbox.progress where sink = 'idle-1'") == [(1,)]

        until(trimmed, seconds=40, what="one row is left of a sink whose shards stand together")
        assert store.calls["trim_progress"] <= WRITTEN // (LEDGER_ROWS - SHARDS) + 2
        assert query(database, "select count(*) from outbox.progress") == [(1 + SHARDS * (IDLE_SINKS - 1),)]
    store.close()


def test_a_chore_that_fails_or_takes_long_stops_no_other_and_is_logged(database: Database) -> None:
    """Red if a chore waits without a limit, or if its error ends the thread."""
    store, done = CountingStore(database.dsn), list[float]()
    store.open()
    with database.connect() as locks, capture_logs() as logs:
        locks.execute("lock table outbox.relay in access exclusive mode")
        stuck = Chore("stuck", partial(store.value, "trim_relays"), 60.0, 60.0, limit_seconds=0.3)
        with doing(store, [stuck, Chore("other", lambda: done.append(time.monotonic()), 0.05, 0.05, leisure=0.0)]):
            until(lambda: len(done) > 3, seconds=10, what="the other one is done")
    assert [(line["event"], line["chore"]) for line in logs] == [("housekeeping.failed", "stuck")]
    assert store.connection_losses == 0
    store.close()


def test_positions_of_names_that_are_gone_are_removed_and_no_others(database: Database) -> None:
    """Goes red when the ledger is trimmed by the names of sinks only: the rest would stay for good."""
    query(database, SINKS, 3)
    query(database, "select outbox.drop_sink('idle-1', true, 1000, null, null)")
    late = """
insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id)
select s, '{0}', '{1}', n, '3:3:', 3, 0
  from unnest('{a, idle-1, y, zz}'::text[]) s, generate_series(1, 2) n
returning 1"""
    query(database, late)
    with ledger(database) as books:
        assert books.store.value("trim_former_positions", {"most": 5}) == 5
        assert books.store.value("trim_former_positions", {"most": 1000}) == 3
        assert books.store.value("trim_former_positions", {"most": 1000}) == 0
    names = query(database, "select distinct sink from outbox.progress order by sink")
    assert names == [("idle-2",), ("idle-3",)]
    assert query(database, "select count(*) from outbox.standing where sink in ('idle-2', 'idle-3')") == [(128,)]
