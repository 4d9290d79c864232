"""One run: everything started, faults injected, the system left to come to rest, what arrived judged."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import psycopg

from tests.chaos import days, inputs, writer
from tests.chaos.arrivals import TOPIC_SETTINGS
from tests.chaos.database import DatabaseSide
from tests.chaos.days import Retention
from tests.chaos.destinations import BrokerDown, ReceiverDown, ReceiverMood
from tests.chaos.evidence import Evidence
from tests.chaos.fleet import Fleet
from tests.chaos.forms import LEASE_SECONDS, Form
from tests.chaos.lanes import Lane, Pulse, Record, inject
from tests.chaos.nemesis import Nemesis
from tests.chaos.nursery import Nursery
from tests.chaos.outcome import Outcome, violations
from tests.chaos.receiver import ReceiverProcess
from tests.chaos.relayfaults import JoinAndLeave, Kill, KillAfterClaim, KillAt, Replace, ShiftedClock, Zombie
from tests.chaos.restore import Restore
from tests.chaos.servicefaults import ROUTE, HealthFlood, Reload
from tests.chaos.starved import starvations
from tests.chaos.timeline import Restored
from tests.chaos.writer import WriterProcess
from tests.support.command import outbox_relay
from tests.support.kafka import KafkaBroker
from tests.support.receiver.signatures import SECRET
from tests.support.wait import NotInTime, until

TOPIC = "chaos"
PARTITIONS = 12
CONFIG = """
[database]
dsn = "{dsn}"
[relay]
lease_seconds = {lease}
[sinks.webhook]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
allow_http = true
allow_networks = ["127.0.0.0/8"]
timeout_seconds = 10
[sinks.webhook.retry]
base_seconds = 0.2
max_seconds = 2
[sinks.webhook.circuit]
probe_seconds = 0.2
probe_max_seconds = 1
[routes]
"""
CONFIG_OF_KAFKA = """"*" = ["kafka"]
[sinks.kafka]
type = "kafka"
topic = "{topic}"
[sinks.kafka.producer]
"bootstrap.servers" = "{bootstrap}"
[sinks.kafka.circuit]
probe_max_seconds = 2
"""
BROKER_SETTINGS = {"log.segment.bytes": str(16 << 20)}
"""A broker that was killed reads its last segments again."""
PAUSES: Mapping[str, float] = {"blackholed connection": 16.0, "promotion": 12.0, "postgres crash": 8.0}
"""Seconds that the system has after a fault that strikes alone; else:"""
PAUSE_SECONDS = 7.0
PROGRESS_SECONDS = 30.0
REST_LOOK_SECONDS = 1.0
WRITER_SECONDS = 60


class Run:
    """The parts of one run; `directory` gets their files."""

    def __init__(self, form: Form, seed: int, directory: Path) -> None:
        self._form = form
        self._seed = seed
        self._directory = directory
        self._record = Record()
        self.outcome = Outcome(form, seed, self._record)
        self._began = time.monotonic()
        self._lanes: list[Lane] = []

    def run(self) -> Outcome:
        """Do it; what must not be stands in the record's failures."""
        with ExitStack() as stack:
            nursery = stack.enter_context(Nursery())
            self._database = stack.enter_context(DatabaseSide())
            self._broker = KafkaBroker(BROKER_SETTINGS)
            self._broker.java = ("-XX:TieredStopAtLevel=1",)
            stack.enter_context(self._broker)
            assert self._broker.real, "needs Apache Kafka: install Java and Maven"
            self._broker.create_topic(TOPIC, PARTITIONS, TOPIC_SETTINGS)
            self._receiver = stack.enter_context(ReceiverProcess(self._directory))
            webhook, both = self._configs()
            self._fleet = stack.enter_context(Fleet(self._directory, both, webhook, nursery, self._form.relays))
            writer.prepare(self._database.dsn, self._form.keys + inputs.OWN_KEYS)
            days.prepare(self._database.dsn, self._form.day_seconds)
            self._writers = [self._writer(number) for number in range(self._form.writers)]
            for one in self._writers:
                stack.callback(one.kill)
            self._nemeses = self._all_nemeses()
            stack.enter_context(Pulse(self._record))
            self._phases()
        return self.outcome

    def _configs(self) -> tuple[str, str]:
        """The configuration of a relay that serves the webhook alone, and that of all others."""
        webhook = CONFIG.format(
            dsn=self._database.relay_dsn, lease=LEASE_SECONDS, url=self._receiver.url, secret=SECRET
        )  # fmt: skip
        webhook += ROUTE
        return webhook, webhook + CONFIG_OF_KAFKA.format(topic=TOPIC, bootstrap=self._broker.bootstrap)

    def _writer(self, number: int) -> WriterProcess:
        rate = self._form.rate / self._form.writers
        return WriterProcess(self._directory, self._database.dsn, number, str(self._seed), rate, self._form.keys)

    def _all_nemeses(self) -> Mapping[str, Nemesis]:
        fleet = self._fleet
        self._restored: list[Restored] = []
        self._zombie = Zombie(fleet, LEASE_SECONDS)
        own: list[Nemesis] = [
            Kill(fleet),
            KillAt(fleet, "after acknowledgement"),
            KillAt(fleet, "inside settle"),
            KillAfterClaim(fleet),
            self._zombie,
            Replace(fleet),
            JoinAndLeave(fleet),
            ShiftedClock(fleet),
            BrokerDown(self._broker, "killed"),
            BrokerDown(self._broker, "stopped"),
            ReceiverDown(self._receiver),
            ReceiverMood(self._receiver, "slow"),
            ReceiverMood(self._receiver, "hanging"),
            Reload(fleet),
            HealthFlood(fleet),
            Retention(self._database.dsn),
            Restore(self._database, fleet, self._restored),
            Restore(self._database, fleet, self._restored, times=2),
        ]
        of_inputs, self._truths = inputs.nemeses(self._database.dsn, self._directory, self._form.keys)
        return {nemesis.fault: nemesis for nemesis in [*own, *of_inputs, *self._database.nemeses()]}

    # -- phases -------------------------------------------------------------------------------------------------------

    def _phases(self) -> None:
        with self._phase("start"):
            self._fleet.start()
            for one in self._writers:
                one.start()
        over = threading.Event()
        progress = threading.Thread(target=self._progress, args=(over,), daemon=True)
        progress.start()
        for name, phase in (("calm", self._calm), ("alone", self._alone), ("storm", self._storm)):
            with self._phase(name):
                phase()
        with self._phase("rest"):
            backlog = self._rest()
        over.set()
        progress.join(30)
        with self._phase("stop"):
            self._stop()
        with self._phase("judge"):
            self._judge(backlog)
        self._require()

    def _phase(self, name: str) -> Phase:
        return Phase(name, self.outcome)

    def _calm(self) -> None:
        """No fault: every relay is replaced, one comes and goes. No event may come twice."""
        rng = random.Random(f"{self._seed}/calm")
        time.sleep(self._form.start_seconds)  # events flow
        for _ in self._fleet.relays:
            inject(self._nemeses["sigterm"], rng, self._record, alone=True)
            time.sleep(1.0)  # the next one is ready
        inject(self._nemeses["join and leave"], rng, self._record, alone=True)
        time.sleep(6.0)  # what comes next explains nothing of this

    def _alone(self) -> None:
        """One fault at a time, each with time to recover."""
        rng = random.Random(f"{self._seed}/alone")
        for fault, count in self._form.alone.items():
            for _ in range(count):
                inject(self._nemeses[fault], rng, self._record, alone=True)
                time.sleep(PAUSES.get(fault, PAUSE_SECONDS))  # it has this long to recover

    def _storm(self) -> None:
        """All lanes at once, until all is injected and enough is written."""
        seed = str(self._seed)
        self._lanes = [
            Lane(name, wanted, self._nemeses, seed, self._record) for name, wanted in self._form.lanes.items()
        ]
        for lane in self._lanes:
            lane.start(self._form.storm_seconds)
        end = time.monotonic() + self._form.storm_seconds + self._form.extra_seconds
        for lane in self._lanes:
            lane.join(end - time.monotonic())
        while self._committed() < self._form.least_events and time.monotonic() < end:
            time.sleep(1.0)  # the writers go on

    def _rest(self) -> dict[str, int]:
        """No more faults, no more events: the system comes to rest by itself; returns what is left, by sink."""
        for one in self._writers:
            try:
                one.stop()
            except AssertionError as error:
                self._record.fail(str(error))
        self.outcome.last_emit = time.monotonic()
        try:
            until(self._at_rest, seconds=self._form.rest_seconds, what="the system is at rest")
        except NotInTime as late:
            status = self._status()
            self._record.fail(f"stuck: {late}; {status}")
            return {name: sink["backlog"] for name, sink in status.items()}
        return {}

    def _at_rest(self) -> bool:
        time.sleep(REST_LOOK_SECONDS)  # a question costs a second of a core
        return all(sink["backlog"] == 0 for sink in self._status().values())

    def _status(self) -> dict[str, Any]:
        ended = outbox_relay("status", "--json", "-c", self._fleet.relays[0].config)
        assert ended.code == 0, ended.err
        return cast("dict[str, Any]", ended.json["sinks"])

    def _stop(self) -> None:
        for relay in self._fleet.relays:
            if not relay.runs:
                self._record.fail(f"{relay.name} does not run at the end")
        try:
            self._fleet.stop()
        except AssertionError as error:
            self._record.fail(str(error))

    # -- progress -----------------------------------------------------------------------------------------------------

    def _progress(self, over: threading.Event) -> None:
        while not over.wait(PROGRESS_SECONDS):
            counts = ", ".join(f"{count} {fault}" for fault, count in sorted(self._record.counts.items()))
            left = ", ".join(f"{lane.left} of {lane.name}" for lane in self._lanes if lane.left)
            say(
                f"{time.monotonic() - self._began:6.0f} s: {self._committed():,} events, {self._rows() or 'no'} rows,"
                f" load {load()}; {counts}"
                + (f"; left: {left}" if left else "")
                + (f"; {len(self._record.failures)} FAILURES" if self._record.failures else "")
            )

    def _committed(self) -> int:
        """Events committed so far; 0 while the database cannot be asked."""
        try:
            with psycopg.connect(self._database.dsn, connect_timeout=5) as connection:
                found = connection.execute(f"select sum(n)::bigint from {writer.COUNTS}".encode()).fetchone()
        except psycopg.Error:
            return 0
        return int(found[0]) if found else 0

    def _rows(self) -> str:
        """Events that need individual care now, by sink and state."""
        try:
            with psycopg.connect(self._database.dsn, connect_timeout=5) as connection:
                found = connection.execute(
                    "select sink, state, count(*) from outbox.delivery group by 1, 2 order by 1, 2"
                )
                return ", ".join(f"{count} {state} of {sink}" for sink, state, count in found)
        except psycopg.Error:
            return "unknown"

    # -- judging ------------------------------------------------------------------------------------------------------

    def _judge(self, backlog: Mapping[str, int]) -> None:
        for strike in starvations(relay.said(0) for relay in [*self._fleet.relays, self._fleet.guest]):
            self._record.add(strike)
        truths = [*(one.truth for one in self._writers), *self._truths]
        evidence = Evidence(
            self._database.dsn, self._broker.bootstrap, TOPIC, self._receiver.journal, truths, self._restored
        )
        evidence.judge(self.outcome, backlog)

    def _require(self) -> None:
        for violation in violations(self.outcome):
            self._record.fail(violation)
        for relay in self._fleet.unasked:
            self._record.fail(f"a relay ended by itself: {relay}")
        for zombie in self._zombie.unnoticed:
            self._record.fail(f"a relay that was frozen beyond its lease did not notice: {zombie}")
        for relay in self._fleet.all:
            if b"Traceback" in relay.log.read_bytes():
                self._record.fail(f"{relay.name} logged a traceback: {relay.log}")


class Phase:
    """Says when a part of the run begins, and remembers how long it took."""

    def __init__(self, name: str, outcome: Outcome) -> None:
        self._name = name
        self._outcome = outcome

    def __enter__(self) -> None:
        self._began = time.monotonic()
        say(f"{self._name} …")

    def __exit__(self, *_: object) -> None:
        self._outcome.seconds[self._name] = round(time.monotonic() - self._began, 1)
        self._outcome.load[self._name] = load()


def load() -> str:
    """The machine's load in the last minute, and how many cores it has."""
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def say(line: str) -> None:
    """A line for whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
