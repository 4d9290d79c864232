"""Unique keys: while an event with a key is not done, a second emit returns its uid and writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import IsolationLevel

from outbox_relay import outbox
from outbox_relay.domain.outcomes import Failed, Refused
from outbox_relay.outbox import Event, InvalidEvent
from outbox_relay.postgres.migrations import migrate
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.erasing import erase
from tests.support.lock_waits import begun
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.replays import Clients, start
from tests.support.wait import auntil, becomes

EMITTERS = 16
LOOK = "update outbox.unique_key set look_at = clock_timestamp() returning 1"
FINISH = "select outbox_internal.finish_unique_keys(500)"
REGISTER_OTHER = """
select outbox_internal.register_sinks('[{"name": "s", "patterns": ["*"], "start": "beginning"}]', t.seq, t.snapshot,
                             t.next_xid)::text
  from outbox_internal.tick() t
"""
"""Register a sink that no relay serves."""


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


def test_a_second_emit_returns_the_uid_of_the_first_and_writes_nothing(database: Database) -> None:
    first = emit(database)
    assert emit(database) == first
    assert logged(database) == [first]


def test_keys_belong_to_a_type(database: Database) -> None:
    first = emit(database)
    assert emit(database, event_type="other.job") != first
    assert emit(database, "invoice-8") != first
    assert emit(database, None) != emit(database, None)
    assert len(logged(database)) == 5


def test_a_key_that_was_rolled_back_is_free(database: Database, conn: psycopg.Connection[Any]) -> None:
    lost = outbox.emit(conn, "job", 1, unique_key="invoice-7")
    conn.rollback()
    assert emit(database) != lost
    assert len(logged(database)) == 1


def test_the_key_is_looked_at_before_the_uid_is_used_up(database: Database) -> None:
    first, mine = emit(database), uuid4()
    assert emit(database, uid=mine) == first
    assert query(database, "select from outbox.uid") == []
    assert emit(database, "another", uid=mine) == mine
    assert logged(database) == [first, mine]


def test_a_repeated_uid_takes_no_key(database: Database) -> None:
    """Its event was emitted before, and may be done: the next event with the key is a new one."""
    mine = uuid4()
    emit(database, None, uid=mine)
    assert emit(database, uid=mine) == mine
    assert query(database, "select from outbox.unique_key") == []
    assert emit(database) not in (mine, None)
    assert len(logged(database)) == 2


def test_many_emitters_of_one_key_emit_one_event(database: Database) -> None:
    with ThreadPoolExecutor(EMITTERS) as pool:
        calls = [pool.submit(emit, database) for _ in range(EMITTERS * 4)]
        uids = {call.result() for call in calls}
    assert logged(database) == list(uids)


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


def test_a_batch_with_one_key_twice_emits_it_once(database: Database, conn: psycopg.Connection[Any]) -> None:
    events = [Event("job", n, unique_key=key) for n, key in enumerate(("a", "b", "a", None, "b"))]
    uids = outbox.emit_many(conn, events)
    conn.commit()
    assert uids == [uids[0], uids[1], uids[0], uids[3], uids[1]]
    assert logged(database) == [uids[0], uids[1], uids[3]]


def test_keys_that_were_locked_and_got_no_event_are_free(database: Database) -> None:
    query(database, "select outbox.lock_unique_keys('{job, job}', '{a, b}')")
    assert query(database, "select unique_key, uid from outbox.unique_key order by 1") == [("a", None), ("b", None)]
    first = emit(database, "a")
    assert emit(database, "a") == first
    assert query(database, "select unique_key, uid from outbox.unique_key order by 1") == [("a", first), ("b", None)]
    finish(database)
    assert query(database, "select from outbox.unique_key") == []


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


BAD = [
    ({"unique_key": ""}, "unique_key must have 1 to 255 bytes; this one has 0"),
    ({"unique_key": "ü" * 128}, "unique_key must have 1 to 255 bytes; this one has 256"),
    ({"tenant": ""}, "tenant must have 1 to 255 bytes; this one has 0"),
    ({"tenant": "x" * 256}, "tenant must have 1 to 255 bytes; this one has 256"),
    ({"priority": 32768}, "priority must be a number from -32768 to 32767; this one is 32768"),
    ({"priority": -32769}, "priority must be a number from -32768 to 32767; this one is -32769"),
    ({"priority": 1 << 70}, "priority must be a number from -32768 to 32767"),
    ({"priority": True}, "priority must be an int, not bool"),
    ({"priority": "5"}, "priority must be an int, not str"),
    ({"tenant": 5}, "tenant must be a str, not int"),
    ({"unique_key": "a\0"}, "unique_key must not have a NUL character"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_odd_values_are_refused_by_name(conn: psycopg.Connection[Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidEvent, match=message):
        outbox.emit(conn, "job", 1, **given)
    conn.rollback()
    with pytest.raises(InvalidEvent, match=f"event 1: {message}"):
        outbox.emit_many(conn, [Event("job", 1), Event("job", 1, **given)])


@pytest.mark.parametrize("literal", ["5", "32767", "5::smallint", "null"])
def test_a_priority_is_any_integer_of_sql(database: Database, literal: str) -> None:
    query(database, f"select outbox.emit('job', '1', tenant => 'acme', priority => {literal})")
    [(tenant, priority)] = query(database, "select tenant, priority from outbox.event")
    assert (tenant, priority) == ("acme", None if literal == "null" else int(literal.partition(":")[0]))


async def test_the_asynchronous_functions_take_the_same(database: Database) -> None:
    async with await database.aconnect() as connection:
        first = await outbox.aemit(connection, "job", 1, tenant="acme", priority=5, unique_key="k")
        assert await outbox.aemit(connection, "job", 2, unique_key="k") == first
        uids = await outbox.aemit_many(connection, [Event("job", 3, unique_key="k"), Event("job", 4, tenant="b")])
    assert uids[0] == first
    assert query(database, "select tenant, priority from outbox.event order by id") == [("acme", 5), ("b", None)]


# -- done ---------------------------------------------------------------------------------------------------------


async def test_a_key_is_free_once_its_event_is_delivered(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        first = emit(database)
        await _delivered(sink, 1)
        await harness.settled()
        await becomes(lambda: finish(database) == 0, "the key is free")
        second = emit(database)
        assert second != first
        await _delivered(sink, 2)


async def test_a_key_stays_in_use_while_one_sink_has_not_delivered_its_event(database: Database) -> None:
    allowed = asyncio.Event()

    async def script(_event: Any, _attempt: int) -> Any:
        await allowed.wait()
        return Failed("not yet")

    prompt, slow = MemorySink(), MemorySink(script, keeps_order=False)
    async with running(database.dsn, (spec("prompt"), prompt), (spec("slow"), slow)) as harness:
        await harness.owns_all()
        first = emit(database)
        await _delivered(prompt, 1)
        assert finish(database) == 1
        assert emit(database) == first
        allowed.set()
        await becomes(lambda: query(database, "select from outbox.delivery where attempts > 0"), "it waits")
        assert finish(database) == 1
        await becomes(lambda: query(database, "select from outbox.delivery where state = 'dead'"), "it is dead")
        await harness.settled()
        await becomes(lambda: finish(database) == 0, "the key is free")
    assert emit(database) != first


async def test_a_refused_event_gives_its_key_back(database: Database) -> None:
    sink = MemorySink(lambda _event, _attempt: Refused("no"), keeps_order=False)
    async with running(database.dsn, (spec("s"), sink)) as harness:
        emit(database, "refused")
        await becomes(lambda: query(database, "select from outbox.delivery where state = 'dead'"), "it is dead")
        await harness.settled()
        await becomes(lambda: finish(database) == 0, "the key is free")


async def test_a_sink_that_was_added_later_does_not_keep_a_key(database: Database) -> None:
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        emit(database)
        await _delivered(sink, 1)
        await harness.stop()
    async with running(database.dsn, (spec("new", patterns=("another.*",)), MemorySink())):
        pass
    query(database, "update outbox.sink set patterns = '{*}' where name = 'new' returning 1")
    assert query(database, "select name from outbox.sink order by 1") == [("new",), ("s",)]
    await becomes(lambda: finish(database) == 0, "the key is free")


def test_a_cancelled_event_gives_its_key_back_at_once(database: Database, conn: psycopg.Connection[Any]) -> None:
    """In the same transaction too: the new job is not referred to one that never runs."""
    uid = emit(database, deliver_at=datetime.now(UTC) + timedelta(days=365))
    assert outbox.cancel(conn, uid) is True
    second = outbox.emit(conn, "job", 1, unique_key="invoice-7")
    conn.commit()
    assert second != uid
    assert emit(database) == second


def test_a_moved_event_is_looked_at_when_it_is_due(database: Database) -> None:
    """Goes red when the key is looked at in an hour: until then jobs would be merged into one that is done."""
    uid = emit(database, deliver_at=datetime.now(UTC) + timedelta(days=365))
    soon = "select look_at < clock_timestamp() + interval '10 seconds' from outbox.unique_key"
    assert query(database, soon) == [(False,)]
    query(database, "select outbox.reschedule(%s, clock_timestamp() + interval '5 seconds')", uid)
    assert query(database, soon) == [(True,)]


async def test_a_scheduled_event_that_is_discarded_gives_its_key_back(database: Database) -> None:
    """Goes red when the key is looked at in an hour: until then jobs would be merged into one that never runs."""
    uid = emit(database, deliver_at=datetime.now(UTC) + timedelta(days=365))
    discard = ("dead", "discard", "--state", "scheduled", "--reason", "no use", "--yes")
    ended = await asyncio.to_thread(inside, *discard, "--dsn", database.dsn)
    assert ended.code == 0, ended
    assert query(database, "select from outbox.scheduled") == []
    assert query(database, "select from outbox.unique_key") == []
    assert emit(database) != uid


async def test_an_event_that_is_erased_gives_its_key_back(database: Database) -> None:
    """It may name the subject. Goes red when only a relay deletes it, later."""
    with database.connect() as connection:
        uid = outbox.emit(connection, "job", 1, key="customer-18", unique_key="mail-customer-18")
    async with running(database.dsn, (spec("s"), sink := MemorySink())):
        await _delivered(sink, 1)
        assert query(database, "select from outbox.unique_key") == [()]
        await becomes(lambda: erase(database, "--key", "customer-18").code == 0, "its position has passed it")
    assert query(database, "select from outbox.unique_key") == []
    assert emit(database, "mail-customer-18") != uid


async def test_emitters_that_share_a_key_do_not_keep_it_in_use(
    database: Database, conn: psycopg.Connection[Any]
) -> None:
    """Such transactions may overlap without an end."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)):
        first = emit(database)
        assert outbox.emit(conn, "job", 1, unique_key="invoice-7") == first
        await _delivered(sink, 1)
        await becomes(lambda: finish(database) == 0, "the key is free, with the emitter's transaction open")
    conn.commit()
    assert emit(database) != first


