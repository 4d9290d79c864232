"""One log to several sinks."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench import relays
from outbox_relay.workbench.bench.database import Database
from outbox_relay.workbench.bench.ends import topic_count
from outbox_relay.workbench.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.place import Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario

QUICK, FULL = 100_000, 500_000
NUMBERS = (1, 2, 4)


def measure(place: Place) -> Sequence[Figure]:
    """The bare loop once, then a relay with one sink, two and four; counted are deliveries."""
    events = place.events(QUICK, FULL)
    base = _backlog(place, events)
    bare = draining.bare_loop(place, base, events)
    found = [Figure("bare loop", bare, EVENTS_PER_SECOND)]
    for number in NUMBERS:
        own = _drained(place, base if number == NUMBERS[0] else _backlog(place, events), events, number)
        sinks = "sink" if number == 1 else "sinks"
        found.append(Figure(f"relay, {number} {sinks}, deliveries", own, EVENTS_PER_SECOND))
        found.append(ratio(f"relay, {number} {sinks} / bare loop", own, bare))
    return found


def _backlog(place: Place, events: int) -> Database:
    base = place.database()
    base.fill(events, place.check)
    base.settle()
    return base


def _drained(place: Place, base: Database, events: int, number: int) -> float:
    """Deliveries per second of one relay to so many topics."""
    topics = {f"sink{n}": place.topic() for n in range(number)}
    counts = [topic_count(place, topic) for topic in topics.values()]
    sinks = [relays.kafka(name, topic, place.bootstrap) for name, topic in topics.items()]
    config = relays.config(base.dsn, list(topics), *sinks)
    return draining.drain(place, config, lambda: sum(count() for count in counts), events * number).per_second


SCENARIO = Scenario(
    "fanout",
    "One relay whose events go to 1, 2 and 4 Kafka sinks, each with a topic of its own; counted are deliveries to all "
    "of them together.",
    measure,
)
