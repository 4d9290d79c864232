"""The choice between two ways of reading the log: one for small events, and one for events of every size."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_relay.domain.event import FAULT, StoredEvent

SMALL_BYTES = 2000
"""Bytes of payload, key and headers up to which an event is small. A chunk of small events needs no other bound."""
SMALL_AGAIN = 1000
"""Number of consecutive small events after which reads are of small events again."""


class SmallReads:
    """Tells whether the next read is one of small events, which takes the server a third less time.

    Such a read ends before the first large event, so it returns none where that is the first of all. After a large
    event, events of every size are therefore read until many in a row were small.
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
        """Count the events of a read towards those that were small, or begin again if one was not."""
        if self._small >= SMALL_AGAIN:
            return
        if any(map(FAULT, events)) or max(map(_size, events), default=0) > SMALL_BYTES:
            self._small = 0
        else:
            self._small += len(events)


def _size(event: StoredEvent) -> int:
    """Return the bytes of an event as the database counts them."""
    return len(event.payload or b"") + _text_bytes(event.key) + _text_bytes(event.headers)


def _text_bytes(text: str | None) -> int:
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode())
