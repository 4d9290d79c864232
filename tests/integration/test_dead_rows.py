"""The cost of dead rows for a relay: none, however many there are. Rows and pages are counted, never timed.

``delivery`` has very many dead rows, of as many keys or all of one key, and few that are to be delivered. Plans are
made while it is empty, after it was filled without being analysed, after that, and while the statistics know dead rows
alone. The bounds are the same for 200,000 dead rows, which they exceed at least as clearly if a plan is wrong, and for
the million of the thorough tests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import product
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from outbox_relay.postgres.database import statements
from outbox_relay.postgres.parameters import PositionColumns, columns
from outbox_relay.postgres.rows import NewRow, settled_rows
from tests.support.database import Database
from tests.support.deliveries import touched
from tests.support.postgres import PostgresServer
from tests.support.recording import unrecorded

pytestmark = pytest.mark.xdist_group("dead rows")

Connection = psycopg.Connection[Any]
DEAD = (200_000, pytest.param(1_000_000, marks=pytest.mark.thorough))  # a million takes 20 s to make, twice
LIVE_KEYS, PER_KEY = 50, 4
SINK = "crm"
OWNER = UUID(int=7)
PAGES = 4_000
"""That a statement may touch; 200,000 dead rows have eight thousand, and each of their indexes a thousand.

Up to a thousand are of row versions that the tests before left behind when they rolled back.

Before PostgreSQL 17 twice as many: ``= any`` goes down an index for each element.
"""
ROWS = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, key, payload, content_type, created_at)
select 'crm', g, g %% 64, %(state)s, true, now() - interval '1 hour', gen_random_uuid(), 't', %(key)s::text || {number},
       '', 't', now()
  from generate_series(%(first)s::integer, %(last)s::integer) g
"""


def fill_dead(connection: Connection, dead_rows: int, *, one_key: bool) -> None:
    """Insert dead rows, each of its own key or all of one."""
    number = "''" if one_key else "g"
    dead = {"state": "dead", "key": "dead-", "first": 1, "last": dead_rows}
    connection.execute(ROWS.format(number=number).encode(), dead)


def fill_live(connection: Connection, dead_rows: int) -> None:
    """Insert of each live key one row that waits and others that are held behind it."""
    for n in range(PER_KEY):
        first = dead_rows + 1 + n * LIVE_KEYS
        live = {"state": "held" if n else "waiting", "key": "live-", "first": first, "last": first + LIVE_KEYS - 1}
        connection.execute(ROWS.format(number=f"(g %% {LIVE_KEYS})").encode(), live)


@pytest.fixture(scope="module")
def filled(postgres: PostgresServer, template: str) -> Generator[Callable[[int, str], Database]]:
    """Return a database by the number of its dead rows and their keys; each is filled when it is first asked for."""
    made: dict[tuple[int, str], Database] = {}

    def of(dead: int, keys: str) -> Database:
        if (dead, keys) not in made:
            made[dead, keys] = database = Database(postgres, f"dead_{dead}_{keys.replace(' ', '_')}")
            postgres.create_database(database.name, template=template)
            with database.connect(autocommit=True) as connection:
                connection.execute("alter table outbox.delivery set (autovacuum_enabled = off)")
                connection.execute("analyze outbox.delivery")
                fill_dead(connection, dead, one_key=keys == "one key")
                fill_live(connection, dead)
        return made[dead, keys]

    yield of
    for database in made.values():
        postgres.drop_database(database.name)


@pytest.fixture(scope="module", params=DEAD)
def dead(request: pytest.FixtureRequest) -> int:
    """Return the number of dead rows."""
    return request.param


@pytest.fixture(
    scope="module",
    params=product(["many keys", "one key"], ["stale statistics", "true statistics", "statistics of dead rows alone"]),
    ids="-".join,
)
def rows(request: pytest.FixtureRequest, dead: int, filled: Callable[[int, str], Database]) -> Database:
    """Return a filled database. Its tests with stale statistics run before those with others.

    An analysis looks at 30,000 rows, so among very many dead ones it may find no other.
    """
    keys, statistics = request.param
    database = filled(dead, keys)
    if statistics == "true statistics":
        with database.connect(autocommit=True) as connection:
            connection.execute("analyze outbox.delivery")
    elif statistics == "statistics of dead rows alone":
        with database.connect(autocommit=True) as connection:
            connection.execute("delete from outbox.delivery where state <> 'dead'")
            connection.execute("analyze outbox.delivery")
            fill_live(connection, dead)
    return database


