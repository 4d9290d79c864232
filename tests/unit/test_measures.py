"""Counts and durations: exact counts of sampled calls, outcomes, exemplars, and the quantiles of the history."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Unavailable, Verdict
from outbox_relay.relay.measures import MOST_OBSERVED, DeliveredCall, RelayMeasures, SinkMeasures
from outbox_relay.service.history import minute, quantile_of, read
from outbox_relay.sinks.contract.handing import an_event

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
PARENT = '{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'


def emitted(seconds: float, *, due: float | None = None, headers: str | None = None) -> StoredEvent:
    """Return an event that was emitted ``seconds`` ago, and was due ``due`` seconds ago."""
    deliver_at = None if due is None else NOW - timedelta(seconds=due)
    return an_event(headers=headers)._replace(created_at=NOW - timedelta(seconds=seconds), deliver_at=deliver_at)


class Measured:
    """The measures of the sink ``s``."""

    def __init__(self) -> None:
        self.process = RelayMeasures()
        self.sink = SinkMeasures(self.process, "s")

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of a sample."""
        return self.process.registry.get_sample_value(f"outbox_{name}", {"sink": "s", **labels})

    @property
    def exemplars(self) -> list[tuple[dict[str, str], float]]:
        """The labels and values of all exemplars."""
        [family] = self.process.end_to_end.collect()
        found: list[Any] = [sample.exemplar for sample in family.samples if sample.exemplar]
        return [(each.labels, each.value) for each in found]


@pytest.mark.parametrize("events", [1, 64, 65, 4000])
def test_counts_are_exact_and_few_events_of_a_large_call_are_observed(events: int) -> None:
    found = Measured()
    found.sink.delivered([emitted(1.0)] * events, 0.2, NOW)
    found.sink.delivered_each([DeliveredCall(emitted(1.0), 0.2, 5.0)] * events, NOW, 5.0)
    assert found.value("delivered_total") == found.value("attempts_total", outcome="delivered") == 2 * events
    observed = found.value("end_to_end_seconds_count")
    assert observed is not None
    assert min(2 * events, MOST_OBSERVED) <= observed <= 2 * MOST_OBSERVED
    assert found.value("end_to_end_seconds_sum") == pytest.approx(observed)


@pytest.mark.parametrize(
    ("event", "waited"),
    [(emitted(2.0), 2.0), (emitted(90.0, due=1.0), 1.0), (emitted(1.0, due=90.0), 1.0), (emitted(-5.0), 0.0)],
    ids=["emitted", "scheduled", "due before the emit", "a clock that is ahead"],
)
def test_end_to_end_begins_when_an_event_may_be_delivered(event: StoredEvent, waited: float) -> None:
    found = Measured()
    found.sink.delivered([event], 0.2, NOW)
    found.sink.delivered_each([DeliveredCall(event, 0.2, 4.0)], NOW + timedelta(seconds=1), 5.0)
    assert found.value("end_to_end_seconds_sum") == 2 * waited


def test_no_time_is_observed_before_the_clock_of_the_database_is_known() -> None:
    found = Measured()
    found.sink.delivered([emitted(1.0)], 0.2, datetime.min.replace(tzinfo=UTC))
    assert (found.value("delivered_total"), found.value("end_to_end_seconds_count")) == (1, 0)


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        (Failed("status 500"), "failed"),
        (Refused("status 400"), "refused"),
        (Unavailable("part", part="topic"), "unavailable"),
        (Unavailable("behind", behind=True), None),
        (DELIVERED, None),
    ],
)
def test_an_attempt_is_counted_by_the_verdict_that_counts(verdict: Verdict, outcome: str | None) -> None:
    found = Measured()
    found.sink.attempted(verdict, 0.2)
    counted = {
        each
        for each in ("delivered", "failed", "refused", "unavailable")
        if found.value("attempts_total", outcome=each)
    }
    assert counted == ({outcome} if outcome else set())


def test_the_slowest_event_of_a_call_is_an_exemplar_at_most_once_a_second() -> None:
    found, slow = Measured(), emitted(3.0, headers=PARENT)
    found.sink.delivered([emitted(1.0), slow], 0.2, NOW)
    found.sink.delivered([emitted(2.0)], 0.2, NOW + timedelta(seconds=0.9))
    labels = {"uid": slow.uid, "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
    assert found.exemplars == [(labels, 3.0)]


def test_the_history_has_what_was_counted_in_between() -> None:
    found = Measured()
    found.sink.delivered([emitted(1.0)], 0.2, NOW)
    before = read(found.process.registry)
    found.sink.delivered([emitted(40.0)] * 2, 0.2, NOW)
    found.sink.attempted(Failed("status 500"), 0.2)
    found.sink.died(["refused"])
    found.process.tick.observe(0.02)
    after = read(found.process.registry)
    process, sink = minute(before, {**after, "s": {**after["s"], ("outbox_shards_owned", ""): 64.0}})
    assert (process["sink"], process["busy_ms"], process["tick_p99"]) == ("", 20.0, pytest.approx(0.025, abs=0.001))
    assert (sink["sink"], sink["delivered"], sink["failed"], sink["dead"], sink["backlog"]) == ("s", 2, 1, 1, None)
    assert 30.0 < sink["end_to_end_p50"] < sink["end_to_end_p99"] <= 60.0


@pytest.mark.parametrize(
    ("buckets", "expected"), [({}, None), ({1.0: 0.0, 2.0: 4.0, 3.0: 4.0}, 1.5), ({1.0: 1.0, float("inf"): 9.0}, 1.0)]
)
def test_a_quantile_is_estimated_inside_its_bucket(buckets: dict[float, float], expected: float | None) -> None:
    assert quantile_of(buckets, 0.5) == expected