@pytest.mark.parametrize(("keys", "seconds"), [(100, 1), (101, 30)])
def test_few_keys_are_looked_at_each_second_however_old_their_events_are(
    database: Database, keys: int, seconds: int
) -> None:
    """Goes red when the time until the next look depends on age alone, not on the number of keys to look at."""
    query(database, REGISTER_OTHER)
    query(database, "update outbox.sink set created_at = created_at - interval '1 hour' returning 1")
    with database.connect() as connection:
        outbox.emit_many(connection, (Event("job", n, unique_key=f"invoice-{n}") for n in range(keys)))
    query(database, "update outbox.unique_key set claimed_at = claimed_at - interval '12 minutes' returning 1")
    assert finish(database) == keys
    looks = "select count(*) from outbox.unique_key where look_at between {} and {}"
    from_now = f"clock_timestamp() + interval '{seconds} seconds'"
    assert query(database, looks.format(f"{from_now} - interval '1 second'", from_now)) == [(keys,)]


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_a_key_is_found_by_a_snapshot_from_before_it_was_looked_at(
    database: Database, conn: psycopg.Connection[Any], level: IsolationLevel
) -> None:
    first = emit(database)
    conn.isolation_level = level
    conn.execute("select 1")
    query(database, "update outbox.unique_key set look_at = clock_timestamp() + interval '1 hour' returning 1")
    assert outbox.emit(conn, "job", 1, unique_key="invoice-7") == first


