"""The evidence of a run, on which it is judged: the log, the dead letters, the topic and the receiver's journal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.chaos import arrivals, eventlog, expected, replays
from tests.chaos.inputs import ODD, POISON
from tests.chaos.oracle import Arrival, Dead, Place, judge
from tests.chaos.outcome import Outcome
from tests.chaos.recovery import Flow
from tests.chaos.timeline import Committed, Logged, Restored
from tests.chaos.writer import for_both

SINKS = ("kafka", "webhook")
DEAD = "select sink, uuid_send(uid), last_error like 'claimed % times%' from outbox.delivery where state = 'dead'"
"""Dead letters are found by uid, as oversized ones have no payload. The last column is true if relays died with it."""


@dataclass(frozen=True)
class Evidence:
    """The places of the evidence."""

    dsn: str
    bootstrap: str
    topic: str
    journal: Path
    expected_files: Sequence[Path]
    restores: Sequence[Restored] = ()

    def judge(self, outcome: Outcome, backlog: Mapping[str, int]) -> None:
        """Judge all sinks and fill in the outcome; `backlog` is the final number of undelivered events by sink."""
        log = Log()
        committed = {sink: Committed(self.restores) for sink in SINKS}
        self._take_back(committed)

        def add(event: Logged) -> None:
            if event.kind == POISON:
                return
            for sink in SINKS:
                if is_for(sink, event.key):
                    committed[sink].add(event.key, event.number, event.uid)

        transactions = (transaction for path in self.expected_files for transaction in expected.read(path))
        lost = (event for restored in self.restores for event in restored.lost)
        outcome.reconciled = expected.reconcile(transactions, self._log(log), add, lost)
        outcome.refused = arrivals.refused(self.journal)
        dead = self._dead(log)
        restored = max((restored.rebased for restored in self.restores), default=0.0)
        replayed = arrivals.Replayed(restored)
        for sink in SINKS:
            flow = outcome.flows[sink] = Flow()
            came = _watched(self._arrivals(sink, replayed), flow, log.shards)
            outcome.accounts[sink] = judge(
                sink, committed[sink], came, outcome.record.strikes, dead[sink], backlog.get(sink, 0)
            )
            flow.close()
        since = time.time() - (time.monotonic() - restored)
        outcome.replays = list(replays.violations(self.dsn, replayed.uids, since))
        outcome.replayed = replayed.count

    def _arrivals(self, sink: str, replayed: arrivals.Replayed) -> Iterator[Arrival]:
        if sink == "webhook":
            return arrivals.from_journal(self.journal, replayed)
        return arrivals.from_topic(self.bootstrap, self.topic, replayed)

    def _take_back(self, committed: Mapping[str, Committed]) -> None:
        """Add the events that restores took back, except poison, which may not arrive."""
        for number, restored in enumerate(self.restores):
            for event in restored.lost:
                for sink in SINKS:
                    if event.kind != POISON and is_for(sink, event.key):
                        committed[sink].take_back(number, event.key, event.number, event.uid)

    def _log(self, log: Log) -> Iterator[Logged]:
        """Yield the events of the database, including emptied days, and fill in `log`."""
        with psycopg.connect(self.dsn) as connection:
            log.dead = {uid for _, uid, _ in connection.execute(DEAD, binary=True)}
            for event in eventlog.events(connection):
                log.shards[event.key] = event.shard
                if event.uid in log.dead:
                    log.places[event.uid] = event.key, event.number
                if event.kind is not None:
                    log.kinds[event.kind].add((event.key, event.number))
                yield event

    def _dead(self, log: Log) -> dict[str, Dead]:
        """Return for each sink its dead letters, and the events that may or must be dead."""
        letters: dict[str, set[Place]] = {sink: set() for sink in SINKS}
        killed: dict[str, set[Place]] = {sink: set() for sink in SINKS}
        with psycopg.connect(self.dsn) as connection:
            for sink, uid, died in connection.execute(DEAD, binary=True):
                if place := log.places.get(uid):
                    letters[sink].add(place)
                    if died:
                        killed[sink].add(place)
        return {
            sink: Dead(
                letters[sink],
                {place for place in log.kinds[POISON] if is_for(sink, place[0])},
                log.kinds[ODD] | killed[sink],
            )
            for sink in SINKS
        }


@dataclass
class Log:
    """Facts about the log that are collected while it is read."""

    shards: dict[int, int] = field(default_factory=dict[int, int])
    """Key → shard."""
    dead: set[bytes] = field(default_factory=set[bytes])
    """Uids of the dead letters of all sinks."""
    places: dict[bytes, Place] = field(default_factory=dict[bytes, Place])
    """Uid of a dead letter → its key and number."""
    kinds: dict[str, set[Place]] = field(default_factory=lambda: {POISON: set[Place](), ODD: set[Place]()})


def is_for(sink: str, key: int) -> bool:
    """Return True if the events of this key are routed to `sink`."""
    return sink == "kafka" or for_both(key)


def _watched(came: Iterable[Arrival], flow: Flow, shards: Mapping[int, int]) -> Iterator[Arrival]:
    """Yield the arrivals and add them to `flow`."""
    for arrival in came:
        if arrival.key in shards:
            flow.add(shards[arrival.key], arrival.emitted, arrival.arrived)
        yield arrival
