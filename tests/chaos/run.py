"""One run: start all processes, inject faults, wait until the system is at rest, and judge the arrivals."""

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

from tests.chaos import days, inputs, jobs, replays, ticks, writer
from tests.chaos.arrivals import TOPIC_SETTINGS
from tests.chaos.configs import CONFIG, CONFIG_OF_ALL, TIMEOUT_SECONDS
from tests.chaos.database import DatabaseSide
from tests.chaos.days import Retention
from tests.chaos.destinations import BrokerDown, ReceiverDown, ReceiverMode
from tests.chaos.evidence import Evidence
from tests.chaos.fleet import Fleet
from tests.chaos.forms import LEASE_SECONDS, Form
from tests.chaos.handlers import CALLS, DIRECTORY
from tests.chaos.jobs import Jobs
from tests.chaos.lanes import Lane, Pulse, Record, inject
from tests.chaos.nemesis import Nemesis
from tests.chaos.outcome import Outcome, violations
from tests.chaos.receiver import ReceiverProcess
from tests.chaos.relayfaults import JoinAndLeave, Kill, KillAfterClaim, KillAt, Replace, ShiftedClock, Zombie
from tests.chaos.replays import Replay
from tests.chaos.restore import Restore
from tests.chaos.servicefaults import ROUTE, HealthFlood, Reload
from tests.chaos.starved import starvations
from tests.chaos.timeline import Restored
from tests.chaos.writer import WriterProcess
from tests.support.command import outbox_relay
from tests.support.fork_server import ForkServer
from tests.support.kafka import KafkaBroker
from tests.support.receiver.signatures import SECRET
from tests.support.wait import NotInTime, until

TOPIC = "chaos"
PARTITIONS = 12
BROKER_SETTINGS = {"log.segment.bytes": str(16 << 20)}
"""Small segments, because a broker that was killed reads its last ones again."""
PAUSES: Mapping[str, float] = {"blackholed connection": 16.0, "promotion": 12.0, "postgres crash": 8.0}
"""Fault → seconds to recover after a strike without other faults; :data:`PAUSE_SECONDS` for the others."""
PAUSE_SECONDS = 7.0
PROGRESS_SECONDS = 30.0
REST_LOOK_SECONDS = 1.0


