"""Events in flight: positions under out-of-order completion, shard groups that split and join, blocked keys.

The schedules are random and seeded. Naive models check them: the undone events of every shard, and the committed and
uncommitted rows of every key.
"""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import BlockedKeys, Chunk, InFlight, ShardGroup
from outbox_relay.domain.window import Position, Tick

A, B, C = Tick(0, "10:10:", 10), Tick(100, "20:20:", 20), Tick(200, "30:30:", 30)
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
BATCHES, SCHEDULES = 8, 100


def event(number: int, shard: int = 0, size: int = 0) -> StoredEvent:
    return StoredEvent(number, shard, f"uid-{number}", "type", None, b"x" * size, "text/plain", None, None, LONG_AGO)


def chunk(*ids: int, start: Position, end: Position) -> Chunk:
    return Chunk([event(i) for i in ids], start, end)


# -- chunks -------------------------------------------------------------------------------------------------------

OPEN = Position(A, B)


# -- shard groups -------------------------------------------------------------------------------------------------


def test_leaving_shards_keep_their_events_in_flight() -> None:
    group = ShardGroup({1, 2, 3}, OPEN)
    part = chunk(5, 7, start=OPEN, end=OPEN.at(7))
    group.take(part)
    leaving = group.split({2, 3, 9})
    assert (group.shards, leaving.shards) == ({1}, {2, 3})
    assert leaving.position == OPEN.at(7)
    assert not leaving.idle
    part.settle(0)
    assert group.settled == leaving.settled == OPEN.at(5)
    part.settle(1)
    assert leaving.idle
    assert group.settled == leaving.settled == OPEN.at(7)


def test_rounds_without_events_use_no_memory_while_one_event_is_not_done() -> None:
    group = ShardGroup({1, 2}, OPEN)
    first = chunk(5, 7, start=OPEN, end=OPEN.closed())
    group.take(first)
    for number in range(2, 10_002):
        group.follow(tick(number))
        group.take(chunk(start=group.position, end=group.position.closed()))
    assert len(group.chunks) == 1
    leaving = group.split({2})
    group.follow(tick(20_000))
    group.take(chunk(start=group.position, end=group.position.closed()))
    assert group.settled == leaving.settled == OPEN
    assert group.unsettled_before_last_done() == []
    first.settle_all()
    assert group.settled == Position(tick(20_000))
    assert leaving.settled == Position(tick(10_001)), "leaving shards were read further"


