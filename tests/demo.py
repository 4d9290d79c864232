"""The main job end to end on embedded parts, for people: `make demo`.

Starts a PostgreSQL from a wheel, a broker (Apache Kafka where Java and Maven are, else one from a wheel), two relays
and eight writers; kills one relay with SIGKILL half-way and replaces it; compares what was committed with what arrived.
Exit code 0 only if nothing was lost, made up or reordered.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from outbox_relay.migrate import migrate
from tests.integration.test_main_job import config
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService
from tests.support.shop import Report, Writers, compare

SECONDS = 20
TOPIC = "shop.events"


def run(stack: ExitStack) -> Report:
    """Everything, and what came of it."""
    _say("starting PostgreSQL and a broker")
    postgres = stack.enter_context(PostgresServer(major=18))
    kafka = stack.enter_context(KafkaBroker())
    kafka.create_topic(TOPIC, partitions=6)
    postgres.create_database("shop")
    migrate(postgres.dsn("shop"))
    writers = Writers(postgres.dsn("shop"))
    writers.prepare()
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    text = config(postgres.dsn("shop"), kafka, TOPIC, lease_seconds=3)
    one, two = (stack.enter_context(RelayService(directory, text, name)) for name in ("one", "two"))
    _say(f"two relays are ready; eight writers emit for {SECONDS} s")
    writers.start()
    stack.callback(writers.stop)
    _watch(writers, SECONDS / 2)
    one.kill()
    _say("relay one was killed with SIGKILL; a third takes its place")
    stack.enter_context(RelayService(directory, text, "three"))
    _watch(writers, SECONDS / 2)
    writers.stop()
    committed = writers.committed()
    wanted = sum(committed.values())
    _say(f"{wanted} events were committed; reading the topic")
    records = kafka.consume(TOPIC, enough=lambda found: len({r.value for r in found}) >= wanted, seconds=60)
    two.stop()
    return compare(committed, [record.value or b"" for record in records])


def _watch(writers: Writers, seconds: float) -> None:
    """Say how many events there are, every second."""
    began, before = time.monotonic(), writers.total()
    while (passed := time.monotonic() - began) < seconds:
        time.sleep(1)
        now = writers.total()
        left = max(0.0, seconds - passed - 1)
        _say(f"{now:>9,} events committed, {now - before:,} in the last second, {left:.0f} s to go")
        before = now


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """Exit code 0 when the run was sound."""
    try:
        with ExitStack() as stack:
            report = run(stack)
    except KeyboardInterrupt:
        _say("stopped; nothing is left running")
        return 130
    _say(f"committed {report.committed:,}, arrived {report.arrived:,}")
    _say(f"lost {report.lost}, made up {report.phantom}, out of order {report.reordered}, twice {report.duplicates}")
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
