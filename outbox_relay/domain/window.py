"""Ticks, windows and positions: lossless reading of the log. Pure.

Ids do not become visible in order: a transaction may take a small id and commit late. Waiting for the oldest running
transaction would be safe, but one long transaction anywhere in the cluster would then stop all delivery. Therefore a
sink reads *windows between two snapshots*, as PgQ does.

A **tick** holds the value of the id sequence, then (later) a snapshot, and the transactions that may be running at
that time. These are the transactions listed in the snapshot and every xid from the snapshot's xmax up to the next xid,
because xmax is only the newest *finished* xid plus one.

The **window** from tick A to tick B has two parts, each in id order:

- the latecomers: ``id <= A.seq``, running at A, visible in B;
- the rest: ``id > A.seq``, visible in B, not visible in A.

Together they are the events that became visible between A and B. An event's xid is assigned before its id, so a
transaction that starts after A takes ids above ``A.seq``. Writers of one key exclude each other, and each commits
before the next takes an id. Therefore id order is commit order inside a window, and a window is cut by id only.

A **position** is (A, B or None, the last id done in the window). Ids up to ``A.seq`` belong to the first part and ids
above it to the second, so the last id also identifies the part being read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Tick(NamedTuple):
    """A sample of the log: sequence value, snapshot, next xid, read in this order.

    The snapshot is ``xmin:xmax:running``.
    """

    seq: int
    snapshot: str
    next_xid: int

    @property
    def xmax(self) -> int:
        """The first xid that counts as unfinished in the snapshot."""
        return int(self.snapshot.split(":", 2)[1])

    @property
    def running(self) -> frozenset[int]:
        """The xids below ``xmax`` that were running."""
        listed = self.snapshot.split(":", 2)[2]
        return frozenset(map(int, listed.split(","))) if listed else frozenset()

    @property
    def has_pending(self) -> bool:
        """True if a transaction may have been running, so that latecomers are possible."""
        _, xmax, listed = self.snapshot.split(":", 2)
        return bool(listed) or int(xmax) < self.next_xid


BEGINNING = Tick(0, "3:3:", 3)
"""The tick that shows no event: 3 is the first xid of a cluster."""
EVERYTHING = f"{2**63 - 1}:{2**63 - 1}:"
"""The snapshot that shows every transaction. It ends the last window of an old numbering (``outbox.rebase``).

