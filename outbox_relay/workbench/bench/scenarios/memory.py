"""How much memory a relay takes on a backlog that is large."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench import machine
from outbox_relay.workbench.bench.figures import COUNT, EVENTS_PER_SECOND, MEGABYTES, Figure, ratio
from outbox_relay.workbench.bench.place import Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario

EVENTS = 5_000_000


def measure(place: Place) -> Sequence[Figure]:
    """The bare loop and a relay drain it; the most that the relay had resident at any moment."""
    events = place.events(EVENTS, EVENTS)
    base = place.database()
    base.fill(events, place.check)
    base.settle()
    bare = draining.bare_loop(place, base, events)
    config, count = draining.to_kafka(place, base)
    relay = place.relay(config)
    course = place.course(count, events)
    peak = machine.peak_bytes(relay.process.pid)
    place.end(relay)
    return [
        Figure("backlog", events, COUNT),
        Figure("relay, most resident memory", peak / machine.MEGABYTE, MEGABYTES),
        Figure("bare loop", bare, EVENTS_PER_SECOND),
        Figure("relay", course.per_second, EVENTS_PER_SECOND),
        ratio("relay / bare loop", course.per_second, bare),
    ]


SCENARIO = Scenario(
    "memory",
    "The most memory that a relay had resident while it drained a backlog of 5 million events to Kafka, and its rate.",
    measure,
    runs_most=1,
)
