"""Schedules in a database, registered as relays register them, the parts of relays, and the times that were emitted."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import structlog

from outbox_relay.postgres.database import statements
from outbox_relay.postgres.store import Store
from outbox_relay.relay.chores import schedule_chores
from outbox_relay.relay.measures import RelayMeasures
from outbox_relay.relay.schedules import ScheduleDefinitions, Schedules
from tests.support.chores import doing
from tests.support.database import Database, query
from tests.support.wait import becomes

SCHEDULED_FOR = "outbox-scheduled-for"


def schedule(name: str = "nightly", **values: Any) -> dict[str, Any]:
    """Return a schedule as relays register it."""
    defaults = {"cron": "* * * * *", "timezone": "UTC", "type": "report.due", "payload": {"n": 1}, "headers": None}
    return {"name": name, **defaults, "key": None, "missed": "one", **values}


def register(database: Database, *wanted: dict[str, Any]) -> dict[str, int]:
    """Register schedules, and return their generations."""
    with database.connect(autocommit=True) as connection:
        return dict(connection.execute(statements()["register_schedules"], {"wanted": json.dumps(wanted)}))


def put(database: Database, name: str, next_at: datetime) -> None:
    """Let the next time of a schedule be this one."""
    text = "update outbox.schedule set after_at = %s, next_at = %s where name = %s returning 1"
    assert query(database, text, next_at - timedelta(seconds=1), next_at, name)


def fire(database: Database, name: str, seen: datetime, following: datetime, generation: int, *times: datetime) -> str:
    """Fire a schedule, and return the outcome."""
    text = "select outcome from outbox_internal.fire_schedule_times(%s, %s, %s, %s, %s::timestamptz[])"
    [(outcome,)] = query(database, text, name, seen, following, generation, list(times) or None)
    return outcome


def row(database: Database, name: str = "nightly") -> dict[str, Any]:
    """Return a schedule as the database has it."""
    [(found,)] = query(database, "select to_jsonb(s) from outbox.schedule s where name = %s", name)
    return found


def emitted(database: Database) -> list[str]:
    """Return the times of the events in the log, in the order of the log."""
    return [time for (time,) in query(database, f"select headers ->> '{SCHEDULED_FOR}' from outbox.event order by id")]


def minute_of(database: Database) -> datetime:
    """Return the time of the database, without seconds."""
    [(now,)] = query(database, "select clock_timestamp()")
    return now.astimezone(UTC).replace(second=0, microsecond=0)


def text_of(time: datetime) -> str:
    """Return a time as the header has it."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Part(NamedTuple):
    """The part of a relay that fires schedules, and what it consists of."""

    relay: UUID
    definitions: ScheduleDefinitions
    schedules: Schedules
    measures: RelayMeasures

    def fired(self, outcome: str) -> float | None:
        """Return the number of times with an outcome."""
        return self.measures.registry.get_sample_value("outbox_schedules_fired_total", {"outcome": outcome})


def part(store: Store, *wanted: dict[str, Any]) -> Part:
    """Return the part of a relay whose file has these schedules."""
    log, relay, measures = structlog.stdlib.get_logger(), uuid4(), RelayMeasures()
    definitions = ScheduleDefinitions(store, relay, wanted, log)
    return Part(relay, definitions, Schedules(store, definitions, "web-1", log, measures.fired), measures)


@contextmanager
def running(store: Store, *parts: Part) -> Generator[None]:
    """Run these parts during the block."""
    with ExitStack() as stack:
        for each in parts:
            stack.enter_context(doing(store, schedule_chores(each.schedules)))
        yield


def run_until(store: Store, fact: Any, what: str, *parts: Part) -> None:
    """Run these parts until a fact is true."""
    with running(store, *parts):
        becomes(fact, what)
