"""The cost of an idle relay, and its latency after a pause."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from outbox_relay.workbench.processes import PythonProcess
from tests.bench import machine
from tests.bench.database import TYPE, BenchDatabase
from tests.bench.destinations import ConsumerProcess
from tests.bench.environment import BenchEnvironment
from tests.bench.figures import (
    MEGABYTES,
    PERCENT,
    STATEMENTS_PER_SECOND,
    Figure,
)
from tests.bench.scenarios import latency
from tests.bench.scenarios.scenario import Scenario

QUICK_SECONDS, FULL_SECONDS = 3.0, 60.0
QUICK_PAUSES, FULL_PAUSES = 20, 300
PAUSE_SECONDS = (0.25, 0.4)
"""Bounds of a random pause, longer than a relay stays awake."""
SETTLE_SECONDS = 2.0
"""Time in which the relay becomes idle after its start."""
ARRIVE_SECONDS = 10.0
TRANSACTIONS = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
EMIT = f"select outbox.emit('{TYPE}', %s::jsonb, key => %s)"


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure an idle relay's statements and processor time, then single events after pauses.

    These are also measured with a bare loop that is always awake.
    """
    database, consumer, process = _followed(bench, latency.relay)
    bench.pause(SETTLE_SECONDS)
    idle = _idle(bench, database, process)
    own = _after_pauses(bench, database, consumer, process)
    bare = _after_pauses(bench, *_followed(bench, latency.bare_loop))
    return [*idle, *latency.compared("first event after a pause", own, bare)]


def _followed(
    bench: BenchEnvironment, follow: Callable[[BenchEnvironment, BenchDatabase, str], PythonProcess]
) -> tuple[BenchDatabase, ConsumerProcess, PythonProcess]:
    """Return a new database, the consumer of a new topic, and the process between them."""
    database, topic = bench.new_database(), bench.new_topic()
    consumer = ConsumerProcess(bench, topic)
    return database, consumer, follow(bench, database, topic)


def _after_pauses(
    bench: BenchEnvironment, database: BenchDatabase, consumer: ConsumerProcess, process: PythonProcess
) -> list[float]:
    """Return the latencies in seconds of single events after pauses, and stop the process."""
    for number in range(1, bench.scaled_events(QUICK_PAUSES, FULL_PAUSES) + 2):
        bench.pause(random.uniform(*PAUSE_SECONDS))
        database.run(EMIT, f'{{"at": {time.time():.6f}, "note": "{"x" * 200}"}}', f"k{number}")
        bench.wait_until(lambda number=number: consumer.count() >= number, ARRIVE_SECONDS, "the event arrives")
    bench.stop(process)
    return consumer.stop()[1:]  # For the first event the relay asks the broker about the topic.


def _idle(bench: BenchEnvironment, database: BenchDatabase, relay: PythonProcess) -> list[Figure]:
    seconds = bench.scaled_seconds(QUICK_SECONDS, FULL_SECONDS)
    pid = relay.pid
    began, before, spent = time.monotonic(), database.value(TRANSACTIONS), machine.cpu_seconds(pid)
    bench.pause(seconds)
    lasted = time.monotonic() - began
    statements = database.value(TRANSACTIONS) - before
    return [
        Figure("statements", statements / lasted, STATEMENTS_PER_SECOND),
        Figure("processor", (machine.cpu_seconds(pid) - spent) / lasted * 100, PERCENT),
        Figure("resident memory", machine.resident_bytes(pid) / machine.MEGABYTE, MEGABYTES),
    ]


SCENARIO = Scenario(
    "idle",
    "A relay with one Kafka sink and no events: statements that reach the database, processor time, memory. Then the "
    "latency of single events after pauses of 0.25 to 0.4 s, from before the insert to the consumer, compared with a "
    "bare loop that polls every millisecond, and so is always awake.",
    measure,
    quick=True,
    max_runs=3,
)
