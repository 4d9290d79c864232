"""The requests per second of one sink, which all relays share.

A row of the database has the tokens. A relay takes those of about 100 ms with one statement, by the database's clock,
and spends one for each event. Without an answer of the database it sends nothing beyond the tokens that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.limit_statements import Taken
from outbox_relay.postgres.store import Store
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.turns import Source, Turns

TAKE_SECONDS = 0.1
"""Seconds of sending for which a relay takes tokens at once, in addition to the response time of the database."""
MOST_TAKE_SECONDS = 0.4
"""Longest time for which a relay takes tokens, less than that whose tokens the database keeps."""
KEEP_SECONDS = 0.5
"""Time after which tokens that were not spent are given back."""
STARVED_SECONDS = 1.0
"""Time without a token after which shards are handed over with events in flight."""
STATEMENT_SECONDS = 3.0
"""Time limit of a statement."""
RETRY_SECONDS = 0.2
"""Pause after a statement that failed."""
LOOK_SECONDS = 1.0
"""Longest pause: the rate may be changed meanwhile."""
LEAST_SECONDS = 0.001
"""Shortest time at which the pace of requests is measured."""
SPREAD = 0.1
"""Part of a pause by which it is longer at random, so that no relay is always the first to ask."""


class SharedRate:
    """The tokens of one sink in this relay. ``leases`` has the rate, and the name of the sink."""

    def __init__(self, store: Store, leases: SinkLeases, log: BoundLogger) -> None:
        self._store = store
        self._leases = leases
        self._log = RateLimitedLog(log)
        self._turns = Turns()
        self._wanted = asyncio.Event()
        self._tokens = 0
        self._taken_at = float("-inf")
        self._ask_at = float("-inf")
        self._spent = 0
        self._served_at = float("-inf")
        self._answer_seconds = 0.0

    @property
    def per_second(self) -> float | None:
        """The rate in events per second, or None."""
        return self._leases.limits.rate_per_second

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._turns)

    @property
    def starved(self) -> bool:
        """True if requests have waited for a while, and none of them got a token."""
        return bool(self._turns) and time.monotonic() - self._served_at > STARVED_SECONDS

    async def spend(self, source: Source, most: int) -> int:
        """Wait for tokens; return how many of ``most`` were spent, at least one."""
        if self.per_second is None:
            return most
        if not self._turns and (ready := min(most, self._fresh())) > 0:
            self._pay(ready)
            return ready
        if not self._turns:
            self._served_at = time.monotonic()
        turn = self._turns.add(source, most)
        self._wanted.set()
        try:
            return await turn.granted
        except asyncio.CancelledError:
            self._turns.remove(source, turn)
            if turn.granted.done() and not turn.granted.cancelled():
                self.refund(turn.granted.result())
            raise

    def refund(self, events: int) -> None:
        """Return the tokens of events that were not sent."""
        if self.per_second is not None and events > 0:
            self._tokens += events
            self._spent -= events
            self._serve()
            self._wanted.set()  # what is left is to be given back

    async def run(self) -> None:
        """Take tokens while requests wait, until cancelled. Raises ``DatabaseUnavailable``.

        Requests may wait already when this begins.
        """
        while True:
            if not self._turns:
                await self._idle()
            elif (pause := self._ask_at - time.monotonic()) > 0.0:
                await asyncio.sleep(pause)
            elif self.per_second is None:
                self._serve_all()
            else:
                pause = await self._take(self.per_second)
                self._ask_at = time.monotonic() + min(LOOK_SECONDS, pause)

    async def _idle(self) -> None:
        """Wait until a request waits. Give back the tokens that are not spent meanwhile."""
        self._wanted.clear()
        left = max(0.0, self._taken_at + KEEP_SECONDS - time.monotonic())
        try:
            async with asyncio.timeout(left if self._tokens > 0 else None):
                await self._wanted.wait()
        except TimeoutError:
            await self._give_back()

    async def _give_back(self) -> None:
        """Give back all tokens. Those of a statement that failed are lost."""
        unused, self._tokens = self._tokens, 0
        if self.per_second is None or unused <= 0:
            return
        with contextlib.suppress(StatementFailed):
            await self._store.take_tokens(self._leases.current_name, 0, unused, STATEMENT_SECONDS)

    async def _take(self, rate: float) -> float:
        """Take tokens once, and give them to the requests that wait; return the pause in seconds after it."""
        most = math.ceil(rate * self._take_seconds)
        wanted = max(1, min(most, max(self._turns.events, self._used_lately())))
        unused, self._tokens, self._spent = self._tokens, 0, 0
        began = time.monotonic()
        try:
            taken = await self._store.take_tokens(self._leases.current_name, wanted, unused, STATEMENT_SECONDS)
        except StatementFailed as error:
            self._log.warning("rate.not_taken", sink=self._leases.sink, reason=str(error))
            return RETRY_SECONDS
        if taken is None:  # the limit was removed, which the next round of leases finds
            return RETRY_SECONDS
        self._tokens += taken.tokens
        self._taken_at = time.monotonic()
        self._answer_seconds = self._taken_at - began
        self._serve()
        pause = _pause(rate, taken, wanted, most)
        return max(0.0, pause - self._answer_seconds) if taken.tokens else pause

    @property
    def _take_seconds(self) -> float:
        """The time for which tokens are taken: the next ones come only after the next answer."""
        return min(MOST_TAKE_SECONDS, TAKE_SECONDS + self._answer_seconds)

    def _used_lately(self) -> int:
        """Return the number of tokens for ``_take_seconds`` at the pace since the last take."""
        return math.ceil(self._spent / max(time.monotonic() - self._taken_at, LEAST_SECONDS) * self._take_seconds)

    def _fresh(self) -> int:
        """Return the number of tokens, unless they are to be given back."""
        return self._tokens if time.monotonic() - self._taken_at < KEEP_SECONDS else 0

    def _pay(self, events: int) -> None:
        self._tokens -= events
        self._spent += events

    def _serve(self) -> None:
        """Give tokens to the requests that wait, in turn."""
        while self._turns and self._tokens > 0:
            turn = self._turns.next()
            if not turn.granted.done():
                self._served_at = time.monotonic()
                events = min(turn.most, self._tokens)
                self._pay(events)
                turn.granted.set_result(events)

    def _serve_all(self) -> None:
        while self._turns:
            turn = self._turns.next()
            if not turn.granted.done():
                turn.granted.set_result(turn.most)


def _pause(rate: float, taken: Taken, wanted: int, most: int) -> float:
    """Return the seconds until it is worth while to ask again.

    A relay that got none asks earlier than one that got some: relays that compete come in turn.
    """
    if taken.remaining >= 1.0:
        return 0.0
    missing = min(most, wanted) if taken.tokens else max(1.0, wanted / 2)
    return (missing - taken.remaining) / rate * (1.0 + random.uniform(0.0, SPREAD))  # noqa: S311 - no secret
