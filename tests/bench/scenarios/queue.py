"""A queue of rows, whose handlers run in the process of the relay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outbox_relay.workbench.processes import RelayProcess
from tests.bench.database import BenchDatabase
from tests.bench.environment import BenchEnvironment
from tests.bench.figures import COUNT, EVENTS_PER_SECOND, SECONDS, Figure, percentile, ratio
from tests.bench.profile import SERVERS, Profile
from tests.bench.scenarios import steps
from tests.bench.scenarios.scenario import Scenario

QUICK, FULL = 10_000, 100_000
SHARES = (0.5, 0.99)
LOST = "outbox_lease_lost_total{"


def measure(bench: BenchEnvironment) -> Sequence[Figure]:
    """Measure handlers of 2 to 5 ms, then empty ones: by the bare queue and by a relay, which take turns."""
    events = bench.scaled_events(QUICK, FULL)
    return [
        *_compared(bench, "brief", "handlers of 2 to 5 ms", events),
        *_compared(bench, "empty", "empty handlers", events),
    ]


def _compared(bench: BenchEnvironment, handler: str, label: str, events: int) -> list[Figure]:
    """Return the figures of one handler. Every other run begins with the relay."""
    database = bench.new_database()
    database.fill(events, bench.check)
    database.settle()
    found: dict[bool, list[Figure]] = {}
    for of_relay in (False, True) if bench.run_number % 2 == 0 else (True, False):
        call: Callable[..., list[Figure]] = _relay if of_relay else _bare
        found[of_relay] = call(bench, database, handler, label, events)
    [bare], [own, *others] = found[False], found[True]
    return [bare, own, ratio(f"{label}: relay / bare queue", own.value, bare.value), *others]


def _bare(bench: BenchEnvironment, database: BenchDatabase, handler: str, label: str, events: int) -> list[Figure]:
    rate = steps.run_bare_queue(bench, database, handler, events)
    return [Figure(f"{label}: bare queue", rate, EVENTS_PER_SECOND)]


def _relay(bench: BenchEnvironment, database: BenchDatabase, handler: str, label: str, events: int) -> list[Figure]:
    relay, log = steps.start_queue(bench, database, handler, events)
    profile = Profile(label)
    opened = time.monotonic()
    log.open(opened)
    progress = bench.track(profile.sampled(log.done, relay.pid, events), events, since=opened)
    lost = lapsed_leases(relay)
    bench.stop(relay)
    waits = log.waits()
    return [
        Figure(f"{label}: relay", progress.per_second, EVENTS_PER_SECOND),
        *(Figure(f"{label}: wait, p{share:.0%}"[:-1], percentile(waits, share), SECONDS) for share in SHARES if waits),
        Figure(f"{label}: lapsed leases", lost, COUNT),
        *(figure for figure in profile.figures if not figure.label.endswith(SERVERS["java"])),
    ]


def lapsed_leases(relay: RelayProcess) -> float:
    """Return the number of leases that have lapsed. Raise :class:`RuntimeError` if the relay does not say."""
    lines = (relay.metrics() or "").splitlines()
    lost = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(LOST)]
    if not lost:
        raise RuntimeError("the relay has no metric of lapsed leases")
    return sum(lost)


SCENARIO = Scenario(
    "queue",
    'Rows that a sink with claim = "rows" has made before, handled in the process of one relay, 32 at a time: by '
    "handlers of 2 to 5 ms, and by empty ones. Compared with a bare asyncio program that calls the same handlers for "
    "the same events. A wait lasts from the moment at which handlers may begin to the call. Includes lapsed leases and "
    "the processor time per event.",
    measure,
    quick=True,
)
