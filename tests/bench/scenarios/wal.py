"""WAL written per event by emitting and by relaying."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from tests.bench.database import PAYLOAD, TYPE, BenchDatabase
from tests.bench.environment import BenchEnvironment
from tests.bench.figures import BYTES_PER_EVENT, Figure
from tests.bench.scenarios import steps
from tests.bench.scenarios.scenario import Scenario

QUICK_EMITTED, FULL_EMITTED = 2_000, 20_000
QUICK_RELAYED, FULL_RELAYED = 30_000, 500_000
CLIENTS = 4
SPARE_SECONDS = 120.0
SCRIPT = f"""\\set k random(1, 5000)
select outbox.emit('{TYPE}', '{PAYLOAD}', key => 'k' || :k::int);
"""
UNVACUUMED = """select format('alter table %s set (autovacuum_enabled = off)', oid::regclass) from pg_class
 where relnamespace = 'outbox'::regnamespace and relkind = 'r'"""
BEGINNING = "select pg_current_wal_insert_lsn()::text"
"""The end of all WAL written so far, including the server's buffers."""
END = "select pg_current_wal_flush_lsn()::text"
"""The end of the WAL that can be read."""
TOTAL = "select (%s::pg_lsn - %s::pg_lsn)::float8"
SPLIT = """select sum(record_size) filter (where not image)::float8,
       sum(fpi_size + case when image then record_size else 0 end)::float8
  from (select s.*, s."resource_manager/record_type" in ('XLOG/FPI', 'XLOG/FPI_FOR_HINT') as image
          from pg_get_wal_stats(%s::pg_lsn, %s::pg_lsn, per_record => true) s) r"""
"""A record that only contains a page image counts as an image completely, with its header."""
SETTLED_SECONDS = 0.5
"""Time after the last delivery in which its position is written."""
NO_SPLIT = "the extension pg_walinspect is not available: page images are not counted separately"
NO_CHECKPOINT = "the role may not run a checkpoint: no figures right after one"


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure emitting and then relaying, each right after a checkpoint and later."""
    database = _database(bench)
    events = bench.scaled_events(QUICK_EMITTED, FULL_EMITTED)
    found: list[Figure] = []
    if database.checkpoint():
        found += _wal_figures(database, "emit, right after a checkpoint", *_emitted(bench, database, events))
    else:
        bench.notes.append(NO_CHECKPOINT)
    found += _wal_figures(database, "emit, going on", *_emitted(bench, database, events))
    return found + _relayed(bench)


def _database(bench: BenchEnvironment) -> BenchDatabase:
    """Create a database without autovacuum, which would write WAL as well."""
    database = bench.new_database()
    for (command,) in database.connection.execute(UNVACUUMED.encode()).fetchall():
        database.run(command)
    try:
        database.run("create extension pg_walinspect")
    except psycopg.Error:
        bench.notes.append(NO_SPLIT)
    return database


def _emitted(bench: BenchEnvironment, database: BenchDatabase, events: int) -> tuple[str, str, int]:
    """Emit one event per transaction. Return the begin and end of their WAL and the number of events."""
    file = bench.new_path(".sql")
    file.write_text(SCRIPT)
    before = database.value(BEGINNING)
    each = max(1, events // CLIENTS)
    bench.pgbench(
        database, "--no-vacuum", "--protocol=prepared", f"--file={file}", f"--client={CLIENTS}", "--jobs=1",
        f"--transactions={each}", seconds=SPARE_SECONDS,
    )  # fmt: skip
    return before, database.value(END), each * CLIENTS


def _relayed(bench: BenchEnvironment) -> list[Figure]:
    """Measure a ready relay on a backlog right after a checkpoint, and on a second one without a checkpoint."""
    database = _database(bench)
    events = bench.scaled_events(QUICK_RELAYED, FULL_RELAYED)
    config, count = steps.relay_to_kafka(bench, database)
    steps.start_relays(bench, config, 1)
    found: list[Figure] = []
    for number, label in enumerate(("relay, right after a checkpoint", "relay, going on"), 1):
        with BenchDatabase(database.dsn) as writer, writer.connection.transaction():
            writer.fill(events, bench.check)
            measurable = number > 1 or database.checkpoint()
            before = database.value(BEGINNING)
        bench.track(count, number * events)
        bench.pause(SETTLED_SECONDS)
        if measurable:
            found += _wal_figures(database, label, before, database.value(END), events)
    return found


def _wal_figures(database: BenchDatabase, label: str, before: str, after: str, events: int) -> list[Figure]:
    """Return the bytes of WAL per event between two positions, with page images separately if possible."""
    try:
        row = database.connection.execute(SPLIT.encode(), (before, after)).fetchone()
    except psycopg.Error:
        return [Figure(f"{label}, all", database.value(TOTAL, after, before) / events, BYTES_PER_EVENT)]
    records, images = (float(value or 0.0) for value in row or (0.0, 0.0))
    return [
        Figure(f"{label}, without page images", records / events, BYTES_PER_EVENT),
        Figure(f"{label}, page images", images / events, BYTES_PER_EVENT),
    ]


SCENARIO = Scenario(
    "wal",
    "Bytes of WAL per event, of transactions with only one emit, and of a ready relay that drains a backlog to the "
    "topic. PostgreSQL writes an image of each page that changes for the first time after a checkpoint; with data "
    "checksums also of a page on which a read marks a row as committed.",
    measure,
    quick=True,
)
