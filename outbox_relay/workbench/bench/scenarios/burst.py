"""Many events scheduled for the same second."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from outbox_relay.workbench.bench.database import BenchDatabase
from outbox_relay.workbench.bench.environment import BenchEnvironment
from outbox_relay.workbench.bench.figures import (
    COUNT,
    EVENTS_PER_SECOND,
    MILLISECONDS,
    Figure,
    Progress,
    percentile,
    ratio,
)
from outbox_relay.workbench.bench.scenarios import steps
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

QUICK, FULL = 20_000, 200_000
RELAYS = 4
FIRST_SECONDS = 10.0
PARKED_PER_SECOND = 3_000
"""Rate at which a slow machine parks events; they are due after that."""
SPARE_SECONDS = 30.0
ROWS_EVERY_SECONDS = 0.5
"""Interval between counts of the rows, which get slower with their number."""
DUE = "select clock_timestamp() + make_interval(secs => %s)"
ROWS = "select count(*) from outbox.delivery where state = 'waiting'"
LEFT_SECONDS = "select extract(epoch from %s::timestamptz - clock_timestamp())::float8"
LOG_ALL = "alter database {} set log_min_duration_statement = 0"
NO_LOG = "no durations of claims: they are read from the log of a server that the bench starts"
_LINE = re.compile(
    r"^(\d+\.\d+) LOG:  duration: ([\d.]+) ms  (?:execute|statement)\b[^\n]*(?:\n\t[^\n]*)*", re.MULTILINE
)


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure four relays on the burst, and the bare loop on as many events."""
    events = bench.scaled_events(QUICK, FULL)
    database = bench.new_database()
    if bench.server is not None:
        database.run(LOG_ALL.format(database.name))
    config, count = steps.relay_to_kafka(bench, database)
    steps.start_relays(bench, config, RELAYS)
    due = database.value(DUE, FIRST_SECONDS + events / PARKED_PER_SECOND)
    database.fill(events, bench.check, due=due)
    parked = _parked(bench, database, events, due)
    bench.pause(database.value(LEFT_SECONDS, due))
    offset = time.time() - time.monotonic()
    log_from = bench.server.log.stat().st_size if bench.server else 0
    progress = bench.track(count, events)
    claimed = claims(bench.server.log, log_from) if bench.server else []
    bare = _bare(bench, events)
    return [
        Figure("bare loop over the log", bare, EVENTS_PER_SECOND),
        Figure(f"{RELAYS} relays", progress.per_second, EVENTS_PER_SECOND),
        ratio(f"{RELAYS} relays / bare loop", progress.per_second, bare),
        Figure("events that were rows when they were due", parked, COUNT),
        *_tenths(bench, progress, claimed, offset),
    ]


def _parked(bench: BenchEnvironment, database: BenchDatabase, events: int, due: object) -> int:
    """Wait until all events are parked or due, and return the number of parked ones."""
    bench.wait_until(
        lambda: database.value(ROWS) >= events or database.value(LEFT_SECONDS, due) <= 1.0,
        FIRST_SECONDS + events / PARKED_PER_SECOND + SPARE_SECONDS,
        "the events are parked or due",
        every=ROWS_EVERY_SECONDS,
    )
    return int(database.value(ROWS))


def _bare(bench: BenchEnvironment, events: int) -> float:
    database = bench.new_database()
    database.fill(events, bench.check)
    database.settle()
    return steps.run_bare_loop(bench, database, events)


def claims(log: Path, after: int) -> list[tuple[float, float]]:
    """Return end (seconds since 1970) and duration (ms) of each claim in the server's log."""
    with log.open("rb") as file:
        file.seek(after)
        text = file.read().decode(errors="replace")
    return [
        (float(found[1]), float(found[2])) for found in _LINE.finditer(text) if "outbox_internal.claim_rows" in found[0]
    ]


def _tenths(
    bench: BenchEnvironment, progress: Progress, claimed: Sequence[tuple[float, float]], offset: float
) -> list[Figure]:
    """Return the p99 of the claims during the first and the last tenth of the arrivals."""
    if not claimed:
        bench.notes.append(NO_LOG)
        return []
    first_until = progress.reached_at(progress.count // 10) + offset
    last_from, last_until = (
        progress.reached_at(progress.count * 9 // 10) + offset,
        progress.reached_at(progress.count) + offset,
    )
    first = [took for at, took in claimed if at <= first_until]
    last = [took for at, took in claimed if last_from <= at <= last_until]
    return [
        Figure(f"claim of rows, p99, {name} tenth", percentile(times, 0.99), MILLISECONDS)
        for name, times in (("first", first), ("last", last))
        if times
    ]


SCENARIO = Scenario(
    "burst",
    f"Events scheduled for the same second (200,000 with --full) and parked before, drained to Kafka by {RELAYS} "
    "relays. Includes the duration of the claims during the first and the last tenth of the arrivals.",
    measure,
)
