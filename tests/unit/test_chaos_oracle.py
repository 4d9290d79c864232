"""The judge of the chaos suite reports each thing that may go wrong, when it does, and nothing when all is well."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from tests.chaos.expected import ExpectedFile, read, reconcile
from tests.chaos.nemesis import Strike
from tests.chaos.oracle import Account, Arrival, Dead, judge
from tests.chaos.recovery import Flow, recoveries
from tests.chaos.starved import starvations
from tests.chaos.timeline import Committed, Logged, Restored

KILL = Strike("sigkill", 10.0, 10.0)


def uid(key: int, number: int) -> bytes:
    """Return the uid of an event."""
    return bytes([1, *key.to_bytes(7), *number.to_bytes(8)])


def came(number: int, at: float, key: int = 1, emitted: float | None = None) -> Arrival:
    """Return an event that was emitted shortly before it arrived."""
    return Arrival(key, number, uid(key, number), at - 0.1 if emitted is None else emitted, at)


def committed(count: int = 3, keys: int = 1) -> Committed:
    """Return events 1 to ``count`` of keys 1 to ``keys``."""
    found = Committed()
    for key in range(1, keys + 1):
        for number in range(1, count + 1):
            found.add(key, number, uid(key, number))
    return found


def judged(arrivals: Sequence[Arrival], *strikes: Strike, backlog: int = 0, sink: str = "kafka") -> Account:
    """Three events of one key."""
    return judge(sink, committed(), arrivals, strikes, backlog=backlog)


def figures(account: Account) -> tuple[int, int, int, int, int, int]:
    """Lost, stuck, phantom, reordered, explained and unexplained duplicates."""
    repeated = account.duplicates.total()
    return (account.lost, account.stuck, account.phantom, account.reordered, repeated, len(account.unexplained))


def test_nothing_is_reported_when_everything_came_once_in_order() -> None:
    account = judged([came(1, 1), came(2, 2), came(3, 3)])
    assert account.sound
    assert figures(account) == (0, 0, 0, 0, 0, 0)
    assert (account.committed, account.arrived) == (3, 3)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_what_never_came_is_lost(missing: int) -> None:
    account = judged([came(n, n) for n in (1, 2, 3) if n != missing])
    assert figures(account) == (1, 0, 0, 0, 0, 0)
    assert not account.sound
    assert account.examples == {"missing": [f"key-1 {missing}"]}


def test_what_never_came_and_is_still_in_the_backlog_is_stuck() -> None:
    account = judged([came(1, 1)], backlog=2)
    assert figures(account) == (0, 2, 0, 0, 0, 0)
    assert not account.sound


def test_a_dead_letter_that_nothing_excuses_is_reported() -> None:
    account = judge("kafka", committed(), [came(1, 1), came(3, 3)], [], dead=Dead({(1, 2)}))
    assert (account.dead, account.condemned, account.lost) == (1, 1, 0)
    assert not account.sound


@pytest.mark.parametrize(
    ("letters", "came_too", "expected"),
    [({(1, 2)}, False, (1, 0, 0)), ({}, False, (0, 1, 0)), ({(1, 2)}, True, (1, 0, 1)), ({}, True, (0, 1, 1))],
    ids=["dead", "gone", "dead and arrived", "arrived"],
)
def test_poison_must_be_dead_and_nothing_else(
    letters: set[tuple[int, int]], came_too: bool, expected: tuple[int, int, int]
) -> None:
    due = Committed()
    for number in (1, 3):
        due.add(1, number, uid(1, number))
    arrivals = [came(1, 1), *([came(2, 2)] if came_too else []), came(3, 3)]
    account = judge("kafka", due, arrivals, [], dead=Dead(letters, poison={(1, 2)}))
    assert (account.poisoned, account.lost, account.phantom) == expected
    assert account.sound == (expected == (1, 0, 0))
    assert account.committed == 2


@pytest.mark.parametrize(
    "made_up",
    [
        Arrival(1, 2, uid(1, 9), 2, 2.5),
        Arrival(1, 4, uid(1, 4), 2, 2.5),
        Arrival(2, 1, uid(2, 1), 2, 2.5),
        Arrival(1, 0, bytes(16), 2, 2.5),
        Arrival(-1, 0, bytes(16), 2, 2.5),
    ],
    ids=["another uid", "beyond the last", "another key", "no number", "unreadable"],
)
def test_what_was_never_committed_is_a_phantom(made_up: Arrival) -> None:
    account = judged([came(1, 1), came(2, 2), made_up, came(3, 3)])
    assert figures(account) == (0, 0, 1, 0, 0, 0)
    assert not account.sound


def test_a_first_arrival_after_a_later_event_of_its_key_is_reordered() -> None:
    account = judged([came(1, 1), came(3, 2), came(2, 3)])
    assert figures(account) == (0, 0, 0, 1, 0, 0)
    assert not account.sound


def test_a_duplicate_without_any_fault_is_not_explained() -> None:
    account = judged([came(1, 1), came(2, 2), came(2, 2.5), came(3, 3)])
    assert figures(account) == (0, 0, 0, 0, 0, 1)
    assert not account.sound


@pytest.mark.parametrize(
    ("first", "again", "explained"),
    [
        (9.9, 13.5, True),
        (4.0, 13.5, False),
        (9.9, 9.95, False),
        (9.9, 19.9, True),
        (30.0, 31.0, False),
    ],
    ids=["in flight", "settled long before", "before the fault", "at the take-over", "long after"],
)
def test_a_fault_explains_what_was_in_flight_at_it(first: float, again: float, explained: bool) -> None:
    later = [came(2, max(again, 14.0) + 0.2, emitted=10.5), came(3, 32)]
    account = judged(sorted([came(1, first), came(1, again), *later], key=lambda arrival: arrival.arrived), KILL)
    assert bool(account.duplicates) is explained
    assert bool(account.unexplained) is not explained


@pytest.mark.parametrize(
    ("fault", "sink", "explains"),
    [
        ("sigterm", "kafka", False),
        ("join and leave", "webhook", False),
        ("clock shifted", "kafka", False),
        ("statistics reset", "kafka", False),
        ("statements cancelled", "kafka", True),
        ("receiver down", "kafka", False),
        ("receiver down", "webhook", True),
        ("broker killed", "kafka", True),
        ("broker killed", "webhook", False),
        ("zombie", "webhook", True),
    ],
)
def test_only_a_fault_that_can_repeat_events_of_a_sink_explains_one(fault: str, sink: str, explains: bool) -> None:
    account = judged([came(1, 9.9), came(1, 11), came(2, 12), came(3, 13)], Strike(fault, 10, 10), sink=sink)
    assert account.sound is explains


# -- what was committed -------------------------------------------------------------------------------------------


def name(key: int, number: int) -> str:
    """Return an event's uid as writers write it down."""
    return str(UUID(bytes=uid(key, number)))


