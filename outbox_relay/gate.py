"""Whether a sink is sent anything now: its circuit, those who wait for it, and what people are told of it."""

from __future__ import annotations

import asyncio
import time

from outbox_relay.ownership import Holding
from outbox_relay.policy import Circuit
from outbox_relay.store import Store

RECORD_SECONDS = 1.0
"""Least time between two records of the circuit in the database."""


class Gate:
    """One circuit of one sink in this process, shared by everything that sends to it."""

    def __init__(self, store: Store, holding: Holding, circuit: Circuit) -> None:
        self._store = store
        self._holding = holding
        self._circuit = circuit
        self._moved = asyncio.Event()
        self._told: tuple[str, str | None] | None = None
        self._heard = asyncio.Event()

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half-open``."""
        return self._circuit.state

    @property
    def closed(self) -> bool:
        """Whether events flow."""
        return self._circuit.state == "closed"

    async def admit(self) -> bool:
        """Wait until an event may be sent; returns whether it is the one probe of a circuit that is not closed.

        Whoever gets the probe reports its outcome, or that it was ``unused``.
        """
        while (seconds := self._circuit.admits(time.monotonic())) > 0.0:
            self._moved.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._moved.wait()
            except TimeoutError:
                continue
        return not self.closed

    def delivered(self) -> None:
        """The destination took an event."""
        was_closed = self.closed
        self._circuit.delivered()
        if not was_closed or self._holding.circuit != "closed":
            self._changed()

    def failed(self, event_id: int, reason: str, *, at_once: bool, retry_after: float | None = None) -> None:
        """The destination did not take an event."""
        self._circuit.failed(event_id, reason, time.monotonic(), at_once=at_once, retry_after=retry_after)
        self._changed()

    def unused(self) -> None:
        """The probe was not needed."""
        self._circuit.unused()
        self._moved.set()

    def _changed(self) -> None:
        self._moved.set()
        self._heard.set()

    async def run(self) -> None:
        """Record what was found out, until cancelled. Raises ``DatabaseLost``."""
        while True:
            await self._heard.wait()
            self._heard.clear()
            state = self._circuit.state
            error = self._circuit.last_error if state != "closed" else None
            if state != self._holding.circuit or (state, error) != self._told:
                await self._store.record_circuit(self._holding.sink, state, error)
                self._holding.circuit, self._told = state, (state, error)
            await asyncio.sleep(RECORD_SECONDS)
