"""Runs the scenarios in rounds within the available time and reports the results."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from subprocess import SubprocessError

import psycopg
from confluent_kafka import KafkaException

from outbox_relay.domain.errors import ConfigurationError, RelayError
from outbox_relay.postgres.errors import explain
from outbox_relay.workbench.supervision import Interrupted, Signals
from tests.bench import machine
from tests.bench.environment import BenchEnvironment, Options
from tests.bench.figures import Figure, summarise
from tests.bench.report import BenchReport, ScenarioResult
from tests.bench.scenarios import SCENARIOS, Scenario

QUICK_SECONDS = 174.0
"""Time limit for all rounds of a quick run; no further round begins that would exceed it."""
FAILURES = (RuntimeError, OSError, SubprocessError, psycopg.Error, KafkaException, RelayError)
"""Exceptions that end a run of a scenario but not the benchmarks."""


class BenchFailed(RelayError):
    """The environment could not be started; the message names the cause, with the end of a log."""


@dataclass(slots=True)
class ScenarioRuns:
    """The runs of one scenario so far."""

    scenario: Scenario
    runs: list[Sequence[Figure]] = field(default_factory=list[Sequence[Figure]])
    notes: dict[str, None] = field(default_factory=dict[str, None])
    """Notes without duplicates, in order."""
    failed: int = 0

    def result(self) -> ScenarioResult:
        """Summarise the runs."""
        return ScenarioResult(
            self.scenario.name, self.scenario.text, summarise(self.runs), list(self.notes), self.failed
        )


def run_bench(options: Options, only: Sequence[str], runs: int) -> BenchReport:
    """Run the scenarios named by `only`, or those of the mode, and report. No process is left running.

    Raise :class:`BenchFailed`, or SystemExit with 128 plus its number after a signal.
    """
    bench_run = BenchRun(options, only, runs)
    try:
        with Signals() as signals, ExitStack() as stack:
            return bench_run.run(BenchEnvironment(stack, signals, options, bench_run.say))
    except Interrupted as interrupted:
        bench_run.say(f"stopped by {interrupted}; nothing is left running")
        raise SystemExit(interrupted.exit_code) from None
    except FAILURES as failure:
        if isinstance(failure, ConfigurationError):
            raise
        raise BenchFailed(describe(failure)) from None


class BenchRun:
    """One run of the benchmarks."""

    def __init__(self, options: Options, only: Sequence[str], runs: int) -> None:
        self._options = options
        self.taken = [ScenarioRuns(scenario) for scenario in choose(only, full=options.full)]
        self._runs = runs
        self._time_limit = None if options.full or only else QUICK_SECONDS
        self._began = time.monotonic()

    def say(self, message: str) -> None:
        """Write a message with the elapsed time to stderr."""
        sys.stderr.write(f"{self._elapsed:6.1f} s  {message}\n")
        sys.stderr.flush()

    def run(self, bench: BenchEnvironment) -> BenchReport:
        """Run all rounds and return the report.

        Every round runs each scenario once, so that changing conditions affect all of them.
        """
        hardware = machine.hardware()
        bench.open()
        done = self.rounds(bench)
        return BenchReport(
            mode="full" if self._options.full else "quick",
            machine=hardware,
            versions=machine.software(bench.admin, bench.broker_name),
            settings={**bench.settings, "rounds": f"{done} of {self._runs}", "scale": f"{self._options.scale:g}"},
            scenarios=[taken.result() for taken in self.taken],
            seconds=self._elapsed,
        )

    def rounds(self, bench: BenchEnvironment) -> int:
        """Run the requested rounds, or as many as the time limit allows, at least one. Return their number."""
        longest = 0.0
        for done in range(self._runs):
            if done and self._time_limit is not None and self._elapsed + longest > self._time_limit:
                self.say(f"no time for another round within {self._time_limit:g} s")
                return done
            began = time.monotonic()
            self._round(bench, done)
            longest = max(longest, time.monotonic() - began)
        return self._runs

    def _round(self, bench: BenchEnvironment, number: int) -> None:
        for taken in self.taken:
            runs = min(self._runs, taken.scenario.max_runs)
            if number < runs:
                self.say(f"run {number + 1} of {runs}: {taken.scenario.name}")
                measure_once(bench, taken, number)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began


def measure_once(bench: BenchEnvironment, taken: ScenarioRuns, number: int) -> None:
    """Run a scenario once; record a failure as a note."""
    try:
        with bench.run(number):
            taken.runs.append(taken.scenario.measure(bench))
    except FAILURES as failure:
        reason = describe(failure)
        bench.say(f"{taken.scenario.name} failed: {reason}")
        taken.failed += 1
        taken.notes[f"a run failed: {reason.partition(chr(10))[0]}"] = None
    taken.notes |= dict.fromkeys(bench.notes)


def describe(failure: Exception) -> str:
    """Return the message of an exception, without data that a database error may quote."""
    return str(explain(failure) if isinstance(failure, psycopg.Error) else failure)


def choose(only: Sequence[str], *, full: bool) -> list[Scenario]:
    """Return the named scenarios, or those of the mode, in order. Raise :class:`ConfigurationError` for an unknown
    name.
    """
    names = [one.name for one in SCENARIOS]
    for name in only:
        if name not in names:
            raise ConfigurationError(f"--only {name}: unknown scenario; choose from {', '.join(names)}")
    return [one for one in SCENARIOS if (one.name in only if only else full or one.quick)]
