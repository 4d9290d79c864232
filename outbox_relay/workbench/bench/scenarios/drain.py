"""Drain of a backlog to Kafka."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench.environment import BenchEnvironment
from outbox_relay.workbench.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.profile import Profile
from outbox_relay.workbench.bench.scenarios import steps
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

QUICK, FULL = 100_000, 1_000_000


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """The bare loop, then a relay that starts on the same backlog."""
    events = bench.scaled_events(QUICK, FULL)
    database = bench.new_database()
    database.fill(events, bench.check)
    database.settle()
    loop, own = Profile("bare loop"), Profile("relay")
    bare = steps.run_bare_loop(bench, database, events, loop)
    config, count = steps.relay_to_kafka(bench, database)
    relay = bench.start_relay(config)
    progress = bench.track(own.watching(count, relay.pid, events), events)
    bench.stop(relay)
    return [
        Figure("bare loop", bare, EVENTS_PER_SECOND),
        Figure("relay", progress.per_second, EVENTS_PER_SECOND),
        ratio("relay / bare loop", progress.per_second, bare),
        *loop.figures,
        *own.figures,
    ]


SCENARIO = Scenario(
    "drain",
    "A backlog of 250-byte events of 5,000 keys, drained to a topic of 6 partitions in order per key, by a relay that "
    "starts on it; beside the bare loop on the same rows. Counted in the topic, from the first record to the last. Of "
    "the processor's time what an event takes, in the threads of whoever relays and in servers.",
    measure,
    quick=True,
)
