"""The cost of a step of an action on deliveries: the same among a million rows as among a hundred thousand.

The bounds are far below both numbers; the million is for the thorough tests. Rows and pages are counted, never timed,
with plans made before the table was analysed and after.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import psycopg
import pytest

from tests.support.database import Database
from tests.support.deliveries import touched
from tests.support.postgres import PostgresServer

pytestmark = pytest.mark.xdist_group("delivery plans")

STEP = 1_000
PARTITIONS = 30
SIZES = (100_000, pytest.param(1_000_000, marks=pytest.mark.thorough))  # a million takes 25 s to make
LOG = f"""
do $$
declare
    today timestamptz := date_trunc('day', now() at time zone 'UTC') at time zone 'UTC';
begin
    for n in 1..{PARTITIONS} loop
        execute format('create table outbox.past_%s (like outbox.event including defaults including generated)', n);
        execute format('alter table outbox.event attach partition outbox.past_%s for values from (%L) to (%L)', n,
                       today - n * interval '1 day', today - (n - 1) * interval '1 day');
    end loop;
end
$$;
alter table outbox.delivery set (autovacuum_enabled = off);
analyze
"""
EVENTS = """
insert into outbox.event (shard, uid, type, key, payload, content_type, created_at)
select outbox_internal.shard_of('k' || g, null), gen_random_uuid(), 't', 'k' || g,
       convert_to(repeat('x', 100), 'UTF8'), 't', now() - g % 30 * interval '1 day'
  from generate_series(1, {size} / 2) g
"""
ROWS = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, since, uid, type, key, payload, content_type,
                             created_at)
select s.name, e.id, e.shard, 'dead', true, now(), now() - interval '1 hour', e.uid, e.type, e.key, e.payload,
       'application/json', e.created_at
  from outbox.event e cross join (values ('crm'), ('events')) s (name)
"""
REGISTER = """
select outbox_internal.register_sinks(
    '[{"name": "crm", "patterns": ["*"], "start": "now"}, {"name": "events", "patterns": ["*"], "start": "now"}]',
    (select last_value from outbox.event_id_seq), pg_current_snapshot(),
    pg_snapshot_xmax(pg_current_snapshot())::text::bigint)
"""
MIDDLE = "(select max(id) / 2 from outbox.event)"
STEPS: list[tuple[str, str, int]] = [
    ("retry of a sink", "done from outbox.retry_deliveries('{\"sink\": \"events\"}')", STEP),
    ("retry of all", "done from outbox.retry_deliveries('{}')", STEP),
    ("retry further on", f"done from outbox.retry_deliveries('{{}}', {MIDDLE}, 'crm')", STEP),
    ("retry of none", "done from outbox.retry_deliveries('{\"key\": \"none\"}')", 0),
    ("retry of waiting", "done from outbox.retry_deliveries('{\"states\": [\"waiting\"]}')", 0),
    ("discard of a sink", "done from outbox.discard_deliveries('{\"sink\": \"events\"}', reason => 'r')", STEP),
    ("discard of all", "done from outbox.discard_deliveries('{}', reason => 'r')", STEP),
    ("list of a sink", "count(*) from outbox.deliveries('{\"sink\": \"events\"}')", 50),
    ("list of all", "count(*) from outbox.deliveries('{}')", 50),
    ("list behind", f"count(*) from outbox.deliveries('{{}}', 50, {MIDDLE})", 50),
    ("number", "matched from outbox.count_deliveries('{}')", 10_000),
]  # fmt: skip


@pytest.fixture(scope="module")
def filled(postgres: PostgresServer, template: str) -> Generator[Callable[[int], Database]]:
    """Return a database by the number of its dead rows; each is filled once."""
    made: dict[int, Database] = {}

    def of(size: int) -> Database:
        if size not in made:
            made[size] = database = Database(postgres, f"deliveries_{size}")
            postgres.create_database(database.name, template=template)
            with database.connect(autocommit=True) as connection:
                for statement in (LOG, EVENTS.format(size=size), REGISTER, ROWS):
                    connection.execute(statement.encode())
        return made[size]

    yield of
    for database in made.values():
        postgres.drop_database(database.name)


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    """Return the number of dead rows."""
    return request.param


@pytest.fixture(scope="module", params=["stale statistics", "true statistics"])
def rows(request: pytest.FixtureRequest, size: int, filled: Callable[[int], Database]) -> Database:
    """Return a filled database. Its tests with stale statistics run before those with true ones."""
    database = filled(size)
    if request.param == "true statistics":
        with database.connect(autocommit=True) as connection:
            connection.execute("analyze")
    return database


def cost(connection: psycopg.Connection[Any]) -> tuple[int, int, int]:
    """Return (rows, pages) of ``delivery``, and rows of the log, that the open transaction has read so far."""
    [(events,)] = connection.execute(
        "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_xact_user_tables "
        "where schemaname = 'outbox' and relname ~ '^(event|past)_'"
    ).fetchall()
    return *touched(connection), int(events)


def run(connection: psycopg.Connection[Any], statement: str) -> tuple[int, list[int]]:
    """Run a statement and take it back; return its value and its cost."""
    with connection.transaction(force_rollback=True):
        before = cost(connection)
        [(found,)] = connection.execute(f"select {statement}".encode()).fetchall()
        return found, [now - then for now, then in zip(cost(connection), before, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "expected"), [step[1:] for step in STEPS], ids=[step[0] for step in STEPS])
@pytest.mark.parametrize("calls", [1, 7], ids=["first call", "beyond the calls that are planned one by one"])
def test_a_step_costs_the_same_whatever_the_number_of_rows(
    rows: Database, statement: str, expected: int, calls: int
) -> None:
    with rows.connect(autocommit=True) as connection:
        found, spent = [run(connection, statement) for _ in range(calls)][-1]
    deliveries, pages, events = spent
    assert found == expected
    assert deliveries <= 12 * STEP, "rows of others were looked at"
    assert pages <= 100 * STEP, "an index was gone through"
    assert events <= 3 * STEP, "the log was gone through"
