"""Loss of both servers, and recovery from an older dump in a new cluster.

A strike follows the page on operations, under load:

1. Run `pg_dump` while writers and relays work. Events continue for a while, with other faults.
2. Stop both servers like a crash. Restore the dump into a cluster with another system identifier at the port of the
   primary, so that connection strings stay the same.
3. Writers reconnect and emit into the new cluster. Every running relay must refuse it, and a relay that starts must end
   with exit code 2.
4. Stop every relay, run `outbox-relay rebase` until it is accepted, and start the relays. The command is refused for
   30 s, while a relay that was killed is alive according to the dump.
5. Add a standby. Start the old primary apart and read the commits that were lost.

In `restore twice` the second dump is taken, and the servers are lost again, just after the relays were started on the
first one.

The judge gets the events of every server and decides (see `oracle`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos import eventlog, ticks
from tests.chaos.database import NAME, DatabaseSide
from tests.chaos.evidence import SINKS
from tests.chaos.explanations import RESTORE
from tests.chaos.fleet import Fleet, Relay
from tests.chaos.nemesis import Strike
from tests.chaos.timeline import Restored
from tests.support.command import outbox_relay
from tests.support.postgres import PostgresServer
from tests.support.replication import Pair
from tests.support.wait import until

FLOW_SECONDS = (6.0, 10.0)
"""Range of the least time between the dump and the loss of the servers."""
EMIT_SECONDS = (0.5, 3.0)
"""Range of the time from the first commit in the new cluster to the stop of the relays."""
WORK_SECONDS = 60.0
REFUSE_SECONDS = 60.0
REBASE_SECONDS = 180.0
TOOL_SECONDS = 600.0
REFUSED = "database_refused"
"""Reason of a session's restart in `/readyz`."""
FAILED, REFUSES = 1, 2
"""Exit codes: a lock was not available in time; a relay is alive, or the log is of another cluster."""
SAID = b"the log comes from another cluster"
IDENTITY = b"select system_identifier from pg_control_system()"


@dataclass(frozen=True)
class Dump:
    """A dump, and the cluster into which it will be restored."""

    successor: PostgresServer
    file: Path
    began: float


@dataclass
class Restore:
    """Replaces the servers by a restored dump, once or twice in succession."""

    side: DatabaseSide
    fleet: Fleet
    restored: list[Restored]
    """Every restore is appended to this list."""
    times: int = 1

    @property
    def fault(self) -> str:
        """Return its name in the forms. Its strikes are of the kind `restore` in both cases."""
        return RESTORE if self.times == 1 else f"{RESTORE} twice"

    def strike(self, rng: random.Random) -> Strike:
        """Take the dump, lose the servers and recover. Other faults may strike between the dump and the loss."""
        with self.side.one_at_a_time:
            successors = [self._prepare() for _ in range(self.times)]
            dump = self._dump(successors.pop())
        time.sleep(rng.uniform(*FLOW_SECONDS))  # events that are not in the dump are delivered
        found: list[Restored] = []
        with self.side.one_at_a_time:
            began = time.monotonic()
            while dump:
                disaster = Disaster(self.side.pair, self.fleet, self.side.dsn, dump, rng)
                with self.fleet.everybody():
                    disaster.strike()
                dump = self._dump(successors.pop()) if successors else None
                found.append(disaster.ask_the_old_server())
            self.side.pair.replace()
        self.restored += found
        return Strike(RESTORE, began, found[-1].rebased, "; ".join(map(_described, found)))

    def _prepare(self) -> PostgresServer:
        server = self.side.pair.prepare()
        self.side.equip(server)
        return server

    def _dump(self, successor: PostgresServer) -> Dump:
        began = time.monotonic()
        file = successor.directory / "dump"
        source = self.side.pair.primary.dsn(NAME)
        successor.run("pg_dump", "--format=custom", "--compress=0", "-f", file, source, seconds=TOOL_SECONDS)
        return Dump(successor, file, began)


