"""Errors of a sink's client that come without an event, recorded for people."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.outcomes import clip
from outbox_relay.postgres.store import Store

RECORD_SECONDS = 1.0
"""Least time between two records of the circuit in the database."""
REMIND_SECONDS = 60.0
"""Longest time between two records while it is not closed: the database counts how long a destination is down."""

CLIENT = "client: "
"""Prefix of errors that the sink's client met without an event. ``record_trouble.sql`` clears only these."""


class ClientTrouble:
    """Records what a sink's client finds out about the destination without an event. ``asked`` returns that.

    It moves no circuit: only people are told.
    """

    def __init__(self, store: Store, sink: str, asked: Callable[[], str | None]) -> None:
        self._store = store
        self._sink = sink
        self._asked = asked

    async def run(self) -> None:
        """Record changes, and remind of an error that another relay may have cleared, until cancelled."""
        recorded: str | None = CLIENT  # an error that an earlier session recorded may be over
        recorded_at = float("-inf")
        while True:
            trouble = self._asked()
            error = None if trouble is None else clip(CLIENT + trouble)
            reminds = error is not None and time.monotonic() - recorded_at > REMIND_SECONDS
            if error != recorded or reminds:
                with contextlib.suppress(StatementFailed):  # it is tried again in a second
                    await self._store.record_trouble(self._sink, error)
                    recorded, recorded_at = error, time.monotonic()
            await asyncio.sleep(RECORD_SECONDS)
