"""Memory of a relay with a large backlog."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench import machine
from tests.bench.environment import BenchEnvironment
from tests.bench.figures import COUNT, EVENTS_PER_SECOND, MEGABYTES, Figure, ratio
from tests.bench.scenarios import steps
from tests.bench.scenarios.scenario import Scenario

EVENTS = 5_000_000


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure the bare loop and a relay, and the peak resident memory of the relay."""
    events = bench.scaled_events(EVENTS, EVENTS)
    database = bench.new_database()
    database.fill(events, bench.check)
    database.settle()
    bare = steps.run_bare_loop(bench, database, events)
    config, count = steps.relay_to_kafka(bench, database)
    relay = bench.start_relay(config)
    progress = bench.track(count, events)
    peak = machine.peak_bytes(relay.pid)
    bench.stop(relay)
    return [
        Figure("backlog", events, COUNT),
        Figure("relay, most resident memory", peak / machine.MEGABYTE, MEGABYTES),
        Figure("bare loop", bare, EVENTS_PER_SECOND),
        Figure("relay", progress.per_second, EVENTS_PER_SECOND),
        ratio("relay / bare loop", progress.per_second, bare),
    ]


SCENARIO = Scenario(
    "memory",
    "Peak resident memory and rate of a relay that drains a backlog of 5 million events to Kafka.",
    measure,
    max_runs=1,
)
