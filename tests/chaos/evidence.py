"""The evidence of a run, on which it is judged: the log, the dead letters, the topic and the receiver's journal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.chaos import arrivals, eventlog, expected, jobs, replays, ticks, unique
from tests.chaos.configs import ROW_LEASE_SECONDS
from tests.chaos.explanations import USUAL, Promise
from tests.chaos.handlers import CALLS, TICKS
from tests.chaos.inputs import ODD, POISON
from tests.chaos.jobs import Jobs
from tests.chaos.oracle import Arrival, Dead, Place, judge
from tests.chaos.outcome import Outcome
from tests.chaos.receiver import jobs_of
from tests.chaos.recovery import Flow
from tests.chaos.timeline import Committed, Logged, Restored
from tests.chaos.writer import for_both

SINKS = ("kafka", "webhook", "jobs", "calls", "effects")
PROMISES = {"jobs": Promise(ordered=False, row_lease_seconds=ROW_LEASE_SECONDS), "effects": Promise(exactly_once=True)}
"""Sink → its promise, if it is not that of the others: rows are claimed in any order of their keys."""
DEAD = "select sink, uuid_send(uid), last_error like 'claimed % times%' from outbox.delivery where state = 'dead'"
"""Dead letters are found by uid, as oversized ones have no payload. The last column is true if relays died with it."""


@dataclass(frozen=True)
class Evidence:
    """The places of the evidence."""

    dsn: str
    bootstrap: str
    topic: str
    journal: Path
    directory: Path
    """The files of the handlers."""
    expected_files: Sequence[Path]
    jobs: Jobs
    restores: Sequence[Restored] = ()

    def judge(self, outcome: Outcome, backlog: Mapping[str, int]) -> None:
        """Judge all sinks and fill in the outcome; `backlog` is the final number of undelivered events by sink."""
        log = Log({event.uid for event in self.jobs.emitted})
        for restore, restored in enumerate(self.restores):
            log.eras |= {event.uid: restore for event in restored.lost if event.uid in log.unique}
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
        outcome.refused = sum(map(arrivals.refused, (self.journal, jobs_of(self.journal))))
        dead = self._dead(log)
        restored = max((restored.rebased for restored in self.restores), default=0.0)
        replayed = arrivals.Replayed(restored)
        for sink in SINKS:
            flow = outcome.flows[sink] = Flow()
            came = _watched(self._arrivals(sink, replayed), flow, log, log.first.setdefault(sink, {}))
            promise = PROMISES.get(sink, USUAL)
            outcome.accounts[sink] = judge(
                sink, committed[sink], came, outcome.record.strikes, dead[sink], backlog.get(sink, 0), promise
            )
            flow.close()
        since = time.time() - (time.monotonic() - restored)
        outcome.replays = list(replays.violations(self.dsn, replayed.uids, since))
        outcome.replayed = replayed.count
        self._unique(outcome, log)
        self._ticks(outcome)

    def _unique(self, outcome: Outcome, log: Log) -> None:
        """Judge the unique keys."""
        sinks = {
            sink: unique.Arrived(log.first[sink], log.dead, in_database=sink == "effects")
            for sink in ("jobs", "calls", "effects")
        }
        emitted, merged = self.jobs.emitted, self.jobs.merged
        outcome.unique, outcome.merged = sum(event.uid in log.eras for event in emitted), len(merged)
        outcome.queue += unique.judge(emitted, merged, log.eras, sinks, jobs.sinks_of)

    def _ticks(self, outcome: Outcome) -> None:
        """Judge the schedules."""
        schedules, emitted = ticks.read(self.dsn)
        lost = {uid for restored in self.restores for uid in restored.ticks}
        outcome.ticks = len(emitted)
        outcome.queue += ticks.violations(schedules, emitted, arrivals.uids(self.directory / TICKS), lost)

    def _arrivals(self, sink: str, replayed: arrivals.Replayed) -> Iterator[Arrival]:
        if sink == "webhook":
            return arrivals.from_journal(self.journal, replayed)
        if sink == "jobs":
            return arrivals.from_journal(jobs_of(self.journal), replayed)
        if sink == "calls":
            return arrivals.from_journal(self.directory / CALLS, replayed)
        if sink == "effects":
            return arrivals.from_effects(self.dsn)
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
                if event.uid in log.unique:
                    log.eras[event.uid] = None
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

    unique: Set[bytes]
    """Uids of the events with unique keys that were emitted, committed or not."""
    eras: dict[bytes, int | None] = field(default_factory=dict[bytes, "int | None"])
    """Uid of a committed event with a unique key → the restore that took it back, if any."""
    first: dict[str, dict[bytes, float]] = field(default_factory=dict[str, dict[bytes, float]])
    """Sink → uid of an event with a unique key → its first arrival."""
    shards: dict[int, int] = field(default_factory=dict[int, int])
    """Key → shard."""
    dead: set[bytes] = field(default_factory=set[bytes])
    """Uids of the dead letters of all sinks."""
    places: dict[bytes, Place] = field(default_factory=dict[bytes, Place])
    """Uid of a dead letter → its key and number."""
    kinds: dict[str, set[Place]] = field(default_factory=lambda: {POISON: set[Place](), ODD: set[Place]()})


def is_for(sink: str, key: int) -> bool:
    """Return True if the events of this key are routed to `sink`."""
    if jobs.is_job(key):
        return sink in jobs.sinks_of(key)
    return sink == "kafka" or (sink == "webhook" and for_both(key))


def _watched(came: Iterable[Arrival], flow: Flow, log: Log, first: dict[bytes, float]) -> Iterator[Arrival]:
    """Yield the arrivals and add them to `flow`, and those of events with unique keys to `first`."""
    for arrival in came:
        if arrival.key in log.shards:
            flow.add(log.shards[arrival.key], arrival.emitted, arrival.arrived)
        if arrival.uid in log.unique:
            first.setdefault(arrival.uid, arrival.arrived)
        yield arrival
