"""Calls of a sink: what a loop hands over, and the completion queue through which it comes back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Verdict

Ended = TypeVar("Ended")


@dataclass(slots=True, eq=False)
class Call:
    """Events that are handed to a sink together.

    From the ``lease_clock()`` value ``until`` on, none of them is passed to the destination's client; the rest are
    ``Unavailable``. ``attempt`` is the number of this attempt, from 1, if the events have rows (that of the first
    event), and 0 if they come from the log.

    The sink calls ``end``. Then ``verdicts`` has one per event, or is None if all were delivered, and ``seconds`` is
    the duration of the call.
    """

    events: Sequence[StoredEvent]
    until: float
    attempt: int = 0
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    verdicts: Sequence[Verdict] | None = None

    def end(self, verdicts: Sequence[Verdict] | None) -> None:
        """Record the verdicts, and how long the call took."""
        self.verdicts = verdicts
        self.seconds = time.monotonic() - self.began


class Sink:
    """A destination, as a completion queue. It knows nothing of the database.

    It belongs to the thread of one loop. Only ``wake``, ``purge``, ``check`` and the properties are for any thread.

    Calls are handed over in order. With ``keeps_order`` there may be several with events of one key; the sink sends
    them in that order, and once an event is ``Unavailable`` so is every later event of its key, in this call and in all
    that are handed over until ``completed`` returns this one: the delivered events of a key are a prefix of those
    passed, if the caller passes the key again only once it has taken every call that has it. A sink that holds keys
    does the same after a ``Refused`` event, with ``behind``. Without ``keeps_order`` each call has one event, and no
    two events of one key are in flight.
    """

    max_batch: int = 1
    """Maximum number of events in one call."""
    max_in_flight: int = 1
    """Maximum number of calls in flight."""
    keeps_order: bool = False
    """True if events of one key arrive in the order in which they were handed over, across calls."""
    timeout_seconds: float = 15.0
    """Maximum duration of a call, give or take a second. The lease of a row lasts longer."""

    @property
    def trouble(self) -> str | None:
        """Return why the destination is unreachable, as found without an event, or None."""
        return None

    @property
    def fault(self) -> str | None:
        """Return why this process cannot deliver, such as a handler that cannot be imported, or None."""
        return None

    @property
    def hanging(self) -> int:
        """The number of calls that have outlasted their time limit and cannot be ended."""
        return 0

    def open(self) -> None:
        """Prepare for deliveries, also after ``close``. The destination may be down."""

    def submit(self, call: Call) -> None:
        """Begin a call, at the latest with the next ``completed``. Errors of the destination do not raise."""
        raise NotImplementedError

    def completed(self, seconds: float) -> Sequence[Call]:
        """Return the calls that have ended, after at most ``seconds`` or a ``wake`` if there is none."""
        raise NotImplementedError

    def wake(self) -> None:
        """End the wait of ``completed``, or the next one, from any thread."""
        raise NotImplementedError

    def extend(self, until: float) -> None:
        """Let calls with events of the log last until the ``lease_clock()`` value ``until``, if they take so long."""

    def deadlines(self) -> Mapping[int, float]:
        """Return the ends of calls with rows that outlast ``timeout_seconds``: event id → ``lease_clock()`` value."""
        return {}

    def withdraw(self) -> None:
        """Forget all calls, and return when no event of them can be sent later. ``completed`` returns none of them."""
        raise NotImplementedError

    def purge(self) -> None:
        """Send nothing more that was handed over and is not on its way yet, from any thread: a lease has ended.

        The calls end as usual, with ``Unavailable`` verdicts.
        """

    def check(self) -> str | None:
        """Return why the destination would not accept events now, in one line, or None if it would. Takes seconds."""
        return None

    def close(self) -> None:
        """Release every resource. No event is sent afterwards."""


class Completions(Generic[Ended]):
    """The completion queue of a sink whose calls end in other threads."""

    def __init__(self) -> None:
        self._ended: deque[Ended] = deque()
        # Locked while there is nothing to wake for. A queue.Queue costs several times as much.
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def put(self, *calls: Ended) -> None:
        """Add calls that have ended, from any thread."""
        self._ended.extend(calls)
        self.wake()

    def wake(self) -> None:
        """End a wait, or the next one, from any thread."""
        with suppress(RuntimeError):  # it is awake already
            self._asleep.release()

    def take(self, seconds: float) -> list[Ended]:
        """Return the calls that have ended, after at most ``seconds`` or a ``wake`` if there is none."""
        if not self._asleep.acquire(blocking=False) and not self._ended and seconds > 0:
            self._asleep.acquire(timeout=seconds)
        return [self._ended.popleft() for _ in range(len(self._ended))]
