"""Build the parts of a relay process from its settings. Nothing is started and the database is not asked.

Leases, ticks and housekeeping are constructed here, and the relays of the sinks in ``relays``. No other module of the
service constructs an object of the relay room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple
from uuid import uuid4

from structlog.stdlib import BoundLogger

from outbox_relay import __version__
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.retry import RetryPolicy
from outbox_relay.domain.routing import like_pattern
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.store import Store
from outbox_relay.relay.housekeeping import Housekeeping
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.ticker import Ticker
from outbox_relay.service.kafka import kafka_sink
from outbox_relay.service.own_addresses import OwnAddresses
from outbox_relay.service.relays import SinkRelays
from outbox_relay.service.webhooks import Webhooks
from outbox_relay.settings import KafkaSettings, Settings, WebhookSettings
from outbox_relay.sinks import Sink

CONNECTIONS, CONNECTIONS_PER_SINK, CONNECTIONS_MAX = 4, 3, 30
"""Database connections of a process: a base, more for each sink, and the limit of their sum."""


class Parts(NamedTuple):
    """The parts of one relay process."""

    store: Store
    own_addresses: OwnAddresses
    webhooks: Webhooks
    sinks: Mapping[str, Sink]
    relays: SinkRelays
    background: Mapping[str, Callable[[], Awaitable[None]]]
    """Parts that run beside the relays of the sinks until they are cancelled, by their names in the log."""


def build(settings: Settings, log: BoundLogger, stopping: asyncio.Event) -> Parts:
    """Return the parts of a process that ends once ``stopping`` is set. Blocks while small files are read.

    Raises ``ConfigurationError`` if a file or variable named by the settings of a sink cannot be used.
    """
    own_addresses = OwnAddresses(settings)
    webhooks = Webhooks(settings, own_addresses)
    sinks = {name: build_sink(name, settings, webhooks) for name in settings.sinks}
    store = build_store(settings, connections_for(len(sinks)))
    lease_seconds, name = settings.relay.lease_seconds, settings.relay.name
    ticker = Ticker(store, CommitListener(wakeup_dsn(settings), store.database_identity, log), lease_seconds, log)
    lease_manager = LeaseManager(store, uuid4(), name, __version__, lease_seconds, log)
    return Parts(
        store,
        own_addresses,
        webhooks,
        sinks,
        SinkRelays(build_specs(settings), sinks, store, ticker, lease_manager, log, stopping),
        {
            "ownership": lease_manager.run,
            "ticking": ticker.run,
            "housekeeping": Housekeeping(store, log).run,
            "own addresses": own_addresses.run,
        },
    )


def connections_for(sinks: int) -> int:
    """Return the maximum number of database connections of a process that serves ``sinks`` sinks."""
    return min(CONNECTIONS_MAX, CONNECTIONS + CONNECTIONS_PER_SINK * sinks)


def build_store(settings: Settings, connections: int) -> Store:
    """Return a store, not yet open, with at most ``connections`` connections."""
    database = settings.database
    return Store(database.dsn, pooler=database.pooler == "transaction", connections=connections)


def wakeup_dsn(settings: Settings) -> Callable[[], str] | None:
    """Return a function that returns the connection string for LISTEN, or None if the relay polls."""
    database = settings.database
    return None if database.wakeup_dsn() is None else lambda: database.wakeup_dsn() or ""


def build_specs(settings: Settings) -> dict[str, SinkSpec]:
    """Return the specification of every sink by its name."""
    return {name: _spec(name, settings) for name in settings.sinks}


def _spec(name: str, settings: Settings) -> SinkSpec:
    sink = settings.sinks[name]
    patterns = settings.routes.patterns_for(name)
    return SinkSpec(
        name=name,
        patterns=patterns,
        types=None if patterns == ("*",) else tuple(like_pattern(pattern) for pattern in patterns),
        ordered=sink.order == "key",
        hold=sink.when_dead == "hold",
        start=sink.start,
        park_after_seconds=settings.relay.park_after_seconds,
        parked_max=sink.parked_max,
        retry=RetryPolicy(**sink.retry.model_dump()),
        circuit=CircuitPolicy(**sink.circuit.model_dump()),
    )


def build_sink(name: str, settings: Settings, webhooks: Webhooks) -> Sink:
    """Return the sink ``name``, not yet open. Blocks and raises as ``build``."""
    match settings.sinks[name]:
        case KafkaSettings() as kafka:
            return kafka_sink(name, kafka, settings.relay.lease_seconds)
        case WebhookSettings():
            return webhooks.make(name)
