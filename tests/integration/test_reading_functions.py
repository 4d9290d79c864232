"""The functions and statements of the schema that relays work with: fences, the order of claims, partitions.

Each is called as the store calls it, by the text of its statement file, on connections that hold their transactions
where it matters. The reads themselves are shown in ``tests/property``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb

from outbox_relay.domain.event import UNREAD
from outbox_relay.postgres.database import statements
from tests.support.database import Database
from tests.support.postgres import PostgresServer
from tests.support.recording import settled_unrecorded, unrecorded
from tests.support.triggers import finish_when_rows_are_added
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("reading functions")

Connection = psycopg.Connection[Any]
SQL = statements()
ME, OTHER = UUID(int=1), UUID(int=2)
AMPLE = 1 << 40
TOO_LARGE = b"x" * 2_000_000
"""A payload above the ceiling."""
BOTH_READS = pytest.mark.parametrize(
    "read", [("read_rest", 9 * 10**9), ("read_late", 2**63 - 1)], ids=["read_rest", "read_late"]
)
"""Each read, and the transaction at which its window ends.

Latecomers that lie close together are read by read_rest, unless the window ends with the last transaction of all.
"""
WAIT_SECONDS = 10.0
POSITION = ("a_seqs", "a_snapshots", "a_nexts", "b_seqs", "b_snapshots", "b_nexts", "lasts")


@pytest.fixture(scope="module")
def database(postgres: PostgresServer, template: str) -> Generator[Database]:
    """Yield one database for all tests: each has a sink of its own."""
    postgres.create_database("functions", template=template)
    yield Database(postgres, "functions")
    postgres.drop_database("functions")


@pytest.fixture
def connection(database: Database) -> Generator[Connection]:
    with database.connect(autocommit=True) as connection:
        yield connection


@pytest.fixture
def sink(connection: Connection) -> str:
    """Return a new sink whose shards are mine at epoch 1."""
    name = f"sink_{uuid4().hex}"
    connection.execute("insert into outbox.sink (name, patterns, start) values (%s, '{*}', 'now')", (name,))
    connection.execute(
        "insert into outbox.shard (sink, shard, owner, epoch, lease_until) "
        "select %s, n, %s, 1, now() + interval '1 hour' from generate_series(0, 63) n",
        (name, ME),
    )
    return name


def call(connection: Connection, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
    """Return the rows of one of the store's statements."""
    given = {"server": None, **unrecorded(len(parameters.get("ids", ()))), **parameters}
    return connection.execute(SQL[statement], given).fetchall()


@contextmanager
def in_background(database: Database, work: Callable[[Connection], Any]) -> Generator[Future[Any]]:
    """Run ``work`` on a connection of its own in a thread, which waits for a lock when the block begins."""
    with ThreadPoolExecutor(1) as pool, database.connect(autocommit=True) as connection:
        pid = connection.info.backend_pid
        done = pool.submit(work, connection)
        until(lambda: done.done() or waits(database, pid), seconds=WAIT_SECONDS, what="the statement waits for a lock")
        yield done


def waits(database: Database, pid: int) -> bool:
    """Return True if a server process waits for a lock."""
    with database.connect() as connection:
        query = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
        return connection.execute(query, (pid,)).fetchone() is not None


# -- settle -------------------------------------------------------------------------------------------------------


def emitted(connection: Connection, key: str | None = None, deliver_at: str | None = None) -> tuple[int, int]:
    """Emit an event and return (id, shard)."""
    [(uid,)] = connection.execute(
        "select outbox.emit('t', '{\"a\": 1}', key => %s, headers => '{\"h\": \"v\"}', deliver_at => %s)",
        (key, deliver_at),
    ).fetchall()
    return connection.execute("select id, shard from outbox.event where uid = %s", (uid,)).fetchall()[0]


@dataclass
class Settlement:
    """The parameters of a settlement: ``events`` become rows, ``moved`` shards (shard → epoch, last id) move."""

    sink: str
    events: Sequence[tuple[int, int]] = ()
    owner: UUID = ME
    fence: Mapping[int, int] | None = None
    """shard → epoch; by default 1 for each shard of the events"""
    moved: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def run(self, connection: Connection) -> bool:
        """Settle; returns what the function says."""
        [(settled,)] = call(connection, "settle", **self._parameters())
        return settled

    def _parameters(self) -> dict[str, Any]:
        fence = {shard: 1 for _, shard in self.events} if self.fence is None else self.fence
        row = {
            "states": "waiting", "ordereds": True, "due_in": 0.0, "attempts": 0, "claims": 0, "leases": None,
            "lease_for": None, "errors": None, "statuses": None, "last_attempts": None, **self.row,
        }  # fmt: skip
        at = [(0, "3:3:", 3, 900, "9:9:", 9, last) for _, last in self.moved.values()]
        return {
            "sink": self.sink,
            "owner": self.owner,
            "shards": [*self.moved],
            "epochs": [epoch for epoch, _ in self.moved.values()],
            "places": [*range(1, len(at) + 1)],
            **{name: [position[n] for position in at] for n, name in enumerate(POSITION)},
            "ids": [event for event, _ in self.events],
            **{name: [value] * len(self.events) for name, value in row.items()},
            "fence_shards": [*fence],
            "fence_epochs": [*fence.values()],
            **settled_unrecorded(),
        }


def written(connection: Connection, sink: str) -> tuple[int, int]:
    """Return the numbers of rows and of positions of a sink."""
    return connection.execute(
        "select (select count(*) from outbox.delivery where sink = %s), "
        "(select coalesce(sum(cardinality(shards)), 0) from outbox.progress where sink = %s)",
        (sink, sink),
    ).fetchall()[0]


def test_settlement_writes_rows_and_positions_together(connection: Connection, sink: str) -> None:
    event = emitted(connection)
    assert Settlement(sink, [event], moved={7: (1, 50)}).run(connection)
    assert written(connection, sink) == (1, 1)


def test_settlement_of_nothing_is_settled(connection: Connection, sink: str) -> None:
    assert Settlement(sink).run(connection)
    assert written(connection, sink) == (0, 0)


def test_settled_row_is_a_copy_of_its_event(connection: Connection, sink: str) -> None:
    event, _ = emitted(connection, key="k", deliver_at="2020-01-01Z")
    columns = "id, shard, uid, type, key, payload, {}, headers, deliver_at, created_at, emitter"
    usual = "coalesce(content_type, 'application/json')"
    with connection.transaction(force_rollback=True):
        assert Settlement(sink, [(event, 0)]).run(connection)
        copied = connection.execute(
            f"select {columns.format('content_type')} from outbox.delivery where sink = %s".encode(), (sink,)
        )
        original = connection.execute(
            f"select {columns.format(usual)} from outbox.event where id = %s".encode(), (event,)
        )
        assert copied.fetchall() == original.fetchall()