def claiming(**changes: Any) -> dict[str, Any]:
    return {
        "sink": SINK, "owner": OWNER, "lease": uuid4(), "lease_for": 20.0, "rows": 100, "bytes": 1 << 40,
        "hold": False, "keys": [], "suspects": False, "with_followers": False, "most_payload": 1 << 30,
        "after_due": None, "after_id": None,
        **changes,
    }  # fmt: skip


LIVE = [f"live-{n}" for n in range(LIVE_KEYS)]
ALL = LIVE_KEYS * PER_KEY
SHARDS = list(range(64))
DEAD_KEYS = ["dead-", "dead-7"]
"""Keys with dead rows: with all of them, or with one."""
FREE = 3_000_000
"""Above the ids of all rows."""


def registered(connection: Connection) -> None:
    """Register the sink, all of whose shards the owner has."""
    connection.execute("insert into outbox.sink (name, patterns, start) values (%s, '{*}', 'now')", (SINK,))
    connection.execute(
        "insert into outbox.shard (sink, shard, owner, epoch) select %s, n, %s, 1 from generate_series(0, 63) n",
        (SINK, OWNER),
    )
    connection.execute("insert into outbox.session values (%s, %s, now() + interval '1 hour')", (SINK, OWNER))


def emitted(connection: Connection, options: str = "") -> list[tuple[int, int]]:
    """Emit an event of each key with dead rows; return (id, shard) of each."""
    connection.execute("select setval('outbox.event_id_seq', greatest(nextval('outbox.event_id_seq'), %s))", (FREE,))
    for key in DEAD_KEYS:
        connection.execute(f"select outbox.emit('t', '1', key => %s {options})".encode(), (key,))
    return connection.execute("select id, shard from outbox.event where id > %s order by id", (FREE,)).fetchall()


def settling(connection: Connection) -> dict[str, Any]:
    """Return a settlement of events whose keys have dead rows."""
    registered(connection)
    rows = [NewRow(event, shard, "waiting", ordered=True) for event, shard in emitted(connection)]
    moved: dict[str, Any] = {
        "shards": [],
        "epochs": [],
        "places": [],
        **columns("position_", PositionColumns._fields, []),
    }
    settlement = settled_rows(rows, dict.fromkeys(SHARDS, 1), (), None)
    return {"sink": SINK, "owner": OWNER, "server": None, **moved, **settlement}


def leased(connection: Connection) -> dict[str, Any]:
    """Lease the first of two rows of each key with dead rows, and the first of each live key; return their ids."""
    for number, key in enumerate(DEAD_KEYS):
        first = FREE + 2 * number
        for event, state in ((first, "waiting"), (first + 1, "held")):
            added = {"state": state, "key": key, "first": event, "last": event}
            connection.execute(ROWS.format(number="''").encode(), added)
    rows = connection.execute(statements()["claim_rows"], claiming()).fetchall()
    ids = [row[0] for row in rows]
    leases = dict(connection.execute("select id, lease from outbox.delivery where lease is not null").fetchall())
    return {
        "sink": SINK,
        "row_id": ids,
        "row_lease": [leases[event] for event in ids],
        "server": None,
        **unrecorded(len(ids)),
    }


def failed(connection: Connection) -> dict[str, Any]:
    """Return an update of leased rows that wait again."""
    found = leased(connection)
    count = len(found["row_id"])
    outcome = {
        "row_state": "waiting",
        "row_due_in": 60.0,
        "row_attempts": 1,
        "row_error": "said no",
        "row_status": 500,
        "row_last_attempt": None,
    }
    return found | {name: [value] * count for name, value in outcome.items()}


def with_unique_keys(connection: Connection) -> dict[str, Any]:
    """Emit events with unique keys, some of which no sink is to read, and have all looked at."""
    emitted(connection, ", unique_key => gen_random_uuid()::text")
    registered(connection)
    emitted(connection, ", unique_key => gen_random_uuid()::text")
    connection.execute("update outbox.unique_key set look_at = clock_timestamp() - interval '1 minute'")
    return {"most": 500}


