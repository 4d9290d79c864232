"""Check that the first records of newly created topics are not lost, in rounds on a real broker.

usage: python -m tests.bench.new_topics [ROUNDS] [--in-flight N]

Records are produced to a topic immediately after its creation, in overlapping calls. If a partition does not exist yet,
the broker refuses the first request. With more than one request in flight it then accepts the next one in its place,
and librdkafka counts both as delivered. `--in-flight 5` removes the protecting setting to show the loss.

Prints the number of acknowledged records that are missing; the exit code is 1 if there are any. Starts the broker.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import chain
from unittest.mock import patch

from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka import KafkaSink, settings
from tests.support.kafka import KafkaBroker
from tests.support.kafka.delivering import finish, opening, submit

PARTITIONS = 6
CALLS, EVENTS, KEYS = 6, 200, 40
REPORT_ROUNDS = 25
STALL_SECONDS = 5.0


def acknowledged_of(sink: KafkaSink, topic: str) -> set[str]:
    """Deliver in overlapping calls and return the uids of the acknowledged events."""
    calls = [[an_event(f"k{n % KEYS}")._replace(type=topic) for n in range(EVENTS)] for _ in range(CALLS)]
    verdicts = finish(sink, *[submit(sink, call) for call in calls])
    pairs = zip(chain(*calls), chain(*verdicts), strict=True)
    return {event.uid for event, verdict in pairs if verdict is DELIVERED}


def rounds(kafka: KafkaBroker, count: int) -> tuple[int, int]:
    """Return the numbers of acknowledged records and of missing ones among them."""
    acknowledged = missing = 0
    with opening(STALL_SECONDS, KafkaSink) as open_sink:
        sink = open_sink("{type}", {"bootstrap.servers": kafka.bootstrap})
        for number in range(count):
            topic = f"new.{number}"
            kafka.create_topic(topic, PARTITIONS)
            wanted = acknowledged_of(sink, topic)
            found = {(record.headers["id"] or b"").decode() for record in kafka.read_all(topic)}
            acknowledged, missing = acknowledged + len(wanted), missing + len(wanted - found)
            if (number + 1) % REPORT_ROUNDS == 0:
                sys.stdout.write(f"{number + 1} topics: {acknowledged:,} acknowledged, {missing} of them missing\n")
                sys.stdout.flush()
    return acknowledged, missing


def main() -> int:
    """Run the rounds. Return 1 if a record is missing."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("rounds", nargs="?", type=int, default=300)
    arguments.add_argument("--in-flight", type=int, default=1)
    options = arguments.parse_args()
    guarantees = {**settings.GUARANTEES, "max.in.flight.requests.per.connection": options.in_flight}
    began = time.monotonic()
    with KafkaBroker() as kafka, patch.object(settings, "GUARANTEES", guarantees):
        acknowledged, missing = rounds(kafka, options.rounds)
    sys.stdout.write(
        f"{options.rounds} topics, {options.in_flight} in flight, {time.monotonic() - began:.0f} s:"
        f" {acknowledged:,} acknowledged, {missing} missing; load {os.getloadavg()[0]:.1f}\n"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
