"""Locks are taken in one order: what changes sinks, migrates and settles at the same time waits and does not fail.

Each test holds one lock in between, so that the statements meet where they would otherwise meet by chance.
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb

from outbox_relay.postgres.database import statements
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.schema import SCHEMA_VERSION
from tests.support.database import Database
from tests.support.lock_waits import SECONDS, begun, waiting
from tests.support.schemas import next_schema
from tests.support.wait import until

Connection = psycopg.Connection[Any]
SQL = statements()
SINK, OWNER, LEASE = "s", UUID(int=1), uuid4()
REGISTER = "select generation from outbox_internal.register_sinks(%s, 0, '3:3:', 3)"


@contextmanager
def migrating(database: Database, folder: Path) -> Generator[Future[Any]]:
    """Run a migration in a thread, which waits for a lock when the block begins."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(migrate, database.dsn, folder=folder)
        found = "application_name like '% migrate'"
        until(lambda: done.done() or waiting(database, found), seconds=SECONDS, what="migrate waits for a lock")
        yield done


def owned_sink(connection: Connection) -> None:
    """Register a sink whose shards have an owner, at epoch 1."""
    connection.execute("insert into outbox.sink (name, patterns, start) values (%s, '{*}', 'now')", (SINK,))
    connection.execute(
        "insert into outbox.shard (sink, shard, owner, epoch) select %s, n, %s, 1 from generate_series(0, 63) n",
        (SINK, OWNER),
    )
    connection.execute("insert into outbox.session values (%s, %s, now() + interval '1 hour')", (SINK, OWNER))


def lock_shard(connection: Connection, shard: int) -> None:
    connection.execute("select from outbox.shard where sink = %s and shard = %s for update", (SINK, shard))


def shards(*wanted: int) -> dict[str, Any]:
    return {"sink": SINK, "owner": OWNER, "shards": [*wanted], "epochs": [1] * len(wanted), "server": None}


def reclaim(connection: Connection) -> int:
    return connection.execute(SQL["reclaim_shards"], shards()).rowcount


# -- shards ---------------------------------------------------------------------------------------------------------


def as_they_lie(connection: Connection) -> None:
    """Leave only plans that go through shards as they lie in the table."""
    for name in ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"):
        connection.execute(f"set {name} = off".encode())


def put_behind(connection: Connection, *shards: int) -> None:
    """Move shards behind all others of the table."""
    for shard in shards:
        connection.execute("update outbox.shard set crashes = crashes where shard = %s", (shard,))


def remove(connection: Connection) -> Any:
    as_they_lie(connection)
    return connection.execute("select deliveries from outbox.drop_sink(%s, true, 1000, null, null)", (SINK,)).fetchone()


def test_removal_of_a_sink_waits_for_its_shards_in_the_order_of_all_others(database: Database) -> None:
    with database.connect() as third:
        owned_sink(third)
        put_behind(third, 3, 4)
        third.commit()
        lock_shard(third, 4)
        with begun(database, reclaim) as reclaimed, begun(database, remove) as removed:
            third.commit()
            assert (reclaimed.result(SECONDS), removed.result(SECONDS)) == (64, (0,))


@pytest.mark.fence("statements of relays, people and migrations deadlock")
@pytest.mark.parametrize("statement", ["release_shards", "reset_crashes"])
def test_shards_are_changed_in_one_order_however_they_lie_in_the_table(database: Database, statement: str) -> None:
    def change(connection: Connection) -> int:
        as_they_lie(connection)
        return connection.execute(SQL[statement], shards(5, 4, 3)).rowcount

    with database.connect() as third:
        owned_sink(third)
        third.execute("update outbox.shard set crashes = 1")
        put_behind(third, 3, 4)
        third.commit()
        lock_shard(third, 4)
        with begun(database, reclaim) as reclaimed, begun(database, change) as changed:
            third.commit()
            assert (reclaimed.result(SECONDS), changed.result(SECONDS)) == (64, 0)


def test_limits_of_sinks_are_stated_in_one_order_however_they_lie_in_the_table(database: Database) -> None:
    """Goes red when relays that start at a time lock the same sinks in different orders."""
    limits = {"limits": Jsonb([{"sink": name, "rate_per_second": 7} for name in "ba"]), "server": None}
    with database.connect() as third:
        for name in "ba":
            third.execute("insert into outbox.sink (name, patterns, start) values (%s, '{*}', 'now')", (name,))
        third.commit()
        third.execute("select from outbox.sink where name = 'a' for update")
        with begun(database, lambda one: one.execute(SQL["state_limits"], limits).rowcount) as stated:
            assert third.execute("select from outbox.sink where name = 'b' for update nowait").rowcount == 1
            third.commit()
            assert stated.result(SECONDS) == 2


# -- rows -----------------------------------------------------------------------------------------------------------

ROWS = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, lease, lease_until, owner, uid, type, payload,
                             content_type, created_at)
select %s, n, 0, 'waiting', false, now(), %s, now() + interval '1 hour', %s, gen_random_uuid(), 't', '', 't', now()
  from generate_series(1, 5) n"""


def remove_patiently(connection: Connection) -> Any:
    """Remove the sink, and look for a deadlock only once there certainly is one: a server looks once for each wait."""
    connection.execute("set deadlock_timeout = '2s'")
    return remove(connection)


def test_removal_of_a_sink_outlives_a_deadlock_with_rows_that_are_being_settled(database: Database) -> None:
    """Rows are no part of any order: they are settled as they come."""
    with database.connect() as third:
        owned_sink(third)
        third.execute(ROWS, (SINK, LEASE, OWNER))
        third.commit()
        third.execute("delete from outbox.delivery where id = 5")
        third.execute("set local deadlock_timeout = '1h'")  # the other one is to notice
        with begun(database, remove_patiently) as removed:
            third.execute("delete from outbox.delivery where id = 1")
            third.commit()
            assert removed.result(SECONDS) == (3,)


# -- migrations -----------------------------------------------------------------------------------------------------


@pytest.mark.fence("statements of relays, people and migrations deadlock")
def test_sinks_are_registered_while_a_later_migration_changes_them(database: Database, tmp_path: Path) -> None:
    folder = next_schema(tmp_path / "next")
    with database.connect() as relay:
        owned_sink(relay)
        relay.commit()
        relay.execute("lock table outbox.sink in share row exclusive mode")  # what register_sinks does first of all
        with migrating(database, folder) as migrated:
            relay.execute(REGISTER, (Jsonb([{"name": SINK, "patterns": ["b"], "start": None}]),))
            relay.commit()
            assert migrated.result(SECONDS).after == SCHEMA_VERSION + 1
