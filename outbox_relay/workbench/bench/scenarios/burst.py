"""Many events scheduled for the same second."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench.environment import BenchEnvironment
from outbox_relay.workbench.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.scenarios import steps
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

QUICK, FULL = 20_000, 200_000
RELAYS = 4
FIRST_SECONDS = 10.0
FILLED_PER_SECOND = 10_000
"""Rate at which a slow machine inserts events; they are due after that."""
DUE = "select clock_timestamp() + make_interval(secs => %s)"
LEFT_SECONDS = "select extract(epoch from %s::timestamptz - clock_timestamp())::float8"


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure four relays on the burst, and the bare loop on as many events."""
    events = bench.scaled_events(QUICK, FULL)
    database = bench.new_database()
    config, count = steps.relay_to_kafka(bench, database)
    steps.start_relays(bench, config, RELAYS)
    due = database.value(DUE, FIRST_SECONDS + events / FILLED_PER_SECOND)
    database.fill(events, bench.check, due=due)
    bench.pause(database.value(LEFT_SECONDS, due))
    progress = bench.track(count, events)
    bare = _bare(bench, events)
    return [
        Figure("bare loop over the log", bare, EVENTS_PER_SECOND),
        Figure(f"{RELAYS} relays", progress.per_second, EVENTS_PER_SECOND),
        ratio(f"{RELAYS} relays / bare loop", progress.per_second, bare),
    ]


def _bare(bench: BenchEnvironment, events: int) -> float:
    database = bench.new_database()
    database.fill(events, bench.check)
    database.settle()
    return steps.run_bare_loop(bench, database, events)


SCENARIO = Scenario(
    "burst",
    f"Events scheduled for the same second (200,000 with --full), drained to Kafka by {RELAYS} relays.",
    measure,
)