def logged(key: int, number: int, uid: bytes) -> Logged:
    """Return an event of the database's log."""
    return Logged(key, number, uid, 0, None)


def ignore(_event: Logged) -> None:
    """Do nothing: nothing is judged by it here."""


def expected_file(path: Path) -> Path:
    """Four transactions: one of each end, and one whose end was not written down."""
    file = ExpectedFile(path)
    for number, end in enumerate(["ok", "rolled back", "unknown"], 1):
        file.intend(number, [(1, number, name(1, number))])
        file.end(number, end)  # type: ignore[arg-type]
    file.intend(4, [(1, 4, name(1, 4))])
    file.close()
    return path


def test_expected_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = expected_file(tmp_path / "expected")
    assert [(events[0][1], end) for events, end in read(path)] == [
        (1, "ok"),
        (2, "rolled back"),
        (3, "unknown"),
        (4, "unknown"),
    ]
    with path.open("ab") as file:
        file.write(b'{"tx":5,"eve')
    assert len(list(read(path))) == 4


def test_the_database_decides_what_the_writer_does_not_know(tmp_path: Path) -> None:
    log = [logged(1, 1, uid(1, 1)), logged(1, 3, uid(1, 3))]
    found = reconcile(read(expected_file(tmp_path / "expected")), log, ignore)
    assert found.sound
    assert (found.committed, found.unknown_committed) == (2, 1)
    assert found.by_end == {"ok": 1, "rolled back": 1, "unknown": 2}


