"""Statements that relays repeat, while another session holds a snapshot and VACUUM removes no dead version."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import psycopg
import pytest

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.database import statements
from tests.support.database import Database
from tests.support.ledger import Ledger, ledger
from tests.support.wait import until

SINK = "s"
LONG = "a_sink_with_a_long_name"
ANY_SIZE = "select outbox_internal.raise_ledger_starts(1, 0)"
START = "select ledger_start from outbox.sink where name = 's'"
STANDING = "select * from outbox.standing order by sink, shard"
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
def owner(database: Database) -> Generator[Ledger]:
    """Yield a relay that owns all shards of a sink, for a minute."""
    with ledger(database) as books:
        books.register((SINK, ["*"], "now"))
        books.own(SINK)
        yield books


def held(books: Ledger) -> list[tuple[str, int, int]]:
    """Return what the relay holds: sink, shard and epoch."""
    return [(SINK, shard, epoch) for shard, epoch in books.epochs[SINK].items()]


def advance(books: Ledger, positions: int) -> None:
    """Write positions of all shards, and trim the ledger."""
    for _ in range(positions):
        books.catch_up(SINK)
    while books.store.value("trim_progress", {"most": 1000}):
        pass


# -- positions ------------------------------------------------------------------------------------------------------


def test_readers_of_the_ledger_begin_behind_what_was_trimmed(owner: Ledger) -> None:
    """The entries of an index count the work, also for dead versions."""
    with held_snapshot(owner.database):
        advance(owner, 300)
        before = owner.query(STANDING)
        assert owner.query(ANY_SIZE) == [(False,)]
        assert owner.query(START) == owner.query("select min(seq) from outbox.progress")
        assert owner.query(STANDING) == before
        advance(owner, 2)
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
        assert len(owner.store.positions(SINK, range(SHARDS))) == SHARDS
    before = owner.query(START)
    assert owner.query(ANY_SIZE) == [(False,)]
    assert owner.query(START) > before


@pytest.mark.fence("the ledger of a sink starts behind a position that is committed later")
def test_a_ledger_does_not_start_behind_a_position_that_is_not_committed(owner: Ledger) -> None:
    """Goes red without the lock: no reader would find the position that was begun first."""
    with owner.database.connect() as slow:
        [(begun,)] = slow.execute(POSITION.encode()).fetchall()
        advance(owner, 3)
        assert owner.query(ANY_SIZE) == [(True,)]
        assert owner.query(START) == [(0,)]
    assert owner.query(ANY_SIZE) == [(False,)]
    assert owner.query(START) == [(begun,)]


def test_the_start_of_a_ledger_waits_for_no_more_than_a_moment(owner: Ledger) -> None:
    """It is raised beside a reader, and another time if another session has locked the sink or the ledger."""
    advance(owner, 3)
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
def test_the_start_of_a_ledger_waits_for_no_change_of_sinks(owner: Ledger, lock: str) -> None:
    """Goes red when it waits with the ledger locked: every settlement would wait with it."""
    advance(owner, 3)
    with owner.database.connect() as other, owner.database.connect() as connection:
        other.execute(f"lock table outbox.sink in {lock}".encode())
        connection.execute("set statement_timeout = '5s'")
        assert connection.execute(ANY_SIZE.encode()).fetchall() == [(True,)]


def test_a_start_is_raised_only_by_what_was_committed_before_the_lock(owner: Ledger) -> None:
    with owner.database.connect() as connection:
        connection.execute("set transaction isolation level repeatable read")
        with pytest.raises(psycopg.Error, match="must see what is committed before it has its locks"):
            connection.execute(ANY_SIZE.encode())


@pytest.mark.fence("the ledger of a sink starts behind a position that is committed later")
def test_a_rebase_writes_positions_behind_every_start(owner: Ledger) -> None:
    """Goes red when it goes by the positions that are left: after a partial restore, or TRUNCATE, none would count."""
    advance(owner, 3)
    owner.query(ANY_SIZE)
    owner.do("truncate outbox.progress restart identity")
    owner.query("select outbox.rebase()")
    assert owner.query("select count(*) from outbox.standing") == [(SHARDS,)]


def test_a_start_is_raised_over_any_distance_unless_sessions_keep_numbers(owner: Ledger) -> None:
    owner.query("select setval(pg_get_serial_sequence('outbox.progress', 'seq'), 500000000)")
    advance(owner, 2)
    while owner.query(ANY_SIZE) == [(True,)]:
        pass
    assert owner.query(START) == owner.query("select min(seq) from outbox.progress")
    owner.do("alter sequence outbox.progress_seq_seq cache 10")
    advance(owner, 2)
    assert owner.query(ANY_SIZE) == [(False,)]


# -- leases ---------------------------------------------------------------------------------------------------------


def test_renewals_and_questions_for_free_shards_pass_by_no_old_version(owner: Ledger) -> None:
    """Also once the planner knows the table: the index of the shards is smaller than that of the leases."""
    owner.register((SINK, ["*"], "now"), (LONG, ["*"], "now"))
    owner.own(LONG)
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


def test_leases_of_a_clock_that_was_ahead_are_found_by_their_end(owner: Ledger) -> None:
    for _ in range(30):
        owner.do("update outbox.shard set crashes = 0, lease_until = now() + interval '5 seconds' returning 1")
    owner.do("update outbox.shard set lease_until = now() + interval '1 hour' where shard < 10 returning 1")
    with owner.database.connect() as connection:
        assert connection.execute(statements()["cap_times"], {"most": 600.0}).fetchall() == [(10,)]


def test_a_lease_that_ended_long_ago_is_renewed_if_no_other_relay_has_claimed_it(owner: Ledger) -> None:
    owner.do("update outbox.shard set lease_until = now() - interval '1 day' where shard < 10 returning 1")
    leases = owner.store.renew_shards(owner.relay, held(owner), 60.0, 5.0)
    assert leases.keys() == set(held(owner))
    other = Ledger(owner.database, owner.store)
    owner.do("update outbox.shard set lease_until = now() - interval '1 day' where shard < 10 returning 1")
    assert len(other.own(SINK)) == 10
    leases = owner.store.renew_shards(owner.relay, held(owner), 60.0, 5.0)
    assert {shard for _, shard, _ in leases} == set(range(10, SHARDS))


def test_leases_last_longer_while_there_are_many_dead_versions(owner: Ledger) -> None:
    """They are renewed more rarely, and a relay counts on none of it."""
    owner.do("alter table outbox.shard set (autovacuum_enabled = off)")
    with owner.database.connect() as connection:
        connection.execute(DEAD.format(250_000 // SHARDS).encode())
        connection.rollback()

    def counted() -> bool:
        return owner.query("select outbox_internal.lease_term(40) > 49") == [(True,)]

    until(counted, seconds=60, what="the server has counted the dead versions")
    owner.do("update outbox.shard set lease_until = now() returning 1")
    leases = owner.store.renew_shards(owner.relay, held(owner), 40.0, 60.0)
    assert leases.keys() == set(held(owner))
    assert all(45 < seconds < 55 for seconds in leases.values())
    assert owner.query("select outbox_internal.lease_term(400), outbox_internal.lease_term(59)") == [(400, 60)]
    versions = "select xmin::text from outbox.shard order by shard"
    before = owner.query(versions)
    owner.do("update outbox.shard set lease_until = now() + interval '35 seconds' where shard < 10 returning 1")
    owner.do("update outbox.shard set lease_until = now() + interval '1 year' where shard = 10 returning 1")
    leases = owner.store.renew_shards(owner.relay, held(owner), 40.0, 60.0)
    assert leases.keys() == set(held(owner))
    assert all(45 < seconds < 55 for seconds in leases.values())
    assert owner.query(versions)[11:] == before[11:]
    owner.do("update outbox.shard set lease_until = now() - interval '1 day' where shard < 10 returning 1")
    leases = owner.store.renew_shards(owner.relay, held(owner), 40.0, 60.0)
    assert {shard for _, shard, _ in leases} == set(range(10, SHARDS))
