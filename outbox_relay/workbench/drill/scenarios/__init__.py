"""The drills by their names."""

from __future__ import annotations

from collections.abc import Mapping

from outbox_relay.workbench.drill.scenarios import (
    burst,
    destination_down,
    failover,
    long_transaction,
    poison,
    worker_crash,
)
from outbox_relay.workbench.drill.scenarios.plan import DrillPlan, Fault

PLANS: Mapping[str, DrillPlan] = {
    each.name: each
    for each in (
        worker_crash.PLAN,
        failover.PLAN,
        poison.PLAN,
        destination_down.PLAN,
        burst.PLAN,
        long_transaction.PLAN,
    )
}

__all__ = ["PLANS", "DrillPlan", "Fault"]
