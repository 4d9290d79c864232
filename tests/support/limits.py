"""Limits of sinks across all relays, for parts that are tested without a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast
from uuid import UUID

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.sink_limits import SinkLimits
from outbox_relay.postgres.limit_statements import Taken
from outbox_relay.postgres.store import Store
from outbox_relay.relay.shared_limits import SharedLimits
from outbox_relay.relay.sink_leases import SinkLeases
from tests.support.logs import RecordedLog

LEASE_SECONDS = 10.0


def no_limits(leases: SinkLeases | None = None) -> SharedLimits:
    """Return the limits of a sink that has none."""
    nothing = cast("Any", None)
    return SharedLimits(nothing, UUID(int=1), leases or SinkLeases("s", 1), 15.0, RecordedLog())


class LimitsDatabase:
    """The statements of the limits. ``tokens`` and ``slots`` are given to whom asks, as far as they go."""

    def __init__(self) -> None:
        self.tokens = 0
        self.slots = 0
        self.down = False
        self.pass_time: Callable[[], None] = lambda: None
        self.taken: list[tuple[int, int]] = []
        self.sinks: list[str] = []
        self.tended: list[tuple[int, int, int, float]] = []
        self.answering = asyncio.Event()
        self.answering.set()

    async def take_tokens(self, _sink: str, wanted: int, unused: int, _deadline: float) -> Taken:
        self.taken.append((wanted, unused))
        self.pass_time()
        if self.down:
            raise StatementFailed("no answer")
        self.tokens += unused
        given = min(wanted, self.tokens)
        self.tokens -= given
        return Taken(given, float(self.tokens))

    async def tend_slots(
        self, sink: str, _relay: UUID, call: int, wanted: int, kept: int, lease: float, _deadline: float
    ) -> tuple[int, int]:
        self.sinks.append(sink)
        self.tended.append((call, wanted, kept, lease))
        await self.answering.wait()
        if self.down:
            raise StatementFailed("no answer")
        quota = min(wanted, self.slots)
        return max(kept, quota), quota


@asynccontextmanager
async def limited(limits: SinkLimits) -> AsyncGenerator[tuple[SharedLimits, LimitsDatabase, SinkLeases]]:
    """Yield the limits of a sink, kept inside the block."""
    database, leases = LimitsDatabase(), SinkLeases("s", 1, limits)
    shared = SharedLimits(cast("Store", database), UUID(int=1), leases, LEASE_SECONDS, RecordedLog())
    keeping = asyncio.create_task(shared.run())
    try:
        yield shared, database, leases
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
