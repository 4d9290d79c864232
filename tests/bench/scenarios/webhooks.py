"""Drain of a backlog to webhooks."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench import relay_config
from tests.bench.destinations import ReceiverProcess
from tests.bench.environment import BenchEnvironment
from tests.bench.figures import EVENTS_PER_SECOND, Figure, ratio
from tests.bench.scenarios import steps
from tests.bench.scenarios.scenario import Scenario

QUICK, FULL = 4_000, 60_000


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure bare posts, then a relay that starts on the same backlog."""
    events = bench.scaled_events(QUICK, FULL)
    database = bench.new_database()
    database.fill(events, bench.check)
    database.settle()
    bare = steps.run_bare_posts(bench, database, ReceiverProcess(bench), events)
    receiver = ReceiverProcess(bench)
    config = relay_config.config(database.dsn, [steps.SINK], relay_config.webhook(steps.SINK, receiver.url))
    own = steps.drain(bench, config, receiver.count, events).per_second
    return [
        Figure("bare posts", bare, EVENTS_PER_SECOND),
        Figure("relay", own, EVENTS_PER_SECOND),
        ratio("relay / bare posts", own, bare),
    ]


SCENARIO = Scenario(
    "webhooks",
    "A backlog drained to one webhook with 64 concurrent requests, signed, in order per key; the receiver is a "
    "separate process that answers immediately. Compared with a loop that posts the same rows with plain aiohttp.",
    measure,
    quick=True,
)
