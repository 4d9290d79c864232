"""The history: once a minute each relay adds what its registry has counted to the minute in the database.

A minute that cannot be written is dropped, and so is one that lasted too long, such as that of a suspended process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from outbox_relay.domain.times import lease_clock
from outbox_relay.postgres.store import Store

MINUTE_SECONDS = 60.0
LONGEST_SECONDS = 90.0
"""Length of an interval, by either clock, from which on it is dropped."""

Samples = Mapping[str, Mapping[tuple[str, str], float]]
"""The values of one sink, or of the process under an empty name, by sample and by its other labels, joined."""


class History:
    """Adds what ``registry`` has counted since the last call of ``step``."""

    def __init__(self, store: Store, registry: CollectorRegistry) -> None:
        self._store = store
        self._registry = registry
        self._before: tuple[float, float, Samples] | None = None
        """The last samples, by two clocks: the second one counts while the machine is suspended."""

    def step(self) -> None:
        """Add the interval since the last call, once, if there was one."""
        before, after = self._before, (time.monotonic(), lease_clock(), read(self._registry))
        self._before = after
        if before is not None and max(after[0] - before[0], after[1] - before[1]) <= LONGEST_SECONDS:
            self._store.add_history(minute(before[2], after[2]))


def read(registry: CollectorRegistry) -> Samples:
    """Return the present samples."""
    found: defaultdict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for family in registry.collect():
        for sample in family.samples:
            others = " ".join(value for name, value in sorted(sample.labels.items()) if name != "sink")
            found[sample.labels.get("sink", "")][sample.name, others] = sample.value
    return found


def minute(before: Samples, after: Samples) -> list[dict[str, Any]]:
    """Return the rows of an interval, sorted by sink: that of the process, and one of each sink that it serves."""
    served = [sink for sink, samples in after.items() if ("outbox_shards_owned", "") in samples]
    return [_row(sink, before.get(sink, {}), after.get(sink, {})) for sink in sorted(["", *served])]


def _row(sink: str, before: Mapping[tuple[str, str], float], after: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    counted = {key: value - before.get(key, 0.0) for key, value in after.items()}

    def total(sample: str, *without: str) -> float:
        return sum(value for (name, label), value in counted.items() if name == sample and label not in without)

    def quantile(kind: str, share: float) -> float | None:
        name = f"outbox_{kind}_seconds_bucket"
        return quantile_of({float(le): value for (each, le), value in counted.items() if each == name}, share)

    busy = sum(total(f"outbox_{kind}_seconds_sum") for kind in ("tick", "read", "claim", "settle"))
    row = {"sink": sink, "tick_p99": quantile("tick", 0.99), "busy_ms": 1000.0 * busy}
    if not sink:
        return row
    backlog = after.get(("outbox_backlog_events", ""))
    return {
        **row,
        "delivered": int(total("outbox_delivered_total")),
        "failed": int(total("outbox_attempts_total", "delivered")),
        "dead": int(total("outbox_dead_total")),
        "backlog": None if backlog is None else int(backlog),
        "oldest_seconds": after.get(("outbox_oldest_undelivered_seconds", "")),
        "end_to_end_p50": quantile("end_to_end", 0.5),
        "end_to_end_p99": quantile("end_to_end", 0.99),
        "claim_p99": quantile("claim", 0.99),
        "settle_p99": quantile("settle", 0.99),
    }


def quantile_of(buckets: Mapping[float, float], share: float) -> float | None:
    """Return an estimate of a quantile in seconds from cumulative counts by upper bound; None without an observation.

    A quantile above the last finite bound is returned as that bound.
    """
    wanted = share * max(buckets.values(), default=0.0)
    low = below = 0.0
    for bound, count in sorted(buckets.items()):
        if wanted and count >= wanted:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return None
