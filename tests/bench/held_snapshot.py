"""Measure the statements of a relay while another session holds a snapshot, so that VACUUM removes nothing.

usage: python -m tests.bench.held_snapshot [--hours 1 3] [--calls 20]

A relay with one sink under load is imitated: ten positions of all 64 shards a second, which another relay would read
when it takes over, a trim of the ledger and a renewal of the leases every five seconds. The time between them is left
out, so an hour takes about a minute. Prints the medians of the statements in milliseconds, and the sizes of their
tables, before the snapshot and after the given hours of it. Before each of these, leases are renewed a few times at
their real interval: how long ago each version was written matters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.window import Position
from outbox_relay.postgres.database import statements
from outbox_relay.postgres.migrations import migrate
from outbox_relay.relay.chores import LEDGER_ROWS
from tests.support.database import Database, new_database
from tests.support.ledger import Ledger, ledger
from tests.support.postgres import PostgresServer

SINK = "s"
LEASE_SECONDS, LIMIT_SECONDS = 15.0, 60.0
SHORT_LEASE_SECONDS = 0.2
"""The same while the time between statements is left out: the longer a lease, the more of its versions are found."""
A_SECOND = 10
"""Positions per second."""
BETWEEN = 5
"""Seconds between two trims, and between two renewals."""
TABLES = ("progress", "shard", "relay")
STARTS_BETWEEN = 60
"""Seconds between two calls that let the ledgers start later."""
MOST_OVERHEAD = 50
"""A relay waits for this many times the duration of a trim before the next one."""


class Relay:
    """The statements of a relay that serves one sink."""

    def __init__(self, at: Ledger) -> None:
        self._at = at
        self._next_trim = 0.0
        self._second = 0
        self._event = 0

    def start(self) -> None:
        """Register the sink and own its shards."""
        self._at.register((SINK, ["*"], "now"))
        self._at.live("one", SINK)
        self._at.own(SINK, lease_seconds=LEASE_SECONDS)
        [self._event] = self._at.emit("a key")

    def keep_pace(self) -> None:
        """Renew the leases at their interval until none is left from before."""
        for _ in range(round(2 * LEASE_SECONDS / BETWEEN)):
            time.sleep(BETWEEN)
            self.renew()

    def end_leases(self) -> None:
        """Let the leases end, so that the next renewal is due."""
        self._at.do("update outbox.session set lease_until = now() returning 1")

    def hours(self, hours: float) -> None:
        """Write what a relay writes in ``hours``."""
        for _ in range(round(hours * 3600 / BETWEEN)):
            for _ in range(BETWEEN * A_SECOND):
                self.settle()
            self._second += BETWEEN
            self.renew(SHORT_LEASE_SECONDS)
            self._at.live("one", SINK)
            if self._second >= self._next_trim:
                self._next_trim = self._second + MOST_OVERHEAD * seconds(self.trim)
            if self._second % STARTS_BETWEEN == 0:
                self.raise_starts()

    def settle(self) -> None:
        """Write the position of all shards."""
        self._at.place(SINK, Position(self._at.tick()))

    def park(self) -> None:
        """Make a row of an event, under the lock on its shard."""
        self._at.park(SINK, self._at.row(self._event))

    def renew(self, lease_seconds: float = LEASE_SECONDS) -> None:
        """Renew the lease on the sink."""
        self._at.store.renew_sessions(self._at.relay, [SINK], lease_seconds, LIMIT_SECONDS)

    def trim(self) -> None:
        """Delete outranked positions."""
        self._at.store.value("trim_progress", {"most": LEDGER_ROWS})

    def raise_starts(self) -> None:
        """Let readers of the ledger begin behind what was trimmed."""
        self._at.store.value("raise_ledger_starts")

    def poll(self) -> None:
        """Ask for the state of the sink, and for shards without an owner."""
        self._at.store.sinks([SINK])

    def figures(self) -> None:
        """Read the figures of all sinks."""
        self._at.query(statements()["figures_of_sinks"])

    def read(self) -> None:
        """Read the positions, as a relay does that takes over."""
        self._at.store.positions(SINK, range(SHARDS))


def seconds(call: Callable[[], object]) -> float:
    """Return the duration of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def figures(relay: Relay, at: Ledger, calls: int) -> dict[str, float]:
    """Return medians in milliseconds, and the sizes of the tables in megabytes."""
    found: dict[str, float] = {}
    statements = {
        "settle": relay.settle,
        "park": relay.park,
        "trim": relay.trim,
        "raise starts": relay.raise_starts,
        "positions": relay.read,
        "poll": relay.poll,
        "renew": relay.renew,
        "figures": relay.figures,
    }
    for name, call in statements.items():
        took = list[float]()
        for _ in range(calls):
            if name == "renew":
                relay.end_leases()
            took.append(seconds(call))
        found[f"{name}, ms"] = statistics.median(took) * 1000
    for table in TABLES:
        [(size,)] = at.query("select pg_total_relation_size(%s::regclass)", f"outbox.{table}")
        found[f"{table}, MB"] = size / 1e6
    return found


def measure(database: Database, hours: Sequence[int], calls: int) -> None:
    """Print the figures before the snapshot and after each number of hours of it."""
    with ledger(database) as at:
        relay = Relay(at)
        relay.start()
        relay.hours(0.01)
        relay.keep_pace()
        report(0, figures(relay, at, calls))
        with database.connect() as holder:
            holder.execute("set transaction isolation level repeatable read")
            holder.execute("select pg_current_xact_id()")
            for before, after in pairwise([0, *sorted(hours)]):
                relay.hours(after - before)
                relay.keep_pace()
                report(after, figures(relay, at, calls))


def report(hour: int, found: dict[str, Any]) -> None:
    """Print a line of figures."""
    print(json.dumps({"hours": hour, **{name: round(value, 2) for name, value in found.items()}}), flush=True)


def main() -> int:
    """Measure on a server of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--hours",
        type=int,
        nargs="+",
        default=[1, 3],
        help="hours of the snapshot after which is measured; default 1 3",
    )
    parser.add_argument("--calls", type=int, default=20, help="calls per figure; default 20")
    arguments = parser.parse_args()

    with PostgresServer({"shared_buffers": "1GB"}) as server, new_database(server, "template1") as database:
        migrate(database.dsn)
        measure(database, arguments.hours, arguments.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
