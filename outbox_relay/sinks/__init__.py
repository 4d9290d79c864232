"""The interface between the relay and every kind of destination, and what a plug-in needs of it.

A plug-in imports from this module alone. Names that it lacks may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.formats.headers import own_headers
from outbox_relay.sinks.settings import SHOWN, PluginSettings, SinkSettings

__all__ = [
    "API_VERSION",
    "DELIVERED",
    "SHOWN",
    "Attempt",
    "Delivered",
    "ExtendsCalls",
    "ExtendsDeliveries",
    "Failed",
    "Plugin",
    "PluginSettings",
    "Refused",
    "Sink",
    "SinkContext",
    "SinkSettings",
    "StoredEvent",
    "Unavailable",
    "Verdict",
    "lease_clock",
    "own_headers",
]

API_VERSION: Final = 1
"""The version of the interface of plug-ins. It grows when a class that was written for it would no longer work."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The place of a sink in the relay: its name in the file, and for a client of a replay the number of that.

    ``slots`` limits the concurrent calls of a client of a replay.
    """

    name: str
    replay: int | None = None
    slots: int | None = None


class Plugin(Protocol):
    """The sink of a plug-in, as the relay calls it.

    Its class also has ``API_VERSION``, the number of the interface that it was written for, and ``Settings``, its
    model, which extends ``PluginSettings``. The relay calls the class with the settings and a ``SinkContext``; that
    must not wait for anything. If it has an async method ``open``, this is called before the first event.

    All methods run in an event loop of the plug-in's own, in a thread of the relay.
    """

    @property
    def keeps_order(self) -> bool:
        """Return True if events of one key arrive in the order in which they were passed, across calls."""
        ...

    @property
    def max_batch(self) -> int:
        """Return the maximum number of events in one call. Without ``keeps_order`` every call has one event."""
        ...

    @property
    def max_in_flight(self) -> int:
        """Return the maximum number of concurrent calls."""
        ...

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int, /) -> Sequence[Verdict]:
        """Deliver ``batch`` as ``Sink.deliver`` specifies."""
        ...

    async def reset(self) -> None:
        """Discard all unsent events and return when none of them can be sent later.

        The calls under way were cancelled before.
        """
        ...

    async def check(self) -> str | None:
        """Return why the destination would not accept events now, in one line, or None if it would."""
        ...

    async def close(self) -> None:
        """Release every resource. The relay makes a new object if it needs the sink again."""
        ...


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


@runtime_checkable
class ExtendsCalls(Protocol):
    """A sink whose calls with events of the log may last for as long as the leases of the shards are renewed."""

    def extend(self, until: float) -> None:
        """Let these calls last until the ``lease_clock()`` value ``until``, at which the leases end by now."""
        ...


@runtime_checkable
class Prefetches(Protocol):
    """A sink that takes more calls than ``max_in_flight``. They wait next to the handler for others to end."""

    @property
    def prefetch(self) -> int:
        """The number of calls that may wait at present."""
        ...


@runtime_checkable
class RunsHandlers(Protocol):
    """A sink that runs code of the application. If it cannot, the reason is this process and not a destination."""

    @property
    def fault(self) -> str | None:
        """Return why no handler can be called, or None."""
        ...