@pytest.mark.parametrize(
    ("row", "deliver_at", "due"),
    [
        ({"due_in": 3600.0}, None, "now() + interval '1 hour'"),
        ({"due_in": 3600.0}, "2020-01-01Z", "now() + interval '1 hour'"),
        ({"due_in": None}, "2020-01-01Z", "'2020-01-01Z'::timestamptz"),
        ({"due_in": None}, None, "now()"),
    ],
)
def test_row_is_due_when_it_is_told_else_as_its_event_asks(
    connection: Connection, sink: str, row: dict[str, Any], deliver_at: str | None, due: str
) -> None:
    assert Settlement(sink, [emitted(connection, deliver_at=deliver_at)], row=row).run(connection)
    query = f"select abs(extract(epoch from due_at - ({due}))) < 60 from outbox.delivery where sink = %s"
    assert connection.execute(query.encode(), (sink,)).fetchall() == [(True,)]


def test_row_under_way_is_leased_to_who_settles(connection: Connection, sink: str) -> None:
    lease = uuid4()
    row = {"leases": lease, "lease_for": 600.0, "claims": 1}
    assert Settlement(sink, [emitted(connection)], row=row).run(connection)
    query = "select owner, lease, claims, lease_until > now() + interval '500 s' from outbox.delivery where sink = %s"
    assert connection.execute(query, (sink,)).fetchall() == [(ME, lease, 1, True)]
    assert claimed(connection, sink) == []


def test_fence_owner(connection: Connection, sink: str) -> None:
    """Without ``s.owner = owner_id`` in the fence a relay settles rows of a shard that was given to another."""
    event = emitted(connection)
    assert not Settlement(sink, [event], owner=OTHER, moved={7: (1, 50)}).run(connection)
    assert written(connection, sink) == (0, 0)


@pytest.mark.parametrize("epoch", [0, 2, -1])
def test_fence_epoch(connection: Connection, sink: str, epoch: int) -> None:
    """Without ``s.epoch = f.epoch`` in the fence a settlement from before a shard was lost and won again is written."""
    event, shard = emitted(connection)
    assert not Settlement(sink, [(event, shard)], fence={shard: epoch}, moved={7: (1, 50)}).run(connection)
    assert written(connection, sink) == (0, 0)


def test_fence_sink(connection: Connection, sink: str) -> None:
    """Without ``s.sink = sink_name`` in the fence the shard of any sink would do."""
    event, shard = emitted(connection)
    connection.execute("update outbox.shard set owner = %s where sink = %s", (OTHER, sink))
    other = f"{sink}_other"
    connection.execute("insert into outbox.sink (name, patterns, start) values (%s, '{*}', 'now')", (other,))
    connection.execute(
        "insert into outbox.shard (sink, shard, owner, epoch) values (%s, %s, %s, 1)", (other, shard, ME)
    )
    assert not Settlement(sink, [(event, shard)]).run(connection)


def test_fence_holds_for_every_shard_or_nothing_is_written(connection: Connection, sink: str) -> None:
    """Without ``mine <> cardinality(fence_shards)`` a shard that is still held lets the rows of a lost one through."""
    events = [emitted(connection, key=f"key-{n}") for n in range(20)]
    shards = sorted({shard for _, shard in events})
    connection.execute("update outbox.shard set epoch = 2 where sink = %s and shard = %s", (sink, shards[0]))
    assert not Settlement(sink, events, moved={shards[1]: (1, 50)}).run(connection)
    assert written(connection, sink) == (0, 0)


def claim_shards(connection: Connection, sink: str) -> list[tuple[Any, ...]]:
    """Claim every shard whose lease has lapsed, for the other relay."""
    return call(
        connection, "claim_shards", sink=sink, owner=OTHER, generation=1, lease=15.0, most=64, free_for=0.0,
        lapsed_for=0.0, patterns=None, claim=None,
    )  # fmt: skip


def test_claim_passes_by_a_shard_that_is_being_settled(database: Database, connection: Connection, sink: str) -> None:
    """Without ``for share of s`` in the fence the claim gets the shard, and reads before the rows are there."""
    event, shard = emitted(connection)
    connection.execute("update outbox.shard set lease_until = now() - interval '1 s' where sink = %s", (sink,))
    with database.connect() as settling:
        assert Settlement(sink, [(event, shard)]).run(settling)
        assert shard not in [row[0] for row in claim_shards(connection, sink)]
    assert [row[0] for row in claim_shards(connection, sink)] == [shard]
    assert written(connection, sink) == (1, 0)


@pytest.mark.parametrize("committed", [True, False])
def test_settlement_waits_for_a_claim_under_way(
    database: Database, connection: Connection, sink: str, committed: bool
) -> None:
    """Without ``for share of s`` the settlement does not wait, and writes rows beside the claim."""
    event = emitted(connection)
    connection.execute("update outbox.shard set lease_until = now() - interval '1 s' where sink = %s", (sink,))
    with database.connect() as claiming:
        assert len(claim_shards(claiming, sink)) == 64
        with in_background(database, Settlement(sink, [event], moved={7: (1, 50)}).run) as settled:
            assert not settled.done(), "the settlement did not wait"
            _ = claiming.commit() if committed else claiming.rollback()
        assert settled.result() is not committed
    assert written(connection, sink) == ((0, 0) if committed else (1, 1))


def test_new_epochs_shut_out_what_was_under_way(database: Database, connection: Connection, sink: str) -> None:
    event, shard = emitted(connection)
    with database.connect() as settling:
        assert Settlement(sink, [(event, shard)]).run(settling)
        reclaim = {"sink": sink, "owner": ME, "lease": 15.0}
        with in_background(database, lambda c: call(c, "reclaim_shards", **reclaim)) as reclaimed:
            assert not reclaimed.done(), "a settlement that has passed its fence was not waited for"
            settling.commit()
    assert {epoch for _, epoch, _ in reclaimed.result()} == {2}
    assert not Settlement(sink, [emitted(connection)]).run(connection)
    assert written(connection, sink) == (1, 0)


def stands(connection: Connection, sink: str, shard: int) -> int:
    """Return the last id of the position of a shard."""
    [row] = call(connection, "positions", sink=sink, shards=[shard])
    return row[-1]


def test_position_of_a_late_zombie_never_outranks(connection: Connection, sink: str) -> None:
    """Ordered by ``seq`` alone, what a relay writes after it lost the shard would bring the shard back."""
    assert Settlement(sink, owner=OTHER, moved={7: (5, 100)}).run(connection)
    assert Settlement(sink, moved={7: (4, 50)}).run(connection)
    assert stands(connection, sink, 7) == 100
    assert Settlement(sink, owner=OTHER, moved={7: (5, 120)}).run(connection)
    assert Settlement(sink, owner=OTHER, moved={7: (5, 110)}).run(connection)
    assert stands(connection, sink, 7) == 110


def test_trimmed_ledger_keeps_the_position_of_every_shard(connection: Connection, sink: str) -> None:
    for epoch, last in [(1, 10), (2, 30), (2, 40), (1, 20)]:
        assert Settlement(sink, moved={shard: (epoch, last + shard) for shard in range(64)}).run(connection)
    connection.execute(SQL["trim_progress"], {"most": 5000})
    assert [stands(connection, sink, shard) for shard in range(64)] == [40 + shard for shard in range(64)]
    assert written(connection, sink) == (0, 64)


def test_event_that_is_gone_fails_the_whole_settlement(connection: Connection, sink: str) -> None:
    event = emitted(connection)
    with pytest.raises(psycopg.errors.RaiseException, match="1 of 2 events are no longer in the log"):
        Settlement(sink, [event, (2**40, event[1])], moved={7: (1, 50)}).run(connection)
    assert written(connection, sink) == (0, 0)


