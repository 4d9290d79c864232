"""Judges unique keys: two events of one type and unique key are never in flight at once. Pure.

An event is emitted under a unique key only when the event before it is settled at every sink. So each of its sinks has
received the earlier event, by the destination's own record, when the later `emit` returned. Another arrival of the
earlier event is a duplicate, which needs a fault as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

SLACK_SECONDS = 0.25
"""Precision of the broker's and the receiver's times, compared with those of the emitting threads."""
MOST_LINES = 10


class Emitted(NamedTuple):
    """An event that was emitted under a unique key."""

    name: int
    """The unique key, which determines the type."""
    uid: bytes
    returned: float
    """Time at which `emit` had returned its uid."""


class Merged(NamedTuple):
    """A call of `emit` that returned the uid of an earlier event."""

    name: int
    uid: bytes
    called: float
    """Time before the call."""


class Arrived(NamedTuple):
    """First arrivals at one sink, and the events that need not have arrived."""

    first: Mapping[bytes, float]
    """Uid → time."""
    dead: Collection[bytes] = ()
    in_database: bool = False
    """True if the arrivals are in the database, so that a restore takes back those of the old server."""


def judge(
    emitted: Iterable[Emitted],
    merged: Iterable[Merged],
    eras: Mapping[bytes, int | None],
    sinks: Mapping[str, Arrived],
    sinks_of: Callable[[int], Sequence[str]],
) -> list[str]:
    """Return a line for each violation, at most :data:`MOST_LINES` and their number.

    `eras` has the committed events: uid → the restore that took it back, None for one of the surviving log.
    """
    events = sorted((event for event in emitted if event.uid in eras), key=lambda event: event.returned)
    found = list(_overlaps(events, eras, sinks, sinks_of))
    known = {(event.name, event.uid) for event in events}
    found += [
        f"unique key {name}: emit returned {uid.hex()}, which is no committed event of this unique key"
        for name, uid, _ in merged
        if (name, uid) not in known
    ]
    found += _merged_late(events, merged, eras)
    return found if len(found) <= MOST_LINES else [*found[:MOST_LINES], f"{len(found)} violations of unique keys"]


def _overlaps(
    events: Iterable[Emitted],
    eras: Mapping[bytes, int | None],
    sinks: Mapping[str, Arrived],
    sinks_of: Callable[[int], Sequence[str]],
) -> Iterator[str]:
    """Yield a line for each event that was emitted before a sink had received the event before it."""
    for earlier, later in _pairs(events, eras):
        for sink in sinks_of(earlier.name):
            arrived = sinks[sink]
            if earlier.uid in arrived.dead:
                continue
            if arrived.in_database and (eras[earlier.uid] is not None or eras[later.uid] is not None):
                continue
            at = arrived.first.get(earlier.uid)
            if at is None or at > later.returned + SLACK_SECONDS:
                when = "never" if at is None else f"{at - later.returned:.2f} s later"
                yield (
                    f"unique key {earlier.name}: {later.uid.hex()} was emitted at {later.returned:.3f}, and {sink}"
                    f" received {earlier.uid.hex()} {when}"
                )


def _pairs(events: Iterable[Emitted], eras: Mapping[bytes, int | None]) -> Iterator[tuple[Emitted, Emitted]]:
    """Yield each event with the one before it of the same unique key, in the log of the later one's server."""
    before: dict[int, list[Emitted]] = {}
    for event in events:
        earlier = before.setdefault(event.name, [])
        era = eras[event.uid]
        for one in reversed(earlier):
            if eras[one.uid] is None or eras[one.uid] == era:
                yield one, event
                break
        earlier.append(event)


def _merged_late(
    events: Iterable[Emitted], merged: Iterable[Merged], eras: Mapping[bytes, int | None]
) -> Iterator[str]:
    """Yield a line for each merge into an event that another had followed: its work was done already."""
    followed = {earlier.uid: later for earlier, later in _pairs(events, eras) if eras[earlier.uid] == eras[later.uid]}
    for name, uid, called in merged:
        later = followed.get(uid)
        if later is not None and later.returned < called - SLACK_SECONDS:
            late = f"{called - later.returned:.2f} s after {later.uid.hex()} followed it"
            yield f"unique key {name}: emit returned {uid.hex()} {late}"
