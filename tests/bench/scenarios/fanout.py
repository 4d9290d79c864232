"""Delivery of one log to several sinks."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench import relay_config
from tests.bench.database import BenchDatabase
from tests.bench.destinations import record_counter
from tests.bench.environment import BenchEnvironment
from tests.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from tests.bench.scenarios import steps
from tests.bench.scenarios.scenario import Scenario

QUICK, FULL = 100_000, 500_000
NUMBERS = (1, 2, 4)


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure the bare loop, then a relay with one, two and four sinks; count deliveries."""
    events = bench.scaled_events(QUICK, FULL)
    database = _backlog(bench, events)
    bare = steps.run_bare_loop(bench, database, events)
    found = [Figure("bare loop", bare, EVENTS_PER_SECOND)]
    for number in NUMBERS:
        own = _drained(bench, database if number == NUMBERS[0] else _backlog(bench, events), events, number)
        sinks = "sink" if number == 1 else "sinks"
        found.append(Figure(f"relay, {number} {sinks}, deliveries", own, EVENTS_PER_SECOND))
        found.append(ratio(f"relay, {number} {sinks} / bare loop", own, bare))
    return found


def _backlog(bench: BenchEnvironment, events: int) -> BenchDatabase:
    database = bench.new_database()
    database.fill(events, bench.check)
    database.settle()
    return database


def _drained(bench: BenchEnvironment, database: BenchDatabase, events: int, number: int) -> float:
    """Return the deliveries per second of one relay to `number` topics."""
    topics = {f"sink{n}": bench.new_topic() for n in range(number)}
    counts = [record_counter(bench, topic) for topic in topics.values()]
    sinks = [relay_config.kafka(name, topic, bench.bootstrap) for name, topic in topics.items()]
    config = relay_config.config(database.dsn, list(topics), *sinks)
    return steps.drain(bench, config, lambda: sum(count() for count in counts), events * number).per_second


SCENARIO = Scenario(
    "fanout",
    "One relay that delivers every event to 1, 2 and 4 Kafka sinks with separate topics; the deliveries to all of them "
    "are counted.",
    measure,
)
