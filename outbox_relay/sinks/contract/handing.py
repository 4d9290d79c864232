"""Events as the log has them, and their hand-over as in a relay."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import zip_longest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks import Call, Sink
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


class HandOver:
    """Events that are delivered once each, in calls as the relay makes them.

    With ``keeps_order`` calls overlap, and none begins after an event was unavailable. Otherwise each call has one
    event, keys have one call at a time, and none after an event of theirs was unavailable.
    """

    def __init__(self, sink: Sink, events: Sequence[StoredEvent], *, until: float | None = None, batch: int = 50):
        self._sink, self._events, self._left = sink, events, list(events)
        self._until, self._size = soon() if until is None else until, min(batch, sink.max_batch)
        self._in_flight: list[Call] = []
        self._verdicts: dict[str, Verdict] = {}

    def begin(self) -> None:
        """Hand over as many events as the sink takes at once."""
        self._step(0.01)

    def end(self) -> list[Verdict]:
        """Return the verdicts of all events, in their order."""
        deadline = soon()
        while self._left or self._in_flight:
            assert lease_clock() < deadline, f"{len(self._in_flight)} calls have not ended"
            self._step(1.0)
        return [self._verdicts[event.uid] for event in self._events]

    def _step(self, seconds: float) -> None:
        while len(self._in_flight) < self._sink.max_in_flight and (events := self._next()):
            taken = set(map(id, events))
            self._left = [event for event in self._left if id(event) not in taken]
            self._in_flight.append(call := Call(events, self._until))
            self._sink.submit(call)
        for call in self._sink.completed(seconds):
            self._in_flight.remove(call)
            verdicts = [DELIVERED] * len(call.events) if call.verdicts is None else call.verdicts
            for event, verdict in zip(call.events, verdicts, strict=True):
                self._verdicts[event.uid] = verdict
                if isinstance(verdict, Unavailable):
                    self._give_up_behind(event)

    def _next(self) -> Sequence[StoredEvent]:
        if self._sink.keeps_order:
            return self._left[: self._size]
        busy = {event.key for call in self._in_flight for event in call.events if event.key is not None}
        return next(([event] for event in self._left if event.key not in busy), list[StoredEvent]())

    def _give_up_behind(self, event: StoredEvent) -> None:
        behind = [each for each in self._left if self._sink.keeps_order or each.key == event.key is not None]
        if behind:
            unavailable = Unavailable("behind an undelivered event")
            self._verdicts.update(dict.fromkeys((each.uid for each in behind), unavailable))
            self._left = [each for each in self._left if each.uid not in self._verdicts]


def hand_over(
    sink: Sink, events: Sequence[StoredEvent], *, until: float | None = None, batch: int = 50
) -> list[Verdict]:
    """Return the verdicts of ``events``, delivered once each as the relay does it."""
    return HandOver(sink, events, until=until, batch=batch).end()


def hand_over_all(sink: Sink, events: Sequence[StoredEvent], batch: int = 50) -> None:
    """Deliver ``events`` until none is unavailable. Those that are come again, in order."""
    deadline, left = soon(), list(events)
    while left:
        assert lease_clock() < deadline, f"{len(left)} events are still not delivered"
        left = unavailable(left, hand_over(sink, left, batch=batch))


def unavailable(events: Sequence[StoredEvent], verdicts: Sequence[Verdict]) -> list[StoredEvent]:
    """Return the events whose verdict is ``Unavailable``."""
    return [event for event, verdict in zip(events, verdicts, strict=True) if isinstance(verdict, Unavailable)]


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
