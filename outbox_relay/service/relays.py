"""The relays of the sinks of one process, with the leases and ticks that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping

from structlog.stdlib import BoundLogger

from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.store import Store
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.sink_relay import SinkRelay
from outbox_relay.relay.ticker import Ticker
from outbox_relay.service.tracing import Trace, untraced
from outbox_relay.sinks import Sink

REMOVED = "was removed from the database, or renamed there: /readyz says what to do"
"""Reason for applying no setting of a sink that is missing from the database."""


class SinkRelays(Mapping[str, SinkRelay]):
    """The relays by the names of their sinks. Empty until ``register`` succeeds.

    Each delivers to the sink that ``trace`` returns.
    """

    def __init__(
        self,
        specs: Mapping[str, SinkSpec],
        sinks: Mapping[str, Sink],
        store: Store,
        ticker: Ticker,
        lease_manager: LeaseManager,
        log: BoundLogger,
        stopping: asyncio.Event,
        trace: Trace = untraced,
    ) -> None:
        self._specs = specs
        self._sinks = sinks
        self._store = store
        self._ticker = ticker
        self._lease_manager = lease_manager
        self._log = log
        self._stopping = stopping
        self._trace = trace
        self._relays: Mapping[str, SinkRelay] = {}

    def __getitem__(self, sink: str) -> SinkRelay:
        return self._relays[sink]

    def __iter__(self) -> Iterator[str]:
        return iter(self._relays)

    def __len__(self) -> int:
        return len(self._relays)

    @property
    def answered_at(self) -> float:
        """``time.monotonic()`` of the last time at which the database answered the round of leases."""
        return self._lease_manager.answered_at

    @property
    def shards(self) -> Mapping[str, int]:
        """Number of owned shards by sink."""
        held = self._lease_manager.held
        return {name: held[name] for name in self._relays}

    async def register(self) -> None:
        """Register the sinks in the database and build their relays.

        Raises ``DatabaseUnavailable``, ``StatementFailed``, ``SessionReset`` or ``DatabaseUnusable``.
        """
        generations = await self._register(self._specs.values())
        self._relays = {name: self._relay(spec, generations[name]) for name, spec in self._specs.items()}

    async def reload(self, specs: Mapping[str, SinkSpec], remade: Mapping[str, Sink]) -> list[str]:
        """Register the routes of ``specs`` and give them, and the sinks that were made again, to the relays.

        Return the sinks that are missing from the database. Nothing of them changes, and they are not registered.

        Raises as ``register``. The database may then have the routes; repeat the call.
        """
        known = {row.name for row in await self._store.sinks(specs)}
        wanted = [spec for name, spec in specs.items() if name in known]
        generations = await self._register(wanted) if wanted else {}
        missing = sorted(name for name in specs if not generations.get(name))
        for name, relay in self._relays.items():
            if name not in missing:
                sink = self._trace(name, remade[name]) if name in remade else None
                relay.reload(specs[name], generations[name], sink)
        return missing

    async def stop(self) -> None:
        """Claim no more shards and let every relay drain those that it owns."""
        await self._lease_manager.stop()

    async def unregister(self) -> None:
        """Remove this process from the list of relays in the database."""
        await self._lease_manager.leave()

    async def _register(self, specs: Collection[SinkSpec]) -> dict[str, int]:
        result = await self._ticker.refresh()
        wanted = [(spec.name, spec.patterns, spec.start) for spec in specs]
        queued = [spec.name for spec in specs if spec.queued]
        generations = await self._store.register_sinks(wanted, result.tick, queued=queued, server=result.incarnation)
        served = {spec.name: spec.limits for spec in specs if generations.get(spec.name)}
        await self._store.state_limits(served, result.incarnation)
        return generations

    def _relay(self, spec: SinkSpec, generation: int) -> SinkRelay:
        return SinkRelay(
            spec,
            self._trace(spec.name, self._sinks[spec.name]),
            self._store,
            self._ticker,
            self._lease_manager,
            self._lease_manager.add(spec.name, generation, spec.limits, spec.routes),
            self._log.bind(sink=spec.name),
            self._stopping,
        )
