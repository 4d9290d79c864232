"""Events that the receiver refuses, and events that no relay can load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.workbench.drill import promises
from outbox_relay.workbench.drill.environment import DrillEnvironment
from outbox_relay.workbench.drill.judgement import NEVER, Check, Evidence, check_none, check_time, longest_delay
from outbox_relay.workbench.drill.scenarios.plan import DrillPlan, Fault
from outbox_relay.workbench.shop.processes import KAFKA, TIMEOUT_SECONDS, WEBHOOK

REFUSED, FAILING = 400, 500
"""Statuses: the first makes a dead letter at once, the second is tried again."""
DAMAGED, UNLOADABLE = 5, 3
"""Numbers of events of each kind."""
BROKEN_SECONDS, QUICK_BROKEN_SECONDS = 10.0, 2.0


@dataclass(frozen=True)
class Course:
    """The course of the drill: times since 1970, durations in seconds, and the dead letters that are left."""

    began: float
    condemned: float
    mended: float
    attempts: int
    """The most attempts of an event when the receiver was mended."""
    recovered: float
    left: int


def inject(drill: DrillEnvironment, grace: float) -> Fault:
    """Emit poison, mend the receiver once the metrics show it, retry the refused events and discard the others."""
    customers = [f"customer-{n}" for n in range(1, 2 * DAMAGED + 1)]
    began = time.time()
    refused = _emit(drill, customers)
    due = {KAFKA: UNLOADABLE, WEBHOOK: UNLOADABLE + DAMAGED}
    condemned = _seconds(drill, lambda: drill.database.dead() == due)
    drill.pause(drill.pick(BROKEN_SECONDS, QUICK_BROKEN_SECONDS))
    drill.wait(lambda: _shows_dead(drill), promises.METRICS_SECONDS)
    attempts, mended = _mend(drill)
    recovered = _seconds(drill, lambda: drill.database.waiting(WEBHOOK)[0] == 0)
    _clear(drill)
    course = Course(began, condemned, mended, attempts, recovered, sum(drill.database.dead().values()))
    return Fault(
        lambda evidence: _judge(evidence, course, frozenset(customers), grace), exempt={WEBHOOK: frozenset(refused)}
    )


def _judge(evidence: Mapping[str, Evidence], course: Course, keys: frozenset[str], grace: float) -> list[Check]:
    promised = promises.delay_seconds(TIMEOUT_SECONDS)
    retry = promises.retry_seconds(course.attempts, RetryPolicy()) + promised
    delays = {sink: longest_delay(each.arrivals, course.began, course.mended, keys) for sink, each in evidence.items()}
    return [
        check_time("poison is a dead letter of its sinks", course.condemned, promised, grace),
        *(
            check_time(f"{sink}: longest delay of other keys meanwhile", delay, promised, grace)
            for sink, delay in delays.items()
        ),
        check_time("failing events and their followers after the repair", course.recovered, retry, grace),
        check_none("dead letters after dead retry and dead discard", course.left),
    ]


def _emit(drill: DrillEnvironment, customers: Sequence[str]) -> list[str]:
    """Break the receiver and emit poison; return the uids of the events that the receiver refuses."""
    drill.break_receiver()
    refused = drill.database.place_damaged(REFUSED, customers[:DAMAGED])
    drill.database.place_damaged(FAILING, customers[DAMAGED:])
    drill.database.insert_unloadable(UNLOADABLE)
    drill.say(
        f"inject   {DAMAGED} events that the receiver answers with {REFUSED}, {DAMAGED} with {FAILING}, and "
        f"{UNLOADABLE} that no relay can load"
    )
    return refused


def _seconds(drill: DrillEnvironment, fact: Callable[[], bool]) -> float:
    """Wait for a fact and return how long that took; infinity if it did not come."""
    since = time.monotonic()
    return time.monotonic() - since if drill.wait(fact, promises.IDLE_SECONDS) else NEVER


def _shows_dead(drill: DrillEnvironment) -> bool:
    """Return True if the metrics show dead letters of the webhook."""
    return drill.observer.scrape.values("outbox_exceptions").get(f"{WEBHOOK},dead", 0.0) > 0.0


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


PLAN = DrillPlan("poison", "emit events that the receiver refuses, and events that no relay can load", inject)
