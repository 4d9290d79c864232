"""The limits of one sink: concurrent calls, the share of limits across all relays, and the bound of its rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from outbox_relay.domain.circuit import Troubles
from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.sink_limits import TokenBucket, in_flight_share
from outbox_relay.postgres.store import Store
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_spec import SinkSpec

NO_LIMIT = 1 << 31
COUNT_SECONDS = 1.0
"""Minimum interval between two counts of rows."""
COUNT_SHARE, QUEUE_COUNT_SHARE = 20, 100
"""Minimum interval between two counts, as a multiple of the duration of a count, and of that of a queue."""
COUNT_PAGE = 100_000
"""Maximum number of rows of a queue that one statement counts."""
TROUBLE_SECONDS = 5.0
"""Minimum duration of trouble with a part of the destination. By then the rows of its events are in the database."""
FORGET_SECONDS = 150.0
"""Time after which a part is no longer in trouble if it was not reported again, while others are."""
DRAIN_SECONDS = 1.0
"""Time for the events in flight from which on shards are handed over with them."""
EVENTS_PER_REQUEST = 10
"""Events in flight for each call of this relay from which on shards are handed over with them."""
WAIT_SECONDS = 0.02
"""Interval between two looks at the limits while a call waits for them."""
YIELD_SECONDS = 5 * WAIT_SECONDS
"""Time after such a look for which the call counts as one that waits."""
TARGET_CALLS = 3
"""Calls of a sink after which a call of its replays comes next, if one waits."""
NEVER_BEFORE = float("-inf")


class Slots:
    """The number of calls that may be in flight.

    It is halved when the destination throttles, and raised by one whenever as many calls were delivered as it allows.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = self._current = float(maximum)

    @property
    def limit(self) -> int:
        """The number of calls that may be in flight now."""
        return int(self._current)

    @property
    def reduced_limit(self) -> int | None:
        """The current limit; None means the maximum."""
        return self.limit if self._current < self._maximum else None

    def decrease(self) -> None:
        """Halve the limit, since the destination throttles."""
        self._current = max(1.0, self._current / 2)

    def increase(self) -> None:
        """Raise the limit by a fraction of one, since a call was delivered."""
        if self._current < self._maximum:
            self._current = min(self._maximum, self._current + 1.0 / self._current)


class RateShare:
    """The share of this relay in the limits of a sink across all relays: that of the shards that it owns.

    Nothing is asked of the database. A shard has one owner, which drains before it gives the shard up, so the shares of
    all relays together are never more than the limit. The loops of a sink and of its replays use one object, from their
    threads. A replay that waits gets one call after ``TARGET_CALLS`` of its target.
    """

    def __init__(self, leases: SinkLeases, now: float) -> None:
        self._leases = leases
        self._bucket = TokenBucket(now)
        self._lock = threading.Lock()
        self._in_flight = self._target_calls = 0
        self._asked_at = {False: NEVER_BEFORE, True: NEVER_BEFORE}
        """The times when the target, and a replay, had last to wait."""
        self._over_since: float | None = None

    @property
    def active(self) -> bool:
        """True if the sink has a limit."""
        limits = self._leases.limits
        return limits.rate_per_second is not None or limits.max_in_flight_total is not None

    @property
    def waiting(self) -> int:
        """The number of loops, of the sink and of its replays, whose next call waits for a limit: at most two."""
        now = time.monotonic()
        return sum(now - at < YIELD_SECONDS for at in self._asked_at.values())

    def _rate(self) -> float | None:
        total = self._leases.limits.rate_per_second
        return None if total is None else total * self._leases.sharing / SHARDS

    def _most_in_flight(self, shards: int) -> int:
        total = self._leases.limits.max_in_flight_total
        return NO_LIMIT if total is None else in_flight_share(total, shards, self._leases.relays)

    def room(self, now: float) -> int:
        """Return the number of events with which a call may begin now."""
        if not self.active:
            return NO_LIMIT
        with self._lock:
            return self._room(now)

    def _room(self, now: float) -> int:
        if self._in_flight >= self._most_in_flight(self._leases.sharing):
            return 0
        rate = self._rate()
        return NO_LIMIT if rate is None else self._bucket.fill(rate, now)

    def wait(self, now: float, *, replay: bool = False) -> float:
        """Return 0.0 if a call may begin now, and otherwise the seconds after which to ask again."""
        if not self.active:
            return 0.0
        with self._lock:
            other_waits = now - self._asked_at[not replay] < YIELD_SECONDS
            is_turn_of_replay = self._target_calls >= TARGET_CALLS
            if self._room(now) and not (other_waits and is_turn_of_replay != replay):
                self._asked_at[replay] = NEVER_BEFORE
                return 0.0
            self._asked_at[replay] = now
            return WAIT_SECONDS

    def begin(self, events: int, *, replay: bool = False) -> None:
        """Count a call with that many events."""
        with self._lock:
            self._in_flight += 1
            self._target_calls = 0 if replay else self._target_calls + 1
            if self._rate() is not None:
                self._bucket.add(-events)

    def end(self) -> None:
        """Count a call in flight less."""
        with self._lock:
            self._in_flight -= 1

    def stall(self, events: int) -> bool:
        """Return True if ``events`` in flight would take long, so that shards are handed over with them."""
        rate = self._rate()
        is_slow = rate is not None and events > rate * DRAIN_SECONDS
        return is_slow or events > self._most_in_flight(self._leases.sharing) * EVENTS_PER_REQUEST

    def may_release(self, patience: float, now: float) -> bool:
        """Return True if drained shards may be released, whose next owner has their share at once.

        The calls in flight must fit the shards that stay. After ``patience`` seconds only those are left that last
        longer than the time limit of the sink.
        """
        if self._in_flight <= self._most_in_flight(self._leases.staying):
            self._over_since = None
            return True
        if self._over_since is None:
            self._over_since = now
        return now - self._over_since >= patience


