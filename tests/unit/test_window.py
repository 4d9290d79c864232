"""Windows over a modelled server: every committed event is read once, and each key in order, on every schedule.

The model assigns xids, ids and snapshots as PostgreSQL does: a transaction has its xid before it takes an id, its
savepoints take their own xids, and a snapshot's xmax is the newest finished xid plus one. A tick has three steps with
other events in between. Two relays take their own ticks and pass one position to and fro.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from outbox_relay.domain.window import (
    BEGINNING,
    EVERYTHING,
    MAX_ID,
    Position,
    ScanStep,
    Tick,
    WindowSlice,
    next_slice,
    nothing_new,
    position_after,
)

KEYS = 3
SCHEDULES = 300
FIRST_XID = 10


@dataclass
class Transaction:
    """A running transaction: its xid, its savepoints' xids and its events as (id, key)."""

    xid: int
    savepoints: list[int] = field(default_factory=list[int])
    events: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class Server:
    """Transactions that emit, and the numbers that a tick reads."""

    def __init__(self) -> None:
        self.next_xid = FIRST_XID
        self.xmax = FIRST_XID
        self.seq = 0
        self.running: dict[int, Transaction] = {}
        self.committed: dict[int, tuple[int, int]] = {}
        """id → (xid, key) of committed events."""

    def take_xid(self) -> int:
        """Return the next xid."""
        self.next_xid += 1
        return self.next_xid - 1

    def begin(self) -> Transaction:
        """Return a transaction that has taken its xid."""
        transaction = Transaction(self.take_xid())
        self.running[transaction.xid] = transaction
        return transaction

    def emit(self, transaction: Transaction, key: int) -> None:
        """Emit, if no other running transaction has emitted for the key: writers of a key exclude each other."""
        others = (other for other in self.running.values() if other is not transaction)
        if all(k != key for other in others for _, k in other.events):
            self.seq += 1
            transaction.events.append((self.seq, key))

    def finish(self, transaction: Transaction, *, commit: bool) -> None:
        """Commit or roll back."""
        del self.running[transaction.xid]
        self.xmax = max(self.xmax, transaction.xid + 1, *(xid + 1 for xid in transaction.savepoints))
        if commit:
            self.committed |= {event: (transaction.xid, key) for event, key in transaction.events}

    def snapshot(self) -> str:
        """Return the text of the current snapshot."""
        listed = sorted(xid for xid in self.running if xid < self.xmax)
        return f"{min([*listed, self.xmax])}:{self.xmax}:{','.join(map(str, listed))}"


def visible(xid: int, tick: Tick) -> bool:
    """Return the result of PostgreSQL's pg_visible_in_snapshot."""
    return xid < tick.xmax and xid not in tick.running


class Relay:
    """The newest tick of a relay, and the one being taken."""

    def __init__(self) -> None:
        self.latest: Tick | None = None
        self._seen: tuple[int, ...] = ()
        self._snapshot = ""

    def step(self, server: Server) -> None:
        """Take the next of the three steps of a tick; the last one publishes it unless it is empty."""
        if not self._seen:
            self._seen = (server.seq,)
        elif not self._snapshot:
            self._snapshot = server.snapshot()
        else:
            tick = Tick(self._seen[0], self._snapshot, server.next_xid)
            self._seen, self._snapshot = (), ""
            if self.latest is None or not nothing_new(self.latest, tick):
                self.latest = tick

    def tick(self, server: Server) -> None:
        """Take a whole tick."""
        for _ in range(3):
            self.step(server)


