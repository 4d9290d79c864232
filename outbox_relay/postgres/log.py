"""Ticks, reads of the log, and the metadata of the schema."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import lru_cache, partialmethod
from typing import Any, Final, NamedTuple, cast

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.domain.event import FAULT, StoredEvent, cut_unread, max_wire_bytes, pop_scan_end
from outbox_relay.domain.window import Tick
from outbox_relay.postgres.database import Database

MOST_PAYLOAD: Final = 1 << 30
"""More bytes than any payload has, so that only the ceiling of the schema applies."""
TICK_SECONDS: Final = 5.0
"""Longest wait for a tick, which reads next to nothing. It is the first call to notice a connection that was lost
silently, so that the relay delivers again within 20 s. The driver takes up to 10 s more to give up."""


@dataclass(frozen=True, slots=True)
class TickResult:
    """A tick with the server's incarnation, and its clock.

    ``config_versions`` counts changes of the configuration and of positions. It is higher after each of them.
    """

    tick: Tick
    incarnation: str
    now: datetime
    config_versions: int


@dataclass(frozen=True, slots=True, eq=False)
class WindowRequest:
    """The window that a session reads next: events of ``shards`` and ``types``, from the tick ``a`` on.

    ``types`` are SQL LIKE patterns. Ids up to ``floor`` are of an older numbering. A window of more than ``most_ids``
    ids is not read. ``most_events`` and ``most_bytes``, not counting the last event, limit the latecomers and the other
    events, each. A larger payload than ``most_payload`` bytes is not returned. With ``most_size``, the other events are
    read up to the first one that has more bytes, and ``most_bytes`` does not limit them.
    """

    a: Tick
    floor: int
    shards: frozenset[int]
    types: Sequence[str] | None
    most_ids: int = 4_000
    most_events: int = 1_000
    most_bytes: int = 1 << 20
    most_payload: int = 256 << 10
    most_size: int | None = None


class WindowRead(NamedTuple):
    """The events of a requested window up to the tick ``b``, in id order.

    They are all, or those with ids up to ``upto``. Without ``usable``, the window must be read in the usual way. If it
    ``is_cut``, it ends before an event that was not small.
    """

    request: WindowRequest
    b: Tick
    events: list[StoredEvent]
    upto: int | None
    usable: bool = True
    is_cut: bool = False

    @property
    def empty(self) -> bool:
        """True if the window has no events."""
        return self.usable and not self.events and self.upto is None


class Look(NamedTuple):
    """A tick, the events of the requested window if they were read, and the duration of the round trip in seconds."""

    result: TickResult
    window: WindowRead | None
    seconds: float


class LogStatements(Database):
    """Ticks, reads of the log, and the metadata of the schema.

    ``server`` is the incarnation that the caller's ticks come from. Any other server refuses the statement with
    ``IncarnationChanged``. None means any server.
    """

    _known_incarnation: str | None = None

    def schema(self) -> tuple[int, int]:
        """Return the version of the schema, and the oldest schema version whose relays work on it."""
        return self.named("schema", {})[0]

    def floor(self) -> int:
        """Return the floor of the numbering (see ``outbox.rebase``).

        Raises ``DatabaseUnusable`` if the log comes from another cluster, or if it holds ids or xids that the server
        has not assigned yet.
        """
        [row] = self.named("floor", {})
        if row.elsewhere:
            raise DatabaseUnusable(
                "the log comes from another cluster, as after a restore, a move or pg_upgrade: stop every relay, then "
                "run outbox-relay rebase"
            )
        if row.ids_ahead or row.highest_xid > self.tick().tick.next_xid:
            raise DatabaseUnusable(
                "the log holds ids or transaction numbers that this server has not given out yet, as after a restore "
                "into another cluster: stop every relay, then run outbox-relay rebase"
            )
        return row.floor

    def arm(self) -> None:
        """Mark the server, so that a restart after a crash of one of its processes is noticed."""
        self.named("arm", {}, deadline=self._tick_seconds())

    def tick(self) -> TickResult:
        """Take a tick."""
        [row] = self.named("tick", {"known": self._known_incarnation}, deadline=self._tick_seconds())
        return self._tick_of(row)

    def look(self, request: WindowRequest | None) -> Look:
        """Take a tick, and read the requested window up to it if that is small, in one round trip.

        Behind a pooler no window is read: the server may have no time limit that ends a slow read before the relay
        gives up the connection.
        """
        asked = None if self.pooler else request
        began = time.monotonic()
        parameters = {**_look_parameters(asked), "known": self._known_incarnation}
        first, *rows = self.named("look", parameters, deadline=self._tick_seconds())
        result = self._tick_of(first)
        window = window_of(rows, result.tick, asked) if asked and first.read else None
        return Look(result, window, time.monotonic() - began)

    def _tick_of(self, row: Any) -> TickResult:
        self._known_incarnation = row.incarnation
        return TickResult(Tick(row.seq, row.snapshot, row.next_xid), row.incarnation, row.now, row.generations)

    def _tick_seconds(self) -> float:
        return min(TICK_SECONDS, self.call_seconds)

    def _read(
        self,
        name: str,
        shards: Sequence[int],
        types: Sequence[str] | None,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        size: int,
        *,
        most_payload: int | None = None,
        server: str | None = None,
    ) -> list[StoredEvent]:
        """Return events of the window from ``a`` to ``b`` with ids in (``after``, ``upto``], in id order.

        ``types`` are SQL LIKE patterns. The read ends after ``rows`` events, or with the event that exceeds ``size``
        bytes.

        With ``most_payload``, an event with a larger payload has a ``fault`` and no payload, and ``size`` limits
        payloads, keys and headers together. Without it, ``size`` limits payloads alone.
        """
        parameters = {
            "shards": shards,
            "types": None if types is None else list(types),
            "a": a.snapshot,
            "a_next": a.next_xid,
            "b": b.snapshot,
            "after": after,
            "upto": upto,
            "rows": rows,
            "bytes": size,
            "most_payload": most_payload,
            "server": server,
        }
        return self.named(name, parameters, row=StoredEvent)

    read_rest = partialmethod(_read, "read_rest")
    """Read the events with ids above ``a.seq``: see ``_read``."""
    read_small = partialmethod(_read, "read_small")
    """Read as ``read_rest``, with contents only of events of at most ``size`` bytes.

    The others are to be read again: see ``event.cut_unread``."""
    read_late = partialmethod(_read, "read_late")
    """Read the latecomers. With ``most_payload`` the read may be incomplete: see ``event.pop_scan_end``."""


_REQUESTED: Final = tuple(field.name for field in fields(WindowRequest))
_NO_WINDOW: Final[dict[str, Any]] = dict.fromkeys(("a_seq", "a", "a_next", *_REQUESTED))


def _look_parameters(request: WindowRequest | None) -> dict[str, Any]:
    """Return the parameters of the statement ``look`` but ``known``. None asks for the tick alone."""
    if request is None:
        return _NO_WINDOW
    a, types = request.a, None if request.types is None else list(request.types)
    return {
        **{name: getattr(request, name) for name in _REQUESTED},
        "shards": _array(request.shards),
        "types": types,
        "a_seq": a.seq,
        "a": a.snapshot,
        "a_next": a.next_xid,
    }


@lru_cache(maxsize=64)
def _array(shards: frozenset[int]) -> str:
    """Return the text of an array, which costs less to send than the array."""
    return f"{{{','.join(map(str, sorted(shards)))}}}"


def window_of(rows: Sequence[Any], b: Tick, request: WindowRequest) -> WindowRead:
    """Return the window whose events end the rows of an answer.

    It cannot be used if an event has a fault, which may only be that it is too large for a look. If the latecomers are
    incomplete, the events that follow them are left out. Otherwise it ends before the first event that is to be read
    again.
    """
    make, columns = cast(Any, tuple).__new__, slice(-len(StoredEvent._fields), None)
    events: list[StoredEvent] = [make(StoredEvent, row[columns]) for row in rows]
    is_cut = cut_unread(events)
    if any(map(FAULT, events)):
        return WindowRead(request, b, [], None, usable=False)
    latecomers = next((n for n, event in enumerate(events) if event.id > request.a.seq), len(events))
    late, rest = events[:latecomers], events[latecomers:]
    upto = _end(late, request)
    if upto is not None:
        return WindowRead(request, b, late, upto)
    if is_cut:
        return WindowRead(request, b, [*late, *rest], rest[-1].id if rest else request.a.seq, is_cut=True)
    if request.most_size is not None and len(rest) < request.most_events:
        return WindowRead(request, b, [*late, *rest], None)
    return WindowRead(request, b, [*late, *rest], _end(rest, request))


def _end(events: list[StoredEvent], request: WindowRequest) -> int | None:
    """Remove the end row of an incomplete read; return the last id that was searched, or None if all were."""
    upto = pop_scan_end(events)
    if len(events) >= request.most_events or max_wire_bytes(events) >= request.most_bytes:
        return events[-1].id
    return upto
