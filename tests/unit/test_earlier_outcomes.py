"""Questions of reads about earlier sessions, statement by statement, and the outcome of their events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast
from uuid import UUID

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import InFlight
from outbox_relay.domain.window import Position, Tick
from outbox_relay.postgres.store import Store
from outbox_relay.relay import earlier_outcomes
from outbox_relay.relay.earlier_outcomes import EarlierOutcomes
from outbox_relay.sinks.contract.handing import an_event
from tests.support.relay_harness import spec


class Rows:
    """The rows and marks of a database, in memory, and the statements that asked for them."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.dead: dict[str, int] = {}
        self.marks: dict[int, UUID] = {}
        self.asked: list[object] = []

    def blocked_keys(
        self, _sink: str, shards: Iterable[int], hold: bool, *, server: str | None
    ) -> tuple[list[tuple[str, int]], bool]:
        assert server == "here"
        shards = set(shards)
        self.asked.append(shards)
        return [(key, shard) for key, shard in self.live.items() if shard in shards], hold and bool(self.dead)

    def still_blocked(self, _sink: str, keys: Sequence[str], hold: bool, *, server: str | None) -> set[str]:
        assert server == "here"
        self.asked.append(keys)
        return set(keys) & (self.live.keys() | (self.dead.keys() if hold else set()))

    def highest_discarded(self, _sink: str, *, server: str | None) -> int | None:
        assert server == "here"
        return max(self.marks, default=None)

    def discarded(self, _sink: str, events: Collection[tuple[int, UUID]], *, server: str | None) -> set[int]:
        assert server == "here"
        self.asked.append(dict(events))
        return {event_id for event_id, uid in events if self.marks.get(event_id) == uid}


class Screen:
    """An object under test, and what it works on."""

    def __init__(self, rows: Rows, *, hold: bool = False) -> None:
        self.in_flight = InFlight()
        self.blocked = self.in_flight.blocked
        self.rows = rows
        self.outcomes = EarlierOutcomes(cast("Store", rows), spec("s", hold=hold), self.in_flight, "here")

    def take_over(self, *shards: int) -> None:
        self.outcomes.take_over(shards)
        self.in_flight.take_over(shards, Position(Tick(0, "3:3:", 3)))
        self.rows.asked.clear()

    def read(self, *events: StoredEvent) -> list[int]:
        return [event.id for event in self.outcomes.screen(list(events))]


def event(number: int, key: str | None = None) -> StoredEvent:
    return an_event(key)._replace(id=number, uid=str(UUID(int=number)), shard=1)


# -- dead rows --------------------------------------------------------------------------------------------------------


def test_a_read_asks_for_its_keys_that_are_not_known_to_be_blocked() -> None:
    rows = Rows()
    rows.dead = {f"dead-{n}": 1 for n in range(1000)}
    rows.live["live"] = 1
    screen = Screen(rows, hold=True)
    screen.take_over(1)
    assert len(screen.blocked) == 1, "the keys of dead rows are not loaded"
    assert screen.read(event(1, "dead-7"), event(2, "live"), event(3), event(4, "free")) == [1, 2, 3, 4]
    assert rows.asked == [set(), ["dead-7", "free"]]
    assert {key for key in ("dead-7", "live", "free") if key in screen.blocked} == {"dead-7", "live"}
    screen.read(event(5, "dead-7"), event(6, "live"))
    assert rows.asked == [set(), ["dead-7", "free"]], "every key is known, and the rest is asked at intervals"


@pytest.mark.fence("the new owner of a shard delivers an event while a dead row holds its key")
def test_a_retried_row_blocks_its_key_although_no_dead_row_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_outcomes, "LOOK_SECONDS", 0.0)
    rows = Rows()
    rows.dead["a"] = 1
    screen = Screen(rows, hold=True)
    screen.take_over(1)
    rows.live, rows.dead = rows.dead, {}
    screen.read(event(1, "a"), event(2, "b"))
    assert "a" in screen.blocked
    assert rows.asked == [set(), {1}], "the keys of live rows were loaded"
    screen.read(event(3, "c"))
    assert rows.asked == [set(), {1}], "nothing is asked any more"


# -- discarded events -------------------------------------------------------------------------------------------------


def test_marked_events_are_left_out_until_the_reading_has_passed_the_highest_mark() -> None:
    rows = Rows()
    rows.marks = {2: UUID(int=2), 5: UUID(int=5)}
    screen = Screen(rows)
    screen.take_over(1)
    assert screen.read(event(1), event(2), event(3)) == [1, 3]
    assert screen.read(event(4), event(5), event(6)) == [4, 6]
    assert rows.asked == [{n: UUID(int=n) for n in (1, 2, 3)}, {n: UUID(int=n) for n in (4, 5)}]
    assert screen.read(event(7), event(8)) == [7, 8]
    assert len(rows.asked) == 2
    assert screen.read(event(5)) == [], "a shard that was taken over later, or an event that was late"
