"""The bound of parked deliveries, and trouble with a part of the destination."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.domain.troubles import Troubles
from outbox_relay.postgres.store import Store
from outbox_relay.relay.settler import Settler

COUNT_SECONDS = 1.0
"""Minimum interval between two counts of the parked deliveries."""

COUNT_SHARE = 20
"""Minimum interval between two counts, as a multiple of the duration of a count."""

TROUBLE_SECONDS = 5.0
"""Minimum duration of trouble with a part of the destination. By then the rows of its events are in the database."""

FORGET_SECONDS = 150.0
"""Time after which a part is no longer in trouble if it was not reported again, while others are.

A topic in trouble is tried again within 126 s: see ``TopicBreakers.verdict``.
"""


class ParkedLimit:
    """The bound ``parked_max`` of the events that are parked and to be delivered.

    Trouble is that of a part of the destination, such as a topic: its events are parked while the others flow.
    ``changed`` is set when ``notice`` changes.
    """

    def __init__(self, store: Store, spec: SinkSpec, settler: Settler, changed: asyncio.Event) -> None:
        self._store = store
        self._spec = spec
        self._settler = settler
        self._changed = changed
        self._troubles = Troubles()
        self._troubled_at = float("-inf")
        self._added = 0
        self._parked_count = 0
        self._uncounted = False
        self._counted = asyncio.Event()
        self._count_due = asyncio.Event()
        self.notice: str | None = None
        """The trouble, or the full bound, as it is shown to people."""
        self.troubles_over = 0
        """The number of troubles that are over."""

    @property
    def full(self) -> bool:
        """True if no more events may be parked."""
        return self._parked_count >= self._spec.parked_max

    @property
    def has_capacity(self) -> bool:
        """True if ``wait_for_capacity`` would not wait."""
        return not self._uncounted and not self.full

    def add(self, count: int = 1) -> None:
        """Count more parked events."""
        self._added += count
        self._parked_count += count
        self._count_due.set()

    def remove(self, count: int) -> None:
        """Count fewer parked events. The next count of the database does."""

    @property
    def troubles(self) -> Mapping[str, str]:
        """The parts of the destination in trouble, with their reasons."""
        return self._troubles.reasons

    def report_trouble(self, part: str, reason: str) -> None:
        """Record that a part of the destination is in trouble."""
        self._troubled_at = time.monotonic()
        self._troubles.report(part, reason, self._troubled_at)
        self._count_due.set()
        self.notice = self._troubles.text
        self._changed.set()

    async def wait_for_capacity(self) -> None:
        """Wait until more events may be parked, from whatever cause.

        Parked events are claimed and delivered meanwhile, so the wait ends.
        """
        was_full = False
        while not self.has_capacity:
            if self.full:
                was_full = True
                self._set_notice(self._fullness())
            self._counted.clear()
            await self._counted.wait()
        if was_full:
            self.notice = self._troubles.text

    def _fullness(self) -> str:
        most = self._spec.parked_max
        if self._troubles:
            return f"{self._troubles.text}; no more than {most} events may wait for it as rows"
        behind = "; those behind a dead letter wait until it is retried or discarded" if self._spec.hold else ""
        return f"{most} events wait as rows, and no more than that may (parked_max): the sink waits for them{behind}"

    async def run(self) -> None:
        """Count the parked events while there are any, until cancelled.

        Raises ``DatabaseUnavailable``.

        Events are parked only after the first count.
        """
        self._uncounted = True
        while True:
            self._count_due.clear()
            asked_at = time.monotonic()
            await self._count(asked_at)
            self._uncounted = False
            self._counted.set()
            await asyncio.sleep(max(COUNT_SECONDS, COUNT_SHARE * (time.monotonic() - asked_at)))
            if not self._parked_count and not self._troubles:
                await self._count_due.wait()

    async def _count(self, asked_at: float) -> None:
        """Count the rows in the database and those that are not yet in it."""
        added, unsettled, troubled = self._added, self._settler.unsettled, bool(self._troubles)
        try:
            count, waiting = await self._store.count_parked(self._spec.name, self._spec.parked_max, trouble=troubled)
        except StatementFailed:  # the next count may have more time; until then the count of this process is used
            return
        self._parked_count = count + unsettled + self._added - added
        if troubled:
            self._forget_troubles(asked_at, waiting=waiting)

    def _forget_troubles(self, asked_at: float, *, waiting: bool) -> None:
        """End the troubles once no row waits for them, and before that each one that is no longer reported."""
        if not waiting and asked_at - self._troubled_at > TROUBLE_SECONDS:
            self._troubles = Troubles()
            self.notice = None
            self.troubles_over += 1
            self._changed.set()
            return
        known = len(self._troubles)
        self._troubles.forget(asked_at - FORGET_SECONDS)
        if len(self._troubles) < known:
            self._set_notice(self._troubles.text)

    def _set_notice(self, reason: str | None) -> None:
        if reason != self.notice:
            self.notice = reason
            self._changed.set()
