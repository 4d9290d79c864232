"""Run `outbox-relay bench` with a real Apache Kafka if Java and Maven are installed.

usage: python -m tests.bench.measure [options of `outbox-relay bench`]
"""

from __future__ import annotations

import sys

from outbox_relay import cli
from tests.support.kafka import KafkaBroker
from tests.support.kafka.jars import jars


def main(argv: list[str]) -> int:
    """Run the command with a temporary broker and return its exit code."""
    broker = KafkaBroker()
    if not broker.real or "--bootstrap" in argv:
        broker.close()
        return cli.main(["bench", *argv])
    with broker:
        return cli.main(["bench", *argv, "--bootstrap", broker.bootstrap, "--broker", f"Apache Kafka {_version()}"])


def _version() -> str:
    """Return the version of Kafka from the name of its jar."""
    [jar] = jars().glob("kafka_*.jar")
    return jar.stem.rpartition("-")[2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
