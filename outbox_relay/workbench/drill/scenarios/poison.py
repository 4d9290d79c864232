"""Events that the receiver refuses, and events that no relay can load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from outbox_relay.domain.retry import RetryPolicy
from outbox_relay.workbench.drill import promises
from outbox_relay.workbench.drill.environment import DrillEnvironment
from outbox_relay.workbench.drill.judgement import NEVER, Check, Evidence, check_none, check_time, longest_delay
from outbox_relay.workbench.drill.scenarios.scenario import Fault, Scenario
from outbox_relay.workbench.shop.processes import KAFKA, TIMEOUT_SECONDS, WEBHOOK

REFUSED, FAILING = 400, 500
"""Statuses: the first makes a dead letter at once, the second is tried again."""
DAMAGED, UNLOADABLE = 5, 3
"""Numbers of events of each kind."""
BROKEN_SECONDS, QUICK_BROKEN_SECONDS = 10.0, 2.0


def inject(drill: DrillEnvironment, grace: float) -> Fault:
    """Emit poison, mend the receiver after a while, retry its dead letters and discard the others."""
    customers = [f"customer-{n}" for n in range(1, 2 * DAMAGED + 1)]
    drill.break_receiver()
    began = time.time()
    refused = drill.database.place_damaged(REFUSED, customers[:DAMAGED])
    drill.database.place_damaged(FAILING, customers[DAMAGED:])
    drill.database.insert_unloadable(UNLOADABLE)
    drill.say(
        f"inject   {DAMAGED} events that the receiver answers with {REFUSED}, {DAMAGED} with {FAILING}, and "
        f"{UNLOADABLE} that no relay can load"
    )
    due = {KAFKA: UNLOADABLE, WEBHOOK: UNLOADABLE + DAMAGED}
    condemned = _seconds(drill, lambda: drill.database.dead() == due)
    drill.pause(drill.pick(BROKEN_SECONDS, QUICK_BROKEN_SECONDS))
    attempts, mended = _mend(drill)
    recovered = _seconds(drill, lambda: drill.database.waiting(WEBHOOK)[0] == 0)
    _clear(drill)
    left = sum(drill.database.dead().values())
    retry = promises.retry_seconds(attempts, RetryPolicy()) + promises.delay_seconds(TIMEOUT_SECONDS)

    def judge(evidence: Mapping[str, Evidence]) -> list[Check]:
        promised = promises.delay_seconds(TIMEOUT_SECONDS)
        return [
            check_time("poison is a dead letter of its sinks", condemned, promised, grace),
            *(
                check_time(
                    f"{sink}: longest delay of other keys meanwhile",
                    longest_delay(each.arrivals, began, mended, frozenset(customers)),
                    promised,
                    grace,
                )
                for sink, each in evidence.items()
            ),
            check_time("failing events and their followers after the repair", recovered, retry, grace),
            check_none("dead letters after dead retry and dead discard", left),
        ]

    return Fault(judge, exempt={WEBHOOK: frozenset(refused)})


def _seconds(drill: DrillEnvironment, fact: Callable[[], bool]) -> float:
    """Wait for a fact and return how long that took; infinity if it did not come."""
    since = time.monotonic()
    return time.monotonic() - since if drill.wait(fact, promises.IDLE_SECONDS) else NEVER


def _mend(drill: DrillEnvironment) -> tuple[int, float]:
    """Mend the receiver; return the attempts that the failing events have had, and the time."""
    drill.mend_receiver()
    _, attempts = drill.database.waiting(WEBHOOK)
    drill.say(f"repair   the receiver accepts every event again; the failing ones have had {attempts} attempts")
    return attempts, time.time()


def _clear(drill: DrillEnvironment) -> None:
    """Retry and discard dead letters, as an operator does, and wait until the retried ones are delivered."""
    retried = drill.database.retry_dead(WEBHOOK, REFUSED)
    drill.say(f"repair   dead retry --sink {WEBHOOK} --status {REFUSED}: {retried} events")
    drill.wait(lambda: drill.database.waiting(WEBHOOK)[0] == 0, promises.IDLE_SECONDS)
    drill.say(f"repair   dead discard --reason drill: {drill.database.discard_dead()} deliveries")


SCENARIO = Scenario("poison", "emit events that the receiver refuses, and events that no relay can load", inject)
