"""The pace of parked deliveries, which leaves time to the events of the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sized

from outbox_relay.relay.context import DeliveryContext
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.sinks import Prefetches

PAUSE_SECONDS = 0.001
"""Maximum wait of a request for the one before it. A destination that takes longer gets more of them at once."""
CLAIM_SECONDS = 0.025
"""Time in which the rows of one claim begin. A claim of more rows is one long statement."""
FAIR_CLAIM_SECONDS = 0.005
"""The same where tenants take turns: a row that a tenant adds waits for the rows that were claimed before."""
BATCH_ROWS = 100
"""Number of rows in one claim for a sink that takes batches, while the log flows."""
REST_FACTOR = 16
"""Rest after such a claim, as a multiple of its duration."""
MOST_REST_SECONDS = 0.05
FAIR_PREFETCH = 4
"""One in this number of requests is sent ahead where tenants take turns, for the same reason."""
PREFETCH_CALL_SECONDS = 0.02
"""Mean duration of requests, with their waits, up to which some are sent ahead. Rows that wait are kept from others."""
LEAST_SECONDS = 0.0005
"""Duration of a request below which a claim does not become larger."""
FIRST_SECONDS = 1.0
"""Assumed duration of requests before the first one."""
WEIGHT = 0.1
"""Weight of the last request in the mean duration of requests."""
ROUND_WEIGHT = 0.5
"""Maximum weight of all requests that are under way at once. They often end together, after equally long times."""
MOST_WEIGHED = 100
"""Maximum number of requests among which it is divided. With more, the mean would follow too late."""


def _prefetch_of(context: DeliveryContext) -> Callable[[], int] | None:
    """Return a function that returns how many requests may be sent ahead; None if the sink takes none.

    Only rows of a queue are sent ahead, and none while another limit bounds the requests.
    """
    sink, limiter = context.sink, context.limiter
    if not (context.spec.queued and isinstance(sink, Prefetches)):
        return None
    parts = FAIR_PREFETCH if context.spec.fair else 1

    def prefetch() -> int:
        is_bounded = context.limits.active or limiter.reduced_limit is not None or limiter.shared
        return 0 if is_bounded else sink.prefetch // parts

    return prefetch


class ParkedPace:
    """The slots of parked deliveries: when the next request begins, and how many rows a claim takes.

    Requests that are under way together delay the events of the log, even if they use few slots: the relay, the server
    and the destination work on all of them before the next event. While the log flows, parked requests therefore follow
    one another as far as the destination is quick, and claims for batches rest in between.

    ``max_batch`` is the number of events in a call of a sink that keeps the order of its calls; None for others.
    ``blocked`` are the keys of which events of the log wait for rows. ``prefetch`` returns how many requests may be
    sent ahead; None for other sinks. They take no slot of the limiter.
    """

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        claim_seconds: float = CLAIM_SECONDS,
        max_batch: int | None = None,
        blocked: Sized = (),
        prefetch: Callable[[], int] | None = None,
    ) -> None:
        self._limiter = limiter
        self._claim_seconds = claim_seconds
        self._max_batch = max_batch
        self._blocked = blocked
        self._prefetch = prefetch
        self._taken = self._acquired = 0
        self._released = asyncio.Event()
        self._call_seconds = FIRST_SECONDS
        self._rests_until = float("-inf")

    @classmethod
    def for_sink(cls, context: DeliveryContext) -> ParkedPace:
        """Return the pace of one sink."""
        claim_seconds = FAIR_CLAIM_SECONDS if context.spec.fair else CLAIM_SECONDS
        max_batch = context.sink.max_batch if context.sink.keeps_order else None
        return cls(context.limiter, claim_seconds, max_batch, context.blocked, _prefetch_of(context))

    def observe(self, seconds: float) -> None:
        """Record the duration of a request."""
        weight = min(WEIGHT, ROUND_WEIGHT / min(max(1, self._taken), MOST_WEIGHED))
        self._call_seconds += (seconds - self._call_seconds) * weight

    def rows(self, most: int) -> int:
        """Return the number of rows of the next claim: a batch, or those that begin soon, and one for each slot."""
        if self._max_batch is not None:
            return min(BATCH_ROWS if self._yields else most, self._max_batch)
        limiter = self._limiter
        share = self._share
        at_once = 1 if limiter.flows else share
        soon = int(at_once * self._claim_seconds / max(self._call_seconds, LEAST_SECONDS))
        return min(max(self.free + 1, soon, 1), most)

    @property
    def _share(self) -> int:
        """The number of slots that parked deliveries may take. Batches have slots of their own."""
        share = self._limiter.limit if self._max_batch is not None else self._limiter.parked_share()
        return share + self._ahead

    @property
    def _ahead(self) -> int:
        """The number of requests that may be sent ahead."""
        return self._prefetch() if self._prefetch and self._call_seconds <= PREFETCH_CALL_SECONDS else 0

    def over_share(self) -> bool:
        """Return True if more slots are taken than parked deliveries may take now."""
        return self._taken > self._share

    @property
    def _yields(self) -> bool:
        """True while batches leave time to the events of the log, none of which waits for a row of its key."""
        return self._max_batch is not None and self._limiter.flows and not len(self._blocked)

    def claimed(self, seconds: float) -> None:
        """Record that a claim took ``seconds``. One for a batch is followed by a rest."""
        if self._yields:
            self._rests_until = time.monotonic() + min(REST_FACTOR * seconds, MOST_REST_SECONDS)

    async def rest(self) -> None:
        """Wait until the next claim may begin."""
        if (left := self._rests_until - time.monotonic()) > 0:
            await asyncio.sleep(left)

    @property
    def free(self) -> int:
        """The number of slots that may be taken now."""
        return min(self._share - self._taken, self._limiter.free + self._ahead)

    async def take_slot(self) -> None:
        """Wait for a slot of those that parked deliveries may take, and take it."""
        while self._taken >= self._share:
            self._released.clear()
            await self._released.wait()
        if self._acquired < self._limiter.limit or not self._ahead:
            await self._limiter.acquire()
            self._acquired += 1
        self._taken += 1

    def release_slot(self) -> None:
        """Release a slot."""
        self._taken -= 1
        if self._taken < self._acquired:
            self._acquired -= 1
            self._limiter.release()
        self._released.set()

    async def wait_for_turn(self) -> None:
        """Wait until the next request of a claim may begin."""
        if not (self._taken and self._limiter.flows):
            return
        self._released.clear()
        pause = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._released.set)
        try:
            await self._released.wait()
        finally:
            pause.cancel()
