"""The scenarios, one per module."""

from outbox_relay.workbench.bench.scenarios import (
    burst,
    drain,
    emit,
    failing,
    fanout,
    held_open,
    idle,
    latency,
    memory,
    outage,
    queue,
    tenants,
    together,
    wal,
    webhooks,
)
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

SCENARIOS: tuple[Scenario, ...] = (
    drain.SCENARIO,
    webhooks.SCENARIO,
    emit.SCENARIO,
    latency.SCENARIO,
    idle.SCENARIO,
    wal.SCENARIO,
    held_open.SCENARIO,
    together.SCENARIO,
    failing.SCENARIO,
    fanout.SCENARIO,
    outage.SCENARIO,
    burst.SCENARIO,
    queue.SCENARIO,
    tenants.SCENARIO,
    memory.SCENARIO,
)
"""In the order in which they are measured."""

__all__ = ["SCENARIOS", "Scenario"]
