"""Ticks, windows and positions: how the log is read so that nothing is lost and nobody is waited for. Pure.

Ids do not become visible in order: a transaction may take a small id and commit late. Gating on the oldest
running transaction would be safe and would let one long transaction anywhere in the cluster stop everything.
So a sink reads *windows between two snapshots*, as PgQ does.

A **tick** holds the id sequence's value, then (later) a snapshot, and the transactions that may be running
then: those that the snapshot lists, and every xid from the snapshot's xmax up to the next xid, because a
snapshot's xmax is only the newest *finished* xid plus one.

The **window** from tick A to tick B has two parts, each in id order:

- the latecomers: ``id <= A.seq``, running at A, visible in B;
- the rest: ``id > A.seq``, visible in B, not visible in A.

Together they are what became visible between A and B. An event's xid is assigned before its id, so whoever
starts after A takes ids above ``A.seq``: nothing else can be below it. Of one key, whose writers exclude each
other, each writer commits before the next takes an id; so id order is commit order inside a window, and a
window is cut by id only.

A **position** is (A, B or nothing, the last id done in the window). Ids up to ``A.seq`` belong to the first
part and ids above it to the second, so the last id also tells which part is being read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Tick(NamedTuple):
    """One look at the log: its sequence value, then the snapshot (``xmin:xmax:running``), then the next xid."""

    seq: int
    snapshot: str
    next_xid: int

    @property
    def xmax(self) -> int:
        """The first xid that the snapshot takes for unfinished."""
        return int(self.snapshot.split(":", 2)[1])

    @property
    def running(self) -> frozenset[int]:
        """The xids below ``xmax`` that were running."""
        listed = self.snapshot.split(":", 2)[2]
        return frozenset(map(int, listed.split(","))) if listed else frozenset()

    @property
    def has_pending(self) -> bool:
        """Whether any transaction may have been running, so that latecomers may come."""
        _, xmax, listed = self.snapshot.split(":", 2)
        return bool(listed) or int(xmax) < self.next_xid


BEGINNING = Tick(0, "3:3:", 3)
"""The tick in which nothing is visible: 3 is the first xid of a cluster."""


EVERYTHING = f"{2**63 - 1}:{2**63 - 1}:"
"""The snapshot in which every transaction is visible: it ends the last window of an old numbering (``outbox.rebase``).

It begins at the lowest id that is not settled, with the snapshot in which nothing is visible: beside an old numbering,
transaction numbers mean nothing. It holds nothing above its tick's ``seq``; behind it stands the tick of that ``seq``
and of the snapshot that ends at the tick's ``next_xid``.
"""


class Position(NamedTuple):
    """How far a shard has been delivered: the window from ``a`` to ``b``, done up to ``last``.

    Without ``b`` it stands between two windows: everything visible in ``a`` is done, and ``last`` is 0.
    """

    a: Tick
    b: Tick | None = None
    last: int = 0

    def opened(self, b: Tick) -> Position:
        """The same place, at the start of the window that ends at ``b``."""
        return Position(self.a, b, 0)

    def at(self, last: int) -> Position:
        """The same window, done up to the event with id ``last``."""
        return Position(self.a, self.b, last)

    def closed(self) -> Position:
        """Behind the window: between it and the next."""
        if self.b is None:
            return self
        if self.b.snapshot == EVERYTHING:
            return Position(Tick(self.b.seq, f"{self.b.next_xid}:{self.b.next_xid}:", self.b.next_xid))
        return Position(self.b)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a window that one read can return: ids in (``after``, ``upto``].

    ``late`` pieces are looked for by the xids of latecomers, others by their ids. ``last`` is whether the
    window is done when everything in it has been read.
    """

    late: bool
    after: int
    upto: int
    last: bool


FOR_EVER = 2**63 - 1
"""Above every id."""
MOST_CUTS = 8
"""How often a step is quartered until it asks for one id and one event."""
LAST_TRIES = 3
"""Reads of a single event that fail in a row before the event itself counts as the reason."""
SUCCESSES = 4
"""Reads in a row that succeed before a step grows again."""


class Steps:
    """How much one read asks for: a quarter after each that failed, more again after several that succeeded."""

    __slots__ = ("_failures", "_successes")

    def __init__(self) -> None:
        self._failures = 0
        self._successes = 0

    def of(self, most: int) -> int:
        """Return how much to ask for where ``most`` is the usual bound; at least 1."""
        return max(1, most >> 2 * min(self._failures, MOST_CUTS))

    @property
    def exhausted(self) -> bool:
        """Whether reads of a single event failed again and again."""
        return self._failures >= MOST_CUTS + LAST_TRIES

    def failed(self) -> None:
        """Ask for less from now on."""
        self._failures += 1
        self._successes = 0

    def succeeded(self) -> None:
        """Count a read that succeeded."""
        if self._failures:
            self._failures = min(self._failures, MOST_CUTS)
            self._successes = (self._successes + 1) % SUCCESSES
            self._failures -= not self._successes


def part(position: Position, span: int, floor: int = 0, newest: int = 0) -> Part:
    """The next piece of the position's window; its rest is cut into ranges of ``span`` ids, so no read is unbounded.

    Latecomers are looked for by xid up to ``A.seq`` in one piece: a read of them is bounded by what it finds, and says
    how far it got (``event.looked_through``).

    The last range has no upper end: between the two reads of B an emit may have taken an id above ``B.seq``
    and committed, which makes it visible in B. ``newest`` is the ``seq`` of a later tick, or 0: up to it the ids above
    ``B.seq`` are cut as well, or the last range of a window that was open for long would hold all that came meanwhile.
    Ids up to ``floor`` carry xids of an old numbering: they are no latecomers of a window of the new one.
    """
    a, b, last = position
    if b is None:
        raise ValueError("there is no window to read")
    old = b.snapshot == EVERYTHING
    first = last if old else max(last, floor)
    if first < a.seq and a.has_pending:
        return Part(late=True, after=first, upto=a.seq, last=False)
    after = max(last, a.seq)
    upto = after + span
    if upto < (b.seq if old else max(b.seq, newest)):
        return Part(False, after, upto, False)
    return Part(False, after, b.seq if old else FOR_EVER, True)


def read(position: Position, piece: Part) -> Position:
    """The position after all of ``piece`` has been read."""
    return position.closed() if piece.last else position.at(piece.upto)


def nothing_new(a: Tick, b: Tick) -> bool:
    """Whether the window from ``a`` to ``b`` is certainly empty, judged without reading.

    No id was taken in between, and no transaction that was running at ``a`` has finished. Such a tick is
    thrown away: putting it in the place of ``a`` unread loses an event that took its id and committed between
    the two reads of ``b``.

    So is a ``b`` that is older than ``a``, as a relay's newest tick may be that takes over a shard: in the place
    of ``a`` it would have everything read again that became visible between the two.
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
    """Whether ``tick`` shows less than ``than``: xmax only rises, and below it transactions only finish."""
    if tick.snapshot == than.snapshot:
        return False
    xmax, bound = tick.xmax, than.xmax
    return xmax < bound or (xmax == bound and not tick.running <= than.running)
