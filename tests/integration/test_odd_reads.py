"""Events that cannot be delivered, and reads that fail: what becomes of one event, and of its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psycopg
import pytest

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import StoredEvent, pop_scan_end
from outbox_relay.domain.window import MAX_REDUCTIONS, MAX_SINGLE_EVENT_FAILURES, Position, ScanStep, Tick, next_slice
from outbox_relay.postgres.database import statements
from tests.support.database import Database, query
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


def test_dead_letter_of_an_odd_event_holds_its_key(database: Database) -> None:
    sink = MemorySink()
    with running(database.dsn, (spec("s", hold=True), sink)) as harness:
        odd = insert(database, key="k", deliver_at="20000-01-01Z")
        behind, other = insert(database, key="k"), insert(database, key="other")
        until(lambda: _states(database, {odd: "dead", behind: "held"}), seconds=10, what="the key is held")
        until(lambda: _delivered(sink, [other]), seconds=10, what="the other key flows")
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


def _states(database: Database, wanted: dict[int, str]) -> bool:
    return dict(query(database, "select id, state from outbox.delivery")) == wanted


def _delivered(sink: MemorySink, ids: Sequence[int]) -> bool:
    return [event.id for event in sink.delivered] == [*ids]


def test_ceiling_that_is_raised_holds_for_connections_that_read_before(database: Database) -> None:
    """The constant stands in plans that are kept: they must be made again."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        for n in range(10):
            insert(database)
            settled(harness, database, n + 1)
        with database.connect(autocommit=True) as connection:
            connection.execute(
                "create or replace function outbox_internal.payload_ceiling() returns integer "
                "language sql immutable parallel safe return 4194304"
            )
        event = insert(database, payload=b"x" * 2_000_000)
        settled(harness, database, 11)
        assert sink.delivered[-1].id == event
        assert dead_letters(database) == []


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


def test_small_events_are_never_dead_because_the_database_is_slow(database: Database) -> None:
    """Reads that fail whatever they ask for end the session with the reason, and kill no event."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink), expects={"statement_failed"}) as harness:
        harness.owns_all()
        failing = Failing(harness, "57014")
        failing.everything = True
        events = [insert(database) for _ in range(5)]
        until(lambda: _ended(harness), seconds=20, what="the session ends")
        assert isinstance(harness.ended[0], StatementFailed)
        assert "cannot be read, with or without its payload" in str(harness.ended[0])
        failing.everything = False
        settled(harness, database, 5)
        assert [event.id for event in sink.delivered] == events
        assert dead_letters(database) == []


def _ended(harness: RelayHarness) -> bool:
    return bool(harness.ended)


HUGE = 60_000
TINY_MS = 40


def test_a_huge_transaction_is_read_whatever_the_statement_timeout(database: Database) -> None:
    """A timeout that is not enough for a tenth of the transaction: every read that fails makes the next one smaller."""
    with database.connect(autocommit=True) as reading, database.connect() as huge:
        huge.execute("select count(outbox.emit_raw('t', 'p')) from generate_series(1, %s)", (HUGE,))
        a = _tick(reading)
        huge.commit()
        b = _tick(reading)
        reading.execute(f"set statement_timeout = {TINY_MS}".encode())
        got, steps, position = [0], ScanStep(), Position(a).opened(b)
        while got[-1] < HUGE:
            most = steps.limit(4000)
            piece = next_slice(position, steps.limit(50_000))
            assert piece.late
            parameters = {
                "shards": list(range(64)), "types": None, "a": a.snapshot, "a_next": a.next_xid, "b": b.snapshot,
                "after": piece.after, "upto": piece.upto, "rows": most, "bytes": 1 << 30, "most_payload": 1 << 30,
                "server": None,
            }  # fmt: skip
            try:
                events = [
                    StoredEvent(*row) for row in reading.execute(statements()["read_late"], parameters).fetchall()
                ]
            except psycopg.errors.QueryCanceled:
                steps.failed()
                assert not steps.exhausted
                continue
            steps.succeeded()
            upto = pop_scan_end(events)
            assert [event.id for event in events] == list(range(got[-1] + 1, got[-1] + 1 + len(events)))
            got += [event.id for event in events]
            position = position.at(got[-1] if len(events) >= most else upto or piece.upto)
    assert len(got) == HUGE + 1


def _tick(connection: psycopg.Connection[Any]) -> Tick:
    [row] = connection.execute("select seq, snapshot::text, next_xid from outbox_internal.tick()").fetchall()
    return Tick(*row)


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


def test_no_event_is_dead_because_its_read_waited_for_a_connection(database: Database) -> None:
    """The connections of a sink are busy with its other statements for as long as a read may wait, again and again."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        waited = 0

        def wait_and_read(read: Callable[..., list[StoredEvent]], *arguments: Any, **options: Any) -> list[StoredEvent]:
            nonlocal waited
            waited += 1
            if waited <= MAX_REDUCTIONS + MAX_SINGLE_EVENT_FAILURES:
                raise StatementFailed("every connection was busy", StatementFailed.NO_CONNECTION)
            return read(*arguments, **options)

        harness.store.windows = False
        harness.store.read_rest = partial(wait_and_read, harness.store.read_rest)  # type: ignore[method-assign]
        harness.store.read_small = partial(wait_and_read, harness.store.read_small)  # type: ignore[method-assign]
        event = insert(database)
        settled(harness, database, 1)
        assert [event.id for event in sink.delivered] == [event]
        assert dead_letters(database) == []
        assert harness.ended == []
