"""Commands that start servers of their own: dev, demo, drill, bench."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox_relay.cli.arguments import integer_between, number_between, seconds_between
from outbox_relay.cli.command import add_dsn
from outbox_relay.cli.output import DONE, FAILED, say

if TYPE_CHECKING:
    from outbox_relay.workbench.bench.report import BenchReport

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
RUNS, RUNS_MOST = 3, 100
"""Measurements of each scenario: default, maximum."""
DRILLS = ("worker-crash", "failover", "poison", "destination-down", "burst", "long-transaction")
GRACE_MOST = 600
SCALE_LEAST, SCALE_MOST = 0.0001, 100.0
"""Factor for the events and seconds of the bench: minimum, maximum."""


def add(commands: Any) -> None:
    """Add the commands of this module."""
    _add_dev(commands)
    _add_demo(commands)
    _add_drill(commands)
    _add_bench(commands)


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
    text = "run a database, a broker, a receiver, relays and a load on this machine, and leave nothing installed"
    demo: argparse.ArgumentParser = commands.add_parser("demo", help=text, description=text, allow_abbrev=False)
    demo.add_argument(
        "--seconds", type=seconds_between(LOAD_LEAST, LOAD_MOST), default=LOAD_SECONDS, metavar="N",
        help=f"how long events are emitted, {LOAD_LEAST} to {LOAD_MOST}; default: {LOAD_SECONDS}",
    )  # fmt: skip
    demo.add_argument("--json", action="store_true", help="print the report as JSON")
    demo.add_argument("--ui", action="store_true", help="also serve the page, with a sink in trouble to look at")
    demo.set_defaults(do=_demo, extra="demo")


def _add_drill(commands: Any) -> None:
    text = "inject a fault on this machine, show what an operator sees, and judge the recovery by what is promised"
    drill: argparse.ArgumentParser = commands.add_parser("drill", help=text, description=text, allow_abbrev=False)
    drill.add_argument("drill", choices=DRILLS, metavar="NAME", help=", ".join(DRILLS))
    drill.add_argument("--quick", action="store_true", help="a short form: the fault lasts a few seconds")
    drill.add_argument(
        "--grace", type=seconds_between(0, GRACE_MOST), default=0.0, metavar="SECONDS",
        help=f"added to each promised time, for a busy machine, 0 to {GRACE_MOST}; default: 0",
    )  # fmt: skip
    drill.add_argument("--json", action="store_true", help="print the report as JSON")
    drill.set_defaults(do=_drill, extra="demo")


def _add_bench(commands: Any) -> None:
    text = "measure the relay on this machine, compared with a bare loop in the same run"
    bench: argparse.ArgumentParser = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    add_dsn(bench)
    size = bench.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the main scenarios, small, in 3 minutes; the default")
    size.add_argument("--full", action="store_true", help="every scenario, large, in about an hour")
    bench.add_argument("--only", nargs="+", metavar="SCENARIO", default=[], help="only these scenarios, in either size")
    for name, (read, default, text) in {
        "--runs": (integer_between(1, RUNS_MOST), RUNS, f"measurements of each, 1 to {RUNS_MOST}; default: {RUNS}"),
        "--scale": (
            number_between(SCALE_LEAST, SCALE_MOST), 1.0,
            f"factor for all events and seconds, {SCALE_LEAST:g} to {SCALE_MOST:g}; default: 1",
        ),
    }.items():  # fmt: skip
        bench.add_argument(name, type=read, default=default, metavar="N", help=text)
    bench.add_argument("--bootstrap", metavar="SERVERS", help="an existing broker, HOST:PORT,…")
    bench.add_argument("--broker", metavar="NAME", help="the name of that broker in the report, such as its version")
    bench.add_argument("--fsync", action="store_true", help="have the database that is started flush each commit")
    bench.add_argument("--json", action="store_true", help="print the report as JSON")
    bench.add_argument("--plot", type=Path, metavar="DIR", help="write charts of the report into this directory, SVG")
    bench.add_argument("--read", type=Path, metavar="FILE", help="show a report printed by --json; measure nothing")
    bench.set_defaults(do=_bench, extra="demo")


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

    report = run_demo(arguments.seconds, with_page=arguments.ui)
    print(json.dumps(report.json()) if arguments.json else report.text())
    return DONE if report.sound else FAILED


def _drill(arguments: argparse.Namespace) -> int:
    from outbox_relay.workbench.drill.run import run_drill

    report = run_drill(arguments.drill, quick=arguments.quick, grace=arguments.grace)
    print(json.dumps(report.json()) if arguments.json else report.text())
    return DONE if report.kept else FAILED


def _bench(arguments: argparse.Namespace) -> int:
    from outbox_relay.workbench.bench import files

    report = files.read(arguments.read) if arguments.read else _measure(arguments)
    if arguments.plot:
        say(f"{files.draw(report, arguments.plot)} charts in {arguments.plot}")
    print(json.dumps(report.json()) if arguments.json else report.text())
    return DONE if report.complete else FAILED


def _measure(arguments: argparse.Namespace) -> BenchReport:
    from outbox_relay.workbench.bench.environment import Options
    from outbox_relay.workbench.bench.run import run_bench

    options = Options(
        full=arguments.full,
        scale=arguments.scale,
        dsn=arguments.dsn,
        bootstrap=arguments.bootstrap,
        broker=arguments.broker,
        fsync=arguments.fsync,
    )
    return run_bench(options, arguments.only, arguments.runs)
