"""Looks at the log: their parameters and answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from outbox_relay.domain.event import FAULT, StoredEvent, cut_unread, max_wire_bytes, pop_scan_end
from outbox_relay.domain.window import Tick
from outbox_relay.postgres.rows import TickResult, WindowRead, WindowRequest

_NAMES: Final = (
    "a_seq",
    "a",
    "a_next",
    "floor",
    "shards",
    "types",
    "ids",
    "rows",
    "bytes",
    "most_payload",
    "most_size",
)
_NO_WINDOW: Final[Mapping[str, Any]] = dict.fromkeys(_NAMES)
_TICK_COLUMNS: Final = 6
_READ: Final = 6
_EVENT_COLUMNS: Final = slice(7, None)


def look_parameters(request: WindowRequest | None) -> Mapping[str, Any]:
    """Return the parameters of the statement ``look`` but ``known``. None asks for the tick alone."""
    if request is None:
        return _NO_WINDOW
    return {
        "a_seq": request.a.seq,
        "a": request.a.snapshot,
        "a_next": request.a.next_xid,
        "floor": request.floor,
        "shards": _array(request.shards),
        "types": None if request.types is None else list(request.types),
        "ids": request.most_ids,
        "rows": request.most_events,
        "bytes": request.most_bytes,
        "most_payload": request.most_payload,
        "most_size": request.most_size,
    }


@lru_cache(maxsize=64)
def _array(shards: frozenset[int]) -> str:
    """Return the text of an array, which costs less to send than the array."""
    return f"{{{','.join(map(str, sorted(shards)))}}}"


def tick_of(row: Sequence[Any]) -> TickResult:
    """Return the tick in the first row of an answer, or in the row of the statement ``tick``."""
    seq, snapshot, next_xid, incarnation, now, versions = row[:_TICK_COLUMNS]
    return TickResult(Tick(seq, snapshot, next_xid), incarnation, now, int(versions))


def window_of(rows: Sequence[Sequence[Any]], b: Tick, request: WindowRequest | None) -> WindowRead | None:
    """Return the window in the rows of an answer; None if it was not read.

    It cannot be used if an event has a fault, which may only be that it is too large for a look. If the latecomers are
    incomplete, the events that follow them are left out. Otherwise it ends before the first event that is to be read
    again.
    """
    if request is None or not rows[0][_READ]:
        return None
    make = cast(Any, tuple).__new__
    events: list[StoredEvent] = [make(StoredEvent, row[_EVENT_COLUMNS]) for row in rows[1:]]
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