def test_row_that_is_there_already_stays_as_it_is(connection: Connection, sink: str) -> None:
    event = emitted(connection)
    assert Settlement(sink, [event], row={"attempts": 3, "errors": "first"}).run(connection)
    assert Settlement(sink, [event, event], row={"attempts": 9, "states": "held", "errors": "second"}).run(connection)
    rows = connection.execute("select state, attempts, last_error from outbox.delivery where sink = %s", (sink,))
    assert rows.fetchall() == [("waiting", 3, "first")]


def test_row_that_is_finished_meanwhile_counts_as_stored(connection: Connection, sink: str) -> None:
    """As after a restore: the event was read again, and its row was there.

    A trigger finishes it as soon as no statement that is under way can.
    """
    finished, other = emitted(connection), emitted(connection)
    assert Settlement(sink, [finished]).run(connection)
    finish_when_rows_are_added(connection, sink)
    assert Settlement(sink, [finished, other], moved={7: (1, 50)}).run(connection)
    assert connection.execute("select id from outbox.delivery where sink = %s", (sink,)).fetchall() == [(other[0],)]
    assert stands(connection, sink, 7) == 50


def test_row_that_is_added_again_counts_once(database: Database, connection: Connection, sink: str) -> None:
    """A row that is finished while a settlement waits for it is added again, and must not stand for a missing event."""
    event = emitted(connection)
    assert Settlement(sink, [event]).run(connection)
    both = Settlement(sink, [event, (2**40, event[1])])
    with database.connect() as finishing:
        finishing.execute("delete from outbox.delivery where sink = %s", (sink,))
        with in_background(database, both.run) as settled:
            assert not settled.done(), "the settlement did not wait"
            finishing.commit()
    with pytest.raises(psycopg.errors.RaiseException, match="1 of 2 events are no longer in the log"):
        settled.result()


def test_row_of_another_event_stands_for_none(connection: Connection, sink: str) -> None:
    event = emitted(connection)
    assert Settlement(sink, [event]).run(connection)
    connection.execute("update outbox.delivery set uid = gen_random_uuid() where sink = %s", (sink,))
    with pytest.raises(psycopg.errors.RaiseException, match="1 of 1 events are no longer in the log"):
        Settlement(sink, [event]).run(connection)


# -- claiming rows ------------------------------------------------------------------------------------------------

LARGE = Jsonb({"h": "x" * 9_990})
"""Headers of a little less than 10,000 bytes."""


def add(connection: Connection, sink: str, event: int, key: str | None = "k", **changes: Any) -> None:
    """Add a row, due for a minute, unless ``changes`` say otherwise. Times in seconds from now."""
    row = {
        "state": "waiting", "ordered": key is not None, "due_in": -60.0, "claims": 0, "lease": None, "lease_for": None,
        "payload": b"p", "headers": None, **changes,
    }  # fmt: skip
    connection.execute(
        "insert into outbox.delivery (sink, id, shard, state, ordered, due_at, claims, lease, lease_until, uid, type, "
        "key, payload, headers, content_type, created_at) values (%(sink)s, %(id)s, 0, %(state)s, %(ordered)s, "
        "now() + %(due_in)s * interval '1 s', %(claims)s, %(lease)s, now() + %(lease_for)s * interval '1 s', "
        "gen_random_uuid(), 't', %(key)s, %(payload)s, %(headers)s, 't', now())",
        {"sink": sink, "id": event, "key": key, **row},
    )


def claim(connection: Connection, sink: str, **changes: Any) -> list[tuple[Any, ...]]:
    """Claim, of the heads of all keys unless ``keys`` are given, and return the rows in id order.

    The last two columns, when a row was due and whether it was tried, are left out.
    """
    parameters: dict[str, Any] = {
        "sink": sink, "owner": ME, "lease": uuid4(), "lease_for": 20.0, "rows": 100, "bytes": AMPLE, "hold": False,
        "suspects": False, "with_followers": False, "most_payload": None,
        "after_due": None, "after_id": None, **changes,
    }  # fmt: skip
    if "keys" not in parameters:
        parameters["keys"] = [key for (key,) in call(connection, "held_keys", sink=sink, after=None, most=1000)]
    return sorted(row[:-2] for row in call(connection, "claim_rows", **parameters))


def claimed(connection: Connection, sink: str, **changes: Any) -> list[int]:
    """Return the ids that a claim gets."""
    return [row[0] for row in claim(connection, sink, **changes)]


def test_claimed_row_is_leased_and_counted(connection: Connection, sink: str) -> None:
    add(connection, sink, 1)
    lease = uuid4()
    [row] = claim(connection, sink, lease=lease, lease_for=600.0)
    assert (row[0], row[4], row[5], row[-2:]) == (1, "k", b"p", (0, 1))
    query = "select owner, lease, claims, lease_until > now() + interval '500 s' from outbox.delivery where sink = %s"
    assert connection.execute(query, (sink,)).fetchall() == [(ME, lease, 1, True)]


def test_a_claim_begins_behind_a_place(connection: Connection, sink: str) -> None:
    """Goes red when a claim that continues skips a row, or looks before its place."""
    for event in range(1, 6):
        add(connection, sink, event, key=None, due_in=60.0)
    due = "update outbox.delivery set due_at = %s::timestamptz where sink = %s and id = any(%s)"
    for at, events in (("-infinity", [3]), ("2026-01-02", [1, 2]), ("2026-01-03", [4])):
        connection.execute(due, (at, sink, events))
    found: list[int] = []
    place: tuple[float | None, int | None] = (None, None)
    for _ in range(4):
        [row] = call(
            connection, "claim_rows", sink=sink, owner=ME, lease=uuid4(), lease_for=20.0, rows=1, bytes=AMPLE, keys=[],
            hold=False, suspects=False, with_followers=False, most_payload=AMPLE, after_due=place[0], after_id=place[1],
        )  # fmt: skip
        found.append(row[0])
        place = row[-2], row[0]
    assert found == [3, 1, 2, 4]
    connection.execute("update outbox.delivery set lease_until = null where sink = %s", (sink,))
    assert claimed(connection, sink, after_due=place[0], after_id=place[1]) == [], "none is behind the last one"
    assert claimed(connection, sink) == [1, 2, 3, 4]


def test_a_claim_tells_which_events_were_tried(connection: Connection, sink: str) -> None:
    """An operator's retry lets attempts and claims begin again, so that they do not show it."""
    add(connection, sink, 1)
    add(connection, sink, 2)
    connection.execute("update outbox.delivery set last_attempt_at = now() where sink = %s and id = 2", (sink,))
    rows = call(
        connection, "claim_rows", sink=sink, owner=ME, lease=uuid4(), lease_for=20.0, rows=2, bytes=AMPLE, keys=[],
        hold=False, suspects=False, with_followers=True, most_payload=AMPLE, after_due=None, after_id=None,
    )  # fmt: skip
    assert {row[0]: row[-1] for row in rows} == {1: False, 2: True}


