"""The choice between two ways of reading the log: one for small events, and one for events of every size."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.domain.event import FAULT, StoredEvent

SMALL_BYTES = 2000
"""Bytes of payload, key and headers up to which an event is small. A chunk of small events needs no other bound."""
SMALL_AGAIN = 1000
"""Number of consecutive events with small payloads after which small events are read again."""


class SmallReads:
    """Tells whether the next read is one of small events, which costs the server two thirds.

    Such a read ends before the first large event, and is in vain if that is the first of all. So after a large event,
    events of every size are read until many in a row were small.
    """

    def __init__(self) -> None:
        self._small = SMALL_AGAIN

    @property
    def size(self) -> int | None:
        """The size of small events if the next read is one of them, or None."""
        return SMALL_BYTES if self._small >= SMALL_AGAIN else None

    def met_large(self) -> None:
        """Read events of every size from now on: a read of small events met a large one."""
        self._small = 0

    def take(self, events: Sequence[StoredEvent]) -> None:
        """Take note of events of every size that were read."""
        largest = max((len(event.payload) for event in events if event.payload), default=0)
        if largest > SMALL_BYTES or any(map(FAULT, events)):
            self._small = 0
        elif self._small < SMALL_AGAIN:
            self._small += len(events)
