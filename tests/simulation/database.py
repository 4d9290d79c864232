"""The database of the simulation: transactions, the log, shards, positions and rows of one sink, as in the schema.

Each method is one transaction. What the schema's own functions do is asked of a server elsewhere: see ``fences``.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from outbox_relay.domain.errors import IncarnationChanged, LeaseLost
from outbox_relay.domain.event import UNREAD, StoredEvent
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.domain.window import Position, Tick, WindowSlice
from outbox_relay.postgres.log import Look, TickResult, WindowRead, WindowRequest
from outbox_relay.postgres.rows import ClaimedRow, DeliveredRow, NewRow, ParkedWindow, QueueClaim, RowPlace, RowUpdate
from outbox_relay.postgres.shards import Claimed, RelayRank
from outbox_relay.postgres.sinks import SinkRow

SHARDS = 8
EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
SMALL_WINDOW = 10
"""Maximum number of events that come with a tick."""
FEW = 7
"""Maximum number of events in one read, so that windows are read in several."""
LARGE = 11
"""Every event with an id of which this is a divisor counts as a large one."""
BEGINNING = Position(Tick(0, "3:3:", 3))


@dataclass
class Row:
    """A row of ``outbox.delivery``."""

    event: StoredEvent
    state: str
    ordered: bool
    due_at: float
    attempts: int = 0
    claims: int = 0
    lease: UUID | None = None
    lease_until: float = 0.0
    owner: UUID | None = None
    error: str | None = None


@dataclass
class Shard:
    """A row of ``outbox.shard``."""

    owner: UUID | None = None
    epoch: int = 0
    crashes: int = 0


@dataclass
class Transaction:
    """A transaction of a writer: its events become visible together."""

    xid: int
    events: list[StoredEvent] = field(default_factory=list[StoredEvent])


def visible(xid: int, snapshot: str) -> bool:
    """Return what ``pg_visible_in_snapshot`` does."""
    xmin, xmax, running = snapshot.split(":")
    return xid < int(xmin) or (xid < int(xmax) and str(xid) not in running.split(","))


@dataclass
class Contents:
    """The contents of a copy of the database, which a restore brings back."""

    next_xid: int = 3
    seq: int = 0
    finished_max: int = 2
    log: list[tuple[int, StoredEvent]] = field(default_factory=list[tuple[int, StoredEvent]])
    """(xid, event) of committed transactions, by id."""
    commits: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The uids of each key in the order of commits."""
    shards: list[Shard] = field(default_factory=lambda: [Shard() for _ in range(SHARDS)])
    sessions: dict[UUID, float] = field(default_factory=dict[UUID, float])
    """The end of the lease of each relay."""
    ledger: dict[int, list[tuple[int, Position]]] = field(default_factory=dict[int, list[tuple[int, Position]]])
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    relays: dict[UUID, tuple[float, bool]] = field(default_factory=dict[UUID, tuple[float, bool]])
    discarded: dict[int, str] = field(default_factory=dict[int, str])
    generation: int = 1
    patterns: tuple[str, ...] = ("*",)
    paused: bool = False