def test_a_log_that_is_not_what_the_writers_say_is_reported(tmp_path: Path) -> None:
    log = [logged(1, 2, uid(1, 2)), logged(1, 3, uid(1, 3)), logged(2, 7, uid(2, 7)), logged(2, 4, uid(1, 4))]
    found = reconcile(read(expected_file(tmp_path / "expected")), log, ignore)
    assert not found.sound
    assert [event[1] for event in found.vanished] == [1]
    assert [event[1] for event in found.risen] == [2]
    assert [event[:2] for event in found.strangers] == [(2, 7), (2, 4)]


# -- restores -----------------------------------------------------------------------------------------------------


def other(number: int, era: int = 1) -> bytes:
    """Return the uid of an event of key 1 that has the number of one that was taken back."""
    return bytes([1 + era, *uid(1, number)[1:]])


def restored(
    kept: int, *lost: bytes, dumped: float = 20.0, rebased: float = 40.0, unsettled: Sequence[bytes] = ()
) -> Restored:
    """Return a restore of key 1 to its first ``kept`` events; ``lost`` are the uids of those after them."""
    events = [logged(1, number, uid) for number, uid in enumerate(lost, kept + 1)]
    return Restored(dumped, rebased, {1: kept}, events, {"kafka": frozenset(unsettled)})


RESTORED = restored(2, uid(1, 3), uid(1, 4), unsettled=[uid(1, 2)])
"""Of four events two are lost; then 3 and 4 are given out again."""


def after_restore(*restores: Restored) -> Committed:
    """Return events 1 and 2, those that were lost, and those that have the numbers of these now."""
    found = Committed(restores)
    for place, one in enumerate(restores):
        for event in one.lost:
            found.take_back(place, event.key, event.number, event.uid)
    for number, name in enumerate([uid(1, 1), uid(1, 2), *(other(n, len(restores)) for n in (3, 4))], 1):
        found.add(1, number, name)
    return found


def arrived(name: bytes, at: float, emitted: float | None = None) -> Arrival:
    """Return an event of key 1."""
    return Arrival(1, int.from_bytes(name[8:]), name, at - 0.1 if emitted is None else emitted, at)


BEFORE = [arrived(uid(1, 1), 10), arrived(uid(1, 2), 19), arrived(uid(1, 3), 21)]
AFTER = [arrived(other(3), 41, emitted=35), arrived(other(4), 42)]


def judged_restore(*arrivals: Arrival, strikes: Sequence[Strike] = (), dead: Dead | None = None) -> Account:
    """Judge what arrived around `RESTORED`."""
    return judge("kafka", after_restore(RESTORED), arrivals, strikes, dead)


def test_what_a_restore_took_back_may_have_arrived_or_not() -> None:
    account = judged_restore(*BEFORE, *AFTER)
    assert account.sound
    assert (account.committed, account.taken_back, account.arrived) == (4, 2, 5)
    assert judged_restore(*BEFORE[:2], *AFTER).sound


@pytest.mark.parametrize("missing", [0, 1, 3, 4])
def test_what_survives_a_restore_must_arrive(missing: int) -> None:
    every = [*BEFORE, *AFTER]
    account = judged_restore(*every[:missing], *every[missing + 1 :])
    assert account.lost == 1
    assert account.examples["missing"] == [f"key-1 {every[missing].number}"]


@pytest.mark.parametrize(
    "wrong",
    [arrived(uid(1, 4), 40.5), arrived(uid(1, 3), 300), arrived(other(3), 39), arrived(other(4), 21)],
    ids=["taken back, and comes later", "much later", "emitted before the rebase, and comes before it", "far before"],
)
def test_nothing_arrives_on_the_wrong_side_of_the_rebase(wrong: Arrival) -> None:
    account = judged_restore(*sorted([*BEFORE[:2], wrong, *AFTER], key=lambda arrival: arrival.arrived))
    assert account.untimely == 1
    assert not account.sound


