"""Many events are committed at once."""

from __future__ import annotations

import time
from collections.abc import Mapping

from outbox_relay.workbench.drill import promises
from outbox_relay.workbench.drill.environment import DrillEnvironment
from outbox_relay.workbench.drill.judgement import Check, Evidence, check_none
from outbox_relay.workbench.drill.scenarios.plan import DrillPlan, Fault

EVENTS, QUICK_EVENTS = 10_000, 2_000
COUNTED: Mapping[str, str] = {
    "outbox_session_restarts_total": "sessions that restarted",
    "outbox_lease_lost_total": "leases that were lost",
}


def inject(drill: DrillEnvironment, _grace: float) -> Fault:
    """Commit a burst in one transaction, and wait until it has arrived."""
    before = {name: _count(drill, name) for name in COUNTED}
    drill.say("inject   orders of every customer are placed in one transaction")
    events = drill.database.place_many(int(drill.pick(EVENTS, QUICK_EVENTS)))
    committed = time.time()
    drill.say(f"inject   {events:,} events were committed at once")
    burst = drill.database.committed()
    drill.wait(lambda: not any(each.missing(burst) for each in drill.arrivals.values()), promises.IDLE_SECONDS)
    drill.say(f"recovery the burst has arrived, {time.time() - committed:.1f} s after its commit")
    counts = {text: _count(drill, name) - before[name] for name, text in COUNTED.items()}

    def judge(_evidence: Mapping[str, Evidence]) -> list[Check]:
        return [check_none(text, count) for text, count in counts.items()]

    return Fault(judge)


def _count(drill: DrillEnvironment, name: str) -> int:
    return int(sum(drill.observer.scrape.values(name).values()))


PLAN = DrillPlan("burst", "commit thousands of events in one transaction", inject)
