"""The judgement of drills: loss, reordering, duplicates and late recovery are found; and the promised numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from outbox_relay.cli.workbench import DRILLS
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.service.metrics.definitions import DEFINITIONS
from outbox_relay.workbench.drill import metrics, promises
from outbox_relay.workbench.drill.judgement import (
    NEVER,
    Check,
    Evidence,
    Repeats,
    check_deliveries,
    check_none,
    check_time,
    first_of_any,
    first_of_every,
    longest_delay,
)
from outbox_relay.workbench.drill.metrics import add_up
from outbox_relay.workbench.drill.report import DrillReport
from outbox_relay.workbench.drill.scenarios import PLANS
from outbox_relay.workbench.shop.checker import Identity
from outbox_relay.workbench.shop.journal import UNREADABLE, Arrival
from outbox_relay.workbench.shop.processes import LEASE_SECONDS, TIMEOUT_SECONDS

A1, A2, A3, B1 = ("a", 1, "u1"), ("a", 2, "u2"), ("a", 3, "u3"), ("b", 1, "u4")
ALL_EVENTS = (A1, A2, A3, B1)
CRASH = Repeats(since=100.0, until=104.0, most=2)
RELIABILITY = Path(__file__).parents[2] / "docs" / "reliability.md"


def arrival(event: Identity, at: float = 0.0, emitted: float = 0.0) -> Arrival:
    return Arrival(*event, emitted_at=emitted, arrived_at=at)


def broken(
    arrived: Iterable[Arrival],
    committed: Sequence[Identity] = ALL_EVENTS,
    repeats: Repeats | None = None,
    exempt: frozenset[str] = frozenset(),
    unanswered: frozenset[str] = frozenset(),
    interruptions: Sequence[tuple[float, float]] = (),
) -> list[str]:
    """Return what the judgement says was not kept."""
    checks = check_deliveries(
        Evidence("crm", list(arrived), set(committed), exempt, unanswered, interruptions), repeats
    )
    return [check.what for check in checks if not check.kept]


def test_events_that_arrive_once_and_in_order_break_nothing() -> None:
    assert broken(map(arrival, (B1, A1, A2, A3))) == []


@pytest.mark.parametrize(
    ("arrived", "what"),
    [
        ((B1, A1, A2), "crm: lost"),
        ((B1, A2, A1, A3), "crm: out of order in their key"),
        ((B1, A1, A2, A3, ("b", 2, "u9")), "crm: arrived without a commit"),
        ((B1, A1, A2, A3, A3), "crm: duplicates"),
    ],
)
def test_each_violation_is_found(arrived: Sequence[Identity], what: str) -> None:
    assert broken(map(arrival, arrived)) == [what]


def test_an_unreadable_delivery_is_found() -> None:
    assert broken([*map(arrival, ALL_EVENTS), UNREADABLE]) == ["crm: arrived without a commit"]


def test_a_drill_without_events_proves_nothing() -> None:
    assert broken([], committed=()) == ["crm: committed events"]


@pytest.mark.parametrize(("first", "kept"), [(99.9, False), (100.0, True), (104.0, True), (104.1, False)])
def test_a_fault_explains_duplicates_of_events_that_arrived_around_it(first: float, *, kept: bool) -> None:
    arrived = [arrival(event, first) for event in ALL_EVENTS]
    assert (broken([*arrived, arrival(A1, 105.0)], repeats=CRASH) == []) is kept


def test_a_fault_explains_no_more_duplicates_than_were_in_flight() -> None:
    arrived = [arrival(event, 101.0) for event in ALL_EVENTS]
    assert broken([*arrived, *arrived[:2]], repeats=CRASH) == []
    assert broken([*arrived, *arrived[:3]], repeats=CRASH) == ["crm: duplicates"]


def test_a_request_without_an_answer_explains_duplicates_of_its_event_alone() -> None:
    arrived = [*map(arrival, ALL_EVENTS), arrival(A1)]
    assert broken(arrived, unanswered=frozenset({"u1"})) == []
    assert broken(arrived, unanswered=frozenset({"u2"})) == ["crm: duplicates"]


@pytest.mark.parametrize(("first", "kept"), [(9.9, False), (10.0, True), (12.0, True), (12.1, False)])
def test_a_lost_lease_explains_duplicates_of_events_that_arrived_shortly_before(first: float, *, kept: bool) -> None:
    arrived = [arrival(event, first) for event in ALL_EVENTS]
    assert (broken([*arrived, arrival(A1, 20.0)], interruptions=[(1.0, 2.0), (10.0, 12.0)]) == []) is kept


def test_a_retried_dead_letter_may_come_late_but_must_come() -> None:
    assert broken(map(arrival, (A2, A3, B1, A1)), exempt=frozenset({"u1"})) == []
    assert broken(map(arrival, (A2, A3, B1)), exempt=frozenset({"u1"})) == ["crm: lost"]
    assert broken(map(arrival, (A3, A2, B1, A1)), exempt=frozenset({"u1"})) == ["crm: out of order in their key"]


@pytest.mark.parametrize(
    ("found", "grace", "kept"), [(4.0, 0.0, True), (4.1, 0.0, False), (4.1, 1.0, True), (NEVER, 600.0, False)]
)
def test_late_recovery_is_found(found: float, grace: float, *, kept: bool) -> None:
    assert check_time("takeover", found, 4.0, grace).kept is kept


def test_counts_that_must_be_zero() -> None:
    assert check_none("restarts", 0).kept
    assert not check_none("restarts", 1).kept


def test_recovery_ends_with_the_first_event_of_the_last_shard_that_was_emitted_after_the_fault() -> None:
    shards = {"a": 1, "b": 2}
    before = [arrival(A1, at=11.0, emitted=9.0), arrival(B1, at=19.0, emitted=9.5)]
    assert first_of_any(before, 10.0) == NEVER
    one = [*before, arrival(A2, at=12.0, emitted=10.0), arrival(A3, at=13.0, emitted=10.5)]
    assert first_of_any(one, 10.0) == 12.0
    assert first_of_every(one, 10.0, shards) == NEVER
    both = [*one, arrival(("b", 2, "u5"), at=14.0, emitted=11.0), arrival(("late", 1, "u6"), at=30.0, emitted=11.0)]
    assert first_of_every(both, 10.0, shards) == 14.0


def test_delays_are_those_of_first_arrivals_of_other_keys() -> None:
    arrived = [
        arrival(A1, at=12.0, emitted=10.0),
        arrival(A1, at=19.0, emitted=10.0),
        arrival(A2, at=20.0, emitted=9.0),
        arrival(B1, at=18.0, emitted=11.0),
    ]
    assert longest_delay(arrived, 10.0, 11.0) == 7.0
    assert longest_delay(arrived, 10.0, 11.0, {"b"}) == 2.0
    assert longest_delay(arrived, 30.0, 31.0) == NEVER


# -- promises ---------------------------------------------------------------------------------------------------------


def test_promises_follow_from_the_settings() -> None:
    assert promises.takeover_seconds(15) == 16.0
    assert promises.delay_seconds(15) == 15.25
    policy = CircuitPolicy(probe_seconds=2.0, probe_max_seconds=60.0)
    assert promises.return_seconds(10.0, policy) == 13.0
    assert promises.return_seconds(3600.0, policy) == 61.0
    retry = RetryPolicy(base_seconds=1.0, max_seconds=60.0, jitter=0.5)
    assert promises.retry_seconds(3, retry) == 7.0
    assert promises.retry_seconds(30, retry) == 91.0


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ("a restart or a promotion of PostgreSQL", promises.DATABASE_SECONDS),
        ("the death of a relay: its shards, with `lease_seconds = 3`", promises.takeover_seconds(LEASE_SECONDS)),
        ("the same with the default of 15 s", promises.takeover_seconds(15)),
        ("the metrics of the database, after any fault", promises.METRICS_SECONDS),
        ("an event whose destination answers, with `timeout_seconds = 2`", promises.delay_seconds(TIMEOUT_SECONDS)),
        ("the same with the default of 15 s", promises.delay_seconds(15)),
    ],
)
def test_the_page_promises_the_same_numbers(row: str, seconds: float) -> None:
    page = RELIABILITY.read_text(encoding="utf-8")
    assert re.search(rf"^\| {re.escape(row)} \| {seconds:g} s\b", page, re.MULTILINE), (row, seconds)


def test_the_page_describes_every_drill() -> None:
    page = RELIABILITY.read_text(encoding="utf-8")
    assert set(DRILLS) == set(PLANS) == set(re.findall(r"^\| `([a-z-]+)` \|", page.split("## Drills")[1], re.MULTILINE))


# -- metrics ----------------------------------------------------------------------------------------------------------

TEXT = """
# TYPE outbox_delivered_total counter
outbox_delivered_total{{sink="crm"}} {delivered}
# TYPE outbox_circuit_state gauge
outbox_circuit_state{{sink="crm"}} {circuit}
# TYPE outbox_exceptions gauge
outbox_exceptions{{sink="crm",state="dead"}} 3
"""


def test_metrics_of_relays_are_added_up_as_on_a_dashboard() -> None:
    found = add_up([TEXT.format(delivered=3, circuit=0), None, TEXT.format(delivered=4, circuit=2)])
    assert found.values("outbox_delivered_total") == {"crm": 7.0}
    assert found.values("outbox_circuit_state") == {"crm": 2.0}
    assert found.values("outbox_paused") == {}
    assert "up 2 of 3" in found.abnormal()
    assert "outbox_circuit_state(crm) 2" in found.abnormal()
    assert "outbox_exceptions(crm,dead) 3" in found.abnormal()
    assert "outbox_backlog_events unknown" in found.abnormal()
    assert not [text for text in found.abnormal() if "outbox_delivered_total" in text]


def test_watched_metrics_are_exported() -> None:
    assert {*metrics.TOTAL, *metrics.GAUGES, *metrics.SHOWN} <= {definition.name for definition in DEFINITIONS}


# -- report -----------------------------------------------------------------------------------------------------------


def report(*checks: Check, load: float = 0.5) -> DrillReport:
    return DrillReport("burst", checks, ["  1.0 s  metrics"], seconds=30.04, load=load, processors=2)


def test_one_broken_promise_is_enough() -> None:
    good, bad = check_none("lost", 0), check_none("reordered", 1)
    assert report(good).kept
    assert "every promise was kept" in report(good).text()
    assert not report(good, bad).kept
    assert "a promise was NOT KEPT. See docs/reliability.md." in report(good, bad).text()


def test_grace_is_suggested_only_if_a_busy_machine_may_be_the_cause() -> None:
    late, lost = check_time("takeover", 5.0, 4.0, 0.0), check_none("lost", 1)
    assert "--grace" in report(late, load=2.5).text()
    assert "--grace" not in report(late, load=1.5).text()
    assert "--grace" not in report(late, lost, load=2.5).text()


def test_json_has_every_check() -> None:
    assert report(check_none("lost", 0)).json() == {
        "drill": "burst",
        "kept": True,
        "seconds": 30.0,
        "load": 0.5,
        "processors": 2,
        "checks": [{"what": "lost", "found": "0", "promised": "0", "kept": True, "of_time": False}],
        "observed": ["  1.0 s  metrics"],
    }