@pytest.mark.parametrize(
    "order",
    [(0, 2, 1, 3, 4), (0, 2, 3, 1, 4), (0, 1, 2, 4, 3), (1, 0, 2, 3, 4)],
    ids=["a lost one before one of the dump", "a new one before it too", "the new ones", "those of the dump"],
)
def test_the_order_of_a_key_holds_across_a_restore(order: Sequence[int]) -> None:
    every = [*BEFORE, *AFTER]
    account = judged_restore(*(every[place] for place in order))
    assert account.reordered >= 1
    assert not account.sound


@pytest.mark.parametrize(
    ("again", "strikes", "explained"),
    [
        (arrived(uid(1, 2), 41), [], True),
        (arrived(uid(1, 1), 41), [], False),
        (arrived(uid(1, 1), 41), [Strike("sigkill", 39, 41), Strike("postgres crash", 9, 41)], False),
        (arrived(uid(1, 2), 39), [], False),
        (arrived(uid(1, 2), 39), [Strike("sigkill", 20, 30)], True),
        (arrived(uid(1, 2), 60), [], False),
    ],
    ids=[
        "not settled",
        "settled",
        "and nothing else explains it",
        "before the rebase",
        "for another fault",
        "too late",
    ],
)
def test_a_restore_repeats_what_its_dump_does_not_call_settled(
    again: Arrival, strikes: Sequence[Strike], explained: bool
) -> None:
    rest = [AFTER[0], arrived(other(4), 50, emitted=49)]
    every = sorted([*BEFORE, again, *rest], key=lambda arrival: arrival.arrived)
    account = judged_restore(*every, strikes=strikes)
    assert bool(account.unexplained) is not explained
    assert account.duplicates.total() == explained


def test_what_a_writer_committed_is_in_the_log_or_was_taken_back(tmp_path: Path) -> None:
    path = expected_file(tmp_path / "expected")
    first, third = logged(1, 1, uid(1, 1)), logged(1, 3, uid(1, 3))
    found = reconcile(read(path), [third], ignore, [first])
    assert found.sound
    assert (found.committed, found.taken_back) == (1, 1)
    assert reconcile(read(path), [third], ignore).vanished
    assert reconcile(read(path), [first, third], ignore, [first]).strangers, "it cannot be both"
    assert reconcile(read(path), [first], ignore, [logged(1, 2, uid(1, 2))]).risen
    assert reconcile(read(path), [first], ignore, [logged(1, 8, uid(1, 8))]).strangers


# -- recovery -----------------------------------------------------------------------------------------------------


def flow(*arrivals: tuple[int, float, float]) -> Flow:
    """Shard, emitted, arrived."""
    found = Flow()
    for arrival in arrivals:
        found.add(*arrival)
    found.close()
    return found


def test_recovery_counts_events_emitted_after_the_fault() -> None:
    found = flow((1, 9.0, 10.5), (1, 10.2, 13.0), (2, 10.1, 14.0), (2, 10.3, 12.0), (1, 20.0, 20.1), (2, 20.0, 20.2))
    assert found.first(10.0) == 12.0
    assert found.everywhere(10.0) == 13.0
    [recovery] = recoveries([KILL], found, 30.0)
    assert (recovery.resumed_most, recovery.everywhere_most) == (2.0, 3.0)


def test_what_nobody_injected_is_read_from_the_logs() -> None:
    now = datetime.now(UTC).isoformat()
    lines = [
        {"event": "sink.restarted", "reason": "a tick took 1.4 s", "time": now},
        {"event": "sink.restarted", "reason": "the server may not be the one", "time": now},
        {
            "event": "sink.restarted",
            "reason": "sink crm: shards were given up with events in flight",
            "time": now,
        },
        {"event": "relay.started", "time": now},
        {"event": "shards.released", "sink": "erp", "shards": 3, "undone": 2, "time": now},
        {"event": "shards.released", "sink": "erp", "shards": 3, "time": now},
    ]
    found = list(starvations([lines]))
    assert [s.fault for s in found] == ["relay starved", "crm given up while down", "erp given up while down"]
    assert all(abs(strike.began - time.monotonic()) < 5 for strike in found)
