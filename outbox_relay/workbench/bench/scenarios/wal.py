"""How much WAL an event costs when it is emitted, and when it is relayed."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from outbox_relay.workbench.bench.database import PAYLOAD, TYPE, BenchDatabase
from outbox_relay.workbench.bench.environment import BenchEnvironment
from outbox_relay.workbench.bench.figures import BYTES_PER_EVENT, Figure
from outbox_relay.workbench.bench.scenarios import steps
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

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
"""Behind all that was written so far, also what has not left the server's buffers yet."""
END = "select pg_current_wal_flush_lsn()::text"
"""Up to here WAL can be read."""
TOTAL = "select (%s::pg_lsn - %s::pg_lsn)::float8"
SPLIT = """select sum(record_size) filter (where not image)::float8,
       sum(fpi_size + case when image then record_size else 0 end)::float8
  from (select s.*, s."resource_manager/record_type" in ('XLOG/FPI', 'XLOG/FPI_FOR_HINT') as image
          from pg_get_wal_stats(%s::pg_lsn, %s::pg_lsn, per_record => true) s) r"""
"""A record that is nothing but a page image belongs to the images with its head too."""
SETTLED_SECONDS = 0.5
"""How long after the last delivery its position has been written."""
NO_SPLIT = "no extension pg_walinspect here: page images are not told from the rest"
NO_CHECKPOINT = "this role may not ask for a checkpoint: nothing right after one"


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Emitted right after a checkpoint and going on, then relayed with and without a checkpoint before."""
    database = _database(bench)
    events = bench.scaled_events(QUICK_EMITTED, FULL_EMITTED)
    found: list[Figure] = []
    if database.checkpoint():
        found += _of(database, "emit, right after a checkpoint", *_emitted(bench, database, events))
    else:
        bench.notes.append(NO_CHECKPOINT)
    found += _of(database, "emit, going on", *_emitted(bench, database, events))
    return found + _relayed(bench)


def _database(bench: BenchEnvironment) -> BenchDatabase:
    """A database in which autovacuum writes nothing in between."""
    database = bench.new_database()
    for (command,) in database.connection.execute(UNVACUUMED.encode()).fetchall():
        database.run(command)
    try:
        database.run("create extension pg_walinspect")
    except psycopg.Error:
        bench.notes.append(NO_SPLIT)
    return database


def _emitted(bench: BenchEnvironment, database: BenchDatabase, events: int) -> tuple[str, str, int]:
    """Where the WAL of so many transactions, each with one emit, begins and ends, and how many there were."""
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
    """A relay that waits until a backlog is committed, with a checkpoint just before that, and then another without."""
    database = _database(bench)
    events = bench.scaled_events(QUICK_RELAYED, FULL_RELAYED)
    config, count = steps.relay_to_kafka(bench, database)
    steps.start_relays(bench, config, 1)
    found: list[Figure] = []
    for number, label in enumerate(("relay, right after a checkpoint", "relay, going on"), 1):
        with BenchDatabase(database.dsn) as writer, writer.connection.transaction():
            writer.fill(events, bench.check)
            fits = number > 1 or database.checkpoint()
            before = database.value(BEGINNING)
        bench.track(count, number * events)
        bench.pause(SETTLED_SECONDS)
        if fits:
            found += _of(database, label, before, database.value(END), events)
    return found


def _of(database: BenchDatabase, label: str, before: str, after: str, events: int) -> list[Figure]:
    """The WAL between two places as bytes per event: page images apart from the rest where that can be told."""
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
    "Bytes of WAL per event: of transactions with nothing but one emit, and of a ready relay while it "
    "drains a backlog to the topic. Page images are what PostgreSQL writes of each page that is changed for the first "
    "time after a checkpoint; with data checksums that is also a page on which reading marks a row as committed.",
    measure,
    quick=True,
)
