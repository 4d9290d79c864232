"""A transaction with events stays open."""

from __future__ import annotations

import time
from collections.abc import Mapping

from outbox_relay.admin.doctor.server import TRANSACTION_SECONDS as LIMIT
from outbox_relay.workbench.drill import promises
from outbox_relay.workbench.drill.environment import DrillEnvironment
from outbox_relay.workbench.drill.judgement import NEVER, Check, Evidence, check_time, longest_delay
from outbox_relay.workbench.drill.scenarios.plan import DrillPlan, Fault
from outbox_relay.workbench.shop.processes import TIMEOUT_SECONDS

METRIC = "outbox_oldest_transaction_seconds"
OPEN_SECONDS, QUICK_OPEN_SECONDS = 25.0, 2.0


def inject(drill: DrillEnvironment, grace: float) -> Fault:
    """Emit events in a transaction, commit it once the metrics show it, and wait until the events have arrived."""
    began = time.time()
    with drill.database.hold_open() as held:
        drill.say(f"inject   a transaction with {len(held)} events stays open; doctor reports it after {LIMIT:g} s")
        drill.pause(drill.pick(OPEN_SECONDS, QUICK_OPEN_SECONDS))
        drill.wait(lambda: _is_shown(drill), promises.METRICS_SECONDS)
        ended = time.time()
    committed, uids = time.time(), frozenset(held)
    drill.say(f"repair   it was committed after {committed - began:.1f} s")
    drill.wait(
        lambda: all(uids <= {arrival.uid for arrival in each.all} for each in drill.arrivals.values()),
        promises.IDLE_SECONDS,
    )

    def judge(evidence: Mapping[str, Evidence]) -> list[Check]:
        return [check for each in evidence.values() for check in _checks(each)]

    def _checks(evidence: Evidence) -> list[Check]:
        promised = promises.delay_seconds(TIMEOUT_SECONDS)
        own = {each.uid: each for each in reversed(evidence.arrivals) if each.uid in uids}
        late = max(each.arrived_at for each in own.values()) - committed if own.keys() == uids else NEVER
        keys = {each.key for each in own.values()}
        others = longest_delay(evidence.arrivals, began, ended, keys)
        return [
            check_time(f"{evidence.sink}: longest delay of other events meanwhile", others, promised, grace),
            check_time(f"{evidence.sink}: its events after its commit", late, promised, grace),
        ]

    return Fault(judge)


def _is_shown(drill: DrillEnvironment) -> bool:
    """Return True if the metrics show a transaction of some seconds."""
    return any(age >= QUICK_OPEN_SECONDS for age in drill.observer.scrape.values(METRIC).values())


PLAN = DrillPlan("long-transaction", "leave a transaction with events open for a while", inject)
