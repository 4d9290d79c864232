"""The part of a relay that fires schedules: it finds times, fires what is due, and one bad schedule stops no other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

import pytest

from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.store import Store
from tests.support.database import Database, query
from tests.support.schedules import (
    emitted,
    minute_of,
    part,
    put,
    register,
    row,
    run_until,
    running,
    schedule,
    text_of,
)
from tests.support.wait import becomes

MINUTE = timedelta(minutes=1)


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    opened = Store(lambda: database.dsn, pooler=False, connections=8)
    opened.open()
    yield opened
    opened.close()


@pytest.mark.parametrize("missed", ["one", "skip", "all"])
def test_missed_times(database: Database, store: Store, missed: str) -> None:
    register(database, schedule(cron="0 * * * *", missed=missed))
    first = minute_of(database).replace(minute=0) - timedelta(hours=5)
    put(database, "nightly", first)
    run_until(store, lambda: query(database, "select from outbox.schedule where next_at > clock_timestamp()"),
                    "the next time is ahead", part(store))  # fmt: skip
    times = [text_of(first + timedelta(hours=n)) for n in range(6)]
    assert (
        emitted(database)
        in {
            "one": ([times[5]], times[4:]),  # the hour may have begun less than a minute ago
            "skip": ([], times[5:]),
            "all": (times,),
        }[missed]
    )


def test_a_schedule_that_this_relay_cannot_compute_stops_no_other(database: Database, store: Store) -> None:
    register(
        database,
        schedule("a", cron="nonsense"),
        schedule("b", timezone="Mars/Olympus"),
        schedule("c", cron="0 0 30 2 *"),
        schedule("d"),
    )
    for name in "abcd":
        put(database, name, minute_of(database) - 10 * MINUTE)
    run_until(store, lambda: emitted(database), "the last one is emitted", part(store))
    assert {kind for (kind,) in query(database, "select name from outbox.schedule where last_at is not null")} == {"d"}


def test_a_reload_registers_what_is_new_and_keeps_what_is_gone(database: Database, store: Store) -> None:
    relay = part(store, schedule("a"))
    with running(store, relay):
        becomes(lambda: query(database, "select from outbox.schedule where name = 'a'"), "a is registered")
        relay.schedules.definitions.use([schedule("b")])
        becomes(lambda: query(database, "select from outbox.schedule where name = 'b'"), "b is registered")
    assert query(database, "select name from outbox.schedule order by name") == [("a",), ("b",)]


def test_a_schedule_that_a_restore_took_back_is_registered_again_unless_a_person_had_removed_it(
    database: Database, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes red when the relay does not ask after a change of servers. One that is there is left as it is."""
    known, server, restores = store.known_schedules, ["before"], list[str]()

    def known_in(wanted: Iterable[str]) -> tuple[str, set[str]]:
        while restores:
            query(database, restores.pop())
            server[0] = "restored"
        return server[0], (known(wanted))[1]

    assert (store.known_schedules(["a"]))[0]
    monkeypatch.setattr(store, "known_schedules", known_in)
    monkeypatch.setattr("outbox_relay.relay.schedules.HOLD_SECONDS", 0.0)
    relay = part(store, schedule("kept"), schedule("lost"), schedule("removed"))
    with running(store, relay):
        becomes(lambda: names(database) == ["kept", "lost", "removed"], "all are registered")
        query(database, "delete from outbox.schedule where name = 'removed' returning 1")
        becomes(lambda: relay.definitions._present == {"kept", "lost"}, "the relay has looked since")  # pyright: ignore[reportPrivateUsage]
        query(database, "update outbox.schedule set cron = '1 1 1 1 *' where name = 'kept' returning 1")
        restores.append("delete from outbox.schedule where name = 'lost' returning 1")
        becomes(lambda: server == ["restored"] and len(names(database)) == 2, "the missing one is registered again")
    assert names(database) == ["kept", "lost"]
    assert row(database, "kept")["cron"] == "1 1 1 1 *"


def names(database: Database) -> list[str]:
    return [name for (name,) in query(database, "select name from outbox.schedule order by name")]


@pytest.mark.fence("the schema refuses the event of a schedule")
def test_a_refused_event_stops_no_other_schedule(database: Database, store: Store) -> None:
    migrate(database.dsn, max_payload_bytes=1024)
    register(database, schedule("a", payload={"a": "x" * 2000}), schedule("b", type="b"), schedule("c", type="c"))
    for name in "abc":
        put(database, name, minute_of(database) - MINUTE)
    run_until(store, lambda: len(query(database, "select from outbox.event")) >= 2
                    and row(database, "a")["error"], "the others are emitted", part(store))  # fmt: skip
    assert row(database, "a")["error"].startswith("outbox.emit: payload must have at most 1024 bytes")
    assert {kind for (kind,) in query(database, "select type from outbox.event")} == {"b", "c"}