Given = dict[str, Any] | Callable[[Connection], dict[str, Any]]
"""The parameters of a statement, or what prepares it in its transaction and returns them."""
STATEMENTS: list[tuple[str, Given, int]] = [
    ("claim_rows", claiming(), LIVE_KEYS),
    ("claim_rows", claiming(keys=LIVE), LIVE_KEYS),
    ("claim_rows", claiming(with_followers=True, rows=1000), ALL),
    ("claim_rows", claiming(hold=True, rows=1000, with_followers=True), ALL),
    ("claim_rows", claiming(suspects=True), 0),
    ("held_keys", {"sink": SINK, "after": None, "most": 1000}, LIVE_KEYS),
    ("blocked_keys", {"sink": SINK, "shards": SHARDS, "hold": False, "server": None}, LIVE_KEYS),
    ("blocked_keys", {"sink": SINK, "shards": SHARDS, "hold": True, "server": None}, LIVE_KEYS + 1),
    ("still_blocked", {"sink": SINK, "keys": [*LIVE, "dead-", "dead-7"], "hold": False, "server": None}, LIVE_KEYS),
    ("still_blocked", {"sink": SINK, "keys": [*LIVE, "dead-", "dead-7"], "hold": True, "server": None}, LIVE_KEYS + 1),
    ("count_parked", {"sink": SINK, "most": 100_000, "trouble": True}, 1),
    ("give_rows_back", {"sink": SINK, "owner": OWNER}, 1),
    ("give_leases_back", {"sink": SINK, "leases": [OWNER]}, 1),
    ("delete_rows", leased, LIVE_KEYS + len(DEAD_KEYS)),
    ("update_rows", failed, LIVE_KEYS + len(DEAD_KEYS)),
    ("settle", settling, 1),
    ("finish_unique_keys", with_unique_keys, 1),
    ("due_days", {}, 0),
    ("check_day", {"day": "2026-01-01", "lease": None}, 1),
]


def names(value: Any) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "parameters", "returned"), STATEMENTS, ids=names)
@pytest.mark.parametrize("calls", [1, 8], ids=["first call", "beyond the calls that are planned one by one"])
def test_dead_rows_cost_nothing(rows: Database, statement: str, parameters: Given, returned: int, calls: int) -> None:
    text = statements()[statement]
    with rows.connect(autocommit=True) as connection:
        for _ in range(calls - 1):
            with connection.transaction(force_rollback=True):
                given = parameters(connection) if callable(parameters) else parameters
                connection.execute(text, given, prepare=True)
        with connection.transaction(force_rollback=True):
            given = parameters(connection) if callable(parameters) else parameters
            before = touched(connection)
            found = connection.execute(text, given, prepare=True).fetchall()
            looked_at, pages = (now - then for now, then in zip(touched(connection), before, strict=True))
        assert len(found) == returned
        assert not callable(parameters) or found[0][0], "nothing was done"
        assert looked_at <= 20 * ALL, "dead rows were looked at"
        assert pages <= PAGES * (1 if connection.info.server_version >= 170_000 else 2), "dead rows were gone through"


@pytest.mark.parametrize(("statement", "parameters"), [("claim_rows", claiming(rows=1000)), ("count_parked", None)])
def test_plans_made_while_there_was_no_row_look_at_no_dead_one(
    database: Database, statement: str, parameters: dict[str, Any] | None
) -> None:
    given = parameters or {"sink": SINK, "most": 100_000, "trouble": True}
    text = statements()[statement]
    with database.connect(autocommit=True) as connection:
        connection.execute("alter table outbox.delivery set (autovacuum_enabled = off)")
        for _ in range(8):
            connection.execute(text, given, prepare=True)
        connection.execute(ROWS.format(number="g").encode(), {"state": "dead", "key": "k", "first": 1, "last": 20_000})
        connection.execute(
            ROWS.format(number="g").encode(), {"state": "held", "key": "k", "first": 20_001, "last": 20_100}
        )
        with connection.transaction(force_rollback=True):
            before, _ = touched(connection)
            connection.execute(text, given, prepare=True)
            assert touched(connection)[0] - before <= 1_000
