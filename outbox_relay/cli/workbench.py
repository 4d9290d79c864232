"""Commands that start servers: dev and demo."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outbox_relay.cli.arguments import integer_between, seconds_between
from outbox_relay.cli.output import DONE, FAILED, say

POSTGRES_PORT, KAFKA_PORT, PORT_MOST = 15_432, 19_092, 65_535
"""Ports of the servers of `dev`: defaults, and the highest that can be chosen."""
NEXT = """\
Emit an event, deliver it, and look at it:
  echo '{{"id": 1}}' | outbox-relay emit order.created --key order-1 --payload - --dsn {dsn}
{run}  outbox-relay status --dsn {dsn}
Ctrl-C stops everything. The database keeps its data; the broker forgets its topics."""
RUN = "  outbox-relay run -c relay.toml --dsn {dsn}\n"
LOAD_SECONDS, LOAD_LEAST, LOAD_MOST = 20, 2, 600
"""Duration of the demo's load in seconds: default, minimum, maximum."""
FAULTS = ("relay", "database", "broker", "poison")


def add(commands: Any) -> None:
    """Add the commands of this module."""
    _add_dev(commands)
    _add_demo(commands)


def _add_dev(commands: Any) -> None:
    text = "keep a database with the schema and a broker running on this machine, for development"
    dev: argparse.ArgumentParser = commands.add_parser("dev", help=text, description=text, allow_abbrev=False)
    dev.add_argument(
        "-c", "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="also run a relay with this configuration, on the database; default: no relay",
    )  # fmt: skip
    dev.add_argument(
        "--directory", type=Path, metavar="DIR",
        help="keep the data there; default: outbox-relay/dev in the user's cache, in /var/cache for root",
    )  # fmt: skip
    for name, default in ("--postgres-port", POSTGRES_PORT), ("--kafka-port", KAFKA_PORT):
        dev.add_argument(
            name, type=integer_between(0, PORT_MOST, "port"), default=default, metavar="PORT",
            help=f"0 for any that is free; default: {default}",
        )  # fmt: skip
    dev.add_argument("--json", action="store_true", help="print the addresses as JSON")
    dev.set_defaults(do=_dev, extra="demo")


def _add_demo(commands: Any) -> None:
    text = "run a database, a broker, a receiver, relays and a load on this machine, break a part, judge what arrives"
    demo: argparse.ArgumentParser = commands.add_parser("demo", help=text, description=text, allow_abbrev=False)
    demo.add_argument(
        "--seconds", type=seconds_between(LOAD_LEAST, LOAD_MOST), default=LOAD_SECONDS, metavar="N",
        help=f"how long events are emitted, {LOAD_LEAST} to {LOAD_MOST}; default: {LOAD_SECONDS}",
    )  # fmt: skip
    demo.add_argument(
        "--fault", choices=FAULTS, default=FAULTS[0],
        help=f"what breaks half-way: {', '.join(FAULTS)}; default: {FAULTS[0]}",
    )  # fmt: skip
    demo.add_argument("--json", action="store_true", help="print the report as JSON")
    demo.add_argument("--ui", action="store_true", help="also serve the page, with a sink in trouble to look at")
    demo.set_defaults(do=_demo, extra="demo")


def _dev(arguments: argparse.Namespace) -> int:
    from outbox_relay.workbench.dev.directory import default_directory
    from outbox_relay.workbench.dev.run import DevAddresses, DevOptions, run_dev

    def show(addresses: DevAddresses) -> None:
        print(json.dumps(addresses.json()) if arguments.json else addresses.text(), flush=True)
        say(NEXT.format(dsn=addresses.dsn, run="" if arguments.config else RUN.format(dsn=addresses.dsn)))

    directory = (arguments.directory or default_directory()).absolute()
    options = DevOptions(directory, arguments.postgres_port, arguments.kafka_port, arguments.config)
    run_dev(options, show, say)
    return DONE


def _demo(arguments: argparse.Namespace) -> int:
    from outbox_relay.workbench.demo.run import run_demo

    report = run_demo(arguments.seconds, arguments.fault, with_page=arguments.ui)
    print(json.dumps(report.json()) if arguments.json else report.text())
    return DONE if report.sound else FAILED
