"""Measure the memory of a relay while one webhook destination is down and events of another sink are delivered.

usage: python -m tests.bench.dead_destination [--minutes 60] [--rate 1000] [--unrouted]

A relay process serves two webhook sinks. One destination refuses every connection. The other answers immediately and
gets `--rate` events a second; with `--unrouted` these events go to no sink. 1,000 events wait for the dead destination
at first, and one more each second. Every minute the program prints the relay's resident memory, open files and log
lines, and the lag of the healthy sink: a sink that cannot keep up has up to 20,000 events in memory, whatever the state
of the other. The exit code is 1 if memory grows by 20 MB or more from the second minute to the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from outbox_relay import outbox
from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.embedded.ports import free_port
from outbox_relay.workbench.embedded.postgres import PostgresServer
from tests.bench.webhooks import Load, receiver
from tests.support.receiver.signatures import SECRET
from tests.support.service import RelayService

GROWTH_BYTES = 20_000_000
WAITING = 1_000
"""Initial number of events for the dead destination."""
PORTION_SECONDS = 0.02
SETTLED_PERIODS = 2
"""Memory may grow until the end of this period, which is a minute unless a test says otherwise."""
FOREIGN = "other.*"
"""Types of the events for the healthy sink."""
CONFIG = """
[database]
dsn = "{dsn}"
[sinks.dead]
type = "webhook"
url = "{dead}"
{common}
[sinks.alive]
type = "webhook"
url = "{alive}"
{common}
[routes]
"dead.*" = ["dead"]
"{foreign}" = ["alive"]
"""
COMMON = """allow_http = true
allow_networks = ["127.0.0.0/8"]
secrets = ["{secret}"]"""


@dataclass
class Emitter:
    """Emits `rate` events of the other sink and one for the dead destination per second."""

    connection: psycopg.Connection[Any]
    rate: int
    emitted: int = 0

    def until(self, deadline: float) -> None:
        """Emit until the deadline, a value of `time.monotonic()`; catch up on late events."""
        began, before = time.monotonic(), self.emitted
        seconds = 0
        while (now := time.monotonic()) < deadline:
            wanted = before + int((now - began) * self.rate)
            self._emit("other.happened", wanted - self.emitted)
            self.emitted = wanted
            if now - began >= seconds:
                self._emit("dead.happened", 1)
                seconds += 1
            time.sleep(PORTION_SECONDS)

    def emit_waiting(self) -> None:
        """Emit the initial events for the dead destination."""
        self._emit("dead.happened", WAITING)

    def _emit(self, kind: str, count: int) -> None:
        if count > 0:
            events = [outbox.Event(kind, {"n": n}, key=f"k{n}") for n in range(count)]
            with self.connection.transaction():
                outbox.emit_many(self.connection, events)


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def lag(emitter: Emitter) -> int:
    """Return the number of ids after the position of the healthy sink."""
    query = "select s.last_value - max(p.a_seq) from outbox.event_id_seq s, outbox.standing p where p.sink = 'alive'"
    [(found,)] = emitter.connection.execute(f"{query} group by s.last_value").fetchall()
    return int(found)


def measure(
    service: RelayService, emitter: Emitter, periods: int, seconds: float, report: Callable[[str], None]
) -> int:
    """Emit for some periods and return the growth of the relay's memory in bytes since the end of the second one."""
    process, found, began = service.process.pid, list[int](), time.monotonic()
    emitter.emit_waiting()
    for period in range(1, periods + 1):
        emitter.until(began + seconds * period)
        found.append(resident_bytes(process))
        files = len(list(Path(f"/proc/{process}/fd").iterdir()))
        report(
            f"{seconds * period:.0f} s: {found[-1] / 1e6:.1f} MB resident, {files} open files, "
            f"{len(service.lines())} log lines, {emitter.emitted} foreign events, {lag(emitter)} behind"
        )
    return found[-1] - found[min(SETTLED_PERIODS, len(found)) - 1]


def run(periods: int, seconds: float, rate: int, foreign: str, report: Callable[[str], None]) -> int:
    """Start everything, measure, and return the growth in bytes. `foreign` is the pattern of the healthy sink."""
    load = Load("alive", 1, 0, 0.0)
    with PostgresServer() as server, receiver(load) as [alive], tempfile.TemporaryDirectory() as directory:
        server.create_database("dead")
        dsn = server.dsn("dead")
        migrate(dsn)
        text = CONFIG.format(
            dsn=dsn,
            dead=f"http://127.0.0.1:{free_port()}/hooks",
            alive=alive,
            foreign=foreign,
            common=COMMON.format(secret=SECRET),
        )
        with RelayService(Path(directory), text) as service, psycopg.connect(dsn, autocommit=True) as connection:
            return measure(service, Emitter(connection, rate), periods, seconds, report)


def main(argv: list[str]) -> int:
    """Run the measurement, print the results and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dead_destination")
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--unrouted", action="store_true")
    given = parser.parse_args(argv)
    foreign = "nothing.*" if given.unrouted else FOREIGN
    grown = run(given.minutes, 60.0, given.rate, foreign, lambda line: print(line, flush=True))
    print(f"grew by {grown / 1e6:.1f} MB from minute {SETTLED_PERIODS} on")
    return int(grown >= GROWTH_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
