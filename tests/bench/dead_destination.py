"""What a relay holds in memory while a webhook's destination is dead and events of others pass by.

usage: python -m tests.bench.dead_destination [--minutes 60] [--rate 1000] [--unrouted]

A relay process serves two webhook sinks: the destination of one refuses every connection, the other's answers at once
and gets `--rate` events a second; with `--unrouted` those events go to no sink. The dead one has events of its own that
wait: 1,000 at first, one more each second. Each minute prints the resident memory of the relay, its open files, the
lines that it has logged, and how far the living sink is behind: one that cannot keep up has up to 20,000 events in
memory, which says nothing about the dead one. The exit code is 1 when memory grows by 20 MB or more from the second
minute to the end.
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
"""Events that wait for the dead destination at first."""
PORTION_SECONDS = 0.02
SETTLED_MINUTES = 2
"""Until then the relay may grow to its size."""
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
    """Emits at a steady rate: `rate` events of others a second, one for the dead destination."""

    connection: psycopg.Connection[Any]
    rate: int
    emitted: int = 0

    def until(self, deadline: float) -> None:
        """Emit until the deadline, by `time.monotonic()`. What is late is emitted at once."""
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

    def waiting(self) -> None:
        """Emit what waits for the dead destination at first."""
        self._emit("dead.happened", WAITING)

    def _emit(self, kind: str, count: int) -> None:
        if count > 0:
            events = [outbox.Event(kind, {"n": n}, key=f"k{n}") for n in range(count)]
            with self.connection.transaction():
                outbox.emit_many(self.connection, events)


def resident_bytes(process: int) -> int:
    """Resident memory of a process, in bytes."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def behind(emitter: Emitter) -> int:
    """Ids of the log that the living sink has not passed."""
    query = "select s.last_value - max(p.a_seq) from outbox.event_id_seq s, outbox.standing p where p.sink = 'alive'"
    [(found,)] = emitter.connection.execute(f"{query} group by s.last_value").fetchall()
    return int(found)


def measure(service: RelayService, emitter: Emitter, minutes: int, tell: Callable[[str], None]) -> int:
    """Emit for so many minutes; returns by how many bytes the relay's memory grew from the second one on."""
    process, found, began = service.process.pid, list[int](), time.monotonic()
    emitter.waiting()
    for minute in range(1, minutes + 1):
        emitter.until(began + 60.0 * minute)
        found.append(resident_bytes(process))
        files = len(list(Path(f"/proc/{process}/fd").iterdir()))
        tell(
            f"minute {minute}: {found[-1] / 1e6:.1f} MB resident, {files} open files, "
            f"{len(service.lines())} log lines, {emitter.emitted} foreign events, {behind(emitter)} behind"
        )
    return found[-1] - found[min(SETTLED_MINUTES, len(found)) - 1]


def main(argv: list[str]) -> int:
    """Run it and print what was found; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dead_destination")
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--unrouted", action="store_true")
    given = parser.parse_args(argv)
    load = Load("alive", 1, 0, 0.0)
    with PostgresServer() as server, receiver(load) as [alive], tempfile.TemporaryDirectory() as directory:
        server.create_database("dead")
        dsn = server.dsn("dead")
        migrate(dsn)
        text = CONFIG.format(
            dsn=dsn,
            dead=f"http://127.0.0.1:{free_port()}/hooks",
            alive=alive,
            foreign="nothing.*" if given.unrouted else "other.*",
            common=COMMON.format(secret=SECRET),
        )
        with RelayService(Path(directory), text) as service, psycopg.connect(dsn, autocommit=True) as connection:
            grown = measure(
                service, Emitter(connection, given.rate), given.minutes, lambda line: print(line, flush=True)
            )
    print(f"grew by {grown / 1e6:.1f} MB from minute {SETTLED_MINUTES} on")
    return int(grown >= GROWTH_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