class MemoryDatabase:
    """One sink, its log and its rows."""

    def __init__(self, claim: str = "log", *, hold: bool = False, limits: SinkLimits = NO_LIMITS) -> None:
        self.time = 1000.0
        self.running: dict[int, Transaction] = {}
        self.incarnation = "1"
        self.emitted = 0
        self.claim = claim
        self.hold = hold
        self.limits = limits
        self.contents = Contents()

    # -- writers ------------------------------------------------------------------------------------------------

    def begin(self) -> Transaction:
        """Begin a transaction, which has a number at once."""
        transaction = Transaction(self.contents.next_xid)
        self.contents.next_xid += 1
        self.running[transaction.xid] = transaction
        return transaction

    def emit(self, transaction: Transaction, key: str | None, *, scheduled: bool, fault: str | None, type: str) -> None:
        """Add an event, which has an id at once and a uid that no other event ever has."""
        self.contents.seq += 1
        self.emitted += 1
        event_id, uid = self.contents.seq, str(UUID(int=self.emitted))
        shard = zlib.crc32((key or uid).encode()) % SHARDS
        at = EPOCH + timedelta(seconds=self.time)
        event = StoredEvent(
            event_id, shard, uid, type, key, b"{}", "application/json", None, at if scheduled else None, at
        )
        transaction.events.append(event._replace(fault=fault, payload=None if fault else b"{}"))

    def end(self, transaction: Transaction, *, commit: bool) -> None:
        """Commit or roll back."""
        contents = self.contents
        del self.running[transaction.xid]
        contents.finished_max = max(contents.finished_max, transaction.xid)
        if commit:
            contents.log.extend((transaction.xid, event) for event in transaction.events)
            contents.log.sort(key=lambda pair: pair[1].id)
            for event in transaction.events:
                if event.key is not None:
                    contents.commits[event.key].append(event.uid)

    def save(self) -> Contents:
        """Return a copy of the database, in which every transaction that runs has ended."""
        saved = copy.deepcopy(self.contents)
        saved.finished_max = saved.next_xid - 1
        return saved

    def restore(self, saved: Contents) -> None:
        """Go back to a copy, as after a failover to a standby that was behind: numbers are given out again."""
        self.contents = copy.deepcopy(saved)
        self.running.clear()
        self.incarnation = str(int(self.incarnation) + 1)

    # -- ticks and reads ----------------------------------------------------------------------------------------

    def snapshot(self) -> str:
        """Return ``pg_current_snapshot()``."""
        xmax = self.contents.finished_max + 1
        running = sorted(xid for xid in self.running if xid < xmax)
        return f"{running[0] if running else xmax}:{xmax}:{','.join(map(str, running))}"

    def tick(self) -> TickResult:
        """Take a tick."""
        tick = Tick(self.contents.seq, self.snapshot(), self.contents.next_xid)
        now = EPOCH + timedelta(seconds=self.time)
        return TickResult(tick, self.incarnation, now, self.contents.generation)

    def look(self, request: WindowRequest | None) -> Look:
        """Take a tick, and read the window of ``request`` if it has few events."""
        result = self.tick()
        if request is None:
            return Look(result, None, 0.0)
        a, b = request.a, result.tick
        late = self._window(request.shards, request.types, a, b, 0, a.seq, late=True)
        rest = self._window(request.shards, request.types, a, b, a.seq, 1 << 62, late=False)
        found = [*late, *rest]
        window = WindowRead(request, b, found, None) if len(found) <= SMALL_WINDOW else None
        if window is not None and any(event.fault for event in found):
            window = WindowRead(request, b, [], None, usable=False)
        return Look(result, window, 0.0)

    def _window(
        self,
        shards: Collection[int],
        types: Sequence[str] | None,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        *,
        late: bool,
    ) -> Iterator[StoredEvent]:
        wanted, pending = set(shards), set(map(str, a.running))
        for xid, event in self.contents.log:
            if not after < event.id <= upto or event.shard not in wanted or not visible(xid, b.snapshot):
                continue
            if types is not None and event.type not in types:
                continue
            if (str(xid) in pending or a.xmax <= xid < a.next_xid) if late else not visible(xid, a.snapshot):
                yield event

    def read_rest(
        self,
        shards: Sequence[int],
        types: Any,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        *_: Any,
        **named: Any,
    ) -> list[StoredEvent]:
        """Read as the statement does, but few events at a time."""
        return self._read(named, shards, types, a, b, after, upto, rows, late=False)

    def read_small(
        self,
        shards: Sequence[int],
        types: Any,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        *_: Any,
        **named: Any,
    ) -> list[StoredEvent]:
        """Read as the statement does. Every few events one is too large for it."""
        self._only_at(named["server"])
        found = list(self._window(shards, types, a, b, after, upto, late=False))[:rows]
        large = next((n for n, event in enumerate(found) if event.id % LARGE == 0), len(found))
        return [*found[:large], *(event._replace(fault=UNREAD) for event in found[large : large + 1])]

    def read_late(
        self,
        shards: Sequence[int],
        types: Any,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        *_: Any,
        **named: Any,
    ) -> list[StoredEvent]:
        """Read as the statement does."""
        return self._read(named, shards, types, a, b, after, upto, rows, late=True)

    def _read(
        self,
        named: Mapping[str, Any],
        shards: Sequence[int],
        types: Any,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        *,
        late: bool,
    ) -> list[StoredEvent]:
        self._only_at(named["server"])
        found = list(self._window(shards, types, a, b, after, upto, late=late))[:rows]
        if len(found) > FEW:
            # As the row that ends an incomplete read: the ids up to it were searched.
            return [*found[:FEW], found[FEW - 1]._replace(shard=-1)]
        return found

    def _only_at(self, server: str | None) -> None:
        if server is not None and server != self.incarnation:
            raise IncarnationChanged("another server")

    # -- the sink and its relays --------------------------------------------------------------------------------

    def sinks(self, *_: object, relay: UUID | None) -> list[SinkRow]:
        """Return the state of the sink."""
        contents = self.contents
        owned = sum(shard.owner not in (None, relay) and self.lives(shard.owner) for shard in contents.shards)
        state = SinkRow("a", contents.generation, contents.paused, "closed", None, owned, contents.patterns)
        return [state._replace(claim=self.claim, start="beginning", **self.limits._asdict())]

    def register(self, patterns: tuple[str, ...]) -> int:
        """Register the sink with these patterns, as a relay that starts does; return its generation."""
        if self.contents.patterns != patterns:
            self.contents.patterns = patterns
            self.contents.generation += 1
        return self.contents.generation

    def reregister_sink(
        self, _: str, patterns: Sequence[str], generation: int, _tick: Tick, *, queued: bool, server: str
    ) -> int | None:
        """Set the patterns if ``generation`` is still the newest, or if they are in force."""
        self._only_at(server)
        if tuple(patterns) == self.contents.patterns:
            return self.contents.generation
        return self.register(tuple(patterns)) if generation == self.contents.generation else None

    def heartbeat(self, relay: UUID, _name: str, _version: str, serving: Sequence[str], _deadline: float) -> bool:
        """Write the row of a relay."""
        self.contents.relays[relay] = (self.time, bool(serving))
        return True

    def relay_ranks(self, relay: UUID, _: Sequence[str], lease_seconds: float) -> list[RelayRank]:
        """Return the number of live relays, and of those before this one."""
        live = [r for r, (at, serves) in self.contents.relays.items() if serves and at > self.time - lease_seconds]
        return [RelayRank("a", len(live), sum(each < relay for each in live))]

    def forget_relay(self, relay: UUID) -> None:
        """Remove the row of a relay."""
        self.contents.relays.pop(relay, None)

    # -- shards -------------------------------------------------------------------------------------------------

    def lives(self, owner: UUID | None) -> bool:
        """Return True if the lease of a relay has not ended."""
        return owner is not None and self.contents.sessions.get(owner, 0.0) > self.time

    def claim_shards(
        self,
        _: str,
        owner: UUID,
        generation: int,
        most: int,
        *,
        known: Collection[int],
        routes: Any,
    ) -> list[Claimed]:
        """Claim free shards."""
        contents = self.contents
        if contents.paused or generation != contents.generation or tuple(routes.patterns) != contents.patterns:
            return []
        claimed: list[Claimed] = []
        known = set(known)
        for number, shard in enumerate(contents.shards):
            is_mine = shard.owner == owner and number not in known
            if not self.lives(owner) or not (is_mine or (shard.owner != owner and not self.lives(shard.owner))):
                continue
            if len(claimed) < most or is_mine:
                shard.crashes += shard.owner not in (None, owner)
                shard.owner, shard.epoch = owner, shard.epoch + 1
                claimed.append(Claimed(number, shard.epoch, shard.crashes))
        return claimed

    def reclaim_shards(self, _: str, owner: UUID) -> list[Claimed]:
        """Raise the epochs of the shards of a relay."""
        claimed: list[Claimed] = []
        for number, shard in enumerate(self.contents.shards):
            if shard.owner == owner:
                shard.epoch += 1
                claimed.append(Claimed(number, shard.epoch, shard.crashes))
        return claimed

    def renew_sessions(
        self, owner: UUID, sinks: Collection[str], lease: float, _deadline: float | None = None
    ) -> dict[str, dict[int, int]]:
        """Renew or begin the lease of a relay."""
        is_new = owner not in self.contents.sessions
        if sinks:
            self.contents.sessions[owner] = self.time + lease
        owned = {number: shard.epoch for number, shard in enumerate(self.contents.shards) if shard.owner == owner}
        return {sink: {} if is_new else owned for sink in sinks}

    def _is_owner(self, number: int, owner: UUID, epoch: int | None) -> bool:
        shard = self.contents.shards[number]
        return shard.owner == owner and shard.epoch == epoch

    def release_shards(self, _: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Release shards."""
        for number, epoch in held.items():
            if self._is_owner(number, owner, epoch):
                self.contents.shards[number].owner = None

    def end_session(self, _: str, owner: UUID) -> None:
        """Release the shards of a relay, and end its lease."""
        self.contents.sessions.pop(owner, None)
        for shard in self.contents.shards:
            if shard.owner == owner:
                shard.owner = None

    def reset_crashes(self, _: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Reset the crash count."""
        for number, epoch in held.items():
            if self._is_owner(number, owner, epoch):
                self.contents.shards[number].crashes = 0

    def positions(self, _: str, shards: Collection[int], *, server: str | None = None) -> dict[int, Position]:
        """Return the positions with the highest epoch, and of those the newest."""
        self._only_at(server)
        return {shard: self.position(shard) for shard in shards}

    def position(self, shard: int) -> Position:
        """Return the position of a shard."""
        entries = self.contents.ledger.get(shard, [])
        return max(enumerate(entries), key=lambda each: (each[1][0], each[0]), default=(0, (0, BEGINNING)))[1][1]

    def seek(self) -> None:
        """Set all positions back to the beginning of the log, as a person does once no relay owns a shard."""
        if any(shard.owner is not None for shard in self.contents.shards):
            return
        for number, shard in enumerate(self.contents.shards):
            shard.epoch += 1
            self.contents.ledger.setdefault(number, []).append((shard.epoch, BEGINNING))

    # -- settlements --------------------------------------------------------------------------------------------

    def settle(
        self,
        _: str,
        owner: UUID,
        positions: Mapping[int, tuple[int, Position]],
        rows: Sequence[NewRow],
        epochs: Mapping[int, int],
        *,
        server: str | None = None,
        **_named: object,
    ) -> None:
        """Write rows behind the fence, and positions."""
        self._only_at(server)
        if not all(self._is_owner(row.shard, owner, epochs.get(row.shard)) for row in rows):
            raise LeaseLost("a shard has another owner")
        events = {event.id: event for _, event in self.contents.log}
        for row in rows:
            if row.id not in self.contents.rows:
                until = self.time + row.lease_for if row.lease_for is not None else 0.0
                holder = owner if row.lease is not None else None
                due_in = row.due_in
                if due_in is None and row.state == "waiting" and events[row.id].deliver_at is not None:
                    due_in = self.limits.spread_seconds
                due = self.time + (due_in or 0.0)
                self.contents.rows[row.id] = Row(
                    *(events[row.id], row.state, row.ordered, due, row.attempts, row.claims, row.lease, until, holder)
                )
        for shard, (epoch, position) in positions.items():
            self.contents.ledger.setdefault(shard, []).append((epoch, position))

    def park_window(
        self,
        _: str,
        owner: UUID,
        epochs: Mapping[int, int],
        types: Any,
        start: Position,
        end: Position,
        piece: WindowSlice,
        rows: int,
        _bytes: int,
        *,
        fair: bool,
        reason: str | None,
        server: str | None,
    ) -> ParkedWindow:
        """Make rows of the next events of a slice, and move the positions of their shards, behind the fence."""
        self._only_at(server)
        if not all(self._is_owner(shard, owner, epoch) for shard, epoch in epochs.items()):
            raise LeaseLost("a shard has another owner")
        a, b, _last = start
        assert b is not None
        found = list(self._window(list(epochs), types, a, b, piece.after, piece.upto, late=piece.late))
        most = min(rows, FEW)
        upto = found[most - 1].id if len(found) > most else None
        made = 0
        for event in found[:most]:
            if event.id not in self.contents.rows and self.contents.discarded.get(event.id) != event.uid:
                made += 1
                state = "dead" if reason or event.fault else "waiting"
                self.contents.rows[event.id] = Row(event, state, False, self.time, error=reason or event.fault)
        reached = end if upto is None else start.at(upto)
        for shard, epoch in epochs.items():
            self.contents.ledger.setdefault(shard, []).append((epoch, reached))
        return ParkedWindow(upto, list(epochs), made, sum(bool(e.fault) for e in found[:most]), None)

    # -- claims of rows -----------------------------------------------------------------------------------------

    def first(self, key: str | None) -> int | None:
        """Return the id of the first row of a key that takes part in its order."""
        rows = self.contents.rows.items()
        return min((i for i, r in rows if r.ordered and r.state != "dead" and r.event.key == key), default=None)

    def first_dead(self, key: str | None) -> int | None:
        """Return the id of the first dead row of a key."""
        rows = self.contents.rows.items()
        return min((i for i, r in rows if r.ordered and r.state == "dead" and r.event.key == key), default=None)

    def _may_go(self, i: int, row: Row) -> bool:
        if not row.ordered:
            return True
        dead = self.first_dead(row.event.key) if self.hold else None
        return self.first(row.event.key) == i and not (dead is not None and dead < i)

    def claim_rows(
        self,
        _: str,
        owner: UUID,
        lease: UUID,
        lease_seconds: float,
        most: int,
        _bytes: int,
        *,
        keys: Sequence[str] = (),
        suspects: bool = False,
        with_followers: bool = False,
        after: RowPlace | None = None,
        **_named: object,
    ) -> list[ClaimedRow]:
        """Claim rows that are due and the first of their keys, and with followers those behind them."""
        rows = self.contents.rows

        def free(row: Row) -> bool:
            return row.state != "dead" and row.lease_until <= self.time and row.due_at <= self.time

        chosen: list[int] = []
        for i, row in sorted(rows.items(), key=lambda pair: (pair[1].due_at, pair[0])):
            if len(chosen) >= most or not free(row) or (row.claims >= 3) != suspects or not self._may_go(i, row):
                continue
            if after is not None and row.state == "waiting" and (row.due_at, i) <= after:
                continue
            if row.state == "waiting" or row.event.key in keys or suspects:
                chosen.append(i)
        for head in list(chosen) if with_followers and not suspects else ():
            if not rows[head].ordered or rows[head].error is not None:
                continue
            dead = self.first_dead(rows[head].event.key) if self.hold else None
            for i, row in sorted(rows.items()):
                if i <= head or row.event.key != rows[head].event.key or not row.ordered or row.state == "dead":
                    continue
                is_behind_dead = dead is not None and dead < i
                if len(chosen) >= most or not free(row) or row.claims >= 3 or row.error is not None or is_behind_dead:
                    break
                chosen.append(i)
        return self._lease(sorted(chosen), owner, lease, lease_seconds)

    def _lease(self, chosen: Sequence[int], owner: UUID, lease: UUID, lease_seconds: float) -> list[ClaimedRow]:
        claimed: list[ClaimedRow] = []
        for i in chosen:
            row = self.contents.rows[i]
            row.lease, row.lease_until, row.owner, row.claims = lease, self.time + lease_seconds, owner, row.claims + 1
            claimed.append(ClaimedRow(row.event, row.ordered, row.attempts, row.claims, lease, True, row.due_at))
        return claimed

    def claim_queued(
        self, _: str, owner: UUID, lease: UUID, lease_seconds: float, most: int, _bytes: int, **_named: object
    ) -> QueueClaim:
        """Claim rows of a queue."""
        free = [i for i, row in sorted(self.contents.rows.items()) if self._is_free(row)]
        return QueueClaim(self._lease(free[:most], owner, lease, lease_seconds), None)

    def _is_free(self, row: Row) -> bool:
        return row.state != "dead" and row.lease_until <= self.time and row.due_at <= self.time and row.claims < 3

    # -- outcomes of rows ---------------------------------------------------------------------------------------

    def delete_rows(self, _: str, done: Sequence[DeliveredRow], **_named: object) -> dict[int, bool]:
        """Delete delivered rows whose lease is that of the caller."""
        rows = self.contents.rows
        gone = [d.id for d in done if d.id in rows and rows[d.id].lease == d.lease]
        keys = {i: rows[i].event.key for i in gone if rows[i].ordered}
        for i in gone:
            del rows[i]
        return {i: keys.get(i) is not None and self.first(keys[i]) is not None for i in gone}

    def update_rows(self, _: str, updates: Sequence[RowUpdate], **_named: object) -> set[int]:
        """Give rows back whose lease is that of the caller."""
        ours: set[int] = set()
        for update in updates:
            row = self.contents.rows.get(update.id)
            if row is None or row.lease != update.lease:
                continue
            ours.add(update.id)
            self.contents.rows[update.id] = replace(
                row,
                state=update.state or row.state,
                due_at=row.due_at if update.due_in is None else self.time + update.due_in,
                attempts=update.attempts,
                claims=0,
                lease=None,
                lease_until=0.0,
                owner=None,
                error=update.error or row.error,
            )
        return ours

    def give_rows_back(self, _: str, owner: UUID) -> int:
        """End the leases of a relay."""
        return self._give_back(lambda row: row.owner == owner and row.state != "dead")

    def give_leases_back(self, _: str, leases: Sequence[UUID]) -> int:
        """End leases."""
        return self._give_back(lambda row: row.lease in leases)

    def give_queued_back(self, _: str, owner: UUID, leases: Sequence[UUID]) -> int:
        """End leases."""
        return self._give_back(lambda row: row.owner == owner and row.lease in leases)

    def give_claimed_back(self, _: str, rows: Collection[tuple[int, UUID]]) -> int:
        """End leases of these rows."""
        given = set(rows)
        return self._give_back(lambda row: (row.event.id, row.lease) in given)

    def _give_back(self, is_meant: Callable[[Row], bool]) -> int:
        mine = [row for row in self.contents.rows.values() if row.lease is not None and is_meant(row)]
        for row in mine:
            row.lease, row.lease_until, row.owner, row.claims = None, 0.0, None, max(0, row.claims - 1)
        return len(mine)

    # -- questions about rows -----------------------------------------------------------------------------------

    def blocked_keys(
        self, _: str, shards: Collection[int], hold: bool, *, server: str | None = None
    ) -> tuple[list[tuple[str, int]], bool]:
        """Return the keys of live rows, and whether dead ones block others."""
        self._only_at(server)
        rows, wanted = self.contents.rows.values(), set(shards)
        live = [r.event for r in rows if r.ordered and r.state != "dead" and r.event.shard in wanted]
        dead = hold and any(r.ordered and r.state == "dead" for r in rows)
        return [(event.key, event.shard) for event in live if event.key is not None], dead

    def still_blocked(self, _: str, keys: Sequence[str], hold: bool, *, server: str | None = None) -> set[str]:
        """Return those of ``keys`` that have live rows, or dead ones that block them."""
        self._only_at(server)
        return {key for key in keys if self.first(key) is not None or (hold and self.first_dead(key) is not None)}

    def held_keys(self, _: str, after: str | None, most: int) -> list[str]:
        """Return the keys of held rows."""
        rows = self.contents.rows.values()
        keys = {r.event.key for r in rows if r.state == "held" and r.event.key is not None}
        return sorted(key for key in keys if after is None or key > after)[:most]

    def count_parked(self, *_: object, trouble: bool) -> tuple[int, bool]:
        """Count live rows."""
        return sum(row.state != "dead" for row in self.contents.rows.values()), False

    def count_queued(self, _: str, after: int, _most: int) -> tuple[int, int]:
        """Count live rows."""
        return sum(row.state != "dead" and i > after for i, row in self.contents.rows.items()), after

    def highest_discarded(self, _: str, *, server: str | None = None) -> int | None:
        """Return the highest id of a discarded event."""
        return max(self.contents.discarded, default=None)

    def discarded(self, _: str, events: Sequence[tuple[int, UUID]], *, server: str | None = None) -> set[int]:
        """Return the discarded ones."""
        return {i for i, uid in events if self.contents.discarded.get(i) == str(uid)}

    # -- people -------------------------------------------------------------------------------------------------

    def retry(self, rng: random.Random) -> None:
        """Retry a dead row, as a person does."""
        if dead := [i for i, row in self.contents.rows.items() if row.state == "dead" and row.event.fault is None]:
            row = self.contents.rows[rng.choice(dead)]
            self.contents.rows[row.event.id] = replace(
                row, state="waiting", due_at=self.time, attempts=0, claims=0, error=None
            )

    def discard(self, rng: random.Random) -> str | None:
        """Discard a row that no relay has, and whose event the position has passed; return its uid."""
        free = [i for i, row in self.contents.rows.items() if row.lease_until <= self.time and self.passed(row.event)]
        if not free:
            return None
        row = self.contents.rows.pop(rng.choice(free))
        self.contents.discarded[row.event.id] = row.event.uid
        return row.event.uid

    def passed(self, event: StoredEvent) -> bool:
        """Return True if the position of its shard has passed the event."""
        a, b, last = self.position(event.shard)
        xid = next(xid for xid, logged in self.contents.log if logged.id == event.id)
        return visible(xid, a.snapshot) or (b is not None and event.id <= last and visible(xid, b.snapshot))

    # -- what nothing depends on --------------------------------------------------------------------------------

    def floor(self) -> int:
        """Answer that there was no rebase."""
        return 0

    def pause_sink(self, *_: object) -> bool:
        """Answer that no destination is gone."""
        return False

    def nothing(self, *_: object, **_named: object) -> None:
        """Do nothing."""

    check_session = arm = record_circuit = record_failure = record_mended = record_trouble = nothing
