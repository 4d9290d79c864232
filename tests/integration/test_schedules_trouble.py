"""Schedules in trouble: why one does not fire is recorded, and neither it nor a long list of times stops any other."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from outbox_relay.postgres.store import Store
from outbox_relay.relay import schedules
from tests.support.database import Database, query
from tests.support.schedules import emitted, fire, minute_of, part, put, register, row, run_until, schedule, text_of

MINUTE = timedelta(minutes=1)
FAR = "Mars/Olympus"


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    opened = Store(lambda: database.dsn, pooler=False, connections=8)
    opened.open()
    yield opened
    opened.close()


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


@pytest.mark.fence("a long list of missed times, or large events, never fit the time of a statement")
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


# -- no schedule waits for another ------------------------------------------------------------------------------------


@pytest.mark.fence("a time is missed because relays make up for those of other schedules")
def test_a_time_that_comes_during_long_lists_of_missed_ones_does_not_wait_for_them(
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
    run_until(store, lambda: query(database, kinds)[0][0].count("slow") == 12, "all", part(store))
    [(found,)] = query(database, kinds)
    assert "report.due" in found.split()[:5], "before the second list"


# -- reasons ----------------------------------------------------------------------------------------------------------


def test_a_relay_that_cannot_find_the_next_time_says_why(database: Database, store: Store) -> None:
    register(database, schedule(timezone=FAR))
    run_until(store, lambda: row(database)["error"], "a reason is recorded", relay := part(store))
    found = row(database)
    assert found["error"] == "relay web-1: there is no time zone 'Mars/Olympus' on this machine"
    assert found["retry_at"] is None
    assert (relay.fired("failed") or 0) >= 1
    register(database, schedule())
    run_until(store, lambda: row(database)["next_at"], "it is placed", part(store))
    assert row(database)["error"] is None


def test_a_fault_of_ours_stops_no_other_schedule_and_is_not_quoted(
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
        run_until(store, lambda: emitted(database) and row(database, "a")["error"], "b is emitted", part(store))
    assert row(database, "a")["error"] == "relay web-1: LookupError"
    assert [line["schedule"] for line in logs if line["event"] == "schedule.failed"] == ["a"]


@pytest.mark.fence("a relay reports the failure of a time that another one has fired")
def test_a_reason_is_not_recorded_once_another_relay_has_fired(database: Database, store: Store) -> None:
    generation = register(database, schedule())["nightly"]
    seen = minute_of(database)
    put(database, "nightly", seen)
    [looked] = store.due_schedules(1.0, 60.0)
    assert fire(database, "nightly", seen, seen + MINUTE, generation) == "emitted"
    assert not store.fail_schedule(looked, "no")
    assert row(database)["error"] is None
    put(database, "nightly", seen)
    [looked] = store.due_schedules(1.0, 60.0)
    assert store.fail_schedule(looked, "because")
    register(database, schedule(payload={"n": 2}))
    assert not store.fail_schedule(looked, "no"), "of an earlier generation"
    assert row(database)["error"] is None
