"""The demo's checker, figures, rate control, journal and report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from outbox_relay.workbench.demo import rate_control
from outbox_relay.workbench.demo.rate_control import EmitRate
from outbox_relay.workbench.demo.report import DemoReport, DestinationResult
from outbox_relay.workbench.shop.checker import CheckResult, DeliveryChecker, Identity
from outbox_relay.workbench.shop.destinations import MonitoredDestination
from outbox_relay.workbench.shop.figures import Latency, RateMeter, RecentLatency, summarise_latency
from outbox_relay.workbench.shop.journal import REFUSED, UNREADABLE, Arrival, JournalReader, JournalWriter

A1, A2, A3, B1 = ("a", 1, "u1"), ("a", 2, "u2"), ("a", 3, "u3"), ("b", 1, "u4")
NO_LATENCY = Latency(None, None, None)


def checked(arrived: Iterable[Identity], committed: Iterable[Identity] = (A1, A2, A3, B1)) -> CheckResult:
    checker = DeliveryChecker()
    for event in arrived:
        checker.add(*event)
    return checker.result(set(committed))


def test_events_that_arrive_once_and_in_order_are_sound() -> None:
    result = checked([B1, A1, A2, A3])
    assert result == CheckResult(committed=4, arrived=4, lost=0, phantom=0, reordered=0, duplicates=0)
    assert result.sound


@pytest.mark.parametrize(
    ("arrived", "wrong"),
    [
        ([B1, A1, A2], {"lost": 1}),
        ([B1, A1, A3, A2], {"reordered": 1}),
        ([B1, A3, A1, A2], {"reordered": 2}),
        ([B1, A1, A2, A3, ("b", 2, "u9")], {"phantom": 1}),
        # Rolled back and emitted again: the number is the same, the uid is not.
        ([B1, A1, ("a", 2, "u9"), A2, A3], {"phantom": 1}),
        ([("c", 1, "u4"), A1, A2, A3], {"phantom": 1, "lost": 1}),
    ],
)
def test_violations_are_counted(arrived: list[Identity], wrong: dict[str, int]) -> None:
    result = checked(arrived)
    found = {name: getattr(result, name) for name in ("lost", "phantom", "reordered")}
    assert found == {"lost": 0, "phantom": 0, "reordered": 0} | wrong
    assert not result.sound


def test_duplicates_are_counted_and_allowed_anywhere() -> None:
    result = checked([A1, A2, A1, A3, A2, B1, B1])
    assert (result.duplicates, result.arrived, result.sound) == (3, 7, True)


def test_first_arrivals_are_distinguished_from_others() -> None:
    checker = DeliveryChecker()
    assert [checker.add(*event) for event in (A1, A2, A1)] == [True, True, False]
    assert (checker.distinct, checker.missing({A1, A2, A3})) == (2, 1)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], NO_LATENCY),
        ([3.0], Latency(3.0, 3.0, 3.0)),
        ([4.0, 1.0, 3.0, 2.0], Latency(2.0, 4.0, 4.0)),
        ([float(n) for n in range(200, 0, -1)], Latency(100.0, 198.0, 200.0)),
    ],
)
def test_percentiles_use_the_nearest_rank(seconds: list[float], expected: Latency) -> None:
    assert summarise_latency(seconds) == expected


def test_recent_latencies_are_forgotten_after_five_seconds() -> None:
    recent = RecentLatency()
    recent.add(100.0, 9.0)
    recent.add(104.0, 1.0)
    assert recent.latency(105.0).longest_seconds == 9.0
    assert recent.latency(105.1).longest_seconds == 1.0
    assert recent.latency(110.0) == NO_LATENCY


def test_rate_is_of_the_last_two_seconds() -> None:
    rate = RateMeter()
    assert rate.per_second(10.0, 0) == 0
    assert rate.per_second(11.0, 100) == 100
    assert rate.per_second(12.0, 100) == 50
    assert rate.per_second(14.0, 100) == 0


def test_rate_rises_quickly_until_a_destination_falls_behind_and_slowly_afterwards() -> None:
    quick = EmitRate(400).adjusted(backlog=0)
    assert quick == EmitRate(400 * rate_control.FAST_INCREASE)
    assert EmitRate(400).adjusted(backlog=150) == EmitRate(400)
    slow = EmitRate(400).adjusted(backlog=201)
    assert slow == EmitRate(400 * rate_control.DECREASE, limit_found=True)
    assert slow.adjusted(backlog=0).events_per_second == pytest.approx(
        400 * rate_control.DECREASE * rate_control.SLOW_INCREASE
    )


def test_rate_has_limits() -> None:
    assert EmitRate(rate_control.MAXIMUM).adjusted(backlog=0) == EmitRate(rate_control.MAXIMUM)
    assert EmitRate(rate_control.MINIMUM).adjusted(backlog=10_000).events_per_second == rate_control.MINIMUM


ARRIVAL = Arrival("customer-1", 7, "u1", 100.25, 100.5)


def test_journal_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path)
    assert reader.read() == []
    with JournalWriter(path) as writer:
        writer.write(ARRIVAL)
        assert reader.read() == [ARRIVAL]
        writer.write(REFUSED)
        writer.write(ARRIVAL)
    assert reader.read() == [None, ARRIVAL]
    assert reader.read() == []


def test_journal_is_read_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with JournalWriter(path) as writer:
        writer.write(ARRIVAL)
    line = path.read_bytes()
    path.write_bytes(line + line[:9])
    reader = JournalReader(path)
    assert reader.read() == [ARRIVAL]
    path.write_bytes(line + line)
    assert reader.read() == [ARRIVAL]


def test_destination_counts_refusals_and_times_first_arrivals_only(tmp_path: Path) -> None:
    destination = MonitoredDestination("crm", "webhook", tmp_path / "journal")
    with JournalWriter(destination.journal) as writer:
        writer.write(ARRIVAL)
        writer.write(REFUSED)
        writer.write(Arrival("customer-1", 7, "u1", 100.25, 160.25))
        writer.write(UNREADABLE)
    destination.read()
    assert destination.refused == 1
    assert destination.latency(emitted_before=101.0) == Latency(0.0, 0.25, 0.25)
    result = destination.result({("customer-1", 7, "u1")})
    assert (result.arrived, result.duplicates, result.phantom) == (3, 1, 1)


def delivered(result: CheckResult, refused: int = 0) -> DestinationResult:
    took = Latency(0.0123, 0.5, 1.5)
    return DestinationResult("crm", "webhook", result, refused, took, took)


def report(*destinations: DestinationResult) -> DemoReport:
    return DemoReport(destinations, load_seconds=4.0, rolled_back=3, takeover_seconds=None)


def test_report_is_sound_only_if_every_destination_is() -> None:
    good = delivered(checked([A1], [A1]))
    assert report(good, good).sound
    for bad in (delivered(checked([], [A1])), delivered(checked([A1], [A1]), refused=1), delivered(checked([], []))):
        assert not report(good, bad).sound
        assert "BROKEN" in report(good, bad).text()


def test_report_has_the_same_figures_as_text_and_as_json() -> None:
    one = report(delivered(checked([A1, A1, B1], [A1, B1]), refused=2))
    found = json.loads(json.dumps(one.json()))["destinations"]["crm"]
    counts = ("committed", "arrived", "lost", "made_up", "out_of_order", "duplicates", "refused_signatures")
    assert [found[name] for name in counts] == [2, 3, 0, 0, 0, 1, 2]
    assert (found["p50_ms"], found["p99_ms"]) == (12.3, 500)
    lines = {label.strip(): value for label, _, value in (line.rpartition("  ") for line in one.text().splitlines())}
    assert (lines["arrived"], lines["refused signatures"], lines["p99 of the whole run"]) == ("3", "2", "500 ms")
