"""The interface between the relay and every kind of destination, and what a plug-in needs of it.

A plug-in imports from this module alone. Names that it lacks may change in any release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.domain.times import lease_clock
from outbox_relay.formats.headers import own_headers
from outbox_relay.sinks.calls import Call, Sink
from outbox_relay.sinks.settings import SHOWN, PluginSettings, SinkSettings

__all__ = [
    "API_VERSION",
    "DELIVERED",
    "SHOWN",
    "Attempt",
    "Call",
    "Delivered",
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
    must not wait for anything.

    Methods are called in threads: with ``keeps_order`` one call of ``deliver`` at a time, otherwise up to
    ``max_in_flight``. ``open``, ``check`` and ``close`` are optional: the relay calls ``open`` before the first event,
    and ``check`` returns why the destination would not accept events now, in one line, or None.
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
        """Return the maximum number of concurrent calls, without ``keeps_order``."""
        ...

    def deliver(self, events: Sequence[StoredEvent], deadline: float, /) -> Sequence[Verdict]:
        """Deliver the events, and return a verdict for each, in their order.

        From the ``lease_clock()`` value ``deadline`` on nothing may be sent: the rest is ``Unavailable``. With
        ``keeps_order``, the delivered events of a key are a prefix of those that were passed.
        """
        ...
