"""Schedules in trouble: why one does not fire is recorded, and neither it nor a long list of times stops any other."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from psycopg import errors
from structlog.testing import capture_logs

from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.domain.file_reading import FileReader, while_reading
from outbox_relay.postgres.store import Store
from outbox_relay.relay import schedules
from tests.support.database import Database, query
from tests.support.schedules import emitted, fire, minute_of, part, put, register, row, run_until, schedule, text_of

MINUTE = timedelta(minutes=1)
FAR = "Mars/Olympus"


@pytest_asyncio.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    opened = Store(lambda: database.dsn, pooler=False, connections=8)
    await opened.open()
    yield opened
    await opened.close()


def at_each_event(database: Database, body: str, *, when: str = "before", kind: str = "report.due") -> None:
    """Run statements before or after each event of a type is inserted."""
    with database.connect(autocommit=True) as owner:
        owner.execute(
            f"create function public.{when}() returns trigger language plpgsql as $$ begin {body}; return new; end $$; "
            f"create trigger {when} {when} insert on outbox.event for each row when (new.type = '{kind}') "
            f"execute function public.{when}()".encode()
        )


def fire_all(database: Database, first: datetime, times: int, generation: int) -> str:
    """Fire times of every minute from the first on."""
    wanted = [first + n * MINUTE for n in range(times)]
    return fire(database, "nightly", first, wanted[-1] + MINUTE, generation, *wanted)


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_a_transaction_emits_a_bounded_number_of_bytes_and_the_next_one_goes_on(database: Database) -> None:
    generation = register(database, schedule(missed="all", payload={"a": "x" * 1_000_000}))["nightly"]
    first = minute_of(database) - 20 * MINUTE
    put(database, "nightly", first)
    assert fire_all(database, first, 20, generation) == "emitted"
    assert len(emitted(database)) == 8
    found = row(database)
    assert [datetime.fromisoformat(found[name]) for name in ("last_at", "after_at", "next_at")] == [
        first + 7 * MINUTE, first + 7 * MINUTE, first + 8 * MINUTE
    ]  # fmt: skip
    assert fire_all(database, first + 8 * MINUTE, 12, generation) == "emitted"
    assert emitted(database) == [text_of(first + n * MINUTE) for n in range(16)]


def test_a_transaction_ends_after_two_seconds(database: Database) -> None:
    generation = register(database, schedule(missed="all"))["nightly"]
    first = minute_of(database) - 20 * MINUTE
    put(database, "nightly", first)
    at_each_event(database, "perform pg_sleep(0.75)")
    assert fire_all(database, first, 20, generation) == "emitted"
    assert emitted(database) == [text_of(first + n * MINUTE) for n in range(3)]


@pytest.mark.parametrize("order", [(0, 0), (1, 0)])
def test_times_that_are_not_in_order_are_refused(database: Database, order: tuple[int, int]) -> None:
    generation = register(database, schedule(missed="all"))["nightly"]
    first = minute_of(database) - 20 * MINUTE
    put(database, "nightly", first)
    with pytest.raises(errors.InvalidParameterValue, match="in order"):
        fire(database, "nightly", first, first + 5 * MINUTE, generation, *(first + n * MINUTE for n in order))


async def test_missed_times_of_a_large_event_are_all_emitted(database: Database, store: Store) -> None:
    register(database, schedule(missed="all", payload={"a": "x" * 1_000_000}))
    first = minute_of(database) - 20 * MINUTE
    put(database, "nightly", first)
    await run_until(lambda: len(emitted(database)) > 20, "all are emitted", relay := part(store))
    assert emitted(database)[:21] == [text_of(first + n * MINUTE) for n in range(21)]
    assert query(database, "select max(n) from (select count(*) n from outbox.event group by xid) c") == [(8,)]
    assert relay.measures.fired["emitted"] == len(emitted(database))


# -- no schedule waits for another ------------------------------------------------------------------------------------


async def test_those_that_cannot_be_placed_leave_room_for_others(database: Database, store: Store) -> None:
    register(database, *(schedule(f"a{n}", timezone=FAR) for n in range(1000)))
    register(database, schedule())
    put(database, "nightly", minute_of(database))
    await run_until(lambda: emitted(database), "it is emitted", part(store))


async def test_times_that_are_due_come_before_those_that_were_missed(database: Database, store: Store) -> None:
    register(database, schedule("a", missed="all"), schedule("b"), schedule("c"), schedule("d", timezone=FAR))
    now = minute_of(database)
    for name, age in (("a", 5000), ("b", 300), ("c", 0)):
        put(database, name, now - age * MINUTE)
    query(database, "update outbox.schedule set next_at = clock_timestamp() where name = 'c' returning 1")
    assert [row.name for row in await store.due_schedules(1.0, 60.0)] == ["c", "b", "a", "d"]
    query(database, "update outbox.schedule set error = 'no', error_at = now() where name = 'c' returning 1")
    assert [row.name for row in await store.due_schedules(1.0, 60.0)] == ["b", "a", "d", "c"]


async def test_a_time_that_comes_during_long_lists_of_missed_ones_does_not_wait_for_them(
    database: Database, store: Store
) -> None:
    register(database, *(schedule(name, type="slow", missed="all", cron="0 * * * *") for name in "abc"))
    register(database, schedule("due", missed="skip"))
    hour = minute_of(database).replace(minute=0)
    for name in "abc":
        put(database, name, hour - timedelta(hours=3))
    move = "update outbox.schedule set after_at = now() - interval '1 s', next_at = now() where name = 'due'"
    at_each_event(database, move, when="after", kind="slow")
    at_each_event(database, "perform pg_sleep(0.4)", kind="slow")
    kinds = "select coalesce(string_agg(type, ' ' order by id), '') from outbox.event"
    await run_until(lambda: query(database, kinds)[0][0].count("slow") == 12, "all", part(store))
    [(found,)] = query(database, kinds)
    assert "report.due" in found.split()[:5], "before the second list"


# -- reasons ----------------------------------------------------------------------------------------------------------


async def test_a_relay_that_cannot_find_the_next_time_says_why(database: Database, store: Store) -> None:
    register(database, schedule(timezone=FAR))
    await run_until(lambda: row(database)["error"], "a reason is recorded", relay := part(store))
    found = row(database)
    assert found["error"] == "relay web-1: there is no time zone 'Mars/Olympus' on this machine"
    assert found["retry_at"] is None
    assert relay.measures.fired["failed"] >= 1
    register(database, schedule())
    await run_until(lambda: row(database)["next_at"], "it is placed", part(store))
    assert row(database)["error"] is None


async def test_an_error_of_the_database_that_passes_by_itself_is_shown_until_it_has_passed(
    database: Database, store: Store
) -> None:
    at_each_event(database, "raise sqlstate '53100' using message = 'could not extend file: No space left'")
    register(database, schedule())
    put(database, "nightly", minute_of(database))
    await run_until(lambda: row(database)["error"], "a reason is recorded", part(store))
    assert "53100" in row(database)["error"]
    with database.connect(autocommit=True) as owner:
        owner.execute("drop trigger before on outbox.event")
    await run_until(lambda: emitted(database), "it is emitted", part(store))
    assert row(database)["error"] is None


async def test_a_fault_of_ours_stops_no_other_schedule_and_is_not_quoted(
    database: Database, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    firing = schedules.firing

    def faulty(cron: str, *arguments: Any) -> Any:
        if cron == "0 3 * * *":
            raise LookupError("secret")
        return firing(cron, *arguments)

    monkeypatch.setattr(schedules, "firing", faulty)
    register(database, schedule("a", cron="0 3 * * *"), schedule("b"))
    for name in "ab":
        put(database, name, minute_of(database))
    with capture_logs() as logs:
        await run_until(lambda: emitted(database) and row(database, "a")["error"], "b is emitted", part(store))
    assert row(database, "a")["error"] == "relay web-1: LookupError"
    assert [line["schedule"] for line in logs if line["event"] == "schedule.failed"] == ["a"]


async def test_a_fault_outside_of_any_schedule_does_not_end_the_part(
    database: Database, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    due, calls = store.due_schedules, list[int]()

    async def faulty(ahead: float, late: float) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise TypeError("secret")
        return await due(ahead, late)

    monkeypatch.setattr(store, "due_schedules", faulty)
    register(database, schedule())
    put(database, "nightly", minute_of(database))
    with capture_logs() as logs:
        await run_until(lambda: emitted(database), "it is emitted", part(store))
    assert [line["reason"] for line in logs if line["event"] == "schedules.failed"] == ["TypeError"]


async def test_a_lost_connection_is_for_the_supervisor(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(_ahead: float, _late: float) -> Any:
        raise DatabaseUnavailable("gone")

    monkeypatch.setattr(store, "due_schedules", lost)
    with pytest.raises(DatabaseUnavailable):
        await part(store).schedules.run()


async def test_a_file_of_a_time_zone_that_cannot_be_read_holds_up_no_look(
    database: Database, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def stuck(*_arguments: object) -> None:
        with while_reading("time zone 'UTC'"):
            ended.wait(30)

    monkeypatch.setattr(schedules, "next_time", stuck)
    monkeypatch.setattr(schedules, "FileReader", lambda: FileReader(0.2))
    register(database, schedule())
    try:
        await run_until(lambda: row(database)["error"], "a reason is recorded", part(store))
    finally:
        ended.set()
    assert row(database)["error"].startswith("relay web-1: time zone 'UTC': could not be read within")


async def test_each_schedule_that_fails_has_a_line_of_its_own(database: Database, store: Store) -> None:
    register(database, *(schedule(name, timezone=FAR) for name in "abc"))
    with capture_logs() as logs:
        await run_until(
            lambda: query(database, "select count(error) = 3 from outbox.schedule")[0][0], "all", part(store)
        )
    assert {line["schedule"] for line in logs if line["event"] == "schedule.failed"} == set("abc")


async def test_a_reason_is_not_recorded_once_another_relay_has_fired(database: Database, store: Store) -> None:
    generation = register(database, schedule())["nightly"]
    seen = minute_of(database)
    put(database, "nightly", seen)
    [looked] = await store.due_schedules(1.0, 60.0)
    assert fire(database, "nightly", seen, seen + MINUTE, generation) == "emitted"
    assert not await store.fail_schedule(looked, "no")
    assert row(database)["error"] is None
    put(database, "nightly", seen)
    [looked] = await store.due_schedules(1.0, 60.0)
    assert await store.fail_schedule(looked, "no")
    assert not await store.fail_schedule(looked, "no"), "once a minute"
    assert await store.fail_schedule(looked, "because")
    register(database, schedule(payload={"n": 2}))
    assert not await store.fail_schedule(looked, "no")
    assert row(database)["error"] is None


async def test_a_reason_is_not_recorded_once_another_relay_has_found_the_time(database: Database, store: Store) -> None:
    register(database, schedule())
    [looked] = await store.due_schedules(1.0, 60.0)
    assert await store.place_schedule(looked, minute_of(database) + 5 * MINUTE)
    assert not await store.fail_schedule(looked, "no")
    query(database, "update outbox.schedule set next_at = null, paused = true returning 1")
    assert not await store.fail_schedule(looked, "no"), "it is paused"


async def test_a_schedule_that_failed_is_left_to_other_relays_for_a_while(database: Database, store: Store) -> None:
    register(database, schedule(timezone=FAR))
    relay = part(store)
    for _ in range(3):
        await relay.schedules.look()
    assert relay.measures.fired["failed"] == 1
    register(database, schedule(timezone="Moon/Rim"))
    await relay.schedules.look()
    assert relay.measures.fired["failed"] == 2, "a changed one is tried at once"


def test_a_refusal_by_a_trigger_is_recorded_by_its_code_whatever_that_is(database: Database) -> None:
    at_each_event(database, "raise sqlstate '22023' using message = convert_from(new.payload, 'UTF8')")
    generation = register(database, schedule(payload={"secret": "hush"}))["nightly"]
    seen = minute_of(database)
    put(database, "nightly", seen)
    assert fire(database, "nightly", seen, seen + MINUTE, generation) == "refused"
    assert row(database)["error"] == "the database refused the event (22023)"


def test_a_resumed_schedule_has_no_error(database: Database) -> None:
    register(database, schedule())
    query(database, "update outbox.schedule set error = 'no', error_at = now(), paused = true returning 1")
    assert query(database, "select outbox.set_schedule('nightly', 'resume', 'me', null)") == [(True,)]
    assert row(database)["error"] is None


def test_a_tenant_is_that_of_the_event(database: Database) -> None:
    generation = register(database, schedule(tenant="acme"))["nightly"]
    seen = minute_of(database)
    put(database, "nightly", seen)
    assert fire(database, "nightly", seen, seen + MINUTE, generation) == "emitted"
    assert query(database, "select tenant from outbox.event") == [("acme",)]
    assert register(database, schedule())["nightly"] > generation