@pytest.mark.parametrize(
    ("circuit", "said_seconds_ago", "counted"),
    [("closed", 0, 1), ("open", 0, 0), ("half-open", 80, 0), ("open", 100, 1)],
    ids=["up", "down", "down, said a while ago", "nobody says any more that it is down"],
)
def test_claim_does_not_count_while_the_destination_is_known_to_be_down(
    connection: Connection, sink: str, circuit: str, said_seconds_ago: int, counted: int
) -> None:
    """Else relays that are restarted again and again while it is down would make dead letters of what they try."""
    connection.execute(
        "update outbox.sink set circuit = %s, last_error_at = now() - %s * interval '1 second' where name = %s",
        (circuit, said_seconds_ago, sink),
    )
    add(connection, sink, 1, claims=2)
    assert [row[-1] for row in claim(connection, sink)] == [2 + counted]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({}, True),
        ({"state": "held"}, True),
        ({"state": "dead"}, False),
        ({"due_in": 3600.0}, False),
        ({"state": "held", "due_in": 3600.0}, False),
        ({"lease": OTHER, "lease_for": 60.0}, False),
        ({"state": "held", "lease": OTHER, "lease_for": 60.0}, False),
        ({"lease": OTHER, "lease_for": -1.0}, True),
        ({"state": "held", "lease": OTHER, "lease_for": -1.0}, True),
    ],
)
def test_row_is_claimed_when_it_is_due_and_free(
    connection: Connection, sink: str, row: dict[str, Any], found: bool
) -> None:
    add(connection, sink, 1, **row)
    assert claimed(connection, sink) == ([1] if found else [])


IN_THE_WAY: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "waiting for later": ({"due_in": 3600.0}, True, True),
    "leased": ({"lease": OTHER, "lease_for": 60.0}, True, True),
    "held and leased": ({"state": "held", "lease": OTHER, "lease_for": 60.0}, True, True),
    "held and given back": ({"state": "held", "due_in": 3600.0}, True, True),
    "a suspect": ({"claims": 3}, True, True),
    "dead": ({"state": "dead"}, False, True),
    "scheduled": ({"ordered": False, "due_in": 3600.0}, False, False),
    "dead and scheduled": ({"ordered": False, "state": "dead"}, False, False),
    "of another key": ({"key": "other", "due_in": 3600.0}, False, False),
}
"""The kind of an earlier row → the row, and whether later rows of its key wait behind it: with "skip", with "hold"."""


