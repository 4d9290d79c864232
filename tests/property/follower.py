"""Following the log as a relay does, by ticks and windows, in chunks so small that windows are cut everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager

from outbox_relay.domain.event import SHARDS, StoredEvent, cut_unread, max_wire_bytes, pop_scan_end
from outbox_relay.domain.window import BEGINNING, Position, Tick, WindowSlice, next_slice, nothing_new, position_after
from outbox_relay.postgres.log import TickResult, WindowRequest
from outbox_relay.postgres.store import Store

AMPLE_BYTES = 1 << 30
NO_IDS, AMPLE_IDS = 5, 1 << 40
START = Position(BEGINNING)


@contextmanager
def opened(dsn: str) -> Generator[Store]:
    """Yield the product's store on a database, with two connections and one for ticks."""
    store = Store(lambda: dsn, pooler=False, connections=2)
    store.open()
    try:
        yield store
    finally:
        store.close()


class Follower:
    """One reader of the log; ``got`` is what it has read, ``position`` where it stands.

    Each chunk has at most ``most_rows`` events of at most ``most_span`` ids, or fewer as ``seed`` draws them.
    """

    most_payload: int | None = AMPLE_BYTES
    """The largest payload that is asked for, as the relay does; None asks as relays of version 1 do."""
    sizes: Sequence[int | None] = (None, 1, 20, 2000)
    """Sizes of small events, of which each read draws one; None reads events of every size."""

    def __init__(
        self,
        store: Store,
        *,
        position: Position = START,
        shards: Collection[int] = range(SHARDS),
        types: Sequence[str] | None = None,
        most_rows: int = 25,
        most_span: int = 100,
        most_bytes: int = AMPLE_BYTES,
        seed: int = 0,
    ) -> None:
        self._store = store
        self._shards = sorted(shards)
        self._types = types
        self._most_rows = most_rows
        self._most_span = most_span
        self._most_bytes = most_bytes
        self._random = random.Random(seed)
        self.position = position
        self.got: list[StoredEvent] = []
        self.reads: list[tuple[WindowSlice, list[int]]] = []
        """Every piece that was asked for, and the ids that came."""
        self.windows = 0
        """The number of windows that came with their tick."""
        self.longest_range = 0
        """Most transactions above the xmax of a tick that was followed."""

    @property
    def ids(self) -> list[int]:
        """The ids that were read, in that order."""
        return [event.id for event in self.got]

    def follow(self) -> Tick:
        """Take a tick and read the window that ends there, if it may hold anything."""
        tick = self._seen((self._store.tick()).tick)
        self.read_to(tick)
        return tick

    def read_to(self, tick: Tick) -> None:
        """Read the window that ends at ``tick``, if it may hold anything."""
        if nothing_new(self.position.a, tick):
            return
        self.longest_range = max(self.longest_range, tick.next_xid - tick.xmax)
        self.position = self.position.opened(tick)
        while self.position.b is not None:
            self.read_piece()

    def read_piece(self) -> None:
        """Read one chunk of the window that is open."""
        start = self.position
        assert start.b is not None
        piece = next_slice(start, self._random.randint(1, self._most_span))
        most = self._random.randint(1, self._most_rows)
        events, is_cut = self._ask(piece, start.a, start.b, most)
        upto = pop_scan_end(events)
        if is_cut or len(events) >= most or max_wire_bytes(events) >= self._most_bytes:
            upto = events[-1].id
        self.got += events
        self.reads.append((piece, [event.id for event in events]))
        self.position = position_after(start, piece) if upto is None else start.at(upto)

    def _ask(self, piece: WindowSlice, a: Tick, b: Tick, most: int) -> tuple[list[StoredEvent], bool]:
        """Return the events of a read, and True if it was one of small events that ended before a large one."""
        window = (self._shards, self._types, a, b, piece.after, piece.upto, most)
        if not piece.late and self.most_payload is not None and (size := self._random.choice(self.sizes)) is not None:
            events = self._store.read_small(*window, size, most_payload=self.most_payload)
            is_cut = cut_unread(events)
            if events or not is_cut:
                return events, is_cut
        ask, a = (self._store.read_late, self._latecomers_of(a)) if piece.late else (self._store.read_rest, a)
        bounds = (piece.after, piece.upto, most, self._most_bytes)
        return ask(self._shards, self._types, a, b, *bounds, most_payload=self.most_payload), False

    def _seen(self, tick: Tick) -> Tick:
        return tick

    def _latecomers_of(self, a: Tick) -> Tick:
        return a


class WithoutRange(Follower):
    """Takes only what a snapshot lists for pending, not the transactions above its xmax."""

    def _seen(self, tick: Tick) -> Tick:
        return tick._replace(next_xid=tick.xmax)


class WithoutList(Follower):
    """Takes only the transactions above a snapshot's xmax for pending, not those that it lists."""

    def _latecomers_of(self, a: Tick) -> Tick:
        return a._replace(snapshot=f"{a.xmax}:{a.xmax}:")


def at_once(_result: TickResult, _seconds: float) -> bool:
    """End a look after the first one."""
    return True


class Looking(Follower):
    """Reads the window with the tick, and in pieces what is left."""

    fault_at: int = AMPLE_BYTES
    """The size from which on a look returns no payload."""
    _looks = 0
    """The number of looks that found something new; every third asks for a window of almost no ids."""

    def follow(self) -> Tick:
        a, most_ids = self.position.a, NO_IDS if self._looks % 3 == 0 else AMPLE_IDS
        request = WindowRequest(
            *(a, 0, frozenset(self._shards), self._types, most_ids, self._random.randint(1, self._most_rows)),
            *(self._most_bytes, self.fault_at, self._random.choice(self.sizes)),
        )
        look = self._store.look(request)
        tick, window = look.result.tick, look.window
        if nothing_new(a, tick):
            return tick
        self._looks += 1
        self.position = self.position.opened(tick)
        if window is not None and window.usable:
            self.windows += 1
            self.got += window.events
            self.position = self.position.closed() if window.upto is None else self.position.at(window.upto)
        while self.position.b is not None:
            self.read_piece()
        return tick


class OnlyWhenMoved(Looking):
    """Looks, and takes a window for empty if no id was taken since."""

    def follow(self) -> Tick:
        a, read = self.position.a, len(self.got)
        tick = super().follow()
        if tick.seq == a.seq:
            del self.got[read:]
            self.position = Position(tick)
        return tick


ALL: Sequence[Callable[..., Follower]] = (Follower, WithoutRange, WithoutList, Looking, OnlyWhenMoved)
