"""The plans of the figures on a million events and a million rows: rows and buffers, never times.

The tables were analysed while they were empty, and the plans must be the same once the statistics are right.
"""

from __future__ import annotations

import json
from collections.abc import Generator

import pytest

from outbox_relay.service.figures import MOST_EVENTS, MOST_EVENTS_SECONDS, MOST_ROWS
from tests.support.database import Database
from tests.support.plans import EVENTS_OF_A_DAY, LOG, NEVER_IN_ORDER, PARTITIONS, Explained
from tests.support.postgres import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plans"), pytest.mark.timeout(900)]

PER_PARTITION = 33_400
ROWS = 1_000_000
FILL = f"""
select outbox_internal.register_sinks(
         '[{{"name": "crm", "patterns": ["*"]}}, {{"name": "other", "patterns": ["*"]}}]', 0, '3:3:', 3);
insert into outbox.delivery
       (sink, id, shard, state, ordered, due_at, uid, type, key, payload, content_type, created_at, deliver_at)
select 'crm', e.id, e.shard, (array['waiting', 'held', 'dead', 'waiting'])[1 + e.id % 4], true, now(), e.uid, e.type,
       e.key, e.payload, 'application/json', e.created_at, case when e.id % 4 = 3 then now() + interval '1 day' end
  from outbox.event e
 where e.id <= {ROWS}
"""
DAYS_AHEAD = 40
"""Time after which the events of the DEFAULT partition were emitted: no partition is for that day."""
OF_ROWS, OF_SINKS = "group by r.state", "order by k.name"
PLANNED = 7
"""Calls beyond those that are planned one by one."""
STATES = 3
"""Scans of rows: those of waiting and scheduled rows are one."""


@pytest.fixture(scope="module")
def full(postgres: PostgresServer, template: str) -> Generator[Database]:
    """Yield a log of a million events, each with a row. The DEFAULT partition has as many as a day, without rows."""
    postgres.create_database("figure_plans", template=template)
    with postgres.connect("figure_plans") as connection:
        connection.execute(LOG.encode())
        for day in reversed(range(PARTITIONS)):
            connection.execute(EVENTS_OF_A_DAY.format(day, PER_PARTITION).encode())
        connection.execute(FILL.encode())
        connection.execute(EVENTS_OF_A_DAY.format(-DAYS_AHEAD, PER_PARTITION).encode())
    yield Database(postgres, "figure_plans")
    postgres.drop_database("figure_plans")


@pytest.fixture(scope="module", params=["stale statistics", "true statistics"])
def statistics(request: pytest.FixtureRequest, full: Database) -> Database:
    if request.param == "true statistics":
        with full.connect(autocommit=True) as connection:
            connection.execute("analyze")
    return full


@pytest.fixture
def explained(statistics: Database) -> Generator[Explained]:
    with statistics.connect(autocommit=True) as connection:
        explained = Explained(connection)
        connection.execute("set auto_explain.log_buffers = on")
        yield explained


def buffers(explained: Explained, *, of: str) -> int:
    """Return the buffers that the statement with the text ``of`` touched."""
    plans = [json.loads(text[text.index("{") :]) for text in explained.texts if "plan:" in text]
    [plan] = [plan["Plan"] for plan in plans if of in plan["Query Text"]]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def test_rows_are_counted_up_to_a_bound_in_the_order_of_indexes(explained: Explained) -> None:
    found = [explained.run("figures_of_rows", sink="crm", most=MOST_ROWS) for _ in range(PLANNED)][-1]
    assert sum(rows for _, rows, _ in found) == STATES * MOST_ROWS
    scans = explained.scans("delivery", of=OF_ROWS)
    assert not {node.type for node in explained.nodes(of=OF_ROWS)} & NEVER_IN_ORDER
    assert sum(node.scanned for node in scans) <= STATES * (MOST_ROWS + 1)
    assert buffers(explained, of=OF_ROWS) <= 2 * STATES * MOST_ROWS


def test_rows_of_a_sink_without_any_cost_nothing(explained: Explained) -> None:
    assert explained.run("figures_of_rows", sink="other", most=MOST_ROWS) == []
    assert buffers(explained, of=OF_ROWS) < 100


def test_the_lag_of_a_position_looks_at_one_event_of_each_sink(explained: Explained) -> None:
    found = explained.run("figures_of_sinks")
    assert [row[0] for row in found] == ["crm", "other"]
    assert all(row[4] > 0.0 for row in found)
    scans = explained.scans("event_", "past_", of=OF_SINKS)
    assert not {node.type for node in scans} & {"Seq Scan", "Bitmap Heap Scan"}
    assert sum(node.scanned for node in scans) <= 2 * (PARTITIONS + 10)
    assert buffers(explained, of=OF_SINKS) < 5_000


def test_a_backlog_is_counted_up_to_its_bound(explained: Explained) -> None:
    bounds = {"most": MOST_EVENTS, "seconds": MOST_EVENTS_SECONDS}
    [(events, oldest)] = explained.run("figures_of_backlog", sink="other", types=None, **bounds)
    assert events > ROWS / 2, "estimated"
    assert oldest > 0.0
    assert buffers(explained, of="outbox_internal.backlog") < 200_000


@pytest.mark.parametrize(
    ("statement", "of"),
    [
        ("figures_of_locks", "pg_locks"),
        ("figures_of_log", "pg_total_relation_size"),
        ("figures_of_schedules", "outbox.schedule"),
        ("figures_of_tables", "n_dead_tup"),
        ("figures_of_transactions", "pg_prepared_xacts"),
    ],
)
def test_other_figures_read_neither_events_nor_rows(explained: Explained, statement: str, of: str) -> None:
    assert len(explained.run(statement)) > 0
    assert tables_of_events(explained) == set()
    assert buffers(explained, of=of) < 5_000


def tables_of_events(explained: Explained) -> set[str]:
    """Return the tables of events or rows that any of the plans looked at."""
    return {name for name in explained.relations() if name.startswith(("event", "past_", "delivery"))}
