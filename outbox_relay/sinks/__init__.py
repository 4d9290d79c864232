"""The interface between the relay and every kind of destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Verdict


class Sink(Protocol):
    """A destination. It delivers events and returns verdicts, and knows nothing of the database.

    The relay passes events in order. With ``keeps_order`` it may call ``deliver`` again before the previous call
    returns: at most ``max_in_flight`` calls with events of the log at once, and as many with rows. The sink sends the
    batches in the order of the calls. Without ``keeps_order`` every batch is one event, and the relay never has two
    events of one key in flight.
    """

    max_batch: int
    """Maximum number of events in one call."""
    max_in_flight: int
    """Maximum number of concurrent calls; with ``keeps_order`` as many again with rows."""
    keeps_order: bool
    """True if events of one key arrive in the order in which they were passed, across calls."""
    timeout_seconds: float
    """Maximum duration of a call of ``deliver``, give or take a second. The lease of a row lasts longer."""

    @property
    def trouble(self) -> str | None:
        """Return why the destination is unreachable, as found without an event, or None.

        Only clients that keep connections open can find out. Cleared as soon as the destination answers.
        """
        ...

    async def open(self) -> None:
        """Prepare for deliveries, also after ``close``. The destination may be down."""
        ...

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        """Deliver ``batch`` and return one verdict per event, in the same order.

        ``attempt`` is the number of this attempt, from 1, when the batch is one event that has a row. The verdict of a
        row that is delivered has details for its record. 0 is the first attempt of events directly from the log.

        ``until`` is a ``lease_clock()`` value. From then on no event is passed to the destination's client, and the
        remaining events are ``Unavailable``. With ``keeps_order``, once an event is ``Unavailable`` so is every later
        event of its key, in this call and in all concurrent calls: the delivered events of a key are a prefix of those
        passed. A sink that holds keys does the same after a ``Refused`` event, with ``behind``.

        Errors of the destination never raise. After a cancelled call and ``reset``, no event of the batch is sent.
        """
        ...

    async def reset(self) -> None:
        """Discard all unsent events and return when none of them can be sent later."""
        ...

    async def check(self) -> str | None:
        """Return why the destination would not accept events now, in one line, or None if it would."""
        ...

    async def close(self) -> None:
        """Release every resource. No event is sent afterwards."""
        ...


@runtime_checkable
class ExtendsDeliveries(Protocol):
    """A sink whose deliveries may outlast ``timeout_seconds``."""

    def deadlines(self) -> Mapping[int, float]:
        """Return the ends of such deliveries by the ids of their events, as values of ``lease_clock()``."""
        ...
