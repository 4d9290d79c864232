"""Measure the memory of a relay while one webhook destination is down and events of another sink are delivered.

usage: python -m tests.bench.dead_destination [--minutes 60] [--rate 1000] [--unrouted]

A relay process serves two webhook sinks. One destination refuses every connection. The other answers immediately and
gets `--rate` events a second; with `--unrouted` these events go to no sink. 1,000 events wait for the dead destination
at first, and one more each second. Every minute the program prints the relay's resident memory, open files and log
lines, and the lag of the healthy sink: a sink that cannot keep up has up to 20,000 events in memory, whatever the state
of the other. The exit code is 1 if memory grows by 20 MB or more from the second minute to the end, if open files or
log lines grow with time, or if the relay has more sessions of the database than its settings allow.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from outbox_relay import outbox
from outbox_relay.postgres.migrations import migrate
from outbox_relay.service.build import CONNECTIONS
from outbox_relay.workbench.embedded.ports import free_port
from outbox_relay.workbench.embedded.postgres import PostgresServer
from tests.bench.webhooks import Load, receiver
from tests.support.receiver.signatures import SECRET
from tests.support.service import RelayService

GROWTH_BYTES = 20_000_000
"""Growth of resident memory that is too much."""
GROWTH_FILES = 10
"""Greatest growth of open files. A file for each attempt would be 60 of them in an hour."""
GROWTH_LINES = 20
"""Greatest growth of the log, in lines. A line a minute would be 58 of them in an hour."""
SESSIONS = CONNECTIONS + 3 + 1
"""Greatest number of database sessions of a relay with two sinks, replays and the listener included."""
SESSIONS_NOW = """select count(*) from pg_stat_activity
where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()"""
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


@dataclass(frozen=True)
class Use:
    """The resources that a relay uses at the end of a period."""

    resident_bytes: int
    open_files: int
    log_lines: int
    sessions: int

    def __str__(self) -> str:
        """Return a part of a line of the report."""
        return (
            f"{self.resident_bytes / 1e6:.1f} MB resident, {self.open_files} open files, {self.log_lines} log lines, "
            f"{self.sessions} sessions"
        )


def violations(found: Sequence[Use]) -> list[str]:
    """Return a line for each bound that the use of resources at the end of each period violates."""
    settled, last = found[min(SETTLED_PERIODS, len(found)) - 1], found[-1]
    wrong: list[str] = []
    if (grown := last.resident_bytes - settled.resident_bytes) >= GROWTH_BYTES:
        wrong.append(f"memory grew by {grown / 1e6:.1f} MB")
    if (files := last.open_files - settled.open_files) > GROWTH_FILES:
        wrong.append(f"open files grew by {files}")
    if (lines := last.log_lines - settled.log_lines) > GROWTH_LINES:
        wrong.append(f"the log grew by {lines} lines")
    if (sessions := max(use.sessions for use in found)) > SESSIONS:
        wrong.append(f"the relay had {sessions} database sessions, more than {SESSIONS}")
    return wrong


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


def connections_to(process: int, port: int) -> int:
    """Return the number of open connections that a process has to a port of this machine."""
    sockets = set[str]()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(link.readlink()))
    lines = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return sum(int(fields[2].split(":")[1], 16) == port and f"socket:[{fields[9]}]" in sockets for fields in lines)


def use_of(service: RelayService, emitter: Emitter, alive: int) -> Use:
    """Return the resources that the relay uses now, without its connections to the healthy destination.

    The number of these changes with the events that wait for it.
    """
    process = service.process.pid
    [(sessions,)] = emitter.connection.execute(SESSIONS_NOW).fetchall()
    files = len(list(Path(f"/proc/{process}/fd").iterdir())) - connections_to(process, alive)
    return Use(resident_bytes(process), files, len(service.lines()), int(sessions))


def measure(
    service: RelayService, emitter: Emitter, alive: int, periods: int, seconds: float, report: Callable[[str], None]
) -> list[str]:
    """Emit for some periods and return the violations. `alive` is the port of the healthy destination."""
    found, began = list[Use](), time.monotonic()
    emitter.emit_waiting()
    for period in range(1, periods + 1):
        emitter.until(began + seconds * period)
        found.append(use_of(service, emitter, alive))
        report(f"{seconds * period:.0f} s: {found[-1]}, {emitter.emitted} foreign events, {lag(emitter)} behind")
    grown = found[-1].resident_bytes - found[min(SETTLED_PERIODS, periods) - 1].resident_bytes
    report(f"grew by {grown / 1e6:.1f} MB from period {SETTLED_PERIODS} on")
    return violations(found)


def run(periods: int, seconds: float, rate: int, foreign: str, report: Callable[[str], None]) -> list[str]:
    """Start everything, measure, and return the violations. `foreign` is the pattern of the healthy sink."""
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
            port = urlsplit(alive).port or 0
            return measure(service, Emitter(connection, rate), port, periods, seconds, report)


def main(argv: list[str]) -> int:
    """Run the measurement, print the results and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dead_destination")
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--unrouted", action="store_true")
    given = parser.parse_args(argv)
    foreign = "nothing.*" if given.unrouted else FOREIGN
    wrong = run(given.minutes, 60.0, given.rate, foreign, lambda line: print(line, flush=True))
    for each in wrong:
        print(f"wrong: {each}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
