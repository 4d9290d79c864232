"""A relay is killed."""

from __future__ import annotations

from collections.abc import Mapping

from outbox_relay.workbench.drill import promises
from outbox_relay.workbench.drill.environment import READY_SECONDS, DrillEnvironment
from outbox_relay.workbench.drill.judgement import NEVER, Check, Evidence, Repeats, check_time, first_of_every
from outbox_relay.workbench.drill.scenarios.plan import DrillPlan, Fault
from outbox_relay.workbench.shop.processes import KAFKA, LEASE_SECONDS, PARK_AFTER_SECONDS, WEBHOOK


def inject(drill: DrillEnvironment, grace: float) -> Fault:
    """Kill one of two relays, wait until the other delivers for every shard, and start a replacement."""
    shards, promised = drill.database.shards(), promises.takeover_seconds(LEASE_SECONDS)
    killed = drill.kill_relay("relay-1")
    drill.say("inject   relay-1 was killed with SIGKILL while it owned half of the shards")

    def taken_over() -> bool:
        return all(first_of_every(each.all, killed, shards) < NEVER for each in drill.arrivals.values())

    if drill.wait(taken_over, promises.IDLE_SECONDS):
        drill.say("repair   relay-2 delivers for every shard; relay-3 replaces relay-1")
    drill.replace_relay("relay-1", "relay-3")
    drill.wait(drill.shards_shared, READY_SECONDS)

    def judge(evidence: Mapping[str, Evidence]) -> list[Check]:
        return [
            check_time(
                f"{sink}: an event of every shard after the crash",
                first_of_every(each.arrivals, killed, shards) - killed,
                promised,
                grace,
            )
            for sink, each in evidence.items()
        ]

    since = killed - promises.unsettled_seconds(PARK_AFTER_SECONDS) - grace
    repeats = Repeats(since, killed + promised + grace, promises.REPEATED_MOST)
    return Fault(judge, {KAFKA: repeats, WEBHOOK: repeats})


PLAN = DrillPlan("worker-crash", "kill one of two relays with SIGKILL", inject)
