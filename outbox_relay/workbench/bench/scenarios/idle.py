"""What a relay costs that has nothing to do, and how quickly it wakes up."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from outbox_relay.workbench.bench import machine, relays
from outbox_relay.workbench.bench.database import TYPE, Database
from outbox_relay.workbench.bench.ends import TopicConsumer
from outbox_relay.workbench.bench.figures import (
    MEGABYTES,
    MILLISECONDS,
    PERCENT,
    STATEMENTS_PER_SECOND,
    Figure,
    percentile,
)
from outbox_relay.workbench.bench.place import Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.bench.scenarios.shape import Scenario
from outbox_relay.workbench.demo.parts import Part

QUICK_SECONDS, FULL_SECONDS = 3.0, 60.0
QUICK_PAUSES, FULL_PAUSES = 20, 300
PAUSE_SECONDS = (0.25, 0.4)
"""Between these, at random: longer than a relay stays awake, and not in step with what it does."""
SETTLE_SECONDS = 2.0
"""Until the relay has nothing left to do after its start."""
ARRIVE_SECONDS = 10.0
TRANSACTIONS = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
EMIT = f"select outbox.emit('{TYPE}', %s::jsonb, key => %s)"


def measure(place: Place) -> Sequence[Figure]:
    """An idle relay's statements and processor time, then single events after pauses."""
    base, topic = place.database(), place.topic()
    consumer = TopicConsumer(place, topic)
    config = relays.config(base.dsn, [draining.SINK], relays.kafka(draining.SINK, topic, place.bootstrap))
    relay = draining.started(place, config, 1)[0]
    place.pause(SETTLE_SECONDS)
    found = _idle(place, base, relay)
    for number in range(1, place.events(QUICK_PAUSES, FULL_PAUSES) + 2):
        place.pause(random.uniform(*PAUSE_SECONDS))  # noqa: S311 - a pause is no secret
        base.run(EMIT, f'{{"at": {time.time():.6f}, "note": "{"x" * 200}"}}', f"k{number}")
        place.wait(lambda number=number: consumer.count() >= number, ARRIVE_SECONDS, "an event arrives after a pause")
    times = consumer.times()[1:]  # With the first one the broker is asked about the topic.
    return [
        *found,
        Figure("first event after a pause, p50", percentile(times, 0.5) * 1e3, MILLISECONDS),
        Figure("first event after a pause, p99", percentile(times, 0.99) * 1e3, MILLISECONDS),
    ]


def _idle(place: Place, base: Database, relay: Part) -> list[Figure]:
    seconds = place.seconds(QUICK_SECONDS, FULL_SECONDS)
    pid = relay.process.pid
    began, before, spent = time.monotonic(), base.value(TRANSACTIONS), machine.cpu_seconds(pid)
    place.pause(seconds)
    lasted = time.monotonic() - began
    statements = base.value(TRANSACTIONS) - before
    return [
        Figure("statements", statements / lasted, STATEMENTS_PER_SECOND),
        Figure("processor", (machine.cpu_seconds(pid) - spent) / lasted * 100, PERCENT),
        Figure("resident memory", machine.resident_bytes(pid) / machine.MEGABYTE, MEGABYTES),
    ]


SCENARIO = Scenario(
    "idle",
    "A relay with one Kafka sink and nothing to do: statements that reach the database, processor time, memory. Then "
    "single events after pauses of 0.25 to 0.4 s, from before the insert to the consumer.",
    measure,
    quick=True,
    runs_most=3,
)
