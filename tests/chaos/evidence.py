"""What is left after a run: the log, the dead letters, the topic, the receiver's journal; and what is judged by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.chaos import arrivals, truth
from tests.chaos.oracle import Arrival, Committed, judge
from tests.chaos.outcome import Outcome
from tests.chaos.recovery import Flow
from tests.chaos.writer import for_both

SINKS = ("kafka", "webhook")
ROWS = 20_000
LOG = (
    "select substr(key, 5)::int, (convert_from(payload, 'UTF8')::json ->> 'n')::int, uuid_send(uid), shard"
    " from outbox.event"
)
DEAD = (
    "select sink, substr(key, 5)::int, (convert_from(payload, 'UTF8')::json ->> 'n')::int"
    " from outbox.delivery where state = 'dead'"
)


@dataclass(frozen=True)
class Evidence:
    """Where it is."""

    dsn: str
    bootstrap: str
    topic: str
    journal: Path
    truths: Sequence[Path]

    def judge(self, outcome: Outcome, backlog: Mapping[str, int]) -> None:
        """Fill in what is found; `backlog` is what the system still called undelivered, by sink."""
        committed = {sink: Committed() for sink in SINKS}
        shards: dict[int, int] = {}

        def add(key: int, number: int, uid: bytes) -> None:
            committed["kafka"].add(key, number, uid)
            if for_both(key):
                committed["webhook"].add(key, number, uid)

        told = (transaction for path in self.truths for transaction in truth.read(path))
        outcome.reconciled = truth.reconcile(told, self._log(shards), add)
        outcome.refused = arrivals.refused(self.journal)
        dead = self._dead()
        for sink in SINKS:
            flow = outcome.flows[sink] = Flow()
            came = _watched(self._arrivals(sink), flow, shards)
            outcome.accounts[sink] = judge(
                sink, committed[sink], came, outcome.record.strikes, dead[sink], backlog.get(sink, 0)
            )
            flow.close()

    def _arrivals(self, sink: str) -> Iterator[Arrival]:
        if sink == "webhook":
            return arrivals.from_journal(self.journal)
        return arrivals.from_topic(self.bootstrap, self.topic)

    def _log(self, shards: dict[int, int]) -> Iterator[tuple[int, int, bytes]]:
        """The database's log: key, number and uid of each event; fills in the keys' shards."""
        with psycopg.connect(self.dsn) as connection, connection.cursor("log", binary=True) as cursor:
            cursor.itersize = ROWS
            cursor.execute(LOG)
            for key, number, uid, shard in cursor:
                shards[key] = shard
                yield key, number, uid

    def _dead(self) -> dict[str, set[tuple[int, int]]]:
        """Sink → key and number of its dead letters."""
        found: dict[str, set[tuple[int, int]]] = {sink: set() for sink in SINKS}
        with psycopg.connect(self.dsn) as connection:
            for sink, key, number in connection.execute(DEAD):
                found[sink].add((key, number))
        return found


def _watched(came: Iterable[Arrival], flow: Flow, shards: Mapping[int, int]) -> Iterator[Arrival]:
    """The same, told to `flow` in passing."""
    for arrival in came:
        if arrival.key in shards:
            flow.add(shards[arrival.key], arrival.emitted, arrival.arrived)
        yield arrival
