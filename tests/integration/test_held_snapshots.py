"""Statements that relays repeat, while another session holds a snapshot and VACUUM removes no dead version."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager

import psycopg
import pytest

from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.window import Position
from outbox_relay.postgres.database import statements
from tests.support.database import Database, query
from tests.support.ledger import Ledger, ledger
from tests.support.sink_actions import lapse
from tests.support.wait import auntil

SINK = "s"
LONG = "a_sink_with_a_long_name"
ANY_SIZE = "select outbox_internal.raise_ledger_starts(1, 0)"
START = "select ledger_start from outbox.sink where name = 's'"
STANDING = "select * from outbox.standing order by sink, shard"
LEFT = """
select extract(epoch from min(lease_until) - now())::float, extract(epoch from max(lease_until) - now())::float
  from outbox.shard"""
"""The seconds that are left of the first and of the last lease to end."""
POSITION = """
insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id)
select sink, shards, epochs, a_seq, a_snapshot, a_next, last_id from outbox.progress order by seq desc limit 1
returning seq"""
DEAD = """
insert into outbox.shard (sink, shard)
select 'none-' || n, m from generate_series(1, {}) n cross join generate_series(0, 63) m"""
"""Rolled back, it leaves 64 dead versions for each of these sinks."""
ENTRIES = "select {}".format(
    ", ".join(
        f"pg_stat_get_xact_tuples_returned('outbox.{index}'::regclass)"
        for index in ("shard_pkey", "shard_lease", "progress_pkey")
    )
)
"""The entries that this transaction has read of these indexes, those of dead versions too."""


@contextmanager
def held_snapshot(database: Database) -> Generator[None]:
    """Hold a snapshot, from before everything that happens in the block."""
    with database.connect() as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select pg_current_xact_id()")
        yield


@pytest.fixture
async def owner(database: Database) -> AsyncGenerator[Ledger]:
    """Yield a relay that owns all shards of a sink, for a minute."""
    async with ledger(database) as books:
        await books.register((SINK, ["*"], "now"))
        await books.own(SINK)
        yield books


def held(books: Ledger) -> list[tuple[str, int, int]]:
    """Return what the relay holds: sink, shard and epoch."""
    return [(SINK, shard, epoch) for shard, epoch in books.epochs[SINK].items()]


async def advance(books: Ledger, positions: int) -> None:
    """Write positions of all shards, and trim the ledger."""
    for _ in range(positions):
        await books.catch_up(SINK)
    while await books.store.trim_progress(1000):
        pass


# -- positions ------------------------------------------------------------------------------------------------------


async def test_readers_of_the_ledger_begin_behind_what_was_trimmed(owner: Ledger) -> None:
    """The entries of an index count the work, also for dead versions."""
    with held_snapshot(owner.database):
        await advance(owner, 300)
        before = owner.query(STANDING)
        assert owner.query(ANY_SIZE) == [(False,)]
        assert owner.query(START) == owner.query("select min(seq) from outbox.progress")
        assert owner.query(STANDING) == before
        await advance(owner, 2)
        for name, parameters in {
            "positions": {"sink": SINK, "shards": list(range(SHARDS)), "server": None},
            "trim_progress": {"most": 1000},
            "missing_positions": {},
            "figures_of_sinks": {},
            "floor": {},
            "trim_routes": {},
            "trim_former_positions": {"most": 1000},
        }.items():
            with owner.database.connect() as connection:
                connection.execute(statements()[name], parameters)
                [(_, _, entries)] = connection.execute(ENTRIES.encode()).fetchall()
            assert entries < 30, name
        assert len(await owner.store.positions(SINK, range(SHARDS))) == SHARDS
    before = owner.query(START)
    assert owner.query(ANY_SIZE) == [(False,)]
    assert owner.query(START) > before


async def test_a_ledger_does_not_start_behind_a_position_that_is_not_committed(owner: Ledger) -> None:
    """Goes red without the lock: no reader would find the position that was begun first."""
    with owner.database.connect() as slow:
        [(begun,)] = slow.execute(POSITION.encode()).fetchall()
        await advance(owner, 3)
        assert owner.query(ANY_SIZE) == [(True,)]
        assert owner.query(START) == [(0,)]
    assert owner.query(ANY_SIZE) == [(False,)]
    assert owner.query(START) == [(begun,)]


async def test_the_start_of_a_ledger_waits_for_no_more_than_a_moment(owner: Ledger) -> None:
    """It is raised beside a reader, and another time if another session has locked the sink or the ledger."""
    await advance(owner, 3)
    with owner.database.connect() as other:
        other.execute("select from outbox.sink where name = 's' for update")
        assert owner.query(ANY_SIZE) == [(True,)]
    with owner.database.connect() as other:
        other.execute("lock table outbox.progress in share update exclusive mode")  # as VACUUM does
        assert owner.query(ANY_SIZE) == [(True,)]
        assert owner.query(START) == [(0,)]
    with owner.database.connect() as other:
        other.execute("lock table outbox.progress in access share mode")
        assert owner.query(ANY_SIZE) == [(False,)]
    assert owner.query(START) == owner.query("select min(seq) from outbox.progress")


@pytest.mark.parametrize("lock", ["share row exclusive mode", "access exclusive mode"])
async def test_the_start_of_a_ledger_waits_for_no_change_of_sinks(owner: Ledger, lock: str) -> None:
    """Goes red when it waits with the ledger locked: every settlement would wait with it."""
    await advance(owner, 3)
    with owner.database.connect() as other, owner.database.connect() as connection:
        other.execute(f"lock table outbox.sink in {lock}".encode())
        connection.execute("set statement_timeout = '5s'")
        assert connection.execute(ANY_SIZE.encode()).fetchall() == [(True,)]


async def test_every_ledger_has_its_turn(owner: Ledger) -> None:
    """Also beside one that is always due, and one whose sink is locked."""
    await owner.register((SINK, ["*"], "now"), (LONG, ["*"], "now"), ("z", ["*"], "now"))
    await owner.own(LONG)
    await owner.own("z")
    for sink in (SINK, LONG, "z"):
        for _ in range(3):
            await owner.catch_up(sink)
    while await owner.store.trim_progress(1000):
        pass
    with owner.database.connect() as other:
        other.execute("select from outbox.sink where name = %s for update", [LONG])
        raised = "select name from outbox.sink where ledger_start > 0 order by name"
        while owner.query(raised) != [("s",), ("z",)]:  # a call ends after 20 ms, whatever is left
            assert owner.query(ANY_SIZE) == [(True,)]
    while owner.query(ANY_SIZE) != [(False,)]:
        pass
    assert owner.query(raised) == [(LONG,), ("s",), ("z",)]


@pytest.mark.slow
async def test_a_raise_behind_a_gap_of_the_sequence_is_bounded(owner: Ledger) -> None:
    """Goes red when steps grow without a limit while they find nothing: one would pass by all that follows.

    Nor does the sink keep another one waiting while a session has locked it.
    """
    await owner.register((SINK, ["*"], "now"), ("z", ["*"], "now"))
    await owner.own("z")
    owner.query("select setval(pg_get_serial_sequence('outbox.progress', 'seq'), 5000000)")
    rows = 500_000
    with held_snapshot(owner.database):
        owner.do(
            "insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id) "
            f"select 's', '{{0}}', '{{0}}', 0, '3:3:', 3, 0 from generate_series(1, {rows})"
        )
        await advance(owner, 1)
        owner.do("delete from outbox.progress where epochs = '{0}'")
        await owner.catch_up("z")
        await advance(owner, 0)
        with owner.database.connect() as other:
            other.execute("select from outbox.sink where name = 's' for update")
            assert owner.query(ANY_SIZE) == [(True,)]
        assert owner.query("select name from outbox.sink where ledger_start > 0") == [("z",)]
        with owner.database.connect() as connection:
            assert connection.execute(ANY_SIZE.encode()).fetchall() == [(True,)]
            [(_, _, entries)] = connection.execute(ENTRIES.encode()).fetchall()
        assert entries < rows


async def test_a_sink_without_positions_keeps_its_start(owner: Ledger) -> None:
    """Goes red when the start rises with nothing to find: a seek would write positions below it."""
    await owner.register(("other", ["*"], "now"))
    await advance(owner, 3)
    owner.do("delete from outbox.progress where sink = 'other'")
    while owner.query(ANY_SIZE) == [(True,)]:
        pass
    assert owner.query("select ledger_start from outbox.sink where name = 'other'") == [(0,)]


async def test_a_small_ledger_is_not_locked(owner: Ledger) -> None:
    await advance(owner, 3)
    assert not await owner.store.raise_ledger_starts()
    assert owner.query(START) == [(0,)]


async def test_a_start_is_raised_only_by_what_was_committed_before_the_lock(owner: Ledger) -> None:
    with owner.database.connect() as connection:
        connection.execute("set transaction isolation level repeatable read")
        with pytest.raises(psycopg.Error, match="must see what is committed before it has its locks"):
            connection.execute(ANY_SIZE.encode())


async def test_a_rebase_writes_positions_behind_every_start(owner: Ledger) -> None:
    """Goes red when it goes by the positions that are left: after a partial restore, or TRUNCATE, none would count."""
    await advance(owner, 3)
    owner.query(ANY_SIZE)
    owner.do("truncate outbox.progress restart identity")
    owner.query("select outbox.rebase()")
    assert owner.query("select count(*) from outbox.standing") == [(SHARDS,)]


async def test_a_start_is_raised_over_any_distance_unless_sessions_keep_numbers(owner: Ledger) -> None:
    owner.query("select setval(pg_get_serial_sequence('outbox.progress', 'seq'), 500000000)")
    await advance(owner, 2)
    while owner.query(ANY_SIZE) == [(True,)]:
        pass
    assert owner.query(START) == owner.query("select min(seq) from outbox.progress")
    owner.do("alter sequence outbox.progress_seq_seq cache 10")
    await advance(owner, 2)
    assert owner.query(ANY_SIZE) == [(False,)]


async def test_a_renamed_sink_keeps_its_positions(owner: Ledger) -> None:
    await advance(owner, 3)
    owner.query(ANY_SIZE)
    before = owner.query("select shard, a_seq, last_id from outbox.standing order by shard")
    lapse(owner.database)
    owner.query("select outbox.rename_sink('s', 'other', null, null)")
    after = "select shard, a_seq, last_id from outbox.standing where sink = 'other' order by shard"
    assert owner.query(after) == before
    owner.query("select outbox.drop_sink('other', true, 1000, null, null)")
    await owner.register(("other", ["*"], "now"))
    assert owner.query("select count(*) from outbox.standing where sink = 'other'") == [(SHARDS,)]


# -- leases ---------------------------------------------------------------------------------------------------------


async def test_renewals_and_questions_for_free_shards_pass_by_no_old_version(owner: Ledger) -> None:
    """Also once the planner knows the table: the index of the shards is smaller than that of the leases."""
    await owner.register((SINK, ["*"], "now"), (LONG, ["*"], "now"))
    await owner.own(LONG)
    shards = [(sink, shard, epoch) for sink in (SINK, LONG) for shard, epoch in owner.epochs[sink].items()]
    with held_snapshot(owner.database):
        for _ in range(60):
            owner.do("update outbox.shard set lease_until = now() - interval '1 minute' returning 1")
        owner.do("update outbox.shard set lease_until = now() returning 1")
        for statistics in ("", "vacuum analyze outbox.shard"):
            if statistics:
                with owner.database.connect(autocommit=True) as connection:
                    connection.execute(statistics.encode())
            with owner.database.connect() as connection:
                sinks, numbers, epochs = map(list, zip(*shards, strict=True))
                parameters = {"owner": owner.relay, "sinks": sinks, "shards": numbers, "epochs": epochs, "lease": 15.0}
                assert len(connection.execute(statements()["renew_shards"], parameters).fetchall()) == 2 * SHARDS
                assert connection.execute(statements()["sinks"], {"sinks": [SINK]}).fetchall()[0][5] == 0
                connection.execute(statements()["figures_of_sinks"])
                [(by_shard, by_lease, _)] = connection.execute(ENTRIES.encode()).fetchall()
            assert by_shard == 0
            assert by_lease <= 32 * SHARDS


async def test_leases_of_a_clock_that_was_ahead_are_found_by_their_end(owner: Ledger) -> None:
    for _ in range(30):
        owner.do("update outbox.shard set crashes = 0, lease_until = now() + interval '5 seconds' returning 1")
    owner.do("update outbox.shard set lease_until = now() + interval '1 hour' where shard < 10 returning 1")
    with owner.database.connect() as connection:
        assert connection.execute(statements()["cap_times"], {"most": 600.0}).fetchall() == [(10,)]


async def test_a_lease_that_ended_long_ago_is_renewed_if_no_other_relay_has_claimed_it(owner: Ledger) -> None:
    owner.do("update outbox.shard set lease_until = now() - interval '1 day' where shard < 10 returning 1")
    leases = await owner.store.renew_shards(owner.relay, held(owner), 60.0, 5.0)
    assert leases.keys() == set(held(owner))
    other = Ledger(owner.database, owner.store)
    owner.do("update outbox.shard set lease_until = now() - interval '1 day' where shard < 10 returning 1")
    assert len(await other.own(SINK)) == 10
    leases = await owner.store.renew_shards(owner.relay, held(owner), 60.0, 5.0)
    assert {shard for _, shard, _ in leases} == set(range(10, SHARDS))


async def test_leases_last_longer_while_there_are_many_dead_versions(owner: Ledger) -> None:
    """They are renewed more rarely, and a relay counts on none of it."""
    owner.do("alter table outbox.shard set (autovacuum_enabled = off)")
    with owner.database.connect() as connection:
        connection.execute(DEAD.format(250_000 // SHARDS).encode())
        connection.rollback()

    async def counted() -> bool:
        return owner.query("select outbox_internal.lease_term(40) > 49") == [(True,)]

    await auntil(counted, seconds=60, what="the server has counted the dead versions")
    owner.do("update outbox.shard set lease_until = now() returning 1")
    leases = await owner.store.renew_shards(owner.relay, held(owner), 40.0, 60.0)
    assert leases.keys() == set(held(owner))
    assert all(45 < seconds < 55 for seconds in leases.values())
    assert owner.query("select outbox_internal.lease_term(400), outbox_internal.lease_term(59)") == [(400, 60)]
    versions = "select xmin::text from outbox.shard order by shard"
    before = owner.query(versions)
    owner.do("update outbox.shard set lease_until = now() + interval '35 seconds' where shard < 10 returning 1")
    owner.do("update outbox.shard set lease_until = now() + interval '1 year' where shard = 10 returning 1")
    leases = await owner.store.renew_shards(owner.relay, held(owner), 40.0, 60.0)
    assert leases.keys() == set(held(owner))
    assert all(45 < seconds < 55 for seconds in leases.values())
    assert owner.query(versions)[11:] == before[11:]
    owner.do("update outbox.shard set lease_until = now() - interval '1 day' where shard < 10 returning 1")
    leases = await owner.store.renew_shards(owner.relay, held(owner), 40.0, 60.0)
    assert {shard for _, shard, _ in leases} == set(range(10, SHARDS))


async def test_a_late_renewal_leaves_a_lease_for_as_long_as_its_relay_believes(owner: Ledger) -> None:
    """Goes red when leases are renewed for less than was asked for."""
    owner.do("update outbox.shard set lease_until = now() + interval '50 seconds' returning 1")
    assert all(
        seconds > 14 for seconds in (await owner.store.renew_shards(owner.relay, held(owner), 15.0, 5.0)).values()
    )
    [(first, _)] = owner.query(LEFT)
    assert first > 14


async def test_hostile_durations_of_leases(owner: Ledger) -> None:
    for lease, most in {"'NaN'": 600, "'Infinity'": 600, "1e300": 600, "-1": 0, "null": 0}.items():
        [(seconds,)] = query(
            owner.database,
            "select r.lease_seconds from outbox_internal.renew_shards("
            f"%s, array['s'], array[0::smallint], array[%s::bigint], {lease}::float) r",
            owner.relay,
            owner.epochs[SINK][0],
        )
        assert most - 5 < seconds <= most


async def test_positions_that_are_read_are_those_that_were_written(owner: Ledger) -> None:
    tick = await owner.tick()
    await owner.place(SINK, Position(tick), range(10))
    found = await owner.store.positions(SINK, range(10))
    assert {shard: position.a.seq for shard, position in found.items()} == dict.fromkeys(range(10), tick.seq)