class Run:
    """The processes of one run, with their files in `directory`."""

    def __init__(self, form: Form, seed: int, directory: Path) -> None:
        self._form = form
        self._seed = seed
        self._directory = directory
        self._record = Record()
        self.outcome = Outcome(form, seed, self._record)
        self._began = time.monotonic()
        self._lanes: list[Lane] = []

    def run(self) -> Outcome:
        """Run all phases. Violations are in the failures of the record."""
        os.environ[DIRECTORY] = str(self._directory)  # for the relays and their workers
        with ExitStack() as stack:
            fork_server = stack.enter_context(ForkServer("tests.chaos.fork_server"))
            self._database = stack.enter_context(DatabaseSide())
            self._broker = KafkaBroker(BROKER_SETTINGS)
            self._broker.java = ("-XX:TieredStopAtLevel=1",)
            stack.enter_context(self._broker)
            assert self._broker.real, "needs Apache Kafka: install Java and Maven"
            self._broker.create_topic(TOPIC, PARTITIONS, TOPIC_SETTINGS)
            self._receiver = stack.enter_context(ReceiverProcess(self._directory))
            webhook, both = self._configs()
            self._fleet = stack.enter_context(Fleet(self._directory, both, webhook, fork_server, self._form.relays))
            writer.prepare(self._database.dsn, self._form.keys + inputs.OWN_KEYS)
            days.prepare(self._database.dsn)
            replays.prepare(self._database.dsn)
            jobs.prepare(self._database.dsn)
            ticks.prepare(self._database.dsn)
            (self._directory / CALLS).touch()
            self._jobs = Jobs(self._database.dsn, self._directory, str(self._seed))
            self._moves = ticks.Moves(self._database.dsn, str(self._seed))
            self._writers = [self._writer(number) for number in range(self._form.writers)]
            for one in self._writers:
                stack.callback(one.kill)
            self._nemeses = self._all_nemeses()
            stack.enter_context(Pulse(self._record))
            self._phases()
        return self.outcome

    def _configs(self) -> tuple[str, str]:
        """Return the configuration of the relay that serves only the webhook, and that of all others."""
        webhook = CONFIG.format(
            dsn=self._database.relay_dsn,
            lease=LEASE_SECONDS,
            url=self._receiver.url,
            secret=SECRET,
            timeout=TIMEOUT_SECONDS,
        )
        webhook = days.POLICY + webhook + ROUTE
        return webhook, webhook + CONFIG_OF_ALL.format(
            topic=TOPIC,
            bootstrap=self._broker.bootstrap,
            ticks=ticks.ROUTE + ticks.CONFIG,
            jobs_url=self._receiver.jobs_url,
            secret=SECRET,
            timeout=TIMEOUT_SECONDS,
            application_dsn=self._database.application_dsn,
        )

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
            ReceiverMode(self._receiver, "slow"),
            ReceiverMode(self._receiver, "hanging"),
            Reload(fleet),
            HealthFlood(fleet),
            Retention(self._database.dsn, fleet.relays[0].config),
            Replay(self._database.dsn, self._form.keys),
            Restore(self._database, fleet, self._restored),
            Restore(self._database, fleet, self._restored, times=2),
        ]
        of_inputs, self._expected_files = inputs.nemeses(self._database.dsn, self._directory, self._form.keys)
        return {nemesis.fault: nemesis for nemesis in [*own, *of_inputs, *self._database.nemeses()]}

    # -- phases -------------------------------------------------------------------------------------------------------

    def _phases(self) -> None:
        with self._phase("start"):
            self._fleet.start()
            for one in self._writers:
                one.start()
            self._jobs.start()
            self._moves.start()
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
        """Replace every relay, and let one join and leave. No event may arrive twice."""
        rng = random.Random(f"{self._seed}/calm")
        time.sleep(self._form.start_seconds)  # events flow
        for _ in self._fleet.relays:
            inject(self._nemeses["sigterm"], rng, self._record, alone=True)
            time.sleep(1.0)  # the next one is ready
        inject(self._nemeses["join and leave"], rng, self._record, alone=True)
        time.sleep(6.0)  # later faults must not explain duplicates of this phase

    def _alone(self) -> None:
        """Inject one fault at a time, each with time to recover."""
        rng = random.Random(f"{self._seed}/alone")
        for fault, count in self._form.alone.items():
            for _ in range(count):
                inject(self._nemeses[fault], rng, self._record, alone=True)
                time.sleep(PAUSES.get(fault, PAUSE_SECONDS))  # time to recover

    def _storm(self) -> None:
        """Run all lanes in parallel, until every fault is injected and enough events are committed."""
        seed = str(self._seed)
        self._lanes = [
            Lane(name, wanted, self._nemeses, seed, self._record) for name, wanted in self._form.lanes.items()
        ]
        for lane in self._lanes:
            lane.start(self._form.storm_seconds)
        end = time.monotonic() + self._form.storm_seconds + self._form.extra_seconds
        for lane in self._lanes:
            lane.join(end - time.monotonic())
        self._make_up(end)
        while self._committed() < self._form.least_events and time.monotonic() < end:
            time.sleep(1.0)  # the writers go on

    def _make_up(self, end: float) -> None:
        """Inject what the form requires and other faults have prevented, but days: a backlog keeps them."""
        rng = random.Random(f"{self._seed}/late")
        for fault, least in self._form.least.items():
            if fault == Retention.fault:
                continue
            while fault in self._nemeses and self._record.count(fault) < least and time.monotonic() < end:
                inject(self._nemeses[fault], rng, self._record, alone=False)

    def _rest(self) -> dict[str, int]:
        """Stop the writers and wait until the system is at rest. Return the backlog by sink, empty at rest."""
        for one in (*self._writers, self._jobs, self._moves):
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
        rng = random.Random(f"{self._seed}/days")
        for _ in range(self._form.least[Retention.fault] - self._record.count(Retention.fault)):
            inject(self._nemeses[Retention.fault], rng, self._record)
        return {}

    def _at_rest(self) -> bool:
        time.sleep(REST_LOOK_SECONDS)  # `status` takes a second of processor time
        found = self._asked()
        return (
            found["replays"] == []
            and ticks.at_rest(self._database.dsn)
            and all(sink["backlog"] == 0 for sink in found["sinks"].values())
        )

    def _status(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self._asked()["sinks"])

    def _asked(self) -> dict[str, Any]:
        ended = outbox_relay("status", "--json", "-c", self._fleet.relays[0].config)
        assert ended.out, ended.err  # a part that was not answered in time is null in it
        return cast("dict[str, Any]", ended.json)

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
        """Return the number of committed events; 0 while the database is unavailable."""
        try:
            with psycopg.connect(self._database.dsn, connect_timeout=5) as connection:
                found = connection.execute(f"select sum(n)::bigint from {writer.COUNTS}".encode()).fetchone()
        except psycopg.Error:
            return 0
        return int(found[0]) if found else 0

    def _rows(self) -> str:
        """Return the numbers of rows by sink and state, as text."""
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
        expected_files = [*(one.expected for one in self._writers), *self._jobs.files, *self._expected_files]
        evidence = Evidence(
            self._database.dsn,
            self._broker.bootstrap,
            TOPIC,
            self._receiver.journal,
            self._directory,
            expected_files,
            self._jobs,
            self._restored,
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
    """Context of a phase: prints its begin, and records its duration and the load."""

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
    """Return the load of the machine in the last minute, and its number of cores."""
    return f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
