"""Unique keys: while an event with a key is not done, a second emit returns its uid and writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from outbox_relay import outbox
from outbox_relay.domain.outcomes import Failed
from outbox_relay.outbox import Event, InvalidEvent
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database, query
from tests.support.lock_waits import begun
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.wait import becomes, until

LOOK = "update outbox.unique_key set look_at = clock_timestamp() returning 1"
FINISH = "select outbox_internal.finish_unique_keys(500)"


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """Yield an application's connection, in a transaction."""
    with database.connect() as connection:
        yield connection


def emit(database: Database, key: str | None = "invoice-7", event_type: str = "job", **changes: Any) -> UUID:
    """Emit an event in a transaction of its own."""
    with database.connect() as connection:
        return outbox.emit(connection, event_type, {"n": 1}, unique_key=key, **changes)


def logged(database: Database) -> list[UUID]:
    """Return the uids of the log."""
    return [uid for (uid,) in query(database, "select uid from outbox.event order by id")]


def finish(database: Database) -> int:
    """Look at all keys now, as a relay does every second; return how many are left."""
    query(database, LOOK)
    query(database, FINISH)
    return len(query(database, "select from outbox.unique_key"))


# -- emit ---------------------------------------------------------------------------------------------------------


def test_a_key_that_was_rolled_back_is_free(database: Database, conn: psycopg.Connection[Any]) -> None:
    lost = outbox.emit(conn, "job", 1, unique_key="invoice-7")
    conn.rollback()
    assert emit(database) != lost
    assert len(logged(database)) == 1


def test_an_emitter_waits_for_the_open_one(database: Database, conn: psycopg.Connection[Any]) -> None:
    for finished, first in ((conn.commit, True), (conn.rollback, False)):
        key = f"job-{first}"
        opened = outbox.emit(conn, "job", 1, unique_key=key)

        def emit_too(other: psycopg.Connection[Any], key: str = key) -> UUID:
            with other.transaction():
                return outbox.emit(other, "job", 1, unique_key=key)

        with begun(database, emit_too) as second:
            assert not second.done()
            finished()
            assert (second.result(timeout=30) == opened) is first


def test_batches_that_share_keys_in_another_order_do_not_wait_for_each_other(database: Database) -> None:
    keys = [f"job-{n}" for n in range(50)]

    def emit_all(backwards: bool) -> list[UUID]:
        ordered = keys[::-1] if backwards else keys
        with database.connect() as connection:
            uids = outbox.emit_many(connection, [Event("job", 1, unique_key=key) for key in ordered])
        return uids[::-1] if backwards else uids

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(emit_all, [n % 2 == 1 for n in range(40)]))
    assert all(uids == found[0] for uids in found)
    assert sorted(logged(database)) == sorted(found[0])


def test_the_key_of_another_role_is_refused_by_name(database: Database) -> None:
    with database.connect(autocommit=True) as owner:
        for role in ("unique_a", "unique_b"):
            owner.execute(f"drop role if exists {role}".encode())
            owner.execute(f"create role {role} login".encode())
    migrate(database.dsn, grant_emit=["unique_a", "unique_b"])
    try:
        with database.connect(user="unique_a") as mine:
            outbox.emit(mine, "job", 1, unique_key="k")
        with (
            database.connect(user="unique_b") as other,
            pytest.raises(InvalidEvent, match='type job is in use by role "unique_a", and this is role "unique_b"'),
        ):
            outbox.emit(other, "job", 1, unique_key="k")
    finally:
        with database.connect(autocommit=True) as owner:
            owner.execute("drop owned by unique_a, unique_b; drop role unique_a, unique_b")


# -- done ---------------------------------------------------------------------------------------------------------


def test_a_key_is_free_once_its_event_is_delivered(database: Database) -> None:
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        first = emit(database)
        _delivered(sink, 1)
        harness.settled()
        becomes(lambda: finish(database) == 0, "the key is free")
        second = emit(database)
        assert second != first
        _delivered(sink, 2)


def test_a_key_stays_in_use_while_one_sink_has_not_delivered_its_event(database: Database) -> None:
    allowed = asyncio.Event()

    async def script(_event: Any, _attempt: int) -> Any:
        await allowed.wait()
        return Failed("not yet")

    prompt, slow = MemorySink(), MemorySink(script, keeps_order=False)
    with running(database.dsn, (spec("prompt"), prompt), (spec("slow"), slow)) as harness:
        harness.owns_all()
        first = emit(database)
        _delivered(prompt, 1)
        assert finish(database) == 1
        assert emit(database) == first
        allowed.set()
        becomes(lambda: query(database, "select from outbox.delivery where attempts > 0"), "it waits")
        assert finish(database) == 1
        becomes(lambda: query(database, "select from outbox.delivery where state = 'dead'"), "it is dead")
        harness.settled()
        becomes(lambda: finish(database) == 0, "the key is free")
    assert emit(database) != first


def test_a_cancelled_event_gives_its_key_back_at_once(database: Database, conn: psycopg.Connection[Any]) -> None:
    """In the same transaction too: the new job is not referred to one that never runs."""
    uid = emit(database, deliver_at=datetime.now(UTC) + timedelta(days=365))
    assert outbox.cancel(conn, uid) is True
    second = outbox.emit(conn, "job", 1, unique_key="invoice-7")
    conn.commit()
    assert second != uid
    assert emit(database) == second


@pytest.mark.fence("a unique key is given back in a restored log because of positions of the old cluster")
def test_no_key_is_given_back_in_a_restored_log_before_the_rebase(database: Database) -> None:
    """Goes red when positions of the old cluster count: they have passed the transactions of the new one."""
    first = emit(database)  # no sink takes it: it is done
    query(database, "update outbox.meta set system_identifier = system_identifier + 1 returning 1")
    assert finish(database) == 1
    assert emit(database) == first
    query(database, "update outbox.meta set system_identifier = system_identifier - 1 returning 1")
    assert finish(database) == 0


def _delivered(sink: MemorySink, count: int) -> None:
    def fact() -> bool:
        return len(sink.delivered) >= count

    until(fact, seconds=30, what=f"{count} events were delivered")
