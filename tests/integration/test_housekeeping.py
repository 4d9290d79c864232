"""The ledger of positions: trimmed as fast as it grows, and whatever stands still in it."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.relay.housekeeping import TRIM_LEAST, TRIM_ROWS, Housekeeping, LedgerTrim
from tests.support.database import Database, query
from tests.support.ledger import ledger
from tests.support.relay_harness import CountingStore
from tests.support.wait import auntil

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


async def test_a_ledger_that_has_grown_is_trimmed_at_once_whatever_sinks_stand_still(database: Database) -> None:
    query(database, SINKS, IDLE_SINKS)
    query(database, APART)
    query(database, BUSY, WRITTEN)
    store = CountingStore(database.dsn)
    await store.open()
    chores = asyncio.create_task(Housekeeping(store, structlog.get_logger("test")).run())
    try:

        async def trimmed() -> bool:
            return query(database, "select count(*) from outbox.progress where sink = 'idle-1'") == [(1,)]

        await auntil(trimmed, seconds=40, what="one row is left of a sink whose shards stand together")
        assert store.calls["trim_progress"] <= WRITTEN // (TRIM_ROWS - SHARDS) + 2
        assert query(database, "select count(*) from outbox.progress") == [(1 + SHARDS * (IDLE_SINKS - 1),)]
    finally:
        chores.cancel()
        await asyncio.wait({chores})
        await store.close()


async def test_a_trim_that_fails_is_followed_by_smaller_ones() -> None:
    class Slow(CountingStore):
        """The database is slow at first."""

        async def trim_progress(self, most: int) -> int:
            asked.append(most)
            if len(asked) == 1:
                raise StatementFailed("canceling statement due to statement timeout", "57014")
            return 0

    asked = list[int]()
    ledger = LedgerTrim(Slow(""))
    with pytest.raises(StatementFailed):
        await ledger.trim()
    for _ in range(3):
        await ledger.trim()
    assert asked == [TRIM_ROWS, TRIM_LEAST, 2 * TRIM_LEAST, 3 * TRIM_LEAST]


async def test_positions_of_names_that_are_gone_are_removed_and_no_others(database: Database) -> None:
    """Goes red when the ledger is trimmed by the names of sinks only: the rest would stay for good."""
    query(database, SINKS, 3)
    query(database, "select outbox.drop_sink('idle-1', true, 1000, null, null)")
    query(database, "select outbox.rename_sink('idle-2', 'other', null, null)")
    late = """
insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id)
select s, '{0}', '{1}', n, '3:3:', 3, 0
  from unnest('{a, idle-1, idle-2, zz}'::text[]) s, generate_series(1, 2) n
returning 1"""
    query(database, late)
    async with ledger(database) as books:
        assert await books.store.trim_former_positions(5) == 5
        assert await books.store.trim_former_positions(1000) == 3
        assert await books.store.trim_former_positions(1000) == 0
    names = query(database, "select distinct sink from outbox.progress order by sink")
    assert names == [("idle-3",), ("other",)]
    assert query(database, "select count(*) from outbox.standing where sink in ('idle-3', 'other')") == [(128,)]