@pytest.mark.parametrize("later", ["waiting", "held"])
@pytest.mark.parametrize("hold", [False, True], ids=["skip", "hold"])
@pytest.mark.parametrize(("row", "skip_waits", "hold_waits"), IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
def test_row_waits_behind_earlier_rows_of_its_key(
    connection: Connection, sink: str, row: dict[str, Any], skip_waits: bool, hold_waits: bool, hold: bool, later: str
) -> None:
    """Without the ``not exists`` of waiting rows, or with any but the first row of a key as its head, this fails."""
    add(connection, sink, 1, **{"key": "k", **row})
    add(connection, sink, 2, state=later)
    waits = hold_waits if hold else skip_waits
    assert claimed(connection, sink, hold=hold) == ([] if waits else [2])


def test_rows_of_a_key_are_claimed_one_after_another(connection: Connection, sink: str) -> None:
    for event, state in enumerate(["waiting", "held", "waiting", "held"], start=1):
        add(connection, sink, event, state=state)
    for event in (1, 2, 3, 4):
        lease = uuid4()
        assert claimed(connection, sink, lease=lease) == [event]
        assert call(connection, "delete_rows", sink=sink, ids=[event], leases=[lease]) == [(event, event < 4)]
    assert claimed(connection, sink) == []


@pytest.mark.parametrize("state", ["waiting", "held"])
def test_rows_of_a_key_come_together_for_who_delivers_them_in_order(
    connection: Connection, sink: str, state: str
) -> None:
    add(connection, sink, 1, state=state)
    for event in range(2, 7):
        add(connection, sink, event, state="held" if event % 2 else "waiting")
    assert claimed(connection, sink, with_followers=True) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("later", ["waiting", "held"])
@pytest.mark.parametrize("hold", [False, True], ids=["skip", "hold"])
@pytest.mark.parametrize(("row", "skip_waits", "hold_waits"), IN_THE_WAY.values(), ids=IN_THE_WAY.keys())
def test_followers_end_where_a_row_must_wait(
    connection: Connection, sink: str, row: dict[str, Any], skip_waits: bool, hold_waits: bool, hold: bool, later: str
) -> None:
    """Without the statement after ``skip locked``, a row is claimed that comes before its turn."""
    add(connection, sink, 1, state="held")
    add(connection, sink, 2, **{"key": "k", **row})
    add(connection, sink, 3, state=later)
    waits = hold_waits if hold else skip_waits
    assert claimed(connection, sink, hold=hold, with_followers=True) == ([1] if waits else [1, 3])


def test_what_came_back_before_comes_alone(connection: Connection, sink: str) -> None:
    """Also without a counted attempt. Else what is behind it is delivered, or written, each time that it comes back."""
    for event in range(1, 5):
        add(connection, sink, event)
    connection.execute("update outbox.delivery set last_error = 'denied' where sink = %s and id = 3", (sink,))
    assert claimed(connection, sink, with_followers=True) == [1, 2]
    connection.execute("delete from outbox.delivery where sink = %s and id < 3", (sink,))
    assert claimed(connection, sink, with_followers=True) == [3]


def test_first_rows_of_keys_come_before_several_of_one(connection: Connection, sink: str) -> None:
    for event in range(1, 31):
        add(connection, sink, event, key=f"key-{event % 3}", state="held")
    assert claimed(connection, sink, with_followers=True, rows=2, keys=["key-0", "key-1"]) == [1, 3]
    assert claimed(connection, sink, with_followers=True, rows=4) == [2, 5, 8, 11]
    connection.execute("update outbox.delivery set lease_until = null where sink = %s", (sink,))
    assert claimed(connection, sink, with_followers=True, rows=12) == list(range(1, 13))


@pytest.mark.parametrize(
    ("bound", "found"), [({"rows": 5}, [1, 2, 11, 21, 31]), ({"bytes": 7000}, [1, 2, 3, 4, 11, 21, 31])]
)
def test_rows_behind_take_no_place_of_the_first_of_another_key(
    connection: Connection, sink: str, bound: dict[str, int], found: list[int]
) -> None:
    """With the bounds in id order alone, a key waits for as long as another has earlier rows."""
    for event in range(1, 41):
        add(connection, sink, event, key=f"key-{(event - 1) // 10}", payload=bytes(1000))
    assert claimed(connection, sink, with_followers=True, **bound) == found


@pytest.mark.parametrize(("key", "headers", "budget"), [(None, LARGE, 15_000), ("k" * 999, None, 1_500)])
def test_headers_and_keys_count_in_the_bytes_of_a_claim(
    connection: Connection, sink: str, key: str | None, headers: Jsonb | None, budget: int
) -> None:
    for event in range(1, 5):
        add(connection, sink, event, key=key and f"{key}{event}", headers=headers)
    assert claimed(connection, sink, bytes=budget) == [1, 2]


@BOTH_READS
@pytest.mark.parametrize(("column", "value", "budget"), [("headers", LARGE, 15_000), ("key", "k" * 1_000, 1_500)])
def test_headers_and_keys_count_in_the_bytes_of_a_read(
    day_missing: Database, read: tuple[str, int], column: str, value: Any, budget: int
) -> None:
    name, end = read
    with day_missing.connect(autocommit=True) as connection:
        ids = [emitted(connection)[0] for _ in range(4)]
        connection.execute(f"update outbox.event set {column} = %s".encode(), (value,))
        rows = call(
            connection, name, shards=list(range(64)), types=None, a="3:3:", a_next=2**40, b=f"{end}:{end}:",
            after=0, upto=2**40, rows=100, bytes=budget, most_payload=1 << 20,
        )  # fmt: skip
    assert [row[0] for row in rows if row[1] >= 0] == ids[:2]


@BOTH_READS
def test_a_payload_above_the_ceiling_is_not_fetched_by_a_read(day_missing: Database, read: tuple[str, int]) -> None:
    name, end = read
    with day_missing.connect(autocommit=True) as connection:
        ids = [emitted(connection)[0] for _ in range(2)]
        connection.execute("update outbox.event set payload = %s where id = %s", (TOO_LARGE, ids[0]))
        rows = call(
            connection, name, shards=list(range(64)), types=None, a="3:3:", a_next=2**40, b=f"{end}:{end}:",
            after=0, upto=2**40, rows=100, bytes=AMPLE, most_payload=1 << 20,
        )  # fmt: skip
    assert [row[0] for row in rows if row[1] >= 0] == ids
    assert longest(rows) < 1_000


@pytest.mark.parametrize("most_size", [None, 2000], ids=["of every size", "small ones"])
@pytest.mark.parametrize("late", [True, False], ids=["latecomers", "the rest"])
def test_a_payload_above_the_ceiling_is_not_fetched_by_a_look(
    day_missing: Database, late: bool, most_size: int | None
) -> None:
    with day_missing.connect(autocommit=True) as connection:
        ids = [emitted(connection)[0]]
        # Too far apart for latecomers to be read with the rest.
        connection.execute("select setval('outbox.event_id_seq', 1000)")
        ids.append(emitted(connection)[0])
        connection.execute("update outbox.event set payload = %s where id = %s", (TOO_LARGE, ids[0]))
        asked = {
            "known": None,
            "a_seq": ids[1] if late else 0, "a": "3:3:", "a_next": 2**40, "floor": 0, "shards": list(range(64)),
            "types": None, "ids": 2**40, "rows": 100, "bytes": AMPLE, "most_payload": 1 << 20, "most_size": most_size,
        }  # fmt: skip
        rows = connection.execute(SQL["look"], asked).fetchall()
    assert [row[7] for row in rows[1:] if row[8] >= 0] == ids
    assert longest(rows) < 1_000


ODD_EVENTS = """
insert into outbox.event (shard, uid, type, key, payload, content_type, headers, deliver_at, created_at)
select outbox_internal.shard_of(coalesce(v.key, ''), null), gen_random_uuid(), 't', v.key, v.payload, 'x/y', v.headers,
       v.deliver_at, coalesce(v.created_at, now())
  from (values (1, 'k', convert_to(repeat('x', 1999), 'UTF8'), null::jsonb, null::timestamptz, null::timestamptz),
               (2, 'k', convert_to(repeat('x', 2000), 'UTF8'), null, null, null),
               (3, 'k', '{}', jsonb_build_object('h', repeat('y', 2000)), null, null),
               (4, repeat('k', 1000), convert_to(repeat('x', 1000), 'UTF8'), null, null, null),
               (5, repeat('k', 1025), '{}', null, null, null),
               (6, 'k', null, null, null, null),
               (7, 'k', '{}', '{"h": "v"}', now(), null),
               (8, 'k', '{}', null, 'infinity', null),
               (9, 'k', '{}', null, null, 'infinity'),
               (10, 'k', '{}', null, null, '-infinity'),
               (11, 'k', '{}', null, null, '10000-01-01'),
               (12, null, '', '{}', null, null)) v (n, key, payload, headers, deliver_at, created_at)
 order by v.n
returning id"""
SMALL_ONES = {1, 2, 3, 4, 7, 9, 10, 11, 12}


def test_small_events_come_whole_and_others_are_to_be_read_again(day_missing: Database) -> None:
    """An event comes as outbox_internal.read_rest returns it, or with the fault by which it is read again."""
    with day_missing.connect(autocommit=True) as connection:
        ids = [event for (event,) in connection.execute(ODD_EVENTS.encode()).fetchall()]
        asked = {
            "shards": list(range(64)), "types": None, "a": "3:3:", "b": "9000000000:9000000000:",
            "after": 0, "upto": 2**40, "rows": 100, "most_payload": 1 << 20,
        }  # fmt: skip
        rest = call(connection, "read_rest", bytes=AMPLE, **asked)
        small = call(connection, "read_small", bytes=2000, **asked)
    assert [row[0] for row in small] == [row[0] for row in rest] == ids
    for number, (whole, found) in enumerate(zip(rest, small, strict=True), 1):
        if number in SMALL_ONES:
            assert found == whole
        else:
            assert found[10] == UNREAD
            assert found[:4] == whole[:4]
            assert len(found[5] or b"") <= 2000
            assert len(found[7] or "") <= 4000


def test_a_payload_above_the_ceiling_is_not_fetched_by_a_claim(connection: Connection, sink: str) -> None:
    add(connection, sink, 1, payload=TOO_LARGE)
    rows = claim(connection, sink, most_payload=1 << 20)
    assert [row[0] for row in rows] == [1]
    assert longest(rows) < 1_000


def longest(rows: list[tuple[Any, ...]]) -> int:
    """Return the length of the longest value of the rows."""
    return max(len(value) for row in rows for value in row if isinstance(value, bytes | str))


def test_suspect_of_a_key_comes_without_those_behind_it(connection: Connection, sink: str) -> None:
    for event in range(1, 4):
        add(connection, sink, event, claims=3)
    assert claimed(connection, sink, with_followers=True, suspects=True) == [1]


def test_rows_of_another_sink_stand_in_nobodys_way(connection: Connection, sink: str) -> None:
    add(connection, "another", 1, due_in=3600.0)
    add(connection, sink, 2)
    try:
        assert claimed(connection, sink) == [2]
    finally:
        connection.execute("delete from outbox.delivery where sink = 'another'")


def test_rows_without_a_key_wait_for_nobody(connection: Connection, sink: str) -> None:
    add(connection, sink, 1, key=None, due_in=3600.0)
    add(connection, sink, 2, key=None)
    add(connection, sink, 3, key=None, ordered=True)
    assert claimed(connection, sink) == [2, 3]


def test_held_rows_are_found_by_the_keys_given(connection: Connection, sink: str) -> None:
    for event, key in enumerate(["a", "b", "c", "a"], start=1):
        add(connection, sink, event, key=key, state="held")
    assert claimed(connection, sink, keys=[]) == []
    assert claimed(connection, sink, keys=["b", "nothing"]) == [2]


def test_earliest_due_rows_are_claimed_first(connection: Connection, sink: str) -> None:
    for event, due_in in enumerate([-10.0, -40.0, -20.0, -30.0], start=1):
        add(connection, sink, event, key=None, due_in=due_in)
    assert claimed(connection, sink, rows=2) == [2, 4]
    assert claimed(connection, sink, rows=2) == [1, 3]


def test_claim_ends_with_the_row_that_reaches_the_byte_bound(connection: Connection, sink: str) -> None:
    for event in range(1, 6):
        add(connection, sink, event, key=None, payload=bytes(1000))
    assert claimed(connection, sink, bytes=1) == [1]
    assert claimed(connection, sink, bytes=1001) == [2, 3]
    assert claimed(connection, sink, bytes=AMPLE, rows=1) == [4]


def test_suspects_are_claimed_alone_and_only_by_who_asks_for_them(connection: Connection, sink: str) -> None:
    """Without ``not d.suspect`` what kills one process kills the next, with what is beside it."""
    add(connection, sink, 1, key="a", claims=3)
    add(connection, sink, 2, key="b", claims=4, state="held")
    add(connection, sink, 3, key="c", claims=2)
    assert claimed(connection, sink, suspects=True) == [1]
    assert claimed(connection, sink, suspects=True) == [2]
    assert claimed(connection, sink, suspects=True) == []
    assert claimed(connection, sink) == [3]


@pytest.mark.parametrize("state", ["waiting", "held"])
@pytest.mark.parametrize(
    "changes",
    [{"claims": 3}, {"lease": OTHER, "lease_for": 60.0}, {"due_in": 3600.0}],
    ids=["suspect", "leased", "later"],
)
def test_rows_that_cannot_be_claimed_take_no_place_of_others(
    connection: Connection, sink: str, changes: dict[str, Any], state: str
) -> None:
    for event in range(1, 5):
        add(connection, sink, event, key=f"key-{event}", state=state, **({"due_in": -90.0} | changes))
    add(connection, sink, 5, key="key-5", state=state)
    assert claimed(connection, sink, rows=1) == [5]


def test_row_that_is_claimed_again_and_again_becomes_a_suspect(connection: Connection, sink: str) -> None:
    add(connection, sink, 1)
    for claims in (1, 2, 3):
        assert [row[-1] for row in claim(connection, sink, lease_for=-1.0)] == [claims]
    assert claim(connection, sink) == []
    assert [row[-1] for row in claim(connection, sink, suspects=True)] == [4]


def test_claim_passes_by_rows_that_are_being_claimed(database: Database, connection: Connection, sink: str) -> None:
    """Without ``skip locked`` where rows are looked for the second claim waits for the first, or finds nothing."""
    for event in range(1, 11):
        add(connection, sink, event, key=None)
    with database.connect() as first:
        assert claimed(first, sink, rows=4) == [1, 2, 3, 4]
        connection.execute("set statement_timeout = '5s'")
        assert claimed(connection, sink, rows=4) == [5, 6, 7, 8]
    assert claimed(connection, sink) == [9, 10]


def test_a_claim_changes_rows_in_place(database: Database, sink: str) -> None:
    """With fuller pages a claimed row moves to another page, and every index takes it in once more."""
    with database.connect() as connection:
        connection.execute(
            "insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, key, payload, "
            "content_type, created_at) select %s, g, 0, 'waiting', false, now(), gen_random_uuid(), 't', 'key-' || g, "
            "%s, 't', now() from generate_series(1, 1000) g",
            (sink, b"x" * 250),
        )
        connection.commit()
        assert len(claimed(connection, sink, rows=1000)) == 1000
        changed = connection.execute(
            "select pg_stat_get_xact_tuples_updated(oid), pg_stat_get_xact_tuples_hot_updated(oid) "
            "from pg_class where oid = 'outbox.delivery'::regclass"
        )
        assert changed.fetchall() == [(1000, 1000)]


def test_no_row_is_claimed_twice_however_many_claim(database: Database, connection: Connection, sink: str) -> None:
    for event in range(1, 401):
        add(connection, sink, event, key=f"key-{event % 50}", state="held" if event % 2 else "waiting")
    got: Counter[int] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        with database.connect(autocommit=True) as mine:
            deadline = time.monotonic() + WAIT_SECONDS
            while got.total() < 400 and time.monotonic() < deadline:
                lease = uuid4()
                ids = claimed(mine, sink, lease=lease, rows=5 + number)
                with lock:
                    got.update(ids)
                done = call(mine, "delete_rows", sink=sink, ids=ids, leases=[lease] * len(ids))
                assert sorted(event for event, _ in done) == ids

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert got == Counter(range(1, 401))


PAUSE = 77_001
"""The advisory lock at which the claim below pauses."""

BEHIND, CHOSEN = "if with_followers", "chosen := array(\n            select c.id"
"""The part of a claim after the pause, from the rows behind the first ones of their keys on."""


@contextmanager
def claim_that_pauses(connection: Connection, before: str = CHOSEN) -> Generator[None]:
    """Make ``claim_rows`` wait for ``PAUSE`` between its look at held rows and their locks, inside the block."""
    [(original,)] = connection.execute(
        "select pg_get_functiondef(oid) from pg_proc where proname = 'claim_rows'"
    ).fetchall()
    paused = original.replace(before, f"perform pg_advisory_xact_lock({PAUSE});\n{before}", 1)
    assert paused != original
    connection.execute(paused)
    try:
        yield
    finally:
        connection.execute(original)


@pytest.mark.parametrize(("state", "due_in"), [("waiting", 3600.0), ("dead", None)])
def test_row_that_was_given_back_while_it_was_looked_for_is_left(
    database: Database, connection: Connection, sink: str, state: str, due_in: float | None
) -> None:
    """Without the conditions beside ``skip locked``, a row that another relay has just given back is claimed early."""
    add(connection, sink, 1, state="held")
    lease = uuid4()
    with claim_that_pauses(connection), database.connect(autocommit=True) as other:
        other.execute("select pg_advisory_lock(%s)", (PAUSE,))
        with in_background(database, lambda c: claimed(c, sink)) as found:
            assert not found.done(), "the claim did not pause"
            query = "update outbox.delivery set lease = %s, lease_until = now() + interval '1 h' where sink = %s"
            other.execute(query, (lease, sink))
            assert given_back(other, sink, lease, state, due_in=due_in) == [(1,)]
            other.execute("select pg_advisory_unlock(%s)", (PAUSE,))
        assert found.result() == []


@pytest.mark.parametrize("before", [BEHIND, CHOSEN], ids=["the followers are not known yet", "the followers are known"])
@pytest.mark.parametrize("first", [1, 2])
def test_followers_are_not_claimed_behind_what_another_has_just_claimed(
    database: Database, connection: Connection, sink: str, before: str, first: int
) -> None:
    """Without the statement after ``skip locked``, rows are claimed behind one that another relay is delivering."""
    for event in range(1, 4):
        add(connection, sink, event, state="held")
    with claim_that_pauses(connection, before), database.connect(autocommit=True) as other:
        other.execute("select pg_advisory_lock(%s)", (PAUSE,))
        with in_background(database, lambda c: claimed(c, sink, with_followers=True)) as found:
            assert not found.done(), "the claim did not pause"
            query = "update outbox.delivery set lease_until = now() + interval '1 h' where sink = %s and id = %s"
            other.execute(query, (sink, first))
            other.execute("select pg_advisory_unlock(%s)", (PAUSE,))
        assert found.result() == list(range(1, first))


# -- settling rows ------------------------------------------------------------------------------------------------


def given_back(connection: Connection, sink: str, lease: UUID, state: str | None, **changes: Any) -> list[Any]:
    """Give back row 1, by default due in an hour after a second attempt."""
    row = {"due_in": 3600.0, "attempts": 2, "errors": "said no", "statuses": 500, **changes}
    return call(
        connection, "update_rows", sink=sink, ids=[1], leases=[lease], states=[state], due_in=[row["due_in"]],
        attempts=[row["attempts"]], errors=[row["errors"]], statuses=[row["statuses"]],
        last_attempts=[row.get("last_attempts")],
    )  # fmt: skip


def row_state(connection: Connection, sink: str) -> tuple[Any, ...]:
    """Return the changes of a settlement of row 1."""
    return connection.execute(
        "select state, due_at > now() + interval '50 min', attempts, claims, lease, lease_until, owner, last_error, "
        "last_status, last_attempt_at is not null from outbox.delivery where sink = %s and id = 1",
        (sink,),
    ).fetchall()[0]


def test_row_done_needs_its_lease(connection: Connection, sink: str) -> None:
    """Without ``d.lease = r.lease`` a relay whose lease lapsed removes a row that another is delivering."""
    add(connection, sink, 1)
    lease = uuid4()
    assert claimed(connection, sink, lease=lease) == [1]
    assert call(connection, "delete_rows", sink=sink, ids=[1], leases=[uuid4()]) == []
    assert call(connection, "delete_rows", sink="another", ids=[1], leases=[lease]) == []
    assert written(connection, sink) == (1, 0)
    assert call(connection, "delete_rows", sink=sink, ids=[1], leases=[lease]) == [(1, False)]
    assert written(connection, sink) == (0, 0)


@pytest.mark.parametrize(
    ("other", "followed"),
    [
        ({"state": "waiting"}, True),
        ({"state": "held"}, True),
        ({"state": "dead"}, False),
        ({"ordered": False}, False),
        ({"key": "another"}, False),
    ],
)
@pytest.mark.parametrize("later", [True, False], ids=["later", "earlier"])
def test_row_done_says_whether_rows_of_its_key_are_left(
    connection: Connection, sink: str, other: dict[str, Any], *, followed: bool, later: bool
) -> None:
    """An earlier row is that of a transaction that committed late."""
    lease = uuid4()
    add(connection, sink, 2)
    assert claimed(connection, sink, lease=lease) == [2]
    add(connection, sink, 3 if later else 1, **other)
    assert call(connection, "delete_rows", sink=sink, ids=[2], leases=[lease]) == [(2, followed)]


def test_rows_done_together_are_not_left(connection: Connection, sink: str) -> None:
    lease = uuid4()
    for event in (1, 2):
        add(connection, sink, event)
    assert claimed(connection, sink, lease=lease, with_followers=True) == [1, 2]
    done = call(connection, "delete_rows", sink=sink, ids=[1, 2], leases=[lease] * 2)
    assert sorted(done) == [(1, False), (2, False)]


def test_row_back_needs_its_lease(connection: Connection, sink: str) -> None:
    """Without ``d.lease = r.lease`` a relay whose lease lapsed frees a row that another is delivering."""
    add(connection, sink, 1)
    lease = uuid4()
    assert claimed(connection, sink, lease=lease) == [1]
    before = row_state(connection, sink)
    assert given_back(connection, sink, uuid4(), "waiting") == []
    assert row_state(connection, sink) == before
    assert given_back(connection, sink, lease, "waiting") == [(1,)]
    assert given_back(connection, sink, lease, "dead") == [], "a lease is good for one settlement"


def claimed_again(connection: Connection, sink: str) -> tuple[UUID, UUID]:
    """Claim row 1, end its lease, claim it again; return both leases."""
    ended, lease = uuid4(), uuid4()
    add(connection, sink, 1)
    assert claimed(connection, sink, lease=ended) == [1]
    connection.execute("update outbox.delivery set lease_until = now() - interval '1 s' where sink = %s", (sink,))
    assert claimed(connection, sink, lease=lease) == [1]
    return ended, lease


def test_row_done_under_two_leases_goes_once(connection: Connection, sink: str) -> None:
    """A relay that claimed a row again settles both deliveries in one statement, or each in its own."""
    ended, lease = claimed_again(connection, sink)
    assert call(connection, "delete_rows", sink=sink, ids=[1, 1], leases=[ended, uuid4()]) == []
    assert written(connection, sink) == (1, 0)
    assert call(connection, "delete_rows", sink=sink, ids=[1, 1], leases=[ended, lease]) == [(1, False)]
    assert written(connection, sink) == (0, 0)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "last"])
