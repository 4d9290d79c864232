"""Events that cannot be delivered, and reads that fail: what becomes of one event, and of its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import StoredEvent
from tests.support.database import Database
from tests.support.deliveries import dead_letters
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import until

pytestmark = pytest.mark.slow

INSERT = """
insert into outbox.event (shard, uid, type, key, payload, content_type, headers, deliver_at, created_at)
values (outbox_internal.shard_of(coalesce(%(key)s, ''), null), gen_random_uuid(), 't', %(key)s, %(payload)s,
        'text/plain', %(headers)s::jsonb, %(deliver_at)s::timestamptz,
        coalesce(%(created_at)s::timestamptz, now()))
returning id
"""
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "year 20000": ({"deliver_at": "20000-01-01Z"}, "deliver_at lies outside the years 1 to 9998"),
    "infinity": ({"deliver_at": "infinity"}, "deliver_at lies outside the years 1 to 9998"),
    "minus infinity": ({"deliver_at": "-infinity"}, "deliver_at lies outside the years 1 to 9998"),
    "BC": ({"deliver_at": "0044-03-15 BC"}, "deliver_at lies outside the years 1 to 9998"),
    "end of 9999": ({"deliver_at": "9999-12-31 23:59:59.999999Z"}, "deliver_at lies outside the years 1 to 9998"),
    "no payload": ({"payload": None}, "payload is null"),
    "above the ceiling": (
        {"payload": b"x" * 2_000_000},
        "payload has 2000000 bytes, more than the ceiling of 1048576",
    ),
    "long key": ({"key": "k" * 5000}, "key has 5000 bytes, more than the limit of 1024"),
}


def insert(database: Database, **changes: Any) -> int:
    """Write an event as the owner of the log could; returns its id."""
    row = {"key": None, "payload": b"p", "headers": None, "deliver_at": None, "created_at": None, **changes}
    with database.connect(autocommit=True) as connection:
        [(event,)] = connection.execute(INSERT, row).fetchall()
    return event


@pytest.mark.fence("no relay can load an event, or it is above the ceiling")
@pytest.mark.parametrize("batch", [True, False], ids=["batches", "single events"])
@pytest.mark.parametrize(("row", "reason"), ODD.values(), ids=ODD.keys())
def test_odd_event_is_dead_and_its_neighbours_flow(
    database: Database, row: dict[str, Any], reason: str, batch: bool
) -> None:
    """Without the fault the event cannot be loaded, and nothing of its sink is read any more."""
    sink = MemorySink(keeps_order=batch)
    with running(database.dsn, (spec("s"), sink)) as harness:
        key = {"key": "k", **row}
        events = [insert(database, key="k"), insert(database, **key), insert(database, key="k"), insert(database)]
        settled(harness, database, 4)
        assert [event.id for event in sorted(sink.delivered)] == [events[0], *events[2:]]
        assert dead_letters(database) == [(events[1], reason, 0)]
        assert harness.ended == []


def settled(harness: RelayHarness, database: Database, events: int) -> None:
    """Wait until ``events`` events of each sink are delivered or dead, and everything is settled."""
    sinks = [sink for _, sink in harness.sinks if isinstance(sink, MemorySink)]

    def fact() -> bool:
        return all(
            len(sink.delivered) >= events - len(_dead_of(database, s.name))
            for (s, _), sink in zip(harness.sinks, sinks, strict=True)
        )

    until(fact, seconds=20, what="every event is delivered or dead")
    harness.settled()


def _dead_of(database: Database, sink: str) -> list[Any]:
    with database.connect(autocommit=True) as connection:
        query = "select id from outbox.delivery where state = 'dead' and sink = %s"
        return connection.execute(query, (sink,)).fetchall()


# -- reads that fail ----------------------------------------------------------------------------------------------


class Failing:
    """Makes reads of a harness's store fail that find an event in ``poison`` with its payload."""

    def __init__(self, harness: RelayHarness, state: str | None) -> None:
        self._state = state
        self._read, self._read_small = harness.store.read_rest, harness.store.read_small
        self.poison: set[int] = set()
        self.everything = False
        self.failures = 0
        harness.store.windows = False
        harness.store.read_rest = partial(self._fail, self._read)  # type: ignore[method-assign]
        harness.store.read_small = partial(self._fail, self._read_small)  # type: ignore[method-assign]

    def _fail(self, read: Callable[..., list[StoredEvent]], *arguments: Any, **options: Any) -> list[StoredEvent]:
        events = read(*arguments, **options)
        if self.everything or any(event.id in self.poison and event.fault is None for event in events):
            self.failures += 1
            raise StatementFailed("the database says: canceling statement due to statement timeout", self._state)
        return events


@pytest.mark.parametrize(
    ("state", "size", "reason"),
    [
        ("57014", 100_000, "it ran out of time: payload has 100000 bytes"),
        ("53200", 100_000, "it ran out of memory: payload has 100000 bytes"),
        (None, 10, "its answer cannot be loaded: payload has 10 bytes"),
    ],
)
def test_event_that_cannot_be_read_is_dead_after_smaller_steps(
    database: Database, state: str | None, size: int, reason: str
) -> None:
    sink, other = MemorySink(), MemorySink()
    with running(database.dsn, (spec("s"), sink), (spec("other"), other)) as harness:
        harness.owns_all()
        failing = Failing(harness, state)
        with database.connect() as connection:
            payloads = [b"x" * size if n == 20 else b"p" for n in range(50)]
            every = [connection.execute(INSERT, _row(payload)).fetchall()[0][0] for payload in payloads]
            poison = every[20]
            failing.poison = {poison}
        settled(harness, database, 50)
        expected = {(poison, f"reading it failed, {reason}", 0)}
        assert set(dead_letters(database)) == expected
        for each in (sink, other):
            ids = [event.id for event in each.delivered]
            assert ids == [each for each in every if each != poison]
        assert harness.ended == []
        assert failing.failures


def _row(payload: bytes) -> dict[str, Any]:
    return {"key": None, "payload": payload, "headers": None, "deliver_at": None, "created_at": None}


def test_a_read_that_is_cut_behind_large_keys_goes_on_there(database: Database) -> None:
    """Keys that are not returned do not count: else the database cuts a read that looks complete to the relay."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        with database.connect() as connection:
            keys = ["k" * 1_000_000] * 12 + [None] * 20
            every = [connection.execute(INSERT, {**_row(b"p"), "key": key}).fetchall()[0][0] for key in keys]
        settled(harness, database, len(every))
        assert [event.id for event in sink.delivered] == every[12:]
        assert [event for event, _, _ in dead_letters(database)] == every[:12]
