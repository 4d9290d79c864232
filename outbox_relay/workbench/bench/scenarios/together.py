"""Several relays on one sink, compared with one."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench.environment import BenchEnvironment
from outbox_relay.workbench.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.scenarios import steps
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

QUICK, FULL = 200_000, 1_000_000
RELAYS = 4


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure one relay, several relays and the bare loop, each on a new backlog of the same size."""
    events = bench.scaled_events(QUICK, FULL)
    one = steps.drain_while_waiting(bench, 1, events)
    several = steps.drain_while_waiting(bench, RELAYS, events)
    database = bench.new_database()
    database.fill(events, bench.check)
    bare = steps.run_bare_loop(bench, database, events)
    return [
        Figure("bare loop", bare, EVENTS_PER_SECOND),
        Figure("1 relay", one, EVENTS_PER_SECOND),
        Figure(f"{RELAYS} relays", several, EVENTS_PER_SECOND),
        ratio(f"{RELAYS} relays / 1 relay", several, one),
        ratio(f"{RELAYS} relays / bare loop", several, bare),
    ]


SCENARIO = Scenario(
    "together",
    f"{RELAYS} relay processes that share the shards of one sink, compared with a single one. They are ready when the "
    "whole backlog is committed at once. Records are counted in the topic, from the first to the last.",
    measure,
)
