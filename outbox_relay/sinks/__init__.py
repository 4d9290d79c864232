"""What a sink is: the one interface between the relay and every destination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outbox_relay.domain.event import Event
from outbox_relay.domain.outcomes import Verdict


class Sink(Protocol):
    """A destination. It delivers events and answers verdicts; it knows no database and settles nothing.

    The relay gives a sink its events in order. For a sink with ``keeps_order`` it may call ``deliver`` again
    before the last call has returned (at most ``max_in_flight`` calls with events of the log at once, and as many
    with rows): the sink puts the batches on the wire in the order of the calls. Without ``keeps_order`` every batch
    is one event, and the relay itself never has two of one key in flight.
    """

    max_batch: int
    """Events in one call, at most."""
    max_in_flight: int
    """Calls under way at once, at most; with ``keeps_order`` as many again with rows."""
    keeps_order: bool
    """Whether events of one key arrive in the order in which they were handed over, across calls."""
    timeout_seconds: float
    """The longest that a call of ``deliver`` takes, give or take a second; the lease of a row outlasts it."""

    @property
    def trouble(self) -> str | None:
        """Why the destination cannot be reached, as far as the client found out without an event; None if it can.

        Known only for clients that keep connections. Cleared as soon as the destination is known to answer.
        """
        ...

    async def open(self) -> None:
        """Make ready to deliver. Called again after ``close``. Does not need the destination to be up."""
        ...

    async def deliver(self, batch: Sequence[Event], until: float, attempt: int = 1, /) -> Sequence[Verdict]:
        """Deliver ``batch`` and return one verdict per event, in the same places.

        ``attempt`` is the number of this attempt, from 1, when the batch is one event.

        ``until`` is a ``lease_clock()`` value: nothing is handed to the destination's client at or after
        it; what was not is ``Unavailable``. With ``keeps_order``, once an event is ``Unavailable`` so is
        every later one of its key, in this and in every call under way, so that what was delivered of a key
        is a prefix of what was handed over. A sink that was made to hold keys does the same behind a
        ``Refused`` event, with ``behind``.

        Never raises for what a destination answers or for how it fails. When cancelled, nothing of the batch
        is sent any more after ``reset``.
        """
        ...

    async def reset(self) -> None:
        """Forget everything handed over and not yet sent, and make sure that none of it is sent later."""
        ...

    async def check(self) -> str | None:
        """Ask the destination whether it would take events: nothing when it would, else the reason in a line."""
        ...

    async def close(self) -> None:
        """Release every resource. Nothing is sent any more afterwards."""
        ...
