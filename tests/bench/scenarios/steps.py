"""Steps shared by scenarios: bare loops, and relays that start on a backlog or wait for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outbox_relay.workbench.processes import RelayProcess
from tests.bench import relay_config
from tests.bench.database import BenchDatabase
from tests.bench.destinations import ReceiverProcess, record_counter
from tests.bench.environment import BenchEnvironment
from tests.bench.figures import Progress
from tests.bench.handler_log import LOG, HandlerLog
from tests.bench.profile import Profile

SINK = "events"
END_SECONDS = 60.0
PARK_SECONDS, PARKED_PER_SECOND = 60.0, 2_000
"""Time limit for rows to be made of all events: a constant plus the time they take at the minimum rate."""
ROWS_EVERY_SECONDS = 0.5
ROWS = "select count(*) from outbox.delivery"


def run_bare_loop(
    bench: BenchEnvironment, database: BenchDatabase, events: int, profile: Profile | None = None
) -> float:
    """Return the rate of the bare loop to a new topic."""
    topic = bench.new_topic()
    count = record_counter(bench, topic)
    started = time.monotonic()
    process = bench.start_process(
        "bare-loop", "tests.bench.bare_loop", "--bootstrap", bench.bootstrap, "--topic", topic,
        dsn=database.dsn,
    )  # fmt: skip
    progress = bench.track(profile.sampled(count, process.pid, events) if profile else count, events, since=started)
    bench.wait_for_exit(process, END_SECONDS)
    return progress.per_second


def run_bare_posts(bench: BenchEnvironment, database: BenchDatabase, receiver: ReceiverProcess, events: int) -> float:
    """Return the rate of bare posts to `receiver`, which must have no other sender."""
    before = receiver.count() + receiver.refused()
    started = time.monotonic()
    process = bench.start_process(
        "bare-posts", "tests.bench.bare_posts", "--url", receiver.url,
        "--at-once", str(relay_config.AT_ONCE), dsn=database.dsn,
    )  # fmt: skip
    progress = bench.track(lambda: receiver.count() + receiver.refused() - before, events, since=started)
    bench.wait_for_exit(process, END_SECONDS)
    return progress.per_second


def drain(bench: BenchEnvironment, config: str, count: Callable[[], int], events: int) -> Progress:
    """Start a relay on a backlog and return its progress; stop the relay afterwards."""
    started = time.monotonic()
    relay = bench.start_relay(config)
    progress = bench.track(count, events, since=started)
    bench.stop(relay)
    return progress


def relay_to_kafka(bench: BenchEnvironment, database: BenchDatabase) -> tuple[str, Callable[[], int]]:
    """Return the configuration of a relay to a new topic, and a function that counts its records."""
    topic = bench.new_topic()
    config = relay_config.config(database.dsn, [SINK], relay_config.kafka(SINK, topic, bench.bootstrap))
    return config, record_counter(bench, topic)


def start_relays(bench: BenchEnvironment, config: str, number: int) -> Sequence[RelayProcess]:
    """Start relays and wait until they own all shards."""
    relays = [bench.start_relay(config) for _ in range(number)]
    bench.wait_until_ready(*relays)
    return relays


def run_bare_queue(bench: BenchEnvironment, database: BenchDatabase, handler: str, events: int) -> float:
    """Return the rate at which the bare queue calls a handler for the events of the log."""
    path = bench.new_path(".log")
    log = HandlerLog(path, events)
    log.open(time.monotonic())
    process = bench.start_process(
        "bare-queue", "tests.bench.bare_queue", "--handler", handler,
        "--at-once", str(relay_config.HANDLERS_AT_ONCE), dsn=database.dsn, **{LOG: str(path)},
    )  # fmt: skip
    progress = bench.track(log.done, events)
    bench.wait_for_exit(process, END_SECONDS)
    return progress.per_second


def start_queue(
    bench: BenchEnvironment, database: BenchDatabase, handler: str, events: int
) -> tuple[RelayProcess, HandlerLog]:
    """Start a relay and wait until it has made rows of all events. Its handlers wait until the log is opened."""
    path = bench.new_path(".log")
    log = HandlerLog(path, events)
    sink = relay_config.queue(SINK, handler)
    relay = bench.start_relay(relay_config.config(database.dsn, [SINK], sink), **{LOG: str(path)})
    bench.wait_until_ready(relay)
    seconds = PARK_SECONDS + events / PARKED_PER_SECOND
    bench.wait_until(
        lambda: database.value(ROWS) >= events, seconds, "rows of all events are made", every=ROWS_EVERY_SECONDS
    )
    database.run("vacuum analyze outbox.delivery")
    database.checkpoint()
    return relay, log
