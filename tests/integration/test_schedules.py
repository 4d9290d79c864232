"""Schedules in the database: each time is emitted once, whatever fires them, and what becomes of missed times."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta

import psycopg
import pytest

from tests.support.database import Database, query
from tests.support.schedules import emitted, fire, minute_of, put, register, row, schedule, text_of

MINUTE = timedelta(minutes=1)
SWITCH, KILL, WHOLE = 0.05, 0.01, 0.75
"""Chance, at each statement, that another relay comes next, and that the relay is killed after it; that a round is one
statement."""
FIRE = "select outcome from outbox_internal.fire_schedule_times('nightly', %s, %s, %s, array[%s]::timestamptz[])"
NEXT = "select next_at, generation from outbox.schedule"


class MortalRelay:
    """A relay that fires one time after another, a statement at each step, and may be killed between two of them."""

    def __init__(self, database: Database, chance: random.Random) -> None:
        self._database = database
        self._chance = chance
        self.emitted = 0
        self._connect()

    def _connect(self) -> None:
        self._connection = self._database.connect(autocommit=True)
        self._connection.execute("set synchronous_commit = off")
        self._steps = self._work()

    def _work(self) -> Iterator[str]:
        """Yield the name of each statement after it. Three of four rounds are one statement, others a transaction."""
        execute = self._connection.execute
        while True:
            [(seen, generation)] = execute(NEXT).fetchall()
            yield "look"
            outcome = "emitted"
            while outcome == "emitted":
                whole = self._chance.random() < WHOLE
                if not whole:
                    execute("begin")
                    yield "begin"
                [(outcome,)] = execute(FIRE, (seen, seen + MINUTE, generation, seen)).fetchall()
                if not whole:
                    yield "fire, not committed"
                    execute("commit")
                self.emitted += outcome == "emitted"
                seen += MINUTE
                yield "commit"

    def step(self) -> str:
        """Run the next statement, and return its name."""
        return next(self._steps)

    def kill(self) -> None:
        """Cut the connection without a word, as the end of a process does, and begin again."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._connect()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@pytest.fixture
def due(database: Database) -> tuple[datetime, int]:
    """Return a schedule for every minute that missed ten times, which are all wanted: the first, and its generation."""
    generation = register(database, schedule(missed="all"))["nightly"]
    first = minute_of(database) - 10 * MINUTE
    put(database, "nightly", first)
    return first, generation


@pytest.mark.fence("two relays fire one time of a schedule, or one crashes between emit and bookkeeping")
def test_thousands_of_times_are_emitted_once_although_relays_are_killed_between_any_two_statements(
    database: Database,
) -> None:
    times = 2_000
    register(database, schedule(missed="all"))
    first = minute_of(database) - times * MINUTE
    put(database, "nightly", first)
    chance = random.Random(26)
    relays = [MortalRelay(database, chance) for _ in range(3)]
    relay = relays[0]
    kills: Counter[str] = Counter()
    while sum(each.emitted for each in relays) < times:
        if chance.random() < SWITCH:
            relay = chance.choice(relays)
        at = relay.step()
        if chance.random() < KILL:
            kills[at] += 1
            relay.kill()
    for each in relays:
        each.close()
    assert kills.keys() == {"look", "begin", "fire, not committed", "commit"}
    assert emitted(database) == [text_of(first + n * MINUTE) for n in range(times)]


def test_an_event_has_type_payload_key_headers_and_its_time(database: Database) -> None:
    wanted = schedule(payload={"a": [1]}, headers={"source": "x"}, key="k", type="order.due")
    generation = register(database, wanted)["nightly"]
    seen = minute_of(database)
    put(database, "nightly", seen)
    assert fire(database, "nightly", seen, seen + MINUTE, generation) == "emitted"
    found = query(
        database,
        "select type, convert_from(payload, 'UTF8'), key, headers, coalesce(content_type, 'application/json') "
        "from outbox.event",
    )
    headers = {"source": "x", "outbox-scheduled-for": text_of(seen)}
    assert found == [("order.due", '{"a": [1]}', "k", headers, "application/json")]
    assert row(database)["last_at"] == row(database)["after_at"]


def test_only_the_clock_of_the_database_says_that_a_time_has_come(database: Database) -> None:
    generation = register(database, schedule())["nightly"]
    seen = minute_of(database) + 2 * MINUTE
    put(database, "nightly", seen)
    assert fire(database, "nightly", seen, seen + MINUTE, generation) == "early"
    assert fire(database, "nightly", seen, seen + MINUTE, generation, seen) == "early"
    assert emitted(database) == []


@pytest.mark.parametrize("missed", ["one", "skip"])
def test_a_clock_that_goes_back_between_look_and_call_loses_no_time(database: Database, missed: str) -> None:
    """The relay found the time missed, and by the clock of the call it was not."""
    generation = register(database, schedule(missed=missed))["nightly"]
    seen = minute_of(database)
    put(database, "nightly", seen)
    times = [seen + timedelta(seconds=1)] if missed == "one" else []
    text = "select outcome from outbox_internal.fire_schedule_times('nightly', %s, %s, %s, %s::timestamptz[])"
    [(outcome,)] = query(database, text, seen, seen + 5 * MINUTE, generation, times)
    assert outcome in ("again", "early")
    assert emitted(database) == []


def test_relays_that_register_at_once_do_not_meet_in_a_deadlock(database: Database) -> None:
    failed: list[psycopg.Error] = []

    def work(order: int) -> None:
        wanted = [schedule(f"s{n}", payload={"by": order}) for n in range(50)]
        try:
            for _ in range(10):
                register(database, *(wanted if order % 2 else reversed(wanted)))
        except psycopg.Error as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []


def test_a_paused_schedule_does_not_fire_and_its_times_are_not_missed(
    database: Database, due: tuple[datetime, int]
) -> None:
    first, generation = due
    change = "select outbox.set_schedule('nightly', %s, 'me', 'why')"
    assert query(database, change, "pause") == [(True,)]
    assert query(database, change, "pause") == [(False,)]
    assert fire(database, "nightly", first, first + MINUTE, generation) == "superseded"
    assert query(database, change, "resume") == [(True,)]
    assert query(database, change, "resume") == [(False,)]
    assert fire(database, "nightly", first, first + MINUTE, generation) == "superseded"
    found = row(database)
    assert found["next_at"] is None
    assert emitted(database) == []
    actions = query(database, "select action, filter ->> 'schedule', actor, reason from outbox.audit order by id")
    assert actions == [(f"schedule {action}", "nightly", "me", "why") for action in ("pause", "resume")]


@pytest.mark.fence("a relay is stopped between its look at a schedule and its call")
def test_a_relay_that_was_stopped_between_its_look_and_its_call_computes_again(database: Database) -> None:
    generation = register(database, schedule(missed="skip"))["nightly"]
    seen = minute_of(database) - 60 * MINUTE
    put(database, "nightly", seen)
    assert fire(database, "nightly", seen, seen + MINUTE, generation) == "again"
    assert emitted(database) == []


@pytest.mark.fence("a changed schedule emits a time again after the database's clock went back")
def test_no_time_up_to_the_last_one_comes_again_after_a_change_although_the_clock_went_back(database: Database) -> None:
    register(database, schedule())
    last = minute_of(database) + 60 * MINUTE - timedelta(seconds=1)
    put(database, "nightly", last + timedelta(seconds=1))
    register(database, schedule(cron="*/2 * * * *"))
    assert datetime.fromisoformat(row(database)["after_at"]) == last