def test_row_back_under_two_leases_becomes_what_its_own_says(connection: Connection, sink: str, place: int) -> None:
    """Without ``d.lease = r.lease`` the outcome under the lease that ended may be the one that is kept."""
    ended, lease = claimed_again(connection, sink)
    outcomes = [(ended, "dead", None, 7, "ended", 400), (lease, "waiting", 3600.0, 2, "said no", 500)]
    leases, states, due_in, attempts, errors, statuses = zip(outcomes[place], outcomes[1 - place], strict=True)
    settled = call(
        connection, "update_rows", sink=sink, ids=[1, 1], leases=[*leases], states=[*states], due_in=[*due_in],
        attempts=[*attempts], errors=[*errors], statuses=[*statuses], last_attempts=[None, None],
    )  # fmt: skip
    assert settled == [(1,)]
    assert row_state(connection, sink) == ("waiting", True, 2, 0, None, None, None, "said no", 500, True)


@pytest.mark.parametrize(
    ("state", "changes", "after"),
    [
        ("waiting", {}, ("waiting", True, 2, 0, None, None, None, "said no", 500, True)),
        ("dead", {"due_in": None}, ("dead", False, 2, 0, None, None, None, "said no", 500, True)),
        (
            None,
            {"attempts": 0, "due_in": None, "errors": None, "statuses": None},
            ("held", False, 0, 0, None, None, None, None, None, False),
        ),
    ],
)
def test_row_given_back_is_free_again_and_says_why(
    connection: Connection, sink: str, state: str | None, changes: dict[str, Any], after: tuple[Any, ...]
) -> None:
    add(connection, sink, 1, state="held")
    lease = uuid4()
    assert claimed(connection, sink, lease=lease) == [1]
    assert given_back(connection, sink, lease, state, **changes) == [(1,)]
    assert row_state(connection, sink) == after


