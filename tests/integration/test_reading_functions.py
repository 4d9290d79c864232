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

from outbox_relay.postgres.database import statements
from outbox_relay.postgres.parameters import PositionColumns
from tests.support.database import Database
from tests.support.postgres import PostgresServer
from tests.support.recording import settled_unrecorded, unrecorded
from tests.support.wait import until

pytestmark = pytest.mark.xdist_group("reading functions")

Connection = psycopg.Connection[Any]
SQL = statements()
ME, OTHER = UUID(int=1), UUID(int=2)
AMPLE = 1 << 40
TOO_LARGE = b"x" * 2_000_000
"""A payload above the ceiling."""
WAIT_SECONDS = 10.0
POSITION = tuple(f"position_{name}" for name in PositionColumns._fields)


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
        "insert into outbox.shard (sink, shard, owner, epoch) select %s, n, %s, 1 from generate_series(0, 63) n",
        (name, ME),
    )
    connection.execute("insert into outbox.session values (%s, %s, now() + interval '1 hour')", (name, ME))
    connection.execute("insert into outbox.session values (%s, %s, now() + interval '1 hour')", (name, OTHER))
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
            "row_state": "waiting",
            "row_ordered": True,
            "row_due_in": 0.0,
            "row_attempts": 0,
            "row_claims": 0,
            "row_lease": None,
            "row_lease_for": None,
            "row_error": None,
            "row_status": None,
            "row_last_attempt": None,
            **self.row,
        }
        at = [(0, "3:3:", 3, 900, "9:9:", 9, last) for _, last in self.moved.values()]
        return {
            "sink": self.sink,
            "owner": self.owner,
            "shards": [*self.moved],
            "epochs": [epoch for epoch, _ in self.moved.values()],
            "places": [*range(1, len(at) + 1)],
            **{name: [position[n] for position in at] for n, name in enumerate(POSITION)},
            "row_id": [event for event, _ in self.events],
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


@pytest.mark.parametrize("epoch", [0, 2, -1])
def test_fence_epoch(connection: Connection, sink: str, epoch: int) -> None:
    """Without ``s.epoch = f.epoch`` in the fence a settlement from before a shard was lost and won again is written."""
    event, shard = emitted(connection)
    assert not Settlement(sink, [(event, shard)], fence={shard: epoch}, moved={7: (1, 50)}).run(connection)
    assert written(connection, sink) == (0, 0)


def test_fence_holds_for_every_shard_or_nothing_is_written(connection: Connection, sink: str) -> None:
    """Without ``mine <> cardinality(fence_shards)`` a shard that is still held lets the rows of a lost one through."""
    events = [emitted(connection, key=f"key-{n}") for n in range(20)]
    shards = sorted({shard for _, shard in events})
    connection.execute("update outbox.shard set epoch = 2 where sink = %s and shard = %s", (sink, shards[0]))
    assert not Settlement(sink, events, moved={shards[1]: (1, 50)}).run(connection)
    assert written(connection, sink) == (0, 0)


def claim_shards(connection: Connection, sink: str) -> list[tuple[Any, ...]]:
    """Claim every shard whose lease has lapsed, for the other relay."""
    text = "select array(select shard from outbox.shard where sink = %s and owner = %s)"
    [(known,)] = connection.execute(text, (sink, OTHER)).fetchall()
    return call(
        connection, "claim_shards", sink=sink, owner=OTHER, generation=1, most=64, known=known,
        patterns=None, claim=None,
    )  # fmt: skip


@pytest.mark.fence("the COMMIT of a settlement has no answer, and may still take effect")
def test_new_epochs_shut_out_what_was_under_way(database: Database, connection: Connection, sink: str) -> None:
    event, shard = emitted(connection)
    with database.connect() as settling:
        assert Settlement(sink, [(event, shard)]).run(settling)
        reclaim = {"sink": sink, "owner": ME}
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


# -- claiming rows ------------------------------------------------------------------------------------------------


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


@pytest.mark.fence("a row is delivered before an earlier one of its key")
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
            "types": None, "most_ids": 2**40, "most_events": 100, "most_bytes": AMPLE, "most_payload": 1 << 20,
            "most_size": most_size,
        }  # fmt: skip
        rows = connection.execute(SQL["look"], asked).fetchall()
    assert [row[7] for row in rows[1:] if row[8] >= 0] == ids
    assert longest(rows) < 1_000


def longest(rows: list[tuple[Any, ...]]) -> int:
    """Return the length of the longest value of the rows."""
    return max(len(value) for row in rows for value in row if isinstance(value, bytes | str))


@pytest.mark.fence("two relays claim one row or shard")
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
                done = call(mine, "delete_rows", sink=sink, row_id=ids, row_lease=[lease] * len(ids))
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


@pytest.mark.fence("rows of a key are claimed behind one that another relay is claiming")
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
    row = {"row_due_in": 3600.0, "row_attempts": 2, "row_error": "said no", "row_status": 500, **changes}
    return call(
        connection,
        "update_rows",
        sink=sink,
        row_id=[1],
        row_lease=[lease],
        row_state=[state],
        row_due_in=[row["row_due_in"]],
        row_attempts=[row["row_attempts"]],
        row_error=[row["row_error"]],
        row_status=[row["row_status"]],
        row_last_attempt=[row.get("row_last_attempt")],
    )


def row_state(connection: Connection, sink: str) -> tuple[Any, ...]:
    """Return the changes of a settlement of row 1."""
    return connection.execute(
        "select state, due_at > now() + interval '50 min', attempts, claims, lease, lease_until, owner, last_error, "
        "last_status, last_attempt_at is not null from outbox.delivery where sink = %s and id = 1",
        (sink,),
    ).fetchall()[0]


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
    assert call(connection, "delete_rows", sink=sink, row_id=[2], row_lease=[lease]) == [(2, followed)]


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


# -- registering sinks --------------------------------------------------------------------------------------------


BEGINNING, NOW = (0, "3:3:", 3, None, None, None, 0), (500, "90:99:90", 101, None, None, None, 0)


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
