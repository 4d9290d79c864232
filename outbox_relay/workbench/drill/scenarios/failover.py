"""The primary server is killed, and its synchronous standby is promoted."""

from __future__ import annotations

from collections.abc import Mapping

from outbox_relay.workbench.drill import promises
from outbox_relay.workbench.drill.environment import DrillEnvironment
from outbox_relay.workbench.drill.judgement import (
    NEVER,
    Check,
    Evidence,
    Repeats,
    check_time,
    first_of_any,
    first_of_every,
)
from outbox_relay.workbench.drill.scenarios.plan import DrillPlan, Fault
from outbox_relay.workbench.shop.processes import KAFKA, PARK_AFTER_SECONDS, WEBHOOK

RELAYS = 2


def inject(drill: DrillEnvironment, grace: float) -> Fault:
    """Fail over, and wait until events of every shard arrive again."""
    shards, promised = drill.database.shards(), promises.DATABASE_SECONDS
    drill.say("inject   the primary is killed with SIGKILL, and its standby promoted")
    killed, healed = drill.fail_over()
    drill.say(f"inject   the standby accepts writes, {healed - killed:.1f} s after the kill")
    drill.wait(
        lambda: all(first_of_every(each.all, healed, shards) < NEVER for each in drill.arrivals.values()),
        promises.IDLE_SECONDS,
    )

    def judge(evidence: Mapping[str, Evidence]) -> list[Check]:
        return [
            check_time(
                f"{sink}: events flow after the promotion",
                first_of_any(each.arrivals, healed) - healed,
                promised,
                grace,
            )
            for sink, each in evidence.items()
        ]

    since = killed - promises.unsettled_seconds(PARK_AFTER_SECONDS) - grace
    repeats = Repeats(since, healed + promised + grace, RELAYS * promises.REPEATED_MOST)
    return Fault(judge, {KAFKA: repeats, WEBHOOK: repeats})


PLAN = DrillPlan("failover", "kill PostgreSQL and promote its synchronous standby", inject, standby=True)