class Groups:
    """Shard groups under a random schedule, and the undone ids of every shard.

    Each window is 100 ids wide; a chunk may end inside it or at its end.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.undone: dict[int, set[int]] = {shard: set() for shard in range(4)}
        self.groups = [ShardGroup(range(4), Position(tick(0)))]
        self.furthest = dict.fromkeys(range(4), 0)

    def step(self) -> None:
        group = self.random.choice(self.groups)
        self.random.choice([self.read, self.read, self.settle, self.settle, self.settle, self.split, self.join])(group)
        for one in self.groups:
            self.check(one)

    def read(self, group: ShardGroup) -> None:
        if group.position.b is None:
            group.follow(tick(group.position.a.seq // 100 + 1))
        start = group.position
        assert start.b is not None
        after = max(start.last, start.a.seq)
        ids = sorted(self.random.sample(range(after + 1, start.b.seq + 1), min(3, start.b.seq - after)))
        cut = bool(ids) and self.random.random() < 0.6
        shards = sorted(group.shards)
        part = Chunk(
            [event(i, self.random.choice(shards)) for i in ids], start, start.at(ids[-1]) if cut else start.closed()
        )
        for one in part.events:
            self.undone[one.shard].add(one.id)
        group.take(part)

    def settle(self, group: ShardGroup) -> None:
        undone = [(part, place) for part in group.chunks for place in part.undone()]
        if undone:
            part, place = self.random.choice(undone)
            part.settle(place)
            self.undone[part.events[place].shard].discard(part.events[place].id)

    def split(self, group: ShardGroup) -> None:
        if len(group.shards) > 1:
            self.groups.append(group.split(set(self.random.sample(sorted(group.shards), 1))))

    def join(self, group: ShardGroup) -> None:
        other = next((o for o in self.groups if o is not group and o.can_join(group)), None)
        if other is not None:
            other.join(group)
            self.groups.remove(group)

    def check(self, group: ShardGroup) -> None:
        settled, position = group.settled, group.position
        for shard in group.shards:
            assert min(self.undone[shard], default=2**63) > reach(settled), "a position covers an undone event"
            assert reach(settled) >= self.furthest[shard], "a position went back"
            self.furthest[shard] = reach(settled)
        if group.idle:
            assert reach(settled) == reach(position), "every event is done, but the position is behind"


def tick(number: int) -> Tick:
    return Tick(100 * number, f"{10 + number}:{10 + number}:", 10 + number)


def reach(position: Position) -> int:
    """Return the id up to which every event is done, according to a position."""
    return max(position.a.seq, position.last)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_position_covers_exactly_the_events_that_are_done(batch: int) -> None:
    for seed in range(batch * SCHEDULES, (batch + 1) * SCHEDULES):
        groups = Groups(seed)
        for _ in range(60):
            groups.step()


# -- blocked keys -------------------------------------------------------------------------------------------------

KEYS = {f"key-{n}": n % 2 for n in range(4)}
"""key → its shard"""


class Rows:
    """Two shards, owned by this or another relay, and the rows of their keys: committed, under way, being collected.

    Concurrent actions are separate steps: settlements are strictly serial, a question is asked, executed and answered
    in three steps, any relay finishes rows, and the owner of a shard adds rows.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.blocked = BlockedKeys()
        self.ours = {0, 1}
        self.rows: Counter[str] = Counter()
        self.collected: Counter[str] = Counter()
        self.under_way: tuple[int, Counter[str]] | None = None
        self.question: tuple[int, list[str]] | None = None
        self.answer: set[str] | None = None

    def step(self) -> None:
        steps = [self.park, self.settle, self.settle, self.finish, self.lose, self.lose, self.take, self.ask]
        self.random.choice(steps)()
        waiting = {key for key, shard in KEYS.items() if shard in self.ours and self.has_rows(key)}
        assert all(key in self.blocked for key in waiting), "a key with rows would be delivered directly"
        assert len(self.blocked) <= sum(shard in self.ours for shard in KEYS.values()), "another relay's key is blocked"

    def has_rows(self, key: str) -> bool:
        """Return True if later events of the key must wait, given the complete state."""
        return any(rows[key] > 0 for rows in (self.rows, self.collected, *(self.under_way or (0, Counter()))[1:]))

    def park(self) -> None:
        key = self.random.choice([*KEYS])
        if KEYS[key] not in self.ours:
            self.rows[key] += 1  # by the relay that owns the shard
        else:
            self.blocked.touch(key, KEYS[key])
            self.collected[key] += 1

    def settle(self) -> None:
        if self.under_way is not None:
            number, rows = self.under_way
            self.under_way = None
            self.rows.update(rows)
            self.blocked.commit(number)
        elif self.collected.total() or self.random.random() < 0.1:
            self.under_way, self.collected = (self.blocked.begin(), self.collected), Counter()

    def finish(self) -> None:
        key = self.random.choice([*KEYS])
        self.rows[key] = max(0, self.rows[key] - 1)

    def lose(self) -> None:
        """Release a shard after its last settlement."""
        if self.under_way is None and not self.collected.total() and self.ours:
            shard = self.random.choice(sorted(self.ours))
            self.ours.discard(shard)
            self.blocked.forget({shard})

    def take(self) -> None:
        if taken := {0, 1} - self.ours:
            self.ours |= taken
            self.blocked.load((key, shard) for key, shard in KEYS.items() if shard in taken and self.rows[key] > 0)

    def ask(self) -> None:
        if self.question is None:
            self.question = self.blocked.settled(self.random.randint(1, 3))
        elif self.answer is None:
            self.answer = {key for key in self.question[1] if self.rows[key] > 0}
        else:
            self.blocked.free(*self.question, self.answer)
            self.question = self.answer = None

    def calm_down(self) -> None:
        """Settle and finish everything, then ask a few more questions."""
        self.take()
        for _ in range(100):
            self.settle()
        self.rows.clear()
        for _ in range(3 * len(KEYS) + 3):
            self.ask()


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_key_with_rows_is_delivered_directly_and_none_stays_blocked(batch: int) -> None:
    for seed in range(batch * SCHEDULES, (batch + 1) * SCHEDULES):
        rows = Rows(seed)
        for _ in range(150):
            rows.step()
        rows.calm_down()
        assert len(rows.blocked) == 0, f"seed {seed}"


@pytest.mark.fence("a key is delivered directly while a row of it is being written")
def test_key_touched_while_the_question_was_under_way_stays_blocked() -> None:
    blocked = BlockedKeys()
    blocked.touch("k", 1)
    blocked.commit(blocked.begin())
    asked_at, asked = blocked.settled(10)
    assert asked == ["k"]
    blocked.touch("k", 1)
    assert blocked.free(asked_at, asked, set()) == []
    assert "k" in blocked


# -- all events in flight of a sink -------------------------------------------------------------------------------


def read(in_flight: InFlight, *events: StoredEvent) -> Chunk:
    """Add a chunk that ends the window of the group whose turn it is."""
    [group, *_] = in_flight.readable
    part = Chunk(events, group.position, Position(B))
    in_flight.take(group, part)
    return part


def test_an_inherited_position_is_written_once_and_has_not_advanced() -> None:
    """Goes red when a take-over counts the position as written: it is that of an earlier epoch."""
    in_flight = InFlight()
    in_flight.take_over([1, 2], Position(A))
    assert in_flight.begin_settlement(everything=False) == (1, {})
    assert in_flight.begin_settlement(everything=True) == (2, {1: Position(A), 2: Position(A)})
    assert in_flight.record_written({1: Position(A), 2: Position(B)}) == {2}
    assert in_flight.begin_settlement(everything=True)[1] == {2: Position(A)}
    in_flight.drain([1])
    in_flight.drop(in_flight.leaving[0])
    in_flight.take_over([1], Position(A))
    assert in_flight.begin_settlement(everything=True)[1].keys() == {1, 2}
