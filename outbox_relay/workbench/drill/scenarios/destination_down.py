"""The webhook's receiver is gone for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.workbench.drill import promises
from outbox_relay.workbench.drill.environment import DrillEnvironment
from outbox_relay.workbench.drill.judgement import (
    NEVER,
    Check,
    Evidence,
    Repeats,
    check_none,
    check_time,
    first_of_every,
    longest_delay,
)
from outbox_relay.workbench.drill.scenarios.plan import DrillPlan, Fault
from outbox_relay.workbench.shop.journal import Arrival
from outbox_relay.workbench.shop.processes import (
    KAFKA,
    MAX_IN_FLIGHT,
    PARK_AFTER_SECONDS,
    TIMEOUT_SECONDS,
    WEBHOOK,
)

DOWN_SECONDS, QUICK_DOWN_SECONDS = 15.0, 2.0
OPEN_SECONDS = 30.0
"""Time limit for the circuits to open."""
OPEN = 2.0
RELAYS = 2


def inject(drill: DrillEnvironment, grace: float) -> Fault:
    """Kill the receiver, start it again after a while, and wait until it has received events of every shard."""
    shards = drill.database.shards()
    killed = drill.kill_receiver()
    drill.say("inject   the receiver was killed; nothing listens at the address of the webhook")
    drill.wait(lambda: OPEN in drill.observer.scrape.values("outbox_circuit_state").values(), OPEN_SECONDS)
    drill.pause(drill.pick(DOWN_SECONDS, QUICK_DOWN_SECONDS))
    returned = drill.start_receiver()
    drill.say(f"repair   the receiver listens again, {returned - killed:.1f} s after it was killed")
    promised = promises.return_seconds(returned - killed, CircuitPolicy())
    drill.wait(lambda: _resumed(drill.arrivals[WEBHOOK].all, returned, shards) < NEVER, promises.IDLE_SECONDS)
    dead = sum(drill.database.dead().values())

    def judge(evidence: Mapping[str, Evidence]) -> list[Check]:
        resumed = _resumed(evidence[WEBHOOK].arrivals, returned, shards) - returned
        delay = longest_delay(evidence[KAFKA].arrivals, killed, returned)
        return [
            check_time(f"{WEBHOOK}: events of every shard after the return", resumed, promised, grace),
            check_time(f"{KAFKA}: longest delay meanwhile", delay, promises.delay_seconds(TIMEOUT_SECONDS), grace),
            check_none("dead letters", dead),
        ]

    since = killed - promises.unsettled_seconds(PARK_AFTER_SECONDS) - grace
    return Fault(judge, {WEBHOOK: Repeats(since, returned, RELAYS * MAX_IN_FLIGHT)})


def _resumed(arrivals: Sequence[Arrival], since: float, shards: Mapping[str, int]) -> float:
    """Return when the last of all shards received an event after `since`, whenever it was emitted."""
    return first_of_every([each for each in arrivals if each.arrived_at >= since], 0.0, shards)


PLAN = DrillPlan("destination-down", "kill the receiver of the webhook, and start it again after a while", inject)
