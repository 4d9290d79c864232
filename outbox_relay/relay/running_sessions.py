"""The sinks and the claimed rows of the sessions of one sink, of which several may run.

A session that another one follows still settles the rows that it has under way, with the sink that it delivers to.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from outbox_relay.postgres.store import Store
from outbox_relay.relay.queue_claims import RowsInHand
from outbox_relay.sinks import Sink


@dataclass(frozen=True, slots=True, eq=False)
class RunningSession:
    """The sink and the claimed rows of one session."""

    sink: Sink
    rows: RowsInHand = field(default_factory=RowsInHand)


class RunningSessions:
    """The sessions of one sink that run, and what ended ones have left behind."""

    def __init__(self) -> None:
        self._running: list[RunningSession] = []
        self._ended = RowsInHand()
        self._retired: list[Sink] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def retired(self) -> Sequence[Sink]:
        """The sinks that no new session uses, and that are still open."""
        return self._retired

    def uses(self, sink: Sink) -> bool:
        """Return True if a session that runs delivers to ``sink``."""
        return any(session.sink is sink for session in self._running)

    @contextmanager
    def running(self, sink: Sink) -> Generator[RowsInHand]:
        """Give the rows in hand of a session that delivers to ``sink`` and runs during the block."""
        session = RunningSession(sink)
        self._running.append(session)
        try:
            yield session.rows
        finally:
            self._running.remove(session)
            self._ended.add(session.rows)

    def retire(self, sink: Sink) -> None:
        """Close ``sink``, which no new session uses, once no session that runs delivers to it."""
        self._retired.append(sink)

    async def close_retired(self) -> None:
        """Close the retired sinks to which no session delivers any more."""
        for sink in [each for each in self._retired if not self.uses(each)]:
            await sink.close()
            self._retired = [each for each in self._retired if each is not sink]

    async def give_back(self, store: Store, sink: str, relay: UUID) -> None:
        """Give back the rows that ended sessions have claimed and not settled."""
        ended, self._ended = self._ended, RowsInHand()
        try:
            await ended.give_back(store, sink, relay)
        except BaseException:
            self._ended.add(ended)
            raise