def test_emits_do_not_wait_for_a_relay_that_looks_at_keys(database: Database, conn: psycopg.Connection[Any]) -> None:
    query(database, REGISTER_OTHER)
    first = emit(database)
    conn.execute(FINISH.encode())
    with database.connect() as other:
        other.execute("set lock_timeout = '2s'")
        assert outbox.emit(other, "job", 1, unique_key="invoice-7") == first


async def test_a_sink_that_does_not_take_the_type_keeps_no_key(database: Database) -> None:
    """Even if it is down, or its relay was killed and the owner of its shards is still written there."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), (spec("deaf", patterns=("order.*",)), MemorySink())) as harness:
        await harness.owns_all()
    query(database, "update outbox.shard set lease_until = 'infinity' where sink = 'deaf' returning 1")
    query(database, "update outbox.shard set lease_until = now() where sink = 's' returning 1")
    async with running(database.dsn, (spec("s"), sink)):
        emit(database)
        await _delivered(sink, 1)
        await becomes(lambda: finish(database) == 0, "the key is free")


async def test_a_replay_keeps_no_key_in_use(database: Database) -> None:
    """Goes red when rows of replays count, one of which is under way."""

    async def waits(_event: Any, _attempt: int) -> Any:
        await asyncio.Event().wait()

    sink, clients = MemorySink(), Clients(lambda: waits, keeps_order=False)
    relay = running(database.dsn, (spec("s", park_after_seconds=0.1), sink), replay_client=clients)
    async with relay as harness:
        first = emit(database)
        await _delivered(sink, 1)
        passed = "select from outbox_internal.backlog('s', null, 1000, 5.0) where events = 0"
        await becomes(lambda: query(database, passed), "a replay may deliver it")
        start(database, since="PT1H")
        await becomes(lambda: query(database, "select from outbox.delivery where sink like '~%%'"), "it is a row")
        await becomes(lambda: finish(database) == 0, "the key is free")
        assert query(database, "select count(*) from outbox.delivery") == [(1,)]
        await harness.crash()
    assert emit(database) != first


def test_a_role_that_was_renamed_keeps_its_keys(database: Database) -> None:
    with database.connect(autocommit=True) as owner:
        owner.execute("drop role if exists unique_old")
        owner.execute("drop role if exists unique_new")
        owner.execute("create role unique_old login")
    migrate(database.dsn, grant_emit=["unique_old"])
    try:
        with database.connect(user="unique_old") as mine:
            first = outbox.emit(mine, "job", 1, unique_key="k")
        with database.connect(autocommit=True) as owner:
            owner.execute("alter role unique_old rename to unique_new")
        with database.connect(user="unique_new") as mine:
            assert outbox.emit(mine, "job", 1, unique_key="k") == first
    finally:
        with database.connect(autocommit=True) as owner:
            owner.execute("drop owned by unique_new; drop role unique_new")


def test_the_key_of_a_scheduled_event_is_looked_at_once_an_hour(database: Database) -> None:
    query(database, REGISTER_OTHER)
    emit(database, deliver_at=datetime.now(UTC) + timedelta(days=30))
    assert finish(database) == 1
    assert query(database, "select look_at - clock_timestamp() > '59 minutes' from outbox.unique_key") == [(True,)]


def test_few_keys_are_looked_at_together(database: Database) -> None:
    with database.connect() as connection:
        outbox.emit_many(connection, [Event("job", n, unique_key=f"k{n}") for n in range(1200)])
    query(database, "select outbox_internal.finish_unique_keys(1000)")
    assert query(database, "select count(*) from outbox.unique_key") == [(200,)]


def test_no_key_is_given_back_in_a_restored_log_before_the_rebase(database: Database) -> None:
    """Goes red when positions of the old cluster count: they have passed the transactions of the new one."""
    first = emit(database)  # no sink takes it: it is done
    query(database, "update outbox.meta set system_identifier = system_identifier + 1 returning 1")
    assert finish(database) == 1
    assert emit(database) == first
    query(database, "update outbox.meta set system_identifier = system_identifier - 1 returning 1")
    assert finish(database) == 0


async def _delivered(sink: MemorySink, count: int) -> None:
    async def fact() -> bool:
        return len(sink.delivered) >= count

    await auntil(fact, seconds=30, what=f"{count} events were delivered")
