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
from outbox_relay.workbench.drill.scenarios.scenario import Fault, Scenario

SCENARIOS: Mapping[str, Scenario] = {
    each.name: each
    for each in (
        worker_crash.SCENARIO,
        failover.SCENARIO,
        poison.SCENARIO,
        destination_down.SCENARIO,
        burst.SCENARIO,
        long_transaction.SCENARIO,
    )
}

__all__ = ["SCENARIOS", "Fault", "Scenario"]
