"""The pieces of work of a loop: events of the log, or claimed rows, that go with one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID, uuid4

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import Chunk
from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.sinks.calls import Call

_RANDOM_BITS = 76
_LOW_BITS, _TIME_BITS = (1 << _RANDOM_BITS) - 1, (1 << 48) - 1


class Permit(NamedTuple):
    """The admission of one call in a ``term`` of the circuit."""

    term: int
    probe: bool


@dataclass(slots=True, eq=False)
class LogWork:
    """Events of one chunk, by index, that are sent with one call. ``number`` orders the chunks."""

    number: int
    chunk: Chunk
    indexes: Sequence[int]
    began: float | None = None
    """The time when a single event was first sent in vain while the circuit was closed, or None."""
    unavailable_since: float | None = None
    """``Circuit.unavailable_since`` as of that call."""

    @property
    def events(self) -> Sequence[StoredEvent]:
        """The events, in id order."""
        events = self.chunk.events
        return events if len(self.indexes) == len(events) else [events[i] for i in self.indexes]


@dataclass(slots=True, eq=False)
class RowWork:
    """Claimed rows that are sent with one call, which begins before the ``lease_clock()`` value ``until``."""

    rows: Sequence[ClaimedRow]
    until: float

    @property
    def events(self) -> Sequence[StoredEvent]:
        """The events, in id order."""
        return [row.event for row in self.rows]


Work = LogWork | RowWork


@dataclass(slots=True, eq=False)
class SentCall(Call):
    """A call in flight, with its admission and the pieces of work that its verdicts settle.

    The event of a ``slow`` call came from the log, and has become a row meanwhile. ``rows_until`` is the
    ``lease_clock()`` value at which the leases of rows end, as far as they were not extended.
    """

    permit: Permit = Permit(0, probe=False)  # noqa: RUF009 - immutable
    work: Sequence[Work] = ()
    slow: bool = False
    rows_until: float = float("inf")


def new_row_lease(began_at: datetime) -> UUID:
    """Return the id of a new lease for a delivery that began at ``began_at``, by the database's clock.

    It is a UUID of version 7, which contains that time: the command ``running`` shows it.
    """
    milliseconds = int(began_at.timestamp() * 1000) & _TIME_BITS
    return UUID(int=(milliseconds << 80) | (7 << _RANDOM_BITS) | (uuid4().int & _LOW_BITS))
