"""The plans of the statements on the data path, as the server ran them inside the functions: indexes and rows.

The log has 300,000 events in thirty partitions, a million in the slow form, and ``delivery`` 100,000 rows. The planner
knows nothing true of them: they were analysed while they were empty, or never. The plans must be the same once the
statistics are right.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox_relay.relay.log_reader import CHUNK_EVENTS
from tests.support import plans
from tests.support.database import Database
from tests.support.plans import EVENTS_OF_A_DAY, LOG, NEVER_IN_ORDER, PARTITIONS
from tests.support.postgres import PostgresServer

pytestmark = pytest.mark.xdist_group("plans")

FEW, MANY = 10_000, 33_400
"""Events of each partition."""
ROWS = 50_000
"""Rows of ``delivery`` for each of the two sinks."""
EVERYTHING_BEFORE, NOTHING_BEFORE = "3:3:", "9000000000:9000000000:"
SINK = "crm"
OWNER = UUID(int=7)
AMPLE = 1 << 40

ROWS_OF_A_SINK = """
insert into outbox.delivery
       (sink, id, shard, state, ordered, due_at, uid, type, key, payload, content_type, created_at)
select %(sink)s, e.id, e.shard, case when e.id %% 4 = 0 then 'waiting' else 'held' end, true,
       now() + (e.id %% 3 - 1) * interval '1 hour', e.uid, e.type, e.key, e.payload, 'application/json', e.created_at
  from outbox.event e
 where e.id between %(first)s and %(last)s
