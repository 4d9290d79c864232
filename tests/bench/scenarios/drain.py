"""Drain of a backlog to Kafka."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.bench.environment import BenchEnvironment
from tests.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from tests.bench.profile import Profile
from tests.bench.scenarios import steps
from tests.bench.scenarios.scenario import Scenario

QUICK, FULL = 100_000, 1_000_000


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure the bare loop, then a relay that starts on the same backlog."""
    events = bench.scaled_events(QUICK, FULL)
    database = bench.new_database()
    database.fill(events, bench.check)
    database.settle()
    loop, own = Profile("bare loop"), Profile("relay")
    bare = steps.run_bare_loop(bench, database, events, loop)
    config, count = steps.relay_to_kafka(bench, database)
    started = time.monotonic()
    relay = bench.start_relay(config)
    progress = bench.track(own.sampled(count, relay.pid, events), events, since=started)
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
    "A relay starts on a backlog of 250-byte events with 5,000 keys and drains it to a topic with 6 partitions, in "
    "order per key, compared with the bare loop on the same rows. Records are counted in the topic, from the first "
    "to the last. Includes the processor time per event, by thread of the sender and by server.",
    measure,
    quick=True,
)
