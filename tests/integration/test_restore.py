"""Drills: a log that is restored or moved. Each ends with nothing lost, whatever was emitted meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres.migrations import migrate, rebase
from outbox_relay.workbench.embedded.account import unprivileged
from tests.support.database import Database
from tests.support.ledger import ledger
from tests.support.lock_waits import begun, waiting
from tests.support.memory_sink import MemorySink
from tests.support.postgres import PostgresServer
from tests.support.relay_harness import LOST, CountingStore, running, spec
from tests.support.sink_actions import register
from tests.support.wait import becomes, until

AHEAD = 3000
"""Transactions by which the first cluster of a drill is ahead of a new one."""


def emit(database: Database, count: int = 3) -> list[str]:
    """Emit events, each in a transaction of its own; returns their uids."""
    uids: list[str] = []
    for n in range(count):
        with database.connect() as connection:
            row = connection.execute("select outbox.emit('t', '{}', key => %s)::text", (f"k{n}",)).fetchone()
            assert row
            uids.append(row[0])
    return uids


def burn(database: Database, transactions: int) -> None:
    """Use up transaction numbers."""
    with database.connect(autocommit=True) as connection:
        loop = f"for i in 1..{transactions} loop perform pg_current_xact_id(); commit; end loop;"
        connection.execute(f"do $$ begin {loop} end $$".encode())


def do(database: Database, statement: str) -> None:
    """Run a statement in a transaction of its own."""
    with database.connect(autocommit=True) as connection:
        connection.execute(statement.encode())


def relayed(database: Database, wanted: list[str], *, start: str = "beginning", name: str = "s") -> list[str]:
    """Run a relay until all of `wanted` was delivered and every shard stands at the end; returns the uids delivered."""
    sink = MemorySink()
    with running(database.dsn, (spec(name, start=start), sink), lease_seconds=3) as harness:

        def fact() -> bool:
            return not set(wanted) - {event.uid for event in sink.delivered}

        until(fact, seconds=30, what=f"{len(wanted)} events are delivered")
        harness.settled()
        harness.stop()
    return [event.uid for event in sink.delivered]


def refused(database: Database) -> str:
    """Return why no relay may run on a database."""
    store = CountingStore(database.dsn)
    store.open()
    try:
        with pytest.raises(DatabaseUnusable, match="rebase") as error:
            store.floor()
        with pytest.raises(DatabaseUnusable, match="rebase"):
            store.tick()
    finally:
        store.close()
    return str(error.value)


def backlog(database: Database) -> tuple[int, bool]:
    """Return the backlog of sink ``s``."""
    with ledger(database) as books:
        return books.query("select events, exact from outbox_internal.backlog('s', null, 10000, 5.0)")[0]


@contextmanager
def shop(server: PostgresServer, name: str = "shop") -> Generator[Database]:
    """Yield a new database with the schema."""
    server.create_database(name)
    migrate(server.dsn(name))
    yield Database(server, name)


def dump_and_restore(source: Database, server: PostgresServer, name: str = "restored") -> Database:
    """Restore a dump of a database into another cluster."""
    file = source.server.directory / "dump.sql"
    source.server.run("pg_dump", "-f", file, source.dsn)
    # PostgreSQL from Maven has no pg_dump. That of a later version names a setting that this server does not know.
    file.write_text(file.read_text().replace("SET transaction_timeout = 0;\n", ""))
    server.create_database(name)
    server.run("psql", "-q", "-v", "ON_ERROR_STOP=1", "-f", file, server.dsn(name))
    do(Database(server, name), "delete from outbox.relay")
    return Database(server, name)


@pytest.mark.fence("positions of another cluster are applied to a restored log")
@pytest.mark.parametrize(
    "caught_up",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["its numbers are ahead", "the new cluster has caught up"],
)
def test_a_dump_restored_into_another_cluster_loses_nothing(own_postgres: PostgresServer, caught_up: bool) -> None:
    with shop(own_postgres) as old, PostgresServer() as server:
        burn(old, AHEAD)
        before = emit(old)
        assert relayed(old, before) == before
        waiting = emit(old)
        new = dump_and_restore(old, server)
        between = emit(new)
        assert "another cluster" in refused(new)
        if caught_up:
            burn(new, 4 * AHEAD)
            between += emit(new)
            assert "another cluster" in refused(new)
        rebase(new.dsn)
        assert backlog(new) == (len(waiting + between), True)
        assert relayed(new, waiting + between) == waiting + between, "what was settled is not repeated"
        after = emit(new)
        assert relayed(new, after) == after
        every = [*before, *waiting, *between, *after]
        assert sorted(relayed(new, every, name="later")) == sorted(every), "a sink from the beginning"


@pytest.mark.fence("an emitter has taken an id before the log is rebased and commits after it")
def test_an_event_that_is_emitted_while_the_log_is_rebased_is_not_lost(database: Database) -> None:
    register(database, "s")
    with database.connect() as reader, database.connect() as emitter, ThreadPoolExecutor(1) as pool:
        reader.execute("select from outbox.event")
        with begun(database, lambda connection: connection.execute("select outbox.rebase()")) as rebased:
            emitted = pool.submit(lambda: emitter.execute("select outbox.emit('t', '{}')::text").fetchone())
            until(
                lambda: waiting(database, f"pid = {emitter.info.backend_pid}"), seconds=30, what="it waits for a lock"
            )
            reader.commit()
            rebased.result(30)
        row = emitted.result(30)
        assert row
        later = emit(database)
        assert relayed(database, later) == later
        emitter.commit()
    assert relayed(database, [row[0]]) == [row[0]]


@pytest.mark.fence("data is moved into a schema that migrate made, whose own row names the new cluster")
@pytest.mark.slow
@pytest.mark.parametrize("caught_up", [False, True], ids=["its numbers are ahead", "the new cluster has caught up"])
@pytest.mark.parametrize("options", [(), ("--disable-triggers",)], ids=["", "without triggers"])
def test_data_that_is_moved_into_a_migrated_schema_loses_nothing(
    own_postgres: PostgresServer, caught_up: bool, options: tuple[str, ...]
) -> None:
    """Only the data is dumped: ``outbox.meta`` has its row already, which names the new cluster."""
    with shop(own_postgres) as old, PostgresServer() as server, shop(server, "moved") as new:
        burn(old, AHEAD)
        before = emit(old)
        assert relayed(old, before) == before
        waiting = emit(old)
        file = own_postgres.directory / "data.sql"
        own_postgres.run("pg_dump", "--data-only", "-n", "outbox", *options, "-f", file, old.dsn)
        server.run("psql", "-q", "-f", file, new.dsn)
        do(new, "delete from outbox.relay")
        between = emit(new)
        if caught_up:
            burn(new, 4 * AHEAD)
            between += emit(new)
        store = CountingStore(new.dsn)
        store.open()
        with pytest.raises(DatabaseUnusable, match="another cluster"):
            store.floor()
        if not options:
            with pytest.raises(DatabaseUnusable, match="another cluster"):
                store.tick()
        store.close()
        rebase(new.dsn)
        assert relayed(new, waiting + between) == waiting + between, "what was settled is not repeated"
        after = emit(new)
        assert relayed(new, after) == after


@pytest.mark.slow  # has a server of its own
def test_events_of_a_sequence_that_was_left_behind_get_new_ids(own_postgres: PostgresServer) -> None:
    """As logical replication leaves it: rows are copied, sequences are not."""
    with shop(own_postgres) as old, PostgresServer() as server:
        burn(old, AHEAD)
        before = emit(old, 6)
        assert relayed(old, before) == before
        do(old, "delete from outbox.event where id = 5")  # a number that no event has, as after a rollback
        waiting = emit(old, 2)
        new = dump_and_restore(old, server)
        do(new, "select setval('outbox.event_id_seq', 2), setval('outbox.progress_seq_seq', 1)")
        between = emit(new, 4)
        with new.connect() as connection:
            connection.execute("savepoint s")
            row = connection.execute("select outbox.emit('t', '{}', key => 'savepoint')::text").fetchone()
            assert row
            between.append(row[0])
        rebase(new.dsn)
        with new.connect() as connection:
            ids = connection.execute("select id from outbox.event").fetchall()
        assert len(ids) == len(set(ids))
        got = relayed(new, waiting + between)
        assert set(got) >= set(waiting + between)
        after = emit(new)
        assert relayed(new, after) == after


@pytest.mark.slow
def test_a_transaction_that_was_late_for_a_position_is_read_after_a_restore(own_postgres: PostgresServer) -> None:
    with shop(own_postgres) as old, PostgresServer() as server:
        burn(old, AHEAD)
        with old.connect() as late:
            row = late.execute("select outbox.emit('t', '{}', key => 'late')::text").fetchone()
            assert row
            seen = emit(old)
            assert relayed(old, seen) == seen
            late.commit()
        new = dump_and_restore(old, server)
        between = emit(new)
        rebase(new.dsn)
        assert set(relayed(new, [row[0], *between])) >= {row[0], *between}


def mark_as_discarded(database: Database, uid: str) -> None:
    """Discard an event of sink ``s``, whose position has passed it."""
    do(database, "insert into outbox.discarded (sink, id, uid, reason) "
                 f"select 's', id, uid, 'test' from outbox.event where uid = '{uid}'")  # fmt: skip


@pytest.mark.fence("an event that was discarded is read again, as after a restore")
@pytest.mark.slow
def test_what_was_discarded_is_not_delivered_after_a_restore(own_postgres: PostgresServer) -> None:
    """The position goes back before an event that was late for it, and so before what was settled behind that."""
    with shop(own_postgres) as old, PostgresServer() as server:
        with old.connect() as late:
            row = late.execute("select outbox.emit('t', '{}', key => 'k1')::text").fetchone()
            assert row
            seen = emit(old) + emit(old)
            assert relayed(old, seen) == seen
            mark_as_discarded(old, seen[1])
            late.commit()
        new = dump_and_restore(old, server)
        rebase(new.dsn)
        again = [row[0], seen[0], *seen[2:]]
        assert relayed(new, again) == again, "all but the discarded event is delivered again"


@pytest.mark.thorough
def test_point_in_time_recovery_needs_no_rebase() -> None:
    """A base backup and its WAL archive, recovered up to a name, in the same numbering."""
    account = unprivileged()
    archive = account.new_directory("outbox-archive-")
    command = f"cp %p {archive}/%f"
    with PostgresServer({"archive_mode": "on", "archive_command": command}) as server, shop(server) as database:
        burn(database, AHEAD)
        before = emit(database)
        assert relayed(database, before) == before
        backup = server.directory / "backup"
        server.run("pg_basebackup", "-D", backup, "-c", "fast", "-d", server.dsn())
        kept = emit(database)
        do(database, "select pg_create_restore_point('here')")
        gone = emit(database)
        do(database, "select pg_switch_wal()")
        recover(server, backup, archive)
        between = emit(database)
        got = relayed(database, kept + between)
        assert got == kept + between
        assert not set(gone) & set(got)
    shutil.rmtree(archive)


def recover(server: PostgresServer, backup: Path, archive: Path) -> None:
    """Go on from a base backup and the archive, up to the restore point ``here``."""
    with server.connect() as connection:
        row = connection.execute("select pg_walfile_name(pg_current_wal_lsn() - 1)").fetchone()
        assert row
    until((archive / row[0]).exists, seconds=30, what="the WAL is archived")
    server.stop()
    shutil.rmtree(server.data)
    backup.rename(server.data)
    with (server.data / "postgresql.auto.conf").open("a") as file:
        file.write(f"restore_command = 'cp {archive}/%f %p'\nrecovery_target_name = 'here'\n")
        file.write("recovery_target_action = 'promote'\n")
    (server.data / "recovery.signal").touch()
    server.start()
    with server.connect() as connection:
        until(
            lambda: connection.execute("select not pg_is_in_recovery()").fetchone() == (True,),
            seconds=30,
            what="the server has left recovery",
        )


@contextmanager
def backed_up(server: PostgresServer) -> Generator[Callable[[], None]]:
    """Take a base backup, and give a function that puts it in the place of the data."""
    backup = server.directory / "backup"
    server.run("pg_basebackup", "-D", backup, "-c", "fast", "-X", "fetch", "-d", server.dsn())

    def restore() -> None:
        server.stop("fast")
        shutil.rmtree(server.data)
        backup.rename(server.data)
        server.start()

    yield restore


EXPECTED = {*LOST, "reload", "lease_lost"}
"""Why sessions end when a backup takes registrations and leases back: which of them is noticed first is open."""


@pytest.mark.parametrize("start", ["beginning", "now"])
def test_sinks_whose_registration_a_restore_takes_back_are_registered_again(start: str) -> None:
    """Goes red when the relay waits for a restart, which passes over the events emitted meanwhile.

    The first sinks of a database begin at the beginning together, and do so again, though they are registered one by
    one: an event of the backup that one of them has not delivered is not lost.
    """
    with PostgresServer() as server, shop(server) as database:
        if start == "now":
            register(database, "other")
        kept = emit(database)
        with backed_up(server) as restore:
            sinks = {name: MemorySink() for name in ("mail", "bill")}
            specs = [(spec(name, start=None), sink) for name, sink in sinks.items()]
            with running(database.dsn, *specs, lease_seconds=3, expects=EXPECTED) as harness:
                harness.owns_all()
                before = emit(database)
                for sink in sinks.values():
                    has_arrived(sink, before)
                harness.settled()
                database.close()
                restore()
                names = "select from outbox.sink where name in ('mail', 'bill')"
                becomes(lambda: len(database.run(names)) == 2, "both are registered again")
                after = emit(database)
                for sink in sinks.values():
                    has_arrived(sink, after)
                harness.settled()
    wanted = {"beginning": [*kept, *before, *kept, *after], "now": [*before, *after]}[start]
    assert {name: [event.uid for event in sink.delivered] for name, sink in sinks.items()} == dict.fromkeys(
        sinks, wanted
    )


@pytest.mark.fence("a relay registers a sink again that a person removed, or that others have registered")
def test_a_sink_whose_row_is_deleted_by_hand_stays_away_after_a_restart_too(
    own_postgres: PostgresServer,
) -> None:
    expects = {"lease_lost", *EXPECTED}
    with (
        shop(own_postgres) as database,
        running(database.dsn, (spec("s"), MemorySink()), lease_seconds=3, expects=expects) as harness,
    ):
        harness.owns_all()
        registration = harness.loops[0].registration
        do(database, "delete from outbox.sink")
        becomes(lambda: registration.seen_in is None, "the relay knows it")
        database.close()
        own_postgres.stop("fast")
        own_postgres.start()
        known_at = harness.keeper.answered_at
        becomes(lambda: harness.keeper.answered_at > known_at + 2, "it looks again")
        assert database.run("select from outbox.sink") == []


def has_arrived(sink: MemorySink, uids: list[str]) -> None:
    """Wait until the sink has all of these events."""
    becomes(lambda: not set(uids) - {event.uid for event in sink.delivered}, f"{len(uids)} events are delivered")