class RowBound:
    """The bound of the rows of a sink that are to be delivered: ``pending_max``.

    It is counted in the database, the more seldom the longer that takes. Between two counts the rows that this relay
    makes, and those of a queue that it delivers, count for those of all relays, by its part of the shards.

    Trouble is that of a part of the destination, such as a topic: its events become rows while the others flow.
    """

    def __init__(
        self, store: Store, spec: SinkSpec, leases: SinkLeases, unsettled: Callable[[], int], now: Callable[[], float]
    ) -> None:
        self._store = store
        self._spec = spec
        self._leases = leases
        self._unsettled = unsettled
        self._now = now
        self._most = spec.settings.pending_max
        self._troubles = Troubles()
        self._troubled_at = NEVER_BEFORE
        self._count = 0
        self._changed = 0.0
        self._is_counted = False
        self.count_at = NEVER_BEFORE
        """The time when the next count is due, in seconds of the clock."""
        self._failure: str | None = None
        self.troubles_over = 0
        """The number of troubles that are over."""

    @property
    def full(self) -> bool:
        """True if no more rows may be made."""
        return self._count + self._changed >= self._most

    def has_capacity(self, now: float) -> bool:
        """Return True if events may be sent: those that fail may become rows. Counts the rows if that is due."""
        self.count_if_due(now)
        return not self.full

    @property
    def troubles(self) -> Mapping[str, str]:
        """The parts of the destination in trouble, with their reasons."""
        return self._troubles.reasons

    @property
    def notice(self) -> str | None:
        """The trouble, or the full bound, as it is shown to people."""
        if self.full and self._is_counted:
            text = f"{self._most} events wait as rows, and no more than that may (pending_max): the sink waits for them"
            behind = "; those behind a dead letter wait until it is retried or discarded" if self._spec.hold else ""
            return f"{self._troubles.text}; {text}" if self._troubles else text + behind
        return self._troubles.text or (f"events do not become rows: {self._failure}" if self._failure else None)

    def report_failure(self, error: str | None) -> None:
        """Record why rows of a queue cannot be made; None: they can."""
        self._failure = error

    def add(self, count: int = 1) -> None:
        """Count rows that were made."""
        self._changed += count * self._weight

    def remove(self, count: int) -> None:
        """Count rows of a queue that were delivered. Others are found less by the next count."""
        if self._spec.queued:
            self._changed -= count * self._weight

    @property
    def _weight(self) -> float:
        return SHARDS / max(1, len(self._leases.held)) if self._spec.queued else 1.0

    def report_trouble(self, part: str, reason: str, now: float) -> None:
        """Record that a part of the destination is in trouble."""
        self._troubled_at = now
        self._troubles.report(part, reason, now)

    def count_if_due(self, now: float) -> None:
        """Count the rows in the database if that is due. A count that failed leaves the last one, at first 0."""
        if now < self.count_at:
            return
        if self._is_counted and not (self._count or self._changed or self._troubles):
            return
        troubled, changed = bool(self._troubles), self._changed
        try:
            if self._spec.queued:
                self._count, waiting = self._count_pages(), False
            else:
                self._count, waiting = self._store.count_parked(self._spec.name, self._most, trouble=troubled)
                self._count += self._unsettled()
        except StatementFailed:
            self._is_counted = True
            self.count_at = now + COUNT_SECONDS
            return
        self._changed -= changed
        self._is_counted = True
        share = QUEUE_COUNT_SHARE if self._spec.queued else COUNT_SHARE
        self.count_at = now + max(COUNT_SECONDS, share * (self._now() - now))
        if troubled:
            self._forget_troubles(now, waiting=waiting)

    def _count_pages(self) -> int:
        count, last = 0, 0
        while count <= self._most:
            found, last = self._store.count_queued(self._spec.name, last, COUNT_PAGE)
            count += found
            if found < COUNT_PAGE:
                break
        return count

    def _forget_troubles(self, now: float, *, waiting: bool) -> None:
        """End the troubles once no row waits for them, and before that each one that is no longer reported."""
        if not waiting and now - self._troubled_at > TROUBLE_SECONDS:
            self._troubles = Troubles()
            self.troubles_over += 1
        else:
            self._troubles.forget(now - FORGET_SECONDS)
