"""Check that the first records of newly created topics are not lost, in rounds on a real broker.

usage: python -m tests.bench.new_topics [ROUNDS] [--in-flight N]

Records are produced to a topic immediately after its creation, in overlapping calls. If a partition does not exist yet,
the broker refuses the first request. With more than one request in flight it then accepts the next one in its place,
and librdkafka counts both as delivered. `--in-flight 5` removes the protecting setting to show the loss.

Prints the number of acknowledged records that are missing; the exit code is 1 if there are any. Starts the broker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from unittest.mock import patch

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.contract.handing import an_event, soon
from outbox_relay.sinks.kafka import KafkaSink, client
from tests.support.kafka import KafkaBroker

PARTITIONS = 6
CALLS, EVENTS, KEYS = 6, 200, 40
REPORT_ROUNDS = 25
STALL_SECONDS = 5.0


async def deliver(sink: KafkaSink, topic: str) -> set[str]:
    """Deliver in overlapping calls and return the uids of the acknowledged events."""
    calls = [[an_event(f"k{n % KEYS}")._replace(type=topic) for n in range(EVENTS)] for _ in range(CALLS)]
    verdicts = await asyncio.gather(*(sink.deliver(call, soon()) for call in calls))
    events: list[StoredEvent] = [event for call in calls for event in call]
    flat = [verdict for call in verdicts for verdict in call]
    return {event.uid for event, verdict in zip(events, flat, strict=True) if verdict is DELIVERED}


async def rounds(kafka: KafkaBroker, count: int) -> tuple[int, int]:
    """Return the numbers of acknowledged records and of missing ones among them."""
    sink = KafkaSink("new", TopicTemplate.parse("{type}"), {"bootstrap.servers": kafka.bootstrap}, STALL_SECONDS)
    await sink.open()
    acknowledged = missing = 0
    try:
        for number in range(count):
            topic = f"new.{number}"
            kafka.create_topic(topic, PARTITIONS)
            wanted = await deliver(sink, topic)
            found = {
                (record.headers["id"] or b"").decode() for record in await asyncio.to_thread(kafka.read_all, topic)
            }
            acknowledged, missing = acknowledged + len(wanted), missing + len(wanted - found)
            if (number + 1) % REPORT_ROUNDS == 0:
                sys.stdout.write(f"{number + 1} topics: {acknowledged:,} acknowledged, {missing} of them missing\n")
                sys.stdout.flush()
    finally:
        await sink.close()
    return acknowledged, missing


def main() -> int:
    """Run the rounds. Return 1 if a record is missing."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("rounds", nargs="?", type=int, default=300)
    arguments.add_argument("--in-flight", type=int, default=1)
    options = arguments.parse_args()
    guarantees = {**client.GUARANTEES, "max.in.flight.requests.per.connection": options.in_flight}
    began = time.monotonic()
    with KafkaBroker() as kafka, patch.object(client, "GUARANTEES", guarantees):
        acknowledged, missing = asyncio.run(rounds(kafka, options.rounds))
    sys.stdout.write(
        f"{options.rounds} topics, {options.in_flight} in flight, {time.monotonic() - began:.0f} s:"
        f" {acknowledged:,} acknowledged, {missing} missing; load {os.getloadavg()[0]:.1f}\n"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
