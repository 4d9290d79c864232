"""Drain of a backlog to Kafka."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.place import Place
from outbox_relay.workbench.bench.profile import Profile
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario

QUICK, FULL = 100_000, 1_000_000


def measure(place: Place) -> Sequence[Figure]:
    """The bare loop, then a relay that starts on the same backlog."""
    events = place.events(QUICK, FULL)
    base = place.database()
    base.fill(events, place.check)
    base.settle()
    loop, own = Profile("bare loop"), Profile("relay")
    bare = draining.bare_loop(place, base, events, loop)
    config, count = draining.to_kafka(place, base)
    relay = place.relay(config)
    course = place.course(own.watching(count, relay.process.pid, events), events)
    place.end(relay)
    return [
        Figure("bare loop", bare, EVENTS_PER_SECOND),
        Figure("relay", course.per_second, EVENTS_PER_SECOND),
        ratio("relay / bare loop", course.per_second, bare),
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
