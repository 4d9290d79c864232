"""Build the parts of a relay process from its settings. Nothing is started and the database is not asked.

Leases, ticks and housekeeping are constructed here, and the relays of the sinks in ``relays``. No other module of the
service constructs an object of the relay room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple
from uuid import UUID, uuid4

from structlog.stdlib import BoundLogger

from outbox_relay import __version__
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.measures import RelayMeasures, ScheduleMeasures
from outbox_relay.domain.retry import RetryPolicy
from outbox_relay.domain.routing import like_patterns
from outbox_relay.domain.sink_limits import SinkLimits
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.store import Store
from outbox_relay.relay.housekeeping import Chore, Housekeeping
from outbox_relay.relay.lag_watch import LOOK_SECONDS, LagWatch
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.retention import Retention
from outbox_relay.relay.schedule_definitions import ScheduleDefinitions
from outbox_relay.relay.scheduled_events import ScheduledEvents
from outbox_relay.relay.schedules import Schedules
from outbox_relay.relay.ticker import Ticker
from outbox_relay.retention.archiver import ProcessArchiver, archiver_for
from outbox_relay.service.metrics.figures import Figures
from outbox_relay.service.own_addresses import OwnAddresses
from outbox_relay.service.own_sinks import OwnContext
from outbox_relay.service.recorded_config import RecordedConfig
from outbox_relay.service.relays import SinkRelays
from outbox_relay.service.replays import ReplayRelays
from outbox_relay.service.tracing import Trace, untraced
from outbox_relay.service.webhooks import Webhooks
from outbox_relay.settings import Settings
from outbox_relay.sinks import Sink
from outbox_relay.sinks.door import sink_type

CONNECTIONS, CONNECTIONS_PER_SINK, CONNECTIONS_MAX = 5, 3, 31
"""Database connections of a process: a base, more for each sink, and the limit of their sum."""
DUE_ROWS = 500
"""Rows of a sink with ``claim = "rows"`` that one chore puts into its queue when their time has come."""
LOOK_CONNECTIONS = 1
"""The number of them that is not in the pool: the one on which the relay looks at the log."""


class Parts(NamedTuple):
    """The parts of one relay process."""

    store: Store
    own_addresses: OwnAddresses
    webhooks: Webhooks
    sinks: dict[str, Sink]
    relays: SinkRelays
    replays: ReplayRelays
    replay_clients: ReplayClients
    recorded_config: RecordedConfig
    measures: RelayMeasures
    figures: Figures
    lag_watch: LagWatch
    schedules: Schedules
    background: Mapping[str, Callable[[], Awaitable[None]]]
    """Parts that run with the relays of the sinks until they are cancelled, by their names in the log."""


def build(settings: Settings, log: BoundLogger, stopping: asyncio.Event, trace: Trace = untraced) -> Parts:
    """Return the parts of a process that ends once ``stopping`` is set. Blocks while small files are read.

    ``trace`` is applied to every sink that delivers. Raises ``ConfigurationError`` if a file or variable named by the
    settings of a sink cannot be used.
    """
    own_addresses = OwnAddresses(settings)
    webhooks = Webhooks(settings, own_addresses)
    sinks = {name: build_sink(name, settings, webhooks) for name in settings.sinks}
    store = build_store(settings, connections_for(len(sinks)) - LOOK_CONNECTIONS)
    relay, lease, name, measures = uuid4(), settings.relay.lease_seconds, settings.relay.name, RelayMeasures()
    ticker = Ticker(store, CommitListener(wakeup_dsn(settings), store.database_identity, log), lease, log, measures)
    lease_manager = LeaseManager(store, relay, name, __version__, lease, log)
    relays = SinkRelays(build_specs(settings), sinks, store, ticker, lease_manager, log, stopping, trace)
    recorded_config = RecordedConfig(store, lease_manager, settings, log)
    clients, lag_watch = ReplayClients(settings, webhooks, trace), LagWatch(store, settings.notify.limit, log)
    schedules = build_schedules(settings, store, relay, log, measures.schedules)
    return Parts(
        store,
        own_addresses,
        webhooks,
        sinks,
        relays,
        ReplayRelays(store, ticker, lease_manager, relays, clients.make, log, stopping),
        clients,
        recorded_config,
        measures,
        Figures(store, relay, log),
        lag_watch,
        schedules,
        {
            "ownership": lease_manager.run,
            "ticking": ticker.run,
            "housekeeping": Housekeeping(store, log, lag_chore(lag_watch), *queue_chores(settings, store)).run,
            "retention": build_retention(settings, store, relay, log).run,
            "own addresses": own_addresses.run,
            "recorded settings": recorded_config.run,
            "schedules": schedules.run,
            "scheduled events": ScheduledEvents(store, log).run,
        },
    )


def lag_chore(lag_watch: LagWatch) -> Chore:
    """Return the chore that compares the lag of each sink with the limit."""
    return Chore("look at lags", lag_watch.look, LOOK_SECONDS, LOOK_SECONDS)


def queue_chores(settings: Settings, store: Store) -> list[Chore]:
    """Return the chore of sinks with ``claim = "rows"``; none if there is no such sink."""
    if all(sink.claim == "log" for sink in settings.sinks.values()):
        return []
    return [Chore("queue due rows", partial(store.queue_due_rows, DUE_ROWS), 2.0, 5.0, lambda count: count >= DUE_ROWS)]


def connections_for(sinks: int) -> int:
    """Return the maximum number of database connections of a process that serves ``sinks`` sinks."""
    return min(CONNECTIONS_MAX, CONNECTIONS + CONNECTIONS_PER_SINK * sinks)


def build_store(settings: Settings, connections: int) -> Store:
    """Return a store, not yet open, with at most ``connections`` connections in its pool."""
    database = settings.database
    return Store(database.dsn, pooler=database.pooler == "transaction", connections=connections)


def build_retention(settings: Settings, store: Store, relay: UUID, log: BoundLogger) -> Retention:
    """Return the passes of the relay. Raises ``ConfigurationError`` as ``build_archiver``."""
    stated, enabled = settings.stated_retention(), settings.retention.enabled
    return Retention(store, relay, settings.relay.name, stated, build_archiver(settings), log, enabled=enabled)


def build_schedules(
    settings: Settings, store: Store, relay: UUID, log: BoundLogger, measures: ScheduleMeasures
) -> Schedules:
    """Return the part that registers the schedules of the file, and fires all."""
    definitions = ScheduleDefinitions(store, relay, settings.registered_schedules(), log)
    return Schedules(store, definitions, settings.relay.name, log, measures)


def build_archiver(settings: Settings) -> ProcessArchiver | None:
    """Return the archiver of days, or None without an archive. Raises ``ConfigurationError`` without pyarrow."""
    database, retention = settings.database, settings.retention
    pooler = database.pooler == "transaction"
    return archiver_for(retention.archive, retention.archive_format, database.dsn, pooler=pooler)


def wakeup_dsn(settings: Settings) -> Callable[[], str] | None:
    """Return a function that returns the connection string for LISTEN, or None if the relay polls."""
    database = settings.database
    return None if database.wakeup_dsn() is None else lambda: database.wakeup_dsn() or ""


def build_specs(settings: Settings) -> dict[str, SinkSpec]:
    """Return the specification of every sink by its name."""
    return {name: _spec(name, settings) for name in settings.sinks}


def _spec(name: str, settings: Settings) -> SinkSpec:
    sink = settings.sinks[name]
    patterns = settings.patterns_for(name)
    return SinkSpec(
        name=name,
        patterns=patterns,
        types=like_patterns(patterns),
        ordered=sink.order == "key" and sink.claim == "log",
        hold=sink.when_dead == "hold",
        start=sink.start,
        park_after_seconds=settings.relay.park_after_seconds,
        parked_max=sink.parked_max,
        claim=sink.claim,
        rows_max=sink.rows_max,
        fair=sink.fair_by == "tenant",
        tenants=sink.type == "python",
        record_attempts=sink.record_attempts,
        retry=RetryPolicy(**sink.retry.model_dump()),
        circuit=CircuitPolicy(**sink.circuit.model_dump()),
        limits=SinkLimits(sink.rate_per_second or None, sink.max_in_flight_total or None, sink.spread_seconds or None),
    )


def build_sink(
    name: str, settings: Settings, webhooks: Webhooks, replay: int | None = None, slots: int | None = None
) -> Sink:
    """Return the sink ``name``, or its client for a ``replay`` with ``slots`` calls at once, not yet open.

    Blocks and raises as ``build``.
    """
    sink = settings.sinks[name]
    try:
        found = sink_type(sink.type)
        if found is None:
            raise ConfigurationError(settings.at(("sinks", name, "type"), "is not installed any more"))
        return found.make(sink, OwnContext(name, replay, slots, settings=settings, webhooks=webhooks))
    except ValueError as error:
        raise ConfigurationError(settings.at(("sinks", name), str(error))) from None


class ReplayClients:
    """Makes clients for replays from the settings in force."""

    def __init__(self, settings: Settings, webhooks: Webhooks, trace: Trace = untraced) -> None:
        self._settings = settings
        self._webhooks = webhooks
        self._trace = trace

    def use(self, settings: Settings) -> None:
        """Use the settings of a reload."""
        self._settings = settings

    def make(self, name: str, replay: int, slots: int) -> Sink:
        """Return a client of the sink ``name`` for a replay, not yet open. Blocks and raises as ``build``."""
        return self._trace(name, build_sink(name, self._settings, self._webhooks, replay, slots))
