"""Measure the relay on this machine, compared with a bare loop in the same run: `make bench`.

Without --bootstrap, it runs a real Apache Kafka if Java and Maven are installed, else the broker from a wheel.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack

from outbox_relay.domain.errors import RelayError
from tests.bench.environment import Options
from tests.bench.run import run_bench
from tests.support.kafka import KafkaBroker
from tests.support.kafka.jars import jars


def main() -> int:
    """Print the report and return 1 if a run failed, 2 for a wrong option."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.measure", description=__doc__, allow_abbrev=False)
    parser.add_argument("--full", action="store_true", help="every scenario, large, in about an hour")
    parser.add_argument("--only", nargs="+", metavar="SCENARIO", default=[], help="only these, in either size")
    parser.add_argument("--runs", type=int, default=3, help="measurements of each; default: 3")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all events and seconds; default: 1")
    parser.add_argument("--dsn", help="an existing server, whose role may create databases")
    parser.add_argument("--bootstrap", metavar="SERVERS", help="an existing broker, HOST:PORT,…")
    parser.add_argument("--broker", metavar="NAME", help="the name of that broker in the report, such as its version")
    parser.add_argument("--fsync", action="store_true", help="have the database that is started flush each commit")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args()
    bootstrap, name = arguments.bootstrap, arguments.broker
    with ExitStack() as stack:
        if bootstrap is None and (broker := stack.enter_context(KafkaBroker())).real:
            [jar] = jars().glob("kafka_*.jar")
            bootstrap, name = broker.bootstrap, f"Apache Kafka {jar.stem.rpartition('-')[2]}"
        options = Options(arguments.full, arguments.scale, arguments.dsn, bootstrap, name, arguments.fsync)
        try:
            report = run_bench(options, arguments.only, arguments.runs)
        except RelayError as error:
            print(error, file=sys.stderr)
            return 2
    print(json.dumps(report.json()) if arguments.json else report.text())
    return 0 if report.complete else 1


if __name__ == "__main__":
    sys.exit(main())
