"""The effect of failing keys on other keys."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.workbench.bench import relay_config
from outbox_relay.workbench.bench.destinations import ReceiverProcess
from outbox_relay.workbench.bench.environment import BenchEnvironment
from outbox_relay.workbench.bench.figures import COUNT, EVENTS_PER_SECOND, Figure, ratio
from outbox_relay.workbench.bench.scenarios import steps
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

QUICK, FULL = 10_000, 60_000
KEYS = 1_000
HEALTHY = "select count(*) from outbox.event where key not like '%0'"


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure the same number of healthy events with and without failing keys, and bare posts."""
    events = bench.scaled_events(QUICK, FULL)
    healthy, own, bare, refused = _with_failing(bench, events)
    alone = _alone(bench, healthy)
    return [
        Figure("bare posts, of all events", bare, EVENTS_PER_SECOND),
        Figure("relay, no key fails", alone, EVENTS_PER_SECOND),
        Figure("relay, one key in ten fails: events of the others", own, EVENTS_PER_SECOND),
        Figure("requests that were refused meanwhile", refused, COUNT),
        ratio("with failing keys / without", own, alone),
        ratio("with failing keys / bare posts", own, bare),
    ]


def _with_failing(bench: BenchEnvironment, events: int) -> tuple[int, float, float, int]:
    database = bench.new_database()
    database.fill(events, bench.check, keys=KEYS)
    database.settle()
    healthy = int(database.value(HEALTHY))
    bare = steps.run_bare_posts(bench, database, ReceiverProcess(bench, failing=True), events)
    receiver = ReceiverProcess(bench, failing=True)
    config = relay_config.config(database.dsn, [steps.SINK], relay_config.webhook(steps.SINK, receiver.url))
    own = steps.drain(bench, config, receiver.count, healthy).per_second
    return healthy, own, bare, receiver.refused()


def _alone(bench: BenchEnvironment, events: int) -> float:
    database = bench.new_database()
    database.fill(events, bench.check, keys=KEYS)
    database.settle()
    receiver = ReceiverProcess(bench)
    config = relay_config.config(database.dsn, [steps.SINK], relay_config.webhook(steps.SINK, receiver.url))
    return steps.drain(bench, config, receiver.count, events).per_second


SCENARIO = Scenario(
    "failing",
    "A backlog drained to a webhook that answers 500 to all events of one key in ten, so that these are held and "
    "retried. Only events of the other keys are counted, compared with a drain of as many events without failures.",
    measure,
)
