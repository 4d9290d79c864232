"""Single rows of one tenant, alone and beside a heap of another tenant."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outbox_relay.workbench.bench.database import PAYLOAD
from outbox_relay.workbench.bench.environment import BenchEnvironment
from outbox_relay.workbench.bench.figures import COUNT, MILLISECONDS, Figure, percentile, ratio
from outbox_relay.workbench.bench.handler_log import SINGLE
from outbox_relay.workbench.bench.scenarios import steps
from outbox_relay.workbench.bench.scenarios.queue import SHARES, lapsed_leases
from outbox_relay.workbench.bench.scenarios.scenario import Scenario

QUICK, FULL = 100_000, 1_000_000
QUICK_SECONDS, FULL_SECONDS = 10.0, 100.0
EVERY_SECONDS = 1.0
ARRIVE_SECONDS = 60.0
LEAST_SINGLES = 2
EMIT = f"select outbox.emit('{SINGLE}', %s::jsonb, tenant => 'single')"
RAN_OUT = "the heap was delivered before the last single row: its waits are not those beside a heap"


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure the waits of single rows, alone and beside the heap. Every other run begins with the heap."""
    heap = bench.scaled_events(QUICK, FULL)
    found: dict[int, tuple[list[float], float]] = {}
    for events in (0, heap) if bench.run_number % 2 == 0 else (heap, 0):
        found[events] = _single_waits(bench, events)
    (alone, _), (beside, lost) = found[0], found[heap]
    return [
        *(Figure(f"alone: wait, p{share:.0%}"[:-1], percentile(alone, share) * 1e3, MILLISECONDS) for share in SHARES),
        *(
            Figure(f"beside the heap: wait, p{share:.0%}"[:-1], percentile(beside, share) * 1e3, MILLISECONDS)
            for share in SHARES
        ),
        *(
            ratio(f"beside the heap / alone, p{share:.0%}"[:-1], percentile(beside, share), percentile(alone, share))
            for share in SHARES
        ),
        Figure("lapsed leases", lost, COUNT),
    ]


def _single_waits(bench: BenchEnvironment, heap: int) -> tuple[list[float], float]:
    """Return the waits in seconds of single rows beside a `heap` of rows, and the number of lapsed leases."""
    database = bench.new_database()
    if heap:
        database.fill(heap, bench.check, tenant="heap")
        database.settle()
    singles = max(LEAST_SINGLES, round(bench.scaled_seconds(QUICK_SECONDS, FULL_SECONDS) / EVERY_SECONDS))
    relay, log = steps.start_queue(bench, database, "shared", heap, waits=singles, fair=True)
    began = time.monotonic()
    log.open(began)
    for number in range(1, singles + 1):
        bench.pause(began + number * EVERY_SECONDS - time.monotonic())
        database.run(EMIT, PAYLOAD)
    ran_out = heap and log.done() >= heap
    bench.wait_until(lambda: len(log.waits()) >= singles, ARRIVE_SECONDS, "the single rows are delivered")
    if ran_out:
        bench.notes.append(RAN_OUT)
    lost = lapsed_leases(relay)
    bench.stop(relay)
    return log.waits(), lost


SCENARIO = Scenario(
    "tenants",
    "A tenant with a heap of rows (1,000,000 with --full) and another with one row per second, whose sink has "
    'claim = "rows" and fair_by = "tenant": the wait of the single rows from the emit to the handler, beside the heap '
    "and alone. Handlers take 2 to 5 ms, 32 at a time.",
    measure,
)