That window begins at the lowest unsettled id, with the snapshot that shows no transaction, because xids of an old
numbering cannot be compared. It ends at its tick's ``seq``. The next window begins at the tick of that ``seq`` and of
the snapshot that ends at the tick's ``next_xid``.
"""


class Position(NamedTuple):
    """The progress of a shard: the window from ``a`` to ``b`` is done up to ``last``.

    Without ``b`` the position is between two windows: every event visible in ``a`` is done, and ``last`` is 0.
    """

    a: Tick
    b: Tick | None = None
    last: int = 0

    def opened(self, b: Tick) -> Position:
        """Return this position with the window that ends at ``b`` opened."""
        return Position(self.a, b, 0)

    def at(self, last: int) -> Position:
        """Return the position in the same window after the event with id ``last``."""
        return Position(self.a, self.b, last)

    def closed(self) -> Position:
        """Return the position after the window, before the next one."""
        if self.b is None:
            return self
        if self.b.snapshot == EVERYTHING:
            return Position(Tick(self.b.seq, f"{self.b.next_xid}:{self.b.next_xid}:", self.b.next_xid))
        return Position(self.b)


@dataclass(frozen=True, slots=True)
class WindowSlice:
    """A slice of a window for one read: ids in (``after``, ``upto``].

    A ``late`` slice is searched by the xids of latecomers, any other by id. The ``last`` slice completes the window.
    """

    late: bool
    after: int
    upto: int
    last: bool


MAX_ID = 2**63 - 1
"""The greatest id."""
MAX_REDUCTIONS = 8
"""Reductions to a quarter until a read asks for one id and one event."""
MAX_SINGLE_EVENT_FAILURES = 3
"""Consecutive failed reads of a single event after which the event counts as the reason."""
SUCCESSES = 4
"""Consecutive successful reads after which the step grows."""


class ScanStep:
    """The size of the next read.

    Each failure reduces it to a quarter; several successes let it grow again.
    """

    __slots__ = ("_failures", "_successes")

    def __init__(self) -> None:
        self._failures = 0
        self._successes = 0

    def limit(self, most: int) -> int:
        """Return the limit of the next read, from 1 to the regular limit ``most``."""
        return max(1, most >> 2 * min(self._failures, MAX_REDUCTIONS))

    @property
    def reduced(self) -> bool:
        """True if the next read is smaller than usual."""
        return self._failures > 0

    @property
    def exhausted(self) -> bool:
        """True after repeated failed reads of a single event."""
        return self._failures >= MAX_REDUCTIONS + MAX_SINGLE_EVENT_FAILURES

    def failed(self) -> None:
        """Reduce the size after a failed read."""
        self._failures += 1
        self._successes = 0

    def succeeded(self) -> None:
        """Count a successful read, and grow again after several."""
        if self._failures:
            self._failures = min(self._failures, MAX_REDUCTIONS)
            self._successes = (self._successes + 1) % SUCCESSES
            self._failures -= not self._successes


def next_slice(position: Position, max_ids: int, floor: int = 0, newest: int = 0) -> WindowSlice:
    """Return the next slice of the position's window.

    Latecomers up to ``A.seq`` are one slice: a read of them is bounded by the events it finds, and reports its end
    (``event.pop_scan_end``). The rest is cut into slices of at most ``max_ids`` ids.

    The last slice has no upper end. Between the two reads of B an emit may have taken an id above ``B.seq`` and
    committed, which makes it visible in B. ``newest`` is the ``seq`` of a later tick, or 0. Ids above ``B.seq`` are cut
    up to there as well; otherwise the last slice of a window that was open for long would span all later events.

    Ids up to ``floor`` have xids of an old numbering, so they are not latecomers of a window of the new one.
    """
    a, b, last = position
    if b is None:
        raise ValueError("there is no window to read")
    old = b.snapshot == EVERYTHING
    first = last if old else max(last, floor)
    if first < a.seq and a.has_pending:
        return WindowSlice(late=True, after=first, upto=a.seq, last=False)
    after = max(last, a.seq)
    upto = after + max_ids
    if upto < (b.seq if old else max(b.seq, newest)):
        return WindowSlice(False, after, upto, False)
    return WindowSlice(False, after, b.seq if old else MAX_ID, True)


def position_after(position: Position, piece: WindowSlice) -> Position:
    """Return the position after a slice of its window has been read completely."""
    return position.closed() if piece.last else position.at(piece.upto)


def nothing_new(a: Tick, b: Tick) -> bool:
    """Return True if the unread window from ``a`` to ``b`` is certainly empty.

    No id was taken between the ticks, and no transaction that was running at ``a`` has finished. The caller discards
    such a tick: replacing ``a`` with it unread would lose an event that took its id and committed between the two reads
    of ``b``.

    A ``b`` older than ``a`` is discarded as well. It occurs when a relay takes over a shard. Replacing ``a`` with it
    would repeat every event that became visible between the two.
    """
    if _older(b, a):
        return True
    if a.seq != b.seq:
        return False
    if a.snapshot == b.snapshot or not a.has_pending:
        return True
    xmax, running = b.xmax, b.running
    return all(x >= xmax or x in running for x in a.running) and all(
        x in running for x in range(a.xmax, min(a.next_xid, xmax))
    )


def _older(tick: Tick, than: Tick) -> bool:
    """Return True if ``tick`` shows less than ``than``.

    This follows from two facts: xmax only rises, and transactions below it only finish.
    """
    if tick.snapshot == than.snapshot:
        return False
    xmax, bound = tick.xmax, than.xmax
    return xmax < bound or (xmax == bound and not tick.running <= than.running)
