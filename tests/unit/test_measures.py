"""Counts and durations: buckets, exact counts of sampled calls, outcomes and exemplars."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.measures import BOUNDS, MOST_OBSERVED, DeliveredCall, Histogram, SinkMeasures, quantile, since
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Unavailable, Verdict
from outbox_relay.sinks.contract.handing import an_event

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
PARENT = '{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}'


def emitted(seconds: float, *, due: float | None = None, headers: str | None = None) -> StoredEvent:
    """Return an event that was emitted ``seconds`` ago, and was due ``due`` seconds ago."""
    deliver_at = None if due is None else NOW - timedelta(seconds=due)
    return an_event(headers=headers)._replace(created_at=NOW - timedelta(seconds=seconds), deliver_at=deliver_at)


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (0.001, 0), (0.0011, 1), (0.5, 8), (300.0, 16), (300.1, 17), (1e9, 17)]
)
def test_an_observation_is_counted_in_the_first_bucket_that_holds_it(seconds: float, bucket: int) -> None:
    histogram = Histogram()
    assert histogram.observe(seconds, 3) == bucket
    found = histogram.copy()
    assert (found.counts[bucket], sum(found.counts), found.sum) == (3, 3, pytest.approx(3 * seconds))
    assert len(found.counts) == len(BOUNDS) + 1


@given(st.integers(1, 5000))
def test_counts_are_exact_however_many_events_a_call_has(events: int) -> None:
    measures = SinkMeasures()
    measures.delivered([emitted(1.0)] * events, 0.2, NOW)
    assert measures.delivered_count == measures.attempts["delivered"].count == measures.end_to_end.count == events
    assert measures.end_to_end.copy().sum == pytest.approx(events * 1.0)


@pytest.mark.parametrize("events", [64, 65, 128, 4000])
def test_a_large_call_is_observed_by_few_of_its_events(events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when each event is observed: one call has 4,000 of them."""
    observed: list[float] = []

    def counted(bounds: Sequence[float], seconds: float) -> int:
        observed.append(seconds)
        return bisect_left(bounds, seconds)

    measures = SinkMeasures()
    monkeypatch.setattr("outbox_relay.domain.measures.bisect_left", counted)
    measures.delivered([emitted(1.0)] * events, 0.2, NOW)
    assert len(observed) - 1 <= MOST_OBSERVED, "and once for the duration of the call"
    assert measures.end_to_end.count == events


@pytest.mark.parametrize(
    ("event", "waited"),
    [(emitted(2.0), 2.0), (emitted(90.0, due=1.0), 1.0), (emitted(1.0, due=90.0), 1.0), (emitted(-5.0), 0.0)],
    ids=["emitted", "scheduled", "due before the emit", "a clock that is ahead"],
)
def test_end_to_end_begins_when_an_event_may_be_delivered(event: StoredEvent, waited: float) -> None:
    measures = SinkMeasures()
    measures.delivered([event], 0.2, NOW)
    assert measures.end_to_end.copy().sum == waited
    measures.delivered_each([DeliveredCall(event, 0.2, 5.0)], NOW, 5.0)
    assert measures.end_to_end.copy().sum == 2 * waited


@given(st.lists(st.tuples(st.floats(-5.0, 400.0), st.floats(0.0, 1.0), st.floats(0.0, 0.1)), min_size=1))
def test_calls_that_are_recorded_together_count_as_they_ended(calls: list[tuple[float, float, float]]) -> None:
    together, each = SinkMeasures(), SinkMeasures()
    together.delivered_each(
        [DeliveredCall(emitted(waited), took, 100.0 - ago) for waited, took, ago in calls], NOW, 100.0
    )
    for waited, took, ago in calls:
        each.delivered([emitted(waited)], took, NOW - timedelta(seconds=ago))
    assert together.attempts["delivered"].copy().counts == each.attempts["delivered"].copy().counts
    found, expected = together.end_to_end.copy(), each.end_to_end.copy()
    assert found.sum == pytest.approx(expected.sum, abs=1e-3)
    kept = [place for place, exemplar in enumerate(found.exemplars) if exemplar is not None]
    assert kept == [place for place, count in enumerate(found.counts) if count]


def test_no_time_is_observed_before_the_clock_of_the_database_is_known() -> None:
    measures = SinkMeasures()
    measures.delivered([emitted(1.0)], 0.2, datetime.min.replace(tzinfo=UTC))
    assert (measures.delivered_count, measures.end_to_end.count) == (1, 0)
    measures.delivered_each([DeliveredCall(emitted(1.0), 0.2, 1.0)], datetime.min.replace(tzinfo=UTC), 1.0)
    assert (measures.delivered_count, measures.end_to_end.count) == (2, 0)


@pytest.mark.parametrize(
    ("verdict", "outcomes"),
    [
        (Failed("status 500"), {"failed"}),
        (Refused("status 400"), {"refused"}),
        (Unavailable("down"), {"unavailable"}),
        (Unavailable("part", part="topic"), {"unavailable"}),
        (Unavailable("behind", behind=True), set[str]()),
        (DELIVERED, set[str]()),
    ],
)
def test_an_attempt_is_counted_by_the_verdict_that_counts(verdict: Verdict, outcomes: set[str]) -> None:
    measures = SinkMeasures()
    measures.attempted(verdict, 0.2)
    assert set(measures.attempts) == outcomes


def test_an_exemplar_is_the_newest_event_of_its_bucket_and_is_kept_for_a_second() -> None:
    measures, first, second = SinkMeasures(), emitted(1.0, headers=PARENT), emitted(1.0)
    measures.delivered([first], 0.2, NOW)
    measures.delivered([second._replace(created_at=NOW - timedelta(seconds=0.1))], 0.2, NOW + timedelta(seconds=0.9))
    [kept] = filter(None, measures.end_to_end.copy().exemplars)
    assert (kept.uid, kept.headers, kept.seconds) == (first.uid, PARENT, 1.0)
    measures.delivered([second._replace(created_at=NOW + timedelta(seconds=0.2))], 0.2, NOW + timedelta(seconds=1.2))
    [kept] = filter(None, measures.end_to_end.copy().exemplars)
    assert (kept.uid, kept.headers) == (second.uid, None)


@pytest.mark.parametrize(
    ("observed", "share", "expected"),
    [
        ([], 0.5, None),
        ([0.0005] * 10, 0.5, 0.0005),
        ([0.003] * 99 + [200.0], 0.5, 0.00376),
        ([0.003] * 90 + [200.0] * 10, 0.99, 200.0),
        ([130.0] * 99 + [299.0], 0.5, 210.9),
        ([181.0], 0.5, 181.0),
        ([1000.0], 0.99, 300.0),
    ],
)
def test_a_quantile_is_estimated_inside_its_bucket(observed: list[float], share: float, expected: float | None) -> None:
    histogram = Histogram()
    for seconds in observed:
        histogram.observe(seconds)
    found = quantile(histogram.copy(), share)
    assert found == (None if expected is None else pytest.approx(expected, rel=0.01))


def test_no_quantile_of_an_interval_is_longer_than_its_longest_observation() -> None:
    histogram = Histogram()
    histogram.observe(2760.0)
    before = histogram.copy()
    histogram.begin_interval()
    histogram.observe_all([10.0 * n for n in range(1, 18)])
    found = since(before, histogram.copy())
    assert quantile(found, 0.99) == 170.0
    histogram.observe_all([])
    assert histogram.copy().longest == 170.0
    assert sum(since(histogram.copy(), before).counts) == 0
