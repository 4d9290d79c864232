"""The scenarios, one per module."""

from tests.bench.scenarios import drain, emit, fanout, idle, latency, memory, queue, wal, webhooks
from tests.bench.scenarios.scenario import Scenario

SCENARIOS: tuple[Scenario, ...] = (
    drain.SCENARIO,
    webhooks.SCENARIO,
    emit.SCENARIO,
    latency.SCENARIO,
    idle.SCENARIO,
    wal.SCENARIO,
    fanout.SCENARIO,
    queue.SCENARIO,
    memory.SCENARIO,
)
"""In the order in which they are measured."""

__all__ = ["SCENARIOS", "Scenario"]
