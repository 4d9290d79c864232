"""The statements of the page read what they show, however many rows there are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outbox_relay.domain.window import MAX_ID
from outbox_relay.postgres.database import BY_INDEX, statements
from tests.support.database import Database, query
from tests.support.deliveries import touched
from tests.support.ledger import ledger

pytestmark = pytest.mark.xdist_group("plans of the page")

SINKS, ROWS = 20, 10_000
KEYS = 500
FILL = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, key, payload, content_type, created_at,
                             last_error)
select 's' || case when n %% 2 = 0 then 0 else n %% {sinks} end, n, 0,
       case when n %% 10 = 0 then 'held' else 'dead' end, true, now(), gen_random_uuid(), 'order.created',
       'k' || n %% {keys}, '{{}}', 'application/json', now(), 'gone'
  from generate_series(1, {rows}) n returning 1"""
PAGE: dict[str, Any] = {"before_id": MAX_ID, "before_sink": "", "most": 51}


@pytest.fixture(scope="module")
def rows(shared_database: Database) -> Database:
    """Return a database with many rows, half of them of one sink, and many schedules."""
    with ledger(shared_database) as books:
        books.register(*((f"s{n}", ["*"], "beginning") for n in range(SINKS)))
    query(shared_database, FILL.format(sinks=SINKS, keys=KEYS, rows=ROWS))
    query(shared_database, SCHEDULES)
    with shared_database.connect(autocommit=True) as connection:
        connection.execute("vacuum analyze outbox.delivery, outbox.schedule")
    return shared_database


def read(database: Database, name: str, parameters: dict[str, Any], *, by_index: bool = False) -> tuple[int, int]:
    """Return (rows, pages) of `delivery` and its indexes that a statement looks at."""
    with database.connect() as connection:
        if by_index:
            for setting in BY_INDEX:
                connection.execute(setting)
        connection.execute(statements()[name], parameters)
        return touched(connection)


@pytest.mark.parametrize(
    ("wanted", "looks", "most_rows"),
    [
        ({"states": ["dead"]}, 50, SINKS * 50),
        ({"states": ["dead"], "error": "other"}, 50, SINKS * 50),
        ({"states": ["dead"], "sink": "s0"}, 400, 400),
        ({"states": ["dead"], "sink": "s3", "type": "none"}, 100, 100),
        ({"states": ["held"]}, 400, 400),
        ({"states": ["waiting"]}, 400, 400),
    ],
)
def test_a_search_looks_at_its_number_of_rows(
    rows: Database, wanted: dict[str, Any], looks: int, most_rows: int
) -> None:
    """A row that is shown is read a few times more."""
    found, pages = read(
        rows, "search_deliveries", {**PAGE, "filter": json.dumps(wanted), "looks": looks}, by_index=True
    )
    assert 0 < found <= most_rows + SINKS + 4 * PAGE["most"]
    assert pages <= 3 * found + 8 * SINKS, "it walked through an index from its beginning"


@pytest.mark.parametrize("sink", ["s0", "s3", "none"])
def test_the_last_errors_of_a_sink_are_among_its_newest_rows(rows: Database, sink: str) -> None:
    looks, most = 50, 10
    found, pages = read(rows, "errors_of_sink", {"sink": sink, "looks": looks, "most": most}, by_index=True)
    assert found <= 2 * looks
    assert pages <= 3 * looks + 8


SCHEDULES = """
insert into outbox.schedule (name, cron, timezone, type, payload, missed, after_at, next_at)
select 's' || n, '* * * * *', 'UTC', 'report.due',
       jsonb_build_object('a', (select string_agg(m || gen_random_uuid()::text, '') from generate_series(n, n + 99) m)),
       'one', now(), now() + n * interval '1 minute'
  from generate_series(1, 3000) n returning 1"""
READ = """
select t.seq_tup_read + coalesce(t.idx_tup_fetch, 0), pg_stat_get_xact_blocks_fetched(c.reltoastrelid)
  from pg_stat_xact_user_tables t join pg_class c on c.oid = t.relid where t.relid = 'outbox.schedule'::regclass"""


@pytest.mark.parametrize(
    ("name", "parameters", "most"),
    [
        ("schedules", {"after": "s15", "name": None, "most": 101}, 102),
        ("schedules", {"after": "", "name": "s15", "most": 1}, 1),
        ("due_schedules", {"ahead": 1.0, "late": 60.0, "most": 1000}, 3000),
        ("figures_of_schedules", {}, 3000),
    ],
)
def test_the_statements_on_schedules_read_few_rows_and_no_payload(
    rows: Database, name: str, parameters: dict[str, Any], most: int
) -> None:
    with rows.connect() as connection:
        connection.execute(statements()[name], parameters)
        [(rows_read, payload_pages)] = connection.execute(READ).fetchall()
    assert rows_read <= most
    assert payload_pages == 0