class Schedule:
    """Writers, two relays, and the position that they pass to and fro, in the order drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = Server()
        self.relays = (Relay(), Relay())
        self.owner = self.relays[0]
        self.position = Position(BEGINNING)
        self.got: list[int] = []

    def run(self, steps: int) -> None:
        """Take random ``steps``, finish every transaction, and read to the end."""
        kinds = [self.begin, self.emit, self.emit, self.savepoints, self.finish, self.finish, self.tick_step, self.tick]
        for _ in range(steps):
            self.random.choice([*kinds, self.tick_step, self.read, self.read, self.read, self.hand_over])()
        while self.server.running:
            self.finish()
        for _ in range(2):
            self.owner.tick(self.server)
        while self._advances():
            pass

    def _advances(self) -> bool:
        before = self.position
        self.read()
        return self.position != before

    def begin(self) -> None:
        """Begin a transaction, which takes its xid."""
        self.server.begin()

    def emit(self) -> None:
        """Emit an event in some transaction, which takes an id."""
        running = [*self.server.running.values()]
        self.server.emit(self.random.choice(running) if running else self.server.begin(), self.random.randrange(KEYS))

    def savepoints(self) -> None:
        """Take xids for the savepoints of a running transaction."""
        for transaction in self._one():
            transaction.savepoints += [self.server.take_xid() for _ in range(self.random.randint(1, 4))]

    def finish(self) -> None:
        """End a running transaction."""
        for transaction in self._one():
            self.server.finish(transaction, commit=self.random.random() < 0.8)

    def _one(self) -> list[Transaction]:
        return [self.random.choice([*self.server.running.values()])] if self.server.running else []

    def tick_step(self) -> None:
        """Take one step of a tick."""
        self.random.choice(self.relays).step(self.server)

    def tick(self) -> None:
        """Take the remaining steps of a tick at once."""
        self.random.choice(self.relays).tick(self.server)

    def hand_over(self) -> None:
        """Pass the position to the other relay."""
        self.owner = self.relays[1] if self.owner is self.relays[0] else self.relays[0]

    def read(self) -> None:
        """Open a window if the newest tick may show events, and read a slice of it."""
        tick = self.owner.latest
        if tick and self.position.b is None and not nothing_new(self.position.a, tick):
            self.position = self.position.opened(tick)
        if self.position.b is not None:
            self._read(next_slice(self.position, self.random.randint(1, 5)), self.random.randint(1, 3))

    def _read(self, piece: WindowSlice, most: int) -> None:
        upto = self.random.randint(piece.after + 1, piece.upto) if piece.late else piece.upto
        ids = [event for event in self._found(piece) if event <= upto][:most]
        self.got += ids
        if len(ids) == most:
            self.position = self.position.at(ids[-1])
        elif upto < piece.upto:  # an incomplete read of latecomers
            self.position = self.position.at(upto)
        else:
            self.position = position_after(self.position, piece)

    def _found(self, piece: WindowSlice) -> list[int]:
        a, b = self.position.a, self.position.b
        assert b is not None
        pending = a.running | set(range(a.xmax, a.next_xid))
        return [
            event
            for event, (xid, _) in sorted(self.server.committed.items())
            if piece.after < event <= piece.upto
            and visible(xid, b)
            and (xid in pending if piece.late else not visible(xid, a))
        ]


@pytest.mark.parametrize("batch", range(10))
def test_every_committed_event_is_read_once_and_every_key_in_order(batch: int) -> None:
    for seed in range(batch * SCHEDULES, (batch + 1) * SCHEDULES):
        schedule = Schedule(seed)
        schedule.run(steps=60)
        assert sorted(schedule.got) == sorted(schedule.server.committed), f"seed {seed}"
        for key in range(KEYS):
            of_key = [event for event in schedule.got if schedule.server.committed[event][1] == key]
            assert of_key == sorted(of_key), f"seed {seed}, key {key}"


# -- ticks --------------------------------------------------------------------------------------------------------


A = Tick(100, "7:12:7,9", 15)


# -- positions and slices -----------------------------------------------------------------------------------------

B = Tick(250, "20:20:", 20)


def test_ids_behind_the_window_are_cut_up_to_a_later_tick() -> None:
    """Otherwise the last read of a window that was open for a day would span all later events."""
    assert next_slice(Position(A, B, 240), 100, newest=1000) == WindowSlice(late=False, after=240, upto=340, last=False)
    assert next_slice(Position(A, B, 940), 100, newest=1000) == WindowSlice(
        late=False, after=940, upto=MAX_ID, last=True
    )
    assert next_slice(Position(A, B, 240), 100, newest=200) == WindowSlice(
        late=False, after=240, upto=MAX_ID, last=True
    )


# -- an old numbering ---------------------------------------------------------------------------------------------

LAST_OF_OLD = Tick(300, EVERYTHING, 15)


def test_window_of_an_old_numbering_ends_at_its_sequence() -> None:
    position = Position(A, LAST_OF_OLD, 290)
    piece = next_slice(position, 10, floor=300)
    assert piece == WindowSlice(late=False, after=290, upto=300, last=True)
    assert position_after(position, piece) == Position(Tick(300, "15:15:", 15))


def test_ids_up_to_the_floor_are_no_latecomers_of_a_new_numbering() -> None:
    assert next_slice(Position(A, B), 10, floor=60) == WindowSlice(late=True, after=60, upto=100, last=False)
    assert next_slice(Position(A, B), 10, floor=100) == WindowSlice(late=False, after=100, upto=110, last=False)


# -- the size of a read --------------------------------------------------------------------------------------------


def test_steps_shrink_to_one_and_grow_back() -> None:
    steps = ScanStep()
    asked: list[int] = []
    for _ in range(9):
        asked.append(steps.limit(50_000))
        steps.failed()
    assert asked == [50_000, 12_500, 3125, 781, 195, 48, 12, 3, 1]
    assert not steps.exhausted
    for _ in range(100):
        steps.succeeded()
    assert steps.limit(50_000) == 50_000


def test_an_event_is_suspected_after_several_reads_of_it_alone() -> None:
    steps = ScanStep()
    failures = 0
    while not steps.exhausted:
        assert steps.limit(1) == 1
        steps.failed()
        failures += 1
    assert failures == 11
    steps.succeeded()
    assert not steps.exhausted
    assert steps.limit(50_000) == 1
