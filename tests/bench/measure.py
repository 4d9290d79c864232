"""`outbox-relay bench` with a real Apache Kafka, where Java and Maven are there to start one.

usage: python -m tests.bench.measure [what `outbox-relay bench` takes]
"""

from __future__ import annotations

import sys

from outbox_relay import cli
from tests.support.kafka import KafkaBroker
from tests.support.kafka.jars import jars


def main(argv: list[str]) -> int:
    """Start a broker, measure, and stop it; the command's exit code."""
    broker = KafkaBroker()
    if not broker.real or "--bootstrap" in argv:
        broker.close()
        return cli.main(["bench", *argv])
    with broker:
        return cli.main(["bench", *argv, "--bootstrap", broker.bootstrap, "--broker", f"Apache Kafka {_version()}"])


def _version() -> str:
    """Of Kafka, by the name of its jar."""
    [jar] = jars().glob("kafka_*.jar")
    return jar.stem.rpartition("-")[2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
