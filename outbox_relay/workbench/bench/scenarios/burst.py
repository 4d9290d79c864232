"""Many events that are due in the same second."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from outbox_relay.workbench.bench.database import Database
from outbox_relay.workbench.bench.figures import (
    COUNT,
    EVENTS_PER_SECOND,
    MILLISECONDS,
    Course,
    Figure,
    percentile,
    ratio,
)
from outbox_relay.workbench.bench.place import Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario

QUICK, FULL = 20_000, 200_000
RELAYS = 4
FIRST_SECONDS = 10.0
PARKED_PER_SECOND = 3_000
"""How many events a slow machine makes rows of in a second: they are due once that is done."""
SPARE_SECONDS = 30.0
ROWS_EVERY_SECONDS = 0.5
"""How often rows are counted, which costs more the more there are."""
DUE = "select clock_timestamp() + make_interval(secs => %s)"
ROWS = "select count(*) from outbox.delivery where state = 'waiting'"
LEFT_SECONDS = "select extract(epoch from %s::timestamptz - clock_timestamp())::float8"
LOG_ALL = "alter database {} set log_min_duration_statement = 0"
NO_LOG = "the claims' durations are read from the server's log: only of the server that is started here"
_LINE = re.compile(
    r"^(\d+\.\d+) LOG:  duration: ([\d.]+) ms  (?:execute|statement)\b[^\n]*(?:\n\t[^\n]*)*", re.MULTILINE
)


def measure(place: Place) -> Sequence[Figure]:
    """The burst by four relays; beside it the bare loop over as many events of the log."""
    events = place.events(QUICK, FULL)
    base = place.database()
    if place.server is not None:
        base.run(LOG_ALL.format(base.name))
    config, count = draining.to_kafka(place, base)
    draining.started(place, config, RELAYS)
    due = base.value(DUE, FIRST_SECONDS + events / PARKED_PER_SECOND)
    base.fill(events, place.check, due=due)
    parked = _parked(place, base, events, due)
    place.pause(base.value(LEFT_SECONDS, due))
    offset = time.time() - time.monotonic()
    log_from = place.server.log.stat().st_size if place.server else 0
    course = place.course(count, events)
    claimed = claims(place.server.log, log_from) if place.server else []
    bare = _bare(place, events)
    return [
        Figure("bare loop over the log", bare, EVENTS_PER_SECOND),
        Figure(f"{RELAYS} relays", course.per_second, EVENTS_PER_SECOND),
        ratio(f"{RELAYS} relays / bare loop", course.per_second, bare),
        Figure("events that were rows when they were due", parked, COUNT),
        *_tenths(place, course, claimed, offset),
    ]


def _parked(place: Place, base: Database, events: int, due: object) -> int:
    """Wait until all are rows or due; how many were rows."""
    place.wait(
        lambda: base.value(ROWS) >= events or base.value(LEFT_SECONDS, due) <= 1.0,
        FIRST_SECONDS + events / PARKED_PER_SECOND + SPARE_SECONDS,
        "the events are rows or due",
        every=ROWS_EVERY_SECONDS,
    )
    return int(base.value(ROWS))


def _bare(place: Place, events: int) -> float:
    base = place.database()
    base.fill(events, place.check)
    base.settle()
    return draining.bare_loop(place, base, events)


def claims(log: Path, after: int) -> list[tuple[float, float]]:
    """The claims of rows in the server's log: when each ended, in seconds since 1970, and how many ms it took."""
    with log.open("rb") as file:
        file.seek(after)
        text = file.read().decode(errors="replace")
    return [(float(found[1]), float(found[2])) for found in _LINE.finditer(text) if "outbox.claim_rows" in found[0]]


def _tenths(place: Place, course: Course, claimed: Sequence[tuple[float, float]], offset: float) -> list[Figure]:
    """The claims' p99 while the first and while the last tenth of the events arrived."""
    if not claimed:
        place.notes.append(NO_LOG)
        return []
    first_until = course.at(course.count // 10) + offset
    last_from, last_until = course.at(course.count * 9 // 10) + offset, course.at(course.count) + offset
    first = [took for at, took in claimed if at <= first_until]
    last = [took for at, took in claimed if last_from <= at <= last_until]
    return [
        Figure(f"claim of rows, p99, {name} tenth", percentile(times, 0.99), MILLISECONDS)
        for name, times in (("first", first), ("last", last))
        if times
    ]


SCENARIO = Scenario(
    "burst",
    f"Events that are scheduled for the same second (in full 200,000), drained to Kafka by {RELAYS} relays; they have "
    "become rows before. With how long the claims of rows took while the first and the last tenth arrived.",
    measure,
)
