"""Runs one drill: load, fault, recovery, judgement."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from outbox_relay.domain.errors import RelayError
from outbox_relay.workbench.drill import promises
from outbox_relay.workbench.drill.environment import DrillEnvironment, write_line
from outbox_relay.workbench.drill.judgement import NEVER, Check, Evidence, check_deliveries, check_none, check_time
from outbox_relay.workbench.drill.report import DrillReport
from outbox_relay.workbench.drill.scenarios import PLANS, DrillPlan, Fault
from outbox_relay.workbench.guard import SHOP_MODULES, require_modules, run_guarded
from outbox_relay.workbench.shop.checker import Identity
from outbox_relay.workbench.shop.processes import LEASE_SECONDS, PARK_AFTER_SECONDS
from outbox_relay.workbench.signals import Signals

BEFORE_SECONDS, QUICK_BEFORE_SECONDS = 6.0, 2.0
"""Duration of the load without a fault."""


class DrillFailed(RelayError):
    """The drill could not be carried out; the message names the failed process and contains the end of its log."""


def run_drill(name: str, *, quick: bool, grace: float) -> DrillReport:
    """Run a drill and return its report. No process is left running.

    `grace` seconds are added to every promised time. Raise :class:`DrillFailed`, ImportError if the extra `demo` is not
    installed, or SystemExit with 128 plus its number after a signal.
    """
    require_modules(SHOP_MODULES)

    def run(stack: ExitStack, signals: Signals) -> DrillReport:
        return Drill(PLANS[name], DrillEnvironment(stack, signals, quick=quick), grace).run()

    return run_guarded(run, write_line, DrillFailed)


class Drill:
    """One run of a drill."""

    def __init__(self, plan: DrillPlan, environment: DrillEnvironment, grace: float) -> None:
        self._plan = plan
        self._environment = environment
        self._grace = grace
        self._began = time.monotonic()

    def run(self) -> DrillReport:
        """Run the drill from the first server to the report."""
        drill = self._environment
        drill.say(f"drill    {self._plan.name}: {self._plan.text}")
        drill.open(standby=self._plan.standby)
        drill.say("load     orders are placed, and nothing is wrong yet")
        drill.pause(drill.pick(BEFORE_SECONDS, QUICK_BEFORE_SECONDS))
        fault = self._plan.inject(drill, self._grace)
        drill.say("load     the shop closes; waiting for the last events and for the metrics")
        drill.close_shop()
        committed = drill.database.committed()
        calm = self._wait_until_calm(committed)
        unanswered = drill.database.unanswered()
        drill.stop_all()
        return DrillReport(
            drill=self._plan.name,
            checks=[*self._checks(fault, committed, unanswered), *calm],
            observed=drill.observed,
            seconds=time.monotonic() - self._began,
            load=os.getloadavg()[0],
            processors=os.cpu_count() or 1,
        )

    def _wait_until_calm(self, committed: set[Identity]) -> list[Check]:
        """Wait until every event has arrived and no metric keeps an alert pending; return the checks of both."""
        drill, closed = self._environment, time.monotonic()
        arrived = drill.wait(
            lambda: not any(each.missing(committed) for each in drill.arrivals.values()),
            promises.IDLE_SECONDS + self._grace,
        )
        idle = time.monotonic()
        normal = drill.wait(lambda: not drill.observer.scrape.abnormal(), promises.METRICS_SECONDS + self._grace)
        normal_seconds = time.monotonic() - idle if normal else NEVER
        if not normal:
            drill.say(f"metrics  still: {', '.join(drill.observer.scrape.abnormal())}")
        return [
            check_time(
                "the last event arrived", idle - closed if arrived else NEVER, promises.IDLE_SECONDS, self._grace
            ),
            check_time("metrics of alerts normal again", normal_seconds, promises.METRICS_SECONDS, self._grace),
        ]

    def _checks(self, fault: Fault, committed: set[Identity], unanswered: Sequence[tuple[str, str]]) -> list[Check]:
        arrivals = self._environment.arrivals
        before = LEASE_SECONDS + promises.unsettled_seconds(PARK_AFTER_SECONDS) + self._grace
        interruptions = [(since - before, until) for since, until in self._environment.observer.interruptions]
        evidence: Mapping[str, Evidence] = {
            sink: Evidence(
                sink,
                each.all,
                committed,
                fault.exempt.get(sink, frozenset()),
                {uid for other, uid in unanswered if other == sink},
                interruptions,
            )
            for sink, each in arrivals.items()
        }
        refused = sum(each.refused for each in arrivals.values())
        checks = [check for sink, each in evidence.items() for check in check_deliveries(each, fault.repeats.get(sink))]
        return [*checks, check_none("requests with a wrong signature", refused), *fault.judge(evidence)]