def test_held_row_given_back_with_a_delay_rests_that_long(connection: Connection, sink: str) -> None:
    """Without ``h.due_at <= now()`` a destination that asks for time is sent the head of a key at every look."""
    add(connection, sink, 1, state="held")
    lease = uuid4()
    assert claimed(connection, sink, lease=lease) == [1]
    assert given_back(connection, sink, lease, None, attempts=0) == [(1,)]
    assert claimed(connection, sink) == []
    connection.execute("update outbox.delivery set due_at = now() where sink = %s", (sink,))
    assert claimed(connection, sink) == [1]


# -- registering sinks --------------------------------------------------------------------------------------------


@pytest.fixture
def no_sinks(connection: Connection) -> Generator[Connection]:
    """Yield a transaction, undone at the end, in which the database knows no sink."""
    with connection.transaction(force_rollback=True):
        connection.execute("delete from outbox.sink")
        connection.execute("delete from outbox.progress")
        yield connection


def register(connection: Connection, *wanted: tuple[str, list[str], str | None]) -> dict[str, int]:
    """Return name → generation, registered with a tick of sequence 500."""
    sinks = [{"name": name, "patterns": patterns, "start": start} for name, patterns, start in wanted]
    rows = call(connection, "register_sinks", wanted=Jsonb(sinks), seq=500, snapshot="90:99:90", next=101)
    return dict(rows)


