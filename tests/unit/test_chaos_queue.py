"""The judge of the chaos suite: rows sinks, exactly-once effects, unique keys and schedules.

Each rule has a test that goes red without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from tests.chaos import ticks, unique
from tests.chaos.configs import ROW_LEASE_SECONDS
from tests.chaos.evidence import PROMISES, SINKS, is_for
from tests.chaos.explanations import AFTER_SECONDS, USUAL, Promise, can_repeat
from tests.chaos.forms import SHORT
from tests.chaos.jobs import FIRST_KEY
from tests.chaos.lanes import Record
from tests.chaos.nemesis import Strike
from tests.chaos.oracle import Account, Arrival, judge
from tests.chaos.outcome import Outcome, violations
from tests.chaos.recovery import Flow
from tests.chaos.ticks import Schedule
from tests.chaos.timeline import Committed, Restored
from tests.chaos.unique import Arrived, Emitted, Merged

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
KILL = Strike("sigkill", 10.0, 10.0)
BOTH = ("jobs", "effects")


def account(
    *arrivals: tuple[int, float], promise: Promise = USUAL, restored: Restored | None = None, strike: Strike = KILL
) -> Account:
    """Judge arrivals (number, time) of the two events of a key, with a relay killed at 10."""
    committed = Committed([restored] if restored else [])
    for number, uid in ((1, A), (2, B)):
        committed.add(1, number, uid)
    came = [Arrival(1, number, {1: A, 2: B}[number], at - 0.1, at) for number, at in arrivals]
    return judge("jobs", committed, came, [strike], promise=promise)


# -- rows and effects -------------------------------------------------------------------------------------------------


def test_order_is_judged_except_where_rows_are_claimed() -> None:
    assert account((2, 1.0), (1, 2.0)).reordered == 1
    assert account((2, 1.0), (1, 2.0), promise=PROMISES["jobs"]).sound


@pytest.mark.parametrize("sink", ["jobs", "calls", "effects"])
def test_lost_and_phantom_jobs_are_counted_at_every_new_sink(sink: str) -> None:
    committed = Committed()
    committed.add(FIRST_KEY, 1, A)
    phantom = Arrival(FIRST_KEY, 2, B, 1.0, 1.1)
    found = judge(sink, committed, [phantom], [], promise=PROMISES.get(sink, USUAL))
    assert (found.lost, found.phantom, found.sound) == (1, 1, False)


def test_a_job_in_the_backlog_is_stuck() -> None:
    committed = Committed()
    committed.add(FIRST_KEY, 1, A)
    found = judge("jobs", committed, [], [], backlog=1, promise=PROMISES["jobs"])
    assert (found.lost, found.stuck, found.sound) == (0, 1, False)


def test_a_repeated_row_needs_a_fault() -> None:
    assert account((1, 9.0), (1, 11.0), (2, 12.0), promise=PROMISES["jobs"]).sound
    assert len(account((1, 50.0), (1, 51.0), (2, 52.0), promise=PROMISES["jobs"]).unexplained) == 1


def test_a_row_of_a_dead_relay_comes_back_after_its_lease_whatever_its_key_received() -> None:
    """A relay that died at 10 held the row; later events of its key do not wait for it."""
    came = (1, 9.9), (2, 12.0), (1, 10.0 + ROW_LEASE_SECONDS + 0.1)
    assert account(*came, promise=PROMISES["jobs"]).duplicates == {"sigkill": 1}
    assert len(account(*came).unexplained) == 1, "an ordered sink keeps later events of the key back"


@pytest.mark.parametrize(
    "came",
    [
        ((1, 9.9), (2, 12.0), (1, 10.0 + ROW_LEASE_SECONDS + AFTER_SECONDS + 0.1)),
        ((1, 4.9), (2, 12.0), (1, 30.1)),
        ((1, 20.1), (2, 12.0), (1, 30.1)),
        ((1, 50.0), (2, 12.0), (1, 50.0 + ROW_LEASE_SECONDS)),
        ((1, 9.9), (1, 30.1), (2, 31.0), (1, 35.0)),
    ],
    ids=["later than the lease", "settled before", "received after", "without a fault", "settled when it came back"],
)
def test_what_no_lease_explains_is_reported_at_a_rows_sink(came: Sequence[tuple[int, float]]) -> None:
    assert len(account(*came, promise=PROMISES["jobs"]).unexplained) == 1


def test_no_fault_explains_a_repeated_effect() -> None:
    assert account((1, 9.0), (1, 11.0), (2, 12.0)).sound
    assert len(account((1, 9.0), (1, 11.0), (2, 12.0), promise=PROMISES["effects"]).unexplained) == 1


def test_after_a_restore_a_row_may_arrive_after_later_ones_of_its_key() -> None:
    """Rows have no order: a later event of the key says nothing about the rows of the dump."""
    restored = Restored(28.0, 30.0, {1: 1}, [], {"jobs": {A}})
    came = (1, 27.0), (2, 31.0), (1, 50.0)
    assert account(*came, promise=PROMISES["jobs"], restored=restored).sound
    assert len(account(*came, restored=restored).unexplained) == 1
    late = (1, 27.0), (2, 31.0), (1, 331.0)
    assert len(account(*late, promise=PROMISES["jobs"], restored=restored).unexplained) == 1
    settled = Restored(28.0, 30.0, {1: 1}, [], {"jobs": set()})
    assert len(account(*came, promise=PROMISES["jobs"], restored=settled).unexplained) == 1


def test_the_receiver_explains_duplicates_of_both_of_its_sinks_alone() -> None:
    explained = {sink for sink in SINKS if can_repeat("receiver down", sink)}
    assert explained == {"webhook", "jobs"}
    assert {sink for sink in SINKS if can_repeat("calls given up while down", sink)} == {"calls"}


def test_each_job_is_due_at_the_sinks_of_its_route() -> None:
    assert [sink for sink in SINKS if is_for(sink, FIRST_KEY)] == ["jobs", "calls"]
    assert [sink for sink in SINKS if is_for(sink, FIRST_KEY + 1)] == ["jobs", "effects"]
    assert [sink for sink in SINKS if is_for(sink, 4)] == ["kafka", "webhook"]


# -- unique keys ------------------------------------------------------------------------------------------------------


def overlaps(
    first: dict[str, float], *, eras: dict[bytes, int | None] | None = None, dead: set[bytes] | None = None
) -> list[str]:
    """Judge A, emitted at 1, and B of the same unique key, at 5; `first` are the arrivals of A."""
    sinks = {
        sink: Arrived({A: first[sink]} if sink in first else {}, dead or set(), sink == "effects") for sink in BOTH
    }
    emitted = [Emitted(1, A, 1.0), Emitted(1, B, 5.0)]
    return unique.judge(emitted, [], {A: None, B: None} if eras is None else eras, sinks, lambda _: BOTH)


def test_an_event_follows_when_every_sink_has_received_the_one_before() -> None:
    assert overlaps({"jobs": 2.0, "effects": 4.9}) == []


@pytest.mark.parametrize("late", BOTH)
def test_two_events_of_a_unique_key_in_flight_at_once(late: str) -> None:
    [line] = overlaps({"jobs": 2.0, "effects": 2.0, late: 6.0})
    assert f"{late} received {A.hex()} 1.00 s later" in line


def merges(*merged: Merged) -> list[str]:
    """Judge calls that were merged; B followed A at 5."""
    arrived = {sink: Arrived({A: 2.0, B: 6.0}) for sink in BOTH}
    emitted = [Emitted(1, A, 1.0), Emitted(1, B, 5.0)]
    return unique.judge(emitted, merged, {A: None, B: None}, arrived, lambda _: BOTH)


def test_emit_returns_the_event_in_flight() -> None:
    assert merges(Merged(1, A, 4.0), Merged(1, B, 7.0)) == []


# -- schedules --------------------------------------------------------------------------------------------------------


def times(fired: dict[int, int], moves: list[tuple[int, int]], following: int = 2027) -> list[str]:
    """Judge one schedule."""
    schedule = Schedule("yearly_0", following, moves, Counter(fired))
    return list(ticks.violations([schedule], (), (), ()))


def test_each_time_of_each_move_is_due_once() -> None:
    moves = [(2027, 2025), (2027, 2026)]
    assert times({2025: 1, 2026: 2}, moves) == []
    assert times({2025: 1, 2026: 1}, moves) == ["schedule yearly_0: 1 times were missed: 2026 x 1"]
    assert times({2025: 2, 2026: 2}, moves) == ["schedule yearly_0: 1 times were emitted too often: 2025 x 1"]


def test_events_of_schedules_that_are_lost_or_phantom() -> None:
    assert list(ticks.violations([], {A}, {A}, ())) == []
    assert list(ticks.violations([], {A}, {A, B}, {B})) == [], "a restore took it back"
    assert len(list(ticks.violations([], {A}, (), ()))) == 1
    assert len(list(ticks.violations([], {A}, {A, B}, ()))) == 1


# -- the run ----------------------------------------------------------------------------------------------------------


def test_a_run_without_jobs_is_a_failure() -> None:
    """Else a lane that comes to nothing is green."""
    found = {line for line in violations(_outcome()) if "times:" in line}
    assert len(found) == 3


def test_violations_of_the_queue_fail_a_run() -> None:
    outcome = _outcome()
    outcome.queue.append("schedule yearly_0: 1 times were missed: 2026 x 1")
    assert outcome.queue[0] in list(violations(outcome))


def _outcome() -> Outcome:
    return Outcome(SHORT, 1, Record(), flows={"kafka": Flow()})