class Disaster:
    """One loss of both servers and the recovery; no other nemesis has a relay or a server meanwhile."""

    def __init__(self, pair: Pair, fleet: Fleet, dsn: str, dump: Dump, rng: random.Random) -> None:
        self._pair = pair
        self._fleet = fleet
        self._dsn = dsn
        self._dump = dump
        self._rng = rng
        self._old = pair.primary

    def strike(self) -> None:
        """Lose the servers, restore the dump, rebase it and start the relays."""
        before = {relay.name: _refusals(relay) for relay in self._fleet.relays}
        lost = _identity(self._old)
        self._pair.lose()
        self._restore()
        assert _identity(self._dump.successor) != lost, "the new cluster has the identity of the old one"
        self._pair.take_over(self._dump.successor)
        self._emitted()
        for relay in self._fleet.relays:
            until(
                lambda relay=relay: _refuses(relay, before[relay.name]),
                seconds=REFUSE_SECONDS,
                what=f"{relay.name} refuses the restored log",
            )
        self._refused_at_start(self._fleet.guest)
        self._fleet.stop_all()
        until(self._rebased, seconds=REBASE_SECONDS, what="the log is rebased")
        self._rebased_at = time.monotonic()
        for relay in self._fleet.relays:
            relay.start()

    def ask_the_old_server(self) -> Restored:
        """Start the old primary apart, read the lost events, and remove it."""
        self._old.start()
        with self._old.connect(NAME) as connection, connection.transaction():
            lost = eventlog.above(connection, self._kept)
            ticked = ticks.uids(connection)
        self._pair.remove(self._old)
        return Restored(self._dump.began, self._rebased_at, self._kept, lost, self._unsettled, self._read_again, ticked)

    def _restore(self) -> None:
        """Restore the dump and read its events before any other process can connect."""
        successor, file = self._dump.successor, self._dump.file
        successor.run("pg_restore", "--exit-on-error", "-d", successor.dsn(NAME), file, seconds=TOOL_SECONDS)
        file.unlink()
        with successor.connect(NAME) as connection:
            self._kept = eventlog.last_numbers(connection)
            self._unsettled = {sink: eventlog.unsettled(connection, sink) for sink in SINKS}
            self._read_again = {sink: eventlog.read_again(connection, sink) for sink in SINKS}

    def _emitted(self) -> None:
        """Wait until writers have emitted into the restored database, and a little longer."""
        kept = sum(self._kept.values())
        with self._pair.primary.connect(NAME) as connection:
            until(
                lambda: sum(eventlog.last_numbers(connection).values()) > kept,
                seconds=WORK_SECONDS,
                what="writers emit into the restored database",
            )
        time.sleep(self._rng.uniform(*EMIT_SECONDS))  # they go on emitting before the rebase

    def _refused_at_start(self, relay: Relay) -> None:
        mark = relay.log.stat().st_size
        relay.start()
        code = relay.child.wait_for(REFUSE_SECONDS)
        said = relay.log.read_bytes()[mark:]
        assert code == REFUSES, f"a relay that was started on a restored log ended with {code}: {said.decode()}"
        assert SAID in said, f"a relay that was started on a restored log gave another reason: {said.decode()}"

    def _rebased(self) -> bool:
        ended = outbox_relay("rebase", "--dsn", self._dsn)
        assert ended.code in (0, FAILED, REFUSES), f"rebase ended with {ended.code}: {ended.err}"
        return ended.code == 0


def _refusals(relay: Relay) -> dict[str, int]:
    """Return for each sink the number of restarts because the database was refused."""
    status = relay.ask("/readyz")[1]
    sinks: dict[str, Any] = status["sinks"] if status else {}
    return {name: sink["restarts"].get(REFUSED, 0) for name, sink in sinks.items()}


def _refuses(relay: Relay, before: Mapping[str, int]) -> bool:
    """Return True if every sink of the relay has refused the database since then, or if the relay has ended with 2."""
    if not relay.runs:
        assert relay.child.code == REFUSES, f"{relay.name} ended with {relay.child.code} on a restored log"
        return True
    now = _refusals(relay)
    return bool(now) and all(count > before.get(name, 0) for name, count in now.items())


def _identity(server: PostgresServer) -> int:
    with server.connect() as connection:
        [(identity,)] = connection.execute(IDENTITY).fetchall()
    return identity


def _described(restored: Restored) -> str:
    return f"{len(restored.lost)} events lost, rebased {restored.rebased - restored.dumped:.1f} s after the dump began"
