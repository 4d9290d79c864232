"""Record the series that the tests of the alerts are fed with, from relays that run through real faults.

usage: python -m tests.alerts.record [--minutes 18] [NAME ...]

Runs every fault of tests/alerts/scenarios.py, or those that are named, at the same time, each with a database, a
receiver and relays of its own, and scrapes /metrics every 15 s. Each run begins with a minute without the fault. Writes
tests/alerts/recorded/NAME.yaml, a file for `promtool test rules`, with the metrics that alerts.yaml uses.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path

from tests.alerts.scenarios import SCENARIOS, Scenario
from tests.alerts.series import SECONDS, Recording, document
from tests.alerts.system import System
from tests.support.postgres import PostgresServer

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yaml"
RECORDED = Path(__file__).with_name("recorded")
LABELS = {"database": "shop", "job": "outbox-relay"}
FAULT_AT = 4
"""The scrape before which the fault begins."""
PER_MINUTE = 60 // SECONDS


def metrics() -> frozenset[str]:
    """Return the names of the metrics that the rules use."""
    expressions = re.sub(r"^ *(#|- alert:|summary:|runbook_url:).*", "", RULES.read_text(), flags=re.MULTILINE)
    return frozenset(re.findall(r"\boutbox_\w+", expressions))


def run(system: System, scenario: Scenario, scrapes: int) -> Recording:
    """Start the relays, cause the fault, and scrape them."""
    recording = Recording(metrics())
    scenario.prepare(system)
    system.start()
    began = time.monotonic()
    for number in range(scrapes):
        time.sleep(max(0.0, began + number * SECONDS - time.monotonic()))
        if number == FAULT_AT:
            scenario.begin(system)
        elif number > FAULT_AT:
            scenario.again(system, number)
        recording.scrape(system.scrape(), LABELS)
    return recording


def comment(name: str, minutes: int, major: int, day: date) -> str:
    """Return the comment that says how a file was made."""
    scenario = SCENARIOS[name]
    relays = "a relay" if scenario.relays == 1 else f"{scenario.relays} relays"
    begins = "after one minute" if scenario.has_beginning else "all the time"
    kind = f"The fault, {begins}" if scenario.fires else "There is no fault"
    text = (
        f"Recorded by `python -m tests.alerts.record {name}` on {day} from {relays} on PostgreSQL {major}, for "
        f"{minutes} minutes. {kind}: {scenario.fault}."
    )
    hold = f" The last values are repeated for {scenario.hold_minutes} minutes, since nothing changes any more."
    return text + (hold if scenario.hold_minutes else "")


def record(shared: PostgresServer, minutes: int, name: str) -> str:
    """Write the file of one fault and return its name."""
    scenario = SCENARIOS[name]
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer()) if scenario.own_server else shared
        system = stack.enter_context(System(server, f"alerts_{name.replace('-', '_')}", scenario.relays))
        system.user = stack.enter_context(scenario.role(system))
        recording = run(system, scenario, minutes * PER_MINUTE + 1)
    said = comment(name, minutes, server.major, datetime.now(UTC).date())
    text = document(said, recording.series(), scenario.fires, scenario.hold_minutes * PER_MINUTE)
    (RECORDED / f"{name}.yaml").write_text(text)
    return name


def main(arguments: Iterable[str]) -> None:
    """Record the named faults, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=int, default=18)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*SCENARIOS, []])
    found = parser.parse_args(list(arguments))
    names: list[str] = found.names or list(SCENARIOS)
    with PostgresServer({"max_connections": 400}) as server, ThreadPoolExecutor(len(names)) as threads:
        for name in threads.map(partial(record, server, found.minutes), names):
            sys.stdout.write(f"{RECORDED / name}.yaml\n")


if __name__ == "__main__":
    main(sys.argv[1:])
