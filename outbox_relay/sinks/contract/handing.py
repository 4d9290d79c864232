"""Events as the log has them, and their hand-over as in a relay."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Unavailable, Verdict
from outbox_relay.sinks import Sink
from outbox_relay.sinks.contract.harness import Received

PLENTY_SECONDS = 60.0


_ids = itertools.count(1)


def an_event(key: str | None = "k", payload: bytes = b"{}", headers: str | None = None) -> StoredEvent:
    """Return an event as it comes from the log, with an id and a uid of its own."""
    number = next(_ids)
    uid = f"019a0000-0000-7000-8000-{number:012x}"
    return StoredEvent(
        number, 0, uid, "order.created", key, payload, "application/json", headers, None, datetime.now(UTC)
    )


def some_events(count: int, keys: int = 5) -> list[StoredEvent]:
    """Return events of several keys in turn, each with its number as payload."""
    return [an_event(f"k{number % keys}", b"%d" % number) for number in range(count)]


def soon() -> float:
    """Return a deadline that no scenario meets."""
    return lease_clock() + PLENTY_SECONDS


async def hand_over(
    sink: Sink, events: Sequence[StoredEvent], *, until: float | None = None, batch: int = 50
) -> list[Verdict]:
    """Return the verdicts of ``events``, delivered once each as the relay does it.

    In overlapping calls if the sink keeps their order, and none after one came back with an unavailable event.
    Otherwise one call per event, one event of a key at a time, and none of its key after an unavailable one.
    """
    until = soon() if until is None else until
    limit = asyncio.Semaphore(sink.max_in_flight)
    if sink.keeps_order:
        size = min(batch, sink.max_batch)
        line = _Line(sink, until, limit)
        calls = [line.call(events[at : at + size]) for at in range(0, len(events), size)]
    else:
        lines: dict[object, list[StoredEvent]] = {}
        for event in events:
            lines.setdefault(event.uid if event.key is None else event.key, []).append(event)
        calls = [_Line(sink, until, limit).one_by_one(of_key) for of_key in lines.values()]
    verdicts = {uid: verdict for found in await asyncio.gather(*calls) for uid, verdict in found}
    return [verdicts[event.uid] for event in events]


@dataclass
class _Line:
    """Calls in order, until one has an unavailable event."""

    sink: Sink
    until: float
    limit: asyncio.Semaphore
    ended: bool = False

    async def call(self, events: Sequence[StoredEvent]) -> list[tuple[str, Verdict]]:
        async with self.limit:
            if self.ended:
                return [(event.uid, Unavailable("behind an undelivered event")) for event in events]
            verdicts = await self.sink.deliver(events, self.until)
        assert len(verdicts) == len(events)
        self.ended = self.ended or any(isinstance(verdict, Unavailable) for verdict in verdicts)
        return [(event.uid, verdict) for event, verdict in zip(events, verdicts, strict=True)]

    async def one_by_one(self, events: Sequence[StoredEvent]) -> list[tuple[str, Verdict]]:
        return [found for event in events for found in await self.call([event])]


async def hand_over_all(sink: Sink, events: Sequence[StoredEvent]) -> None:
    """Deliver ``events`` until none is unavailable. Those that are come again, in order."""
    deadline = soon()
    left = list(events)
    while left:
        assert time.monotonic() < deadline, f"{len(left)} events are still not delivered"
        verdicts = await hand_over(sink, left)
        left = [event for event, verdict in zip(left, verdicts, strict=True) if isinstance(verdict, Unavailable)]


def assert_delivered(verdicts: Sequence[Verdict]) -> None:
    """Assert that every event was delivered."""
    others = [f"{place}: {verdict}" for place, verdict in enumerate(verdicts) if verdict != DELIVERED]
    assert not others, f"{len(others)} of {len(verdicts)} events were not delivered, first {others[0]}"


def assert_arrived(received: Sequence[Received], events: Sequence[StoredEvent]) -> None:
    """Assert that the destination has ``events`` and no other, and of each key the first of each uid in order.

    Compares by itself: pytest would show all uids, and takes minutes for it where the variable ``CI`` is set.
    """
    found, expected = _by_key(received), _by_key(events)
    for key in [*expected, *found]:
        uids, wanted = found.get(key, []), expected.get(key, [])
        place = next((at for at, pair in enumerate(zip_longest(uids, wanted)) if pair[0] != pair[1]), None)
        got, want = (None if place is None else next(iter(each[place:]), None) for each in (uids, wanted))
        assert place is None, f"event {place} of key {key!r}: the destination has {got}, expected was {want}"


def _by_key(events: Iterable[StoredEvent | Received]) -> dict[str | None, list[str]]:
    """Return the uids of each key, the first of each, in order."""
    found: dict[str | None, dict[str, None]] = {}
    for event in events:
        found.setdefault(event.key, {}).setdefault(event.uid)
    return {key: list(uids) for key, uids in found.items()}


def assert_prefix_per_key(events: Sequence[StoredEvent], verdicts: Sequence[Verdict]) -> None:
    """Assert that the delivered events of a key are a prefix of those that were handed over."""
    ended: set[str] = set()
    for event, verdict in zip(events, verdicts, strict=True):
        assert isinstance(verdict, Delivered | Unavailable)
        if event.key is None:
            continue
        if isinstance(verdict, Unavailable):
            ended.add(event.key)
        assert not (isinstance(verdict, Delivered) and event.key in ended), f"{event.key}: delivered after a gap"
