"""The sinks and the claimed rows of the sessions of one sink, of which several may run.

A session that another one follows still settles the rows that it has under way, with the sink that it delivers to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.store import Store
from outbox_relay.relay.queue_claims import RowsInHand
from outbox_relay.sinks import Sink

MOST_SESSIONS = 4
"""Maximum number of sessions of one queue, of which all but the last settle what they have under way."""


class NextConfiguration(NamedTuple):
    """The configuration of the next session."""

    spec: SinkSpec
    generation: int
    sink: Sink | None
    """The sink that was made again, open; None if the present one stays."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningSession:
    """The sink and the claimed rows of one session."""

    sink: Sink
    rows: RowsInHand = field(default_factory=RowsInHand)


class RunningSessions:
    """The sessions of one sink that run, and what ended ones have left behind."""

    def __init__(self) -> None:
        self._running: list[RunningSession] = []
        self._ended: list[RowsInHand] = []
        self._retired: list[Sink] = []
        self._unused: list[Sink] = []
        self._closing: list[Sink] = []

    def __len__(self) -> int:
        return len(self._running)

    def may_follow(self, under_way: int, *, queued: bool) -> bool:
        """Return True if another session may take the place of the newest one, which has ``under_way`` rows.

        Rows under way, there or in earlier sessions, stay theirs if all sessions are of a queue.
        """
        if not under_way and len(self) <= 1:
            return True
        return queued and (not under_way or len(self) < MOST_SESSIONS)

    @contextmanager
    def running(self, sink: Sink) -> Generator[RowsInHand]:
        """Give the rows in hand of a session that delivers to ``sink`` and runs during the block."""
        session = RunningSession(sink)
        self._running.append(session)
        try:
            yield session.rows
        finally:
            self._running.remove(session)
            self._ended.append(session.rows)

    async def give_back(self, store: Store, sink: str, relay: UUID) -> None:
        """Give back the rows that ended sessions have claimed and not settled."""
        while self._ended:
            rows = self._ended.pop()
            try:
                await rows.give_back(store, sink, relay)
            except BaseException:
                self._ended.append(rows)
                raise

    # -- sinks ------------------------------------------------------------------------------------------------

    @property
    def retired(self) -> list[Sink]:
        """The sinks that no new session uses, and that are still open."""
        return [*self._retired, *self._unused, *self._closing]

    def uses(self, sink: Sink) -> bool:
        """Return True if a session that runs delivers to ``sink``."""
        return any(session.sink is sink for session in self._running)

    def retire(self, sink: Sink) -> None:
        """Close ``sink``, which no new session uses, once no session that runs delivers to it."""
        self._retired.append(sink)

    def discard(self, sink: Sink) -> None:
        """Close ``sink``, which no session has used, with the next call of ``close_discarded``."""
        self._unused.append(sink)

    async def close_retired(self) -> None:
        """Close the sinks to which no session delivers any more."""
        await self.close_discarded()
        while closable := [sink for sink in self._retired if not self.uses(sink)]:
            await self._close(closable[0], self._retired)

    async def close_discarded(self) -> None:
        """Close the sinks that no session has used."""
        while self._unused:
            await self._close(self._unused[0], self._unused)

    async def _close(self, sink: Sink, kept_in: list[Sink]) -> None:
        """Close ``sink`` once, however many sessions end. It is closed later if that is cancelled."""
        kept_in.remove(sink)
        self._closing.append(sink)
        try:
            await sink.close()
        except asyncio.CancelledError:
            kept_in.append(sink)
            raise
        finally:
            self._closing.remove(sink)