"""


@dataclass(frozen=True)
class Log:
    """A filled database, and the number of its events."""

    database: Database
    events: int


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def log(request: pytest.FixtureRequest, postgres: PostgresServer, template: str) -> Generator[Log]:
    """Yield a log and rows of two sinks, neither ever analysed since it was filled."""
    postgres.create_database("plans", template=template)
    with postgres.connect("plans") as connection:
        connection.execute(LOG.encode())
        for day in reversed(range(PARTITIONS)):
            connection.execute(EVENTS_OF_A_DAY.format(day, request.param).encode())
        for n, sink in enumerate((SINK, "other")):
            parameters = {"sink": sink, "first": n * ROWS + 1, "last": (n + 1) * ROWS}
            connection.execute(ROWS_OF_A_SINK.encode(), parameters)
    yield Log(Database(postgres, "plans"), PARTITIONS * request.param)
    postgres.drop_database("plans")


@pytest.fixture(scope="module", params=["stale statistics", "true statistics"])
def statistics(request: pytest.FixtureRequest, log: Log) -> Log:
    if request.param == "true statistics":
        with log.database.connect(autocommit=True) as connection:
            connection.execute("analyze")
    return log


@dataclass
class Explained(plans.Explained):
    """A connection on which every plan is shown, to a log of `events` events."""

    events: int = 0


@pytest.fixture
def explained(statistics: Log) -> Generator[Explained]:
    with statistics.database.connect(autocommit=True) as connection:
        yield Explained(connection, events=statistics.events)


def read(explained: Explained, statement: str = "read_rest", **changes: Any) -> list[tuple[Any, ...]]:
    parameters: dict[str, Any] = {
        "shards": list(range(64)), "types": None, "a": EVERYTHING_BEFORE, "b": NOTHING_BEFORE, "a_next": 3,
        "after": 0, "upto": explained.events, "rows": CHUNK_EVENTS, "bytes": AMPLE, "most_payload": AMPLE,
    }  # fmt: skip
    return explained.run(statement, **{**parameters, **changes})


REST, LATE = "outbox_internal.window_events(", "l.id + 0 <= last_id"
LOOK, NEXT = "limit most_looks + 1", "limit each"


OF_EVERY_SIZE = pytest.mark.parametrize(
    ("statement", "size"), [("read_rest", AMPLE), ("read_small", 2000)], ids=["of every size", "small ones"]
)


@pytest.mark.slow
@OF_EVERY_SIZE
@pytest.mark.parametrize("part", [0.0, 0.5, 0.98])
@pytest.mark.parametrize("calls", [1, 7], ids=["first call", "beyond the calls that are planned one by one"])
def test_rest_is_read_in_index_order_and_no_further_than_needed(
    explained: Explained, part: float, calls: int, statement: str, size: int
) -> None:
    after = round(part * explained.events)
    found = [read(explained, statement, after=after, upto=2**63 - 1, bytes=size) for _ in range(calls)][-1]
    assert [row[0] for row in found] == list(range(after + 1, after + CHUNK_EVENTS + 1))
    scans = explained.scans("event_", "past_", of=REST)
    assert not {node.type for node in explained.nodes(of=REST)} & NEVER_IN_ORDER
    assert scans
    assert all(node.type == "Index Scan" and "id > $" in node.condition for node in scans), "ordered, and generic"
    assert sum(node.scanned for node in scans) <= len(found) + len(scans)


@pytest.mark.parametrize("most_payload", [None, AMPLE], ids=["version 1", "today"])
@pytest.mark.parametrize("listed", [True, False], ids=["listed in the snapshot", "above its xmax"])
def test_latecomers_are_found_by_their_xid(explained: Explained, listed: bool, most_payload: int | None) -> None:
    connection = explained.connection
    with connection.transaction(force_rollback=True):
        [(xid,)] = connection.execute("select pg_current_xact_id()::text::bigint").fetchall()
        connection.execute(EVENTS_OF_A_DAY.format(0, 50).encode())
        [(last,)] = connection.execute("select max(id) from outbox.event").fetchall()
        snapshot, following = (f"{xid}:{xid + 1}:{xid}", xid + 1) if listed else (f"{xid}:{xid}:", xid + 500)
        found = read(
            explained, "read_late", a=snapshot, a_next=following, upto=last, rows=20, most_payload=most_payload
        )
    assert [row[0] for row in found] == list(range(last - 49, last - 29))
    looks = [LATE] if most_payload is None else [LOOK, REST]
    for text in looks:
        scans = explained.scans("event_", "past_", of=text)
        assert scans
        assert "Seq Scan" not in {node.type for node in scans}
        assert sum(node.scanned for node in scans) <= 50
        assert all("$" in condition for _, condition in explained.conditions(of=text)), "not generic"
    assert {index for index, _ in explained.conditions(of=looks[0])} == {"event_xid_expr_idx"}


def claim(explained: Explained, **changes: Any) -> list[tuple[Any, ...]]:
    parameters: dict[str, Any] = {
        "sink": SINK, "owner": OWNER, "lease": uuid4(), "lease_for": 20.0, "rows": 100, "bytes": AMPLE,
        "hold": False, "keys": [], "suspects": False, "with_followers": False, "most_payload": None,
        "after_due": None, "after_id": None,
    }  # fmt: skip
    with explained.connection.transaction(force_rollback=True):
        return explained.run("claim_rows", **{**parameters, **changes})


WAITING, HEADS, HELD, LOCKED = "d.state = 'waiting'", "recursive held", "unnest(keys) k (key)", "l.due_at <= now()"


def test_due_rows_are_found_by_the_time_they_are_due(explained: Explained) -> None:
    assert claim(explained)
    outer, *inner = explained.scans("delivery", of=WAITING)
    assert not {"Sort", "Seq Scan", "Bitmap Heap Scan"} & {node.type for node in explained.nodes(of=WAITING)}
    assert (outer.index, "due_at" in outer.condition) == ("delivery_due", True)
    assert inner
    assert all(node.index == "delivery_key" and "id < " in node.condition for node in inner)


def held_keys(explained: Explained) -> list[str]:
    return [key for (key,) in explained.run("held_keys", sink=SINK, after=None, most=1000)]
