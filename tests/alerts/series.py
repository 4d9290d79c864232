"""Recorded series in the notation of ``promtool test rules``. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.support.metrics import families

RULES = "../../../deploy/prometheus/alerts.yaml"
"""The rules, relative to the recorded files."""
SECONDS = 15
"""Time between two scrapes."""
FIRED = 'group by (alertname) (count_over_time(ALERTS{alertstate="firing"}[1d]))'
"""A query for the alerts that have fired so far."""

ONLY = {"outbox_exceptions": ("state", "dead"), "outbox_figures_age_seconds": ("group", "sinks")}
"""Metrics of which only the series with one value of a label are kept."""

Value = float | None


class Series(NamedTuple):
    """The name of a series with its labels, and one value per scrape; None if it was absent."""

    name: str
    values: Sequence[Value]


class Recording:
    """The series of several targets, scrape by scrape."""

    def __init__(self, metrics: Iterable[str]) -> None:
        self._metrics = frozenset(metrics)
        self._values: dict[str, list[Value]] = {}
        self.scrapes = 0

    def scrape(self, texts: Mapping[str, str | None], labels: Mapping[str, str]) -> None:
        """Add the answer of each target by its name, or None for one that does not answer, as Prometheus does."""
        for target, text in texts.items():
            own = {**labels, "instance": target}
            self._add("up", own, 0.0 if text is None else 1.0)
            for family in families(text or "").values():
                for sample in family.samples:
                    label, wanted = ONLY.get(sample.name, ("", None))
                    if sample.name in self._metrics and sample.labels.get(label) == wanted:
                        self._add(sample.name, {**own, **sample.labels}, sample.value)
        self.scrapes += 1
        for values in self._values.values():
            values.extend([None] * (self.scrapes - len(values)))

    def _add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        inside = ", ".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
        values = self._values.setdefault(f"{name}{{{inside}}}", [])
        values.extend([None] * (self.scrapes - len(values)))
        values.append(value)

    def series(self) -> list[Series]:
        """Return every series in the order of its name."""
        return [Series(name, tuple(values)) for name, values in sorted(self._values.items())]


def notation(values: Sequence[Value]) -> str:
    """Return values in the notation of promtool: runs of equal steps are written as ``a+bxn``."""
    return " ".join(_words(_rounded(values)))


def _rounded(values: Sequence[Value]) -> list[Value]:
    return [None if value is None or math.isnan(value) else round(value, 3) for value in values]


def _words(values: list[Value]) -> Iterator[str]:
    place = 0
    while place < len(values):
        run = _run(values, place)
        yield _word(values, place, run)
        place += run


def _run(values: list[Value], place: int) -> int:
    """Return how many values from ``place`` on are absent together, or have equal steps."""
    end = place + 1
    if values[place] is None:
        while end < len(values) and values[end] is None:
            end += 1
        return end - place
    step = _step(values, place)
    while step is not None and end < len(values) and _step(values, end - 1) == step:
        end += 1
    return end - place if end - place > 2 else 1


def _step(values: list[Value], place: int) -> float | None:
    if place + 1 >= len(values):
        return None
    here, after = values[place], values[place + 1]
    return None if here is None or after is None else round(after - here, 3)


def _word(values: list[Value], place: int, run: int) -> str:
    value = values[place]
    if value is None:
        # Prometheus marks the end of a series that a target no longer exports.
        first = "stale" if place and values[place - 1] is not None else "_"
        return f"{first} _x{run - 1}" if run > 1 else first
    if run == 1:
        return f"{value:.15g}"
    step = _step(values, place) or 0.0
    return f"{value:.15g}{'-' if step < 0 else '+'}{abs(step):.15g}x{run - 1}"


def document(comment: str, series: Sequence[Series], fires: Iterable[str], hold: int = 0) -> str:
    """Return a file for ``promtool test rules``. The last values are repeated for ``hold`` further scrapes."""
    length = max(len(each.values) for each in series) + hold
    lines = [
        *(f"# {line}" for line in textwrap.wrap(comment, 116)),
        f"rule_files: [{RULES}]",
        f"evaluation_interval: {SECONDS}s",
        "tests:",
        f"  - interval: {SECONDS}s",
        "    input_series:",
    ]
    for name, values in series:
        held = (*values, *[values[-1]] * hold)
        lines += [f"      - series: '{name}'", f"        values: '{notation(held)}'"]
    lines += ["    promql_expr_test:", f"      - expr: '{FIRED}'", f"        eval_time: {SECONDS * (length - 1)}s"]
    expected = [f"          - {{labels: '{{alertname=\"{alert}\"}}', value: 1}}" for alert in sorted(fires)]
    lines += ["        exp_samples:", *expected] if expected else ["        exp_samples: []"]
    return "\n".join(lines) + "\n"
