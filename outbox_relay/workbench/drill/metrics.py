"""Metrics of the relays, as an operator's dashboard adds them up. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Label = str
"""The values of the labels of a series, joined by a comma; empty without labels."""
Totals = Mapping[str, Mapping[Label, float]]
"""Metric → labels → value over all relays."""

TOTAL: Sequence[str] = (
    "outbox_delivered_total",
    "outbox_dead_total",
    "outbox_session_restarts_total",
    "outbox_lease_lost_total",
)
"""Counts of each process, of which the sum is shown."""
GAUGES: Sequence[str] = (
    "outbox_backlog_events",
    "outbox_oldest_undelivered_seconds",
    "outbox_exceptions",
    "outbox_circuit_state",
    "outbox_shards_unowned",
    "outbox_lock_waits",
    "outbox_figures_failed",
)
"""Gauges that are 0 while all is well, of which the maximum is shown. Alerts are made of them."""
SHOWN: Sequence[str] = ("outbox_oldest_transaction_seconds", "outbox_in_flight")
"""Further gauges, of which the maximum is shown."""


@dataclass(frozen=True)
class Scrape:
    """One scrape of all relays; `up` of `relays` answered."""

    up: int
    relays: int
    totals: Totals

    def values(self, name: str) -> Mapping[Label, float]:
        """Return the series of a metric."""
        return self.totals.get(name, {})

    def abnormal(self) -> list[str]:
        """Return what would keep an alert pending: relays without answer, gauges that are not 0 or not there."""
        found = [] if self.up == self.relays else [f"up {self.up} of {self.relays}"]
        for name in GAUGES:
            series = self.values(name)
            found += [] if series else [f"{name} unknown"]
            found += [series_text(name, label, value) for label, value in series.items() if value]
        return found


def add_up(texts: Iterable[str | None]) -> Scrape:
    """Combine the answers of all relays; None is one that did not answer."""
    answers = list(texts)
    totals: dict[str, dict[Label, float]] = {}
    for text in answers:
        for family in text_string_to_metric_families(text) if text else ():
            for sample in family.samples:
                if combine := _COMBINE.get(sample.name):
                    series, label = totals.setdefault(sample.name, {}), ",".join(sample.labels.values())
                    series[label] = combine(series.get(label, 0.0), sample.value)
    return Scrape(sum(text is not None for text in answers), len(answers), totals)


def series_text(name: str, label: Label, value: float) -> str:
    """Return a series for display."""
    return f"{name}{f'({label})' if label else ''} {value:,.{0 if value == int(value) else 1}f}"


def _add(one: float, other: float) -> float:
    return one + other


_COMBINE: Mapping[str, Callable[[float, float], float]] = {
    **dict.fromkeys(TOTAL, _add),
    **dict.fromkeys((*GAUGES, *SHOWN), max),
}