def first_positions(connection: Connection, sink: str) -> set[tuple[Any, ...]]:
    """Return the different first positions of the shards of a sink."""
    rows = call(connection, "positions", sink=sink, shards=list(range(64)))
    assert [row[0] for row in rows] == list(range(64))
    return {row[1:] for row in rows}


BEGINNING, NOW = (0, "3:3:", 3, None, None, None, 0), (500, "90:99:90", 101, None, None, None, 0)


@pytest.mark.parametrize(
    ("known", "start", "position"),
    [
        (False, None, BEGINNING),
        (False, "now", NOW),
        (True, None, NOW),
        (True, "beginning", BEGINNING),
        (True, "now", NOW),
    ],
)
def test_new_sink_begins_where_it_is_told_else_by_who_was_first(
    no_sinks: Connection, known: bool, start: str | None, position: tuple[Any, ...]
) -> None:
    if known:
        register(no_sinks, ("older", ["*"], None))
    assert register(no_sinks, ("new", ["a", "b*"], start), ("beside", ["*"], start)).keys() == {"new", "beside"}
    assert first_positions(no_sinks, "new") == first_positions(no_sinks, "beside") == {position}


def test_only_other_patterns_make_a_new_generation(no_sinks: Connection) -> None:
    first = register(no_sinks, ("s", ["a"], None))
    assert register(no_sinks, ("s", ["a"], "now")) == first
    second = register(no_sinks, ("s", ["a", "b"], None), ("t", ["c"], None))
    third = register(no_sinks, ("s", ["a"], None))
    assert first["s"] < second["s"] < second["t"] < third["s"]
    assert first_positions(no_sinks, "s") == {BEGINNING}


def test_relays_that_register_at_once_make_a_sink_once(database: Database, sink: str) -> None:
    name = f"{sink}_new"
    with database.connect() as first:
        made = register(first, (name, ["a"], None))
        with in_background(database, lambda c: register(c, (name, ["a"], None))) as second:
            assert not second.done(), "the second relay did not wait"
            first.commit()
        assert second.result() == made
        assert first_positions(first, name) == {NOW}


# -- partitions ---------------------------------------------------------------------------------------------------


@pytest.fixture
def day_missing(postgres: PostgresServer, template: str) -> Generator[Database]:
    """Yield a database in whose log today's partition and all later ones are missing."""
    name = f"partitions_{uuid4().hex}"
    postgres.create_database(name, template=template)
    database = Database(postgres, name)
    with database.connect(autocommit=True) as connection:
        for (table,) in partitions(connection):
            connection.execute(f"drop table outbox.{table}".encode())
        connection.execute("update outbox.retention set keep_days = 7")  # partitions of a day
    yield database
    postgres.drop_database(name)


def partitions(connection: Connection) -> list[tuple[str]]:
    """Return the partitions of the log without DEFAULT, by name, which is by day."""
    return connection.execute(
        "select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid "
        "where i.inhparent = 'outbox.event'::regclass and c.relname <> 'event_default' order by 1"
    ).fetchall()


def make(connection: Connection) -> int:
    [(made,)] = call(connection, "make_partitions")
    return made


def test_partitions_are_made_once(day_missing: Database) -> None:
    with day_missing.connect(autocommit=True) as connection:
        assert make(connection) == 4
        assert make(connection) == 0
        emitted(connection)
        [(today,)] = connection.execute("select tableoid::regclass::text from outbox.event").fetchall()
    assert today != "outbox.event_default"


def test_event_without_a_partition_is_kept_and_read(day_missing: Database) -> None:
    with day_missing.connect(autocommit=True) as connection:
        ids = [emitted(connection)[0] for _ in range(3)]
        assert make(connection) == 3
        ids += [emitted(connection)[0] for _ in range(3)]
        connection.execute("update outbox.event set created_at = now() + interval '1 day' where id = %s", (ids[1],))
        rows = call(
            connection, "read_rest", shards=list(range(64)), types=None, a="3:3:", b="9000000000:9000000000:",
            after=0, upto=2**40, rows=100, bytes=AMPLE, most_payload=None,
        )  # fmt: skip
    assert [row[0] for row in rows] == ids


@pytest.mark.parametrize(("ahead", "made"), [(0, 3), (1, 3), (2, 3), (3, 3), (4, 4), (40, 4)])
def test_no_partition_is_made_for_a_day_that_default_has_a_row_of(day_missing: Database, ahead: int, made: int) -> None:
    """Without the look into DEFAULT, attaching fails with the first row that would have to move.

    One event of a day to come, such as while the clock is wrong, must not keep the other days from their partitions.
    """
    with day_missing.connect(autocommit=True) as connection:
        emitted(connection)
        connection.execute("update outbox.event set created_at = created_at + %s * interval '1 day'", (ahead,))
        assert make(connection) == made
        assert connection.execute("select count(*) from outbox.event_default").fetchall() == [(1,)]


def test_a_partition_of_several_days_ends_before_a_day_that_default_has_a_row_of(day_missing: Database) -> None:
    """Goes red when one event dated in the future keeps the partitions of a month from being made."""
    with day_missing.connect(autocommit=True) as connection:
        connection.execute("update outbox.retention set keep_days = 400, stated = true")
        emitted(connection)
        connection.execute("update outbox.event set created_at = created_at + interval '20 days'")
        make(connection)
        emitted(connection)
        parts = connection.execute("select tableoid::regclass::text from outbox.event order by id").fetchall()
    assert parts[0] == ("outbox.event_default",)
    assert parts[1] != parts[0]


def test_partitions_wait_for_nobody(day_missing: Database) -> None:
    """Without ``lock_timeout`` this waits for the open transaction, and every emit behind it."""
    with day_missing.connect(autocommit=True) as connection, day_missing.connect() as emitting:
        emitted(emitting)
        connection.execute("set statement_timeout = '10s'")
        began = time.monotonic()
        with pytest.raises(psycopg.errors.LockNotAvailable):
            make(connection)
        assert time.monotonic() - began < WAIT_SECONDS / 2
        assert partitions(connection) == []
        emitted(connection)
        emitting.commit()
        assert make(connection) == 3


def test_partitions_are_made_by_one_at_a_time(day_missing: Database) -> None:
    with day_missing.connect(autocommit=True) as connection, day_missing.connect() as first:
        assert make(first) == 4
        assert make(connection) == 0
        first.rollback()
        assert make(connection) == 4
