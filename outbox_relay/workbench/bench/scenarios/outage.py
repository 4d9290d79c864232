"""Catch-up after an outage of the destination."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outbox_relay.workbench.bench import relay_config
from outbox_relay.workbench.bench.database import BenchDatabase
from outbox_relay.workbench.bench.destinations import ReceiverProcess
from outbox_relay.workbench.bench.environment import QUERY_SECONDS, BenchEnvironment
from outbox_relay.workbench.bench.figures import COUNT, EVENTS_PER_SECOND, SECONDS, Figure, Progress, ratio
from outbox_relay.workbench.bench.scenarios import steps
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

QUICK, FULL = 10_000, 60_000
"""The full number equals 100 events a second for ten minutes."""
QUICK_DOWN_SECONDS, FULL_DOWN_SECONDS = 3.0, 60.0
BEFORE = 100
OPEN_SECONDS = 60.0
CIRCUIT = "select circuit from outbox.sink where name = %s"
ROWS = "select count(*) from outbox.delivery"


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure the catch-up after an outage, and drains of such a backlog for comparison."""
    events = bench.scaled_events(QUICK, FULL)
    database = bench.new_database()
    receiver = ReceiverProcess(bench)
    config = relay_config.config(database.dsn, [steps.SINK], relay_config.webhook(steps.SINK, receiver.url))
    steps.start_relays(bench, config, 1)
    database.fill(BEFORE, bench.check)
    bench.track(receiver.count, BEFORE)
    receiver.close()
    database.fill(events, bench.check)
    _wait_out_outage(bench, database)
    rows = int(database.value(ROWS))
    returned = time.monotonic()
    progress = bench.track(ReceiverProcess(bench, port=receiver.port).count, events)
    bare, reference = _reference_drains(bench, events)
    return [
        Figure("rows of delivery at the end of the outage", rows, COUNT),
        Figure("first delivery after the return", progress.reached_at(1) - returned, SECONDS),
        Figure("bare posts", bare, EVENTS_PER_SECOND),
        Figure("relay that starts on the same backlog", reference.per_second, EVENTS_PER_SECOND),
        Figure("catch-up", progress.per_second, EVENTS_PER_SECOND),
        ratio("catch-up / drain", progress.per_second, reference.per_second),
        ratio("catch-up / bare posts", progress.per_second, bare),
    ]


def _wait_out_outage(bench: BenchEnvironment, database: BenchDatabase) -> None:
    bench.wait_until(
        lambda: database.value(CIRCUIT, steps.SINK) == "open",
        OPEN_SECONDS,
        "the circuit opens",
        every=QUERY_SECONDS,
    )
    bench.pause(bench.scaled_seconds(QUICK_DOWN_SECONDS, FULL_DOWN_SECONDS))


def _reference_drains(bench: BenchEnvironment, events: int) -> tuple[float, Progress]:
    """Measure bare posts, and a relay that starts on a backlog of the same size."""
    database = bench.new_database()
    database.fill(events, bench.check)
    bare = steps.run_bare_posts(bench, database, ReceiverProcess(bench), events)
    receiver = ReceiverProcess(bench)
    config = relay_config.config(database.dsn, [steps.SINK], relay_config.webhook(steps.SINK, receiver.url))
    return bare, steps.drain(bench, config, receiver.count, events)


SCENARIO = Scenario(
    "outage",
    "A backlog is committed while a webhook is down (60,000 events with --full, as many as in ten minutes at 100/s, "
    "and one more minute). Measures the time to the first delivery after the outage, and the rate from then on.",
    measure,
)
