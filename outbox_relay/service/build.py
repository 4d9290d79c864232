"""Build the parts of a relay process from its settings. The database is not asked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from uuid import UUID, uuid4

from structlog.stdlib import BoundLogger

from outbox_relay import __version__
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.store import Store
from outbox_relay.relay.chores import Chore, Chores, LagWatch, all_chores
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.measures import RelayMeasures
from outbox_relay.relay.retention import PASS_SECONDS, Retention
from outbox_relay.relay.schedules import ScheduleDefinitions, Schedules
from outbox_relay.relay.ticks import Ticks
from outbox_relay.retention.archiver import Archiver, archiver_for
from outbox_relay.service.clients import Clients, build_specs
from outbox_relay.service.figures import ROUND_SECONDS, Figures
from outbox_relay.service.history import MINUTE_SECONDS, History
from outbox_relay.service.metrics import SinkStates, register
from outbox_relay.service.own_addresses import REFRESH_SECONDS, OwnAddresses
from outbox_relay.service.recorded_config import RecordedConfig
from outbox_relay.service.reload import LIMIT_SECONDS, PAUSE_SECONDS, Reload
from outbox_relay.service.replays import Replays
from outbox_relay.service.sinks import ServedSinks
from outbox_relay.service.supervisor import Supervisor
from outbox_relay.service.tracing import Trace, untraced
from outbox_relay.settings import Settings

CONNECTIONS, SINK_CONNECTIONS_MAX, REPLAY_CONNECTIONS = 8, 10, 1
"""Database connections of the main thread and of those in the background, one for each, so that none waits for another,
the most of all sinks together, and those of all replays. One more listens for emits."""


class Parts:
    """The parts of one relay process. Blocks while small files are read.

    ``trace`` is applied to every client. Raises ``ConfigurationError`` if a file or variable named by the settings of a
    sink cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        read_settings: Callable[[], Settings],
        log: BoundLogger,
        trace: Trace = untraced,
    ) -> None:
        self.own_addresses = OwnAddresses(settings)
        clients = Clients(settings, self.own_addresses, trace)
        self.specs = build_specs(settings)
        self.clients = {name: clients.make(name) for name in self.specs}
        self.store = store = build_store(
            settings, CONNECTIONS, max(1, min(len(self.specs), SINK_CONNECTIONS_MAX)), REPLAY_CONNECTIONS
        )
        self.supervisor = supervisor = Supervisor(log)
        self.over = threading.Event()
        """Set once the parts in the background are to end, after the sinks."""
        relay, name = uuid4(), settings.relay.name
        self.measures = measures = RelayMeasures()
        listener = CommitListener(wakeup_dsn(settings), store.database_identity, log)
        self.ticks = Ticks(store.tick, listener, log, durations=measures.tick, longest=settings.relay.lease_seconds / 3)
        self.keeper = Keeper(store, relay, name, __version__, settings.relay.lease_seconds, log)
        self.sinks = ServedSinks(store, self.keeper, self.ticks, measures, supervisor, log)
        self.replays = Replays(store, self.keeper, self.ticks, self.sinks, clients.make, supervisor, log)
        recorded = RecordedConfig(store, self.keeper, settings, log)
        lag_watch = LagWatch(store, settings.notify.limit, log)
        definitions = ScheduleDefinitions(store, relay, settings.registered_schedules(), log)
        schedules = Schedules(store, definitions, name, log, measures.fired)

        def use(settings: Settings, clients: Clients) -> None:
            recorded.use(settings)
            lag_watch.use(settings.notify.limit)
            schedules.definitions.use(settings.registered_schedules())
            self.replays.make_client = clients.make

        self.reload = Reload(settings, read_settings, clients, self.sinks, use, recorded, log)
        figures = Figures(store, relay, log)
        register(measures.registry, [SinkStates(self.sinks), figures], lambda: self.reload.last_successful)
        history = History(store, measures.registry)
        first_history = time.monotonic() + random.uniform(0.0, MINUTE_SECONDS)  # noqa: S311 - jitter is no secret
        looks = [
            Chore("figures", figures.round, ROUND_SECONDS, ROUND_SECONDS, leisure=0.0),
            Chore("history", history.step, MINUTE_SECONDS, MINUTE_SECONDS, leisure=0.0, due_at=first_history),
            Chore("own addresses", self.own_addresses.refresh, REFRESH_SECONDS, REFRESH_SECONDS, leisure=0.0),
            Chore("recorded settings", recorded.record, 1.0, 1.0, leisure=1.0),
        ]
        retention = build_retention(settings, store, relay, log, self.over)

        reload = Chore("reload", self.reload.step, 0.0, PAUSE_SECONDS, float, 0.0, LIMIT_SECONDS)

        def in_turn(*chores: Chore, until: threading.Event = self.over) -> Callable[[], None]:
            return partial(Chores(store, log, chores).run, until)

        self.background: Mapping[str, Callable[[], None]] = {
            "keeper": self.keeper.run,
            "watchdog": self.keeper.watch,
            "waiter": self.ticks.run,
            "chores": in_turn(*all_chores(store, schedules, lag_watch)),
            "retention": in_turn(Chore("retention", retention.step, PASS_SECONDS, PASS_SECONDS, float, 0.0, 10.0)),
            "figures": in_turn(*looks),
            "reload": in_turn(reload, until=supervisor.stopping),
            "replays": self.replays.run,
        }
        """Parts that run with the sinks, each in a thread of its own, by their names in the log."""

    def end_background(self) -> None:
        """Ask the parts in the background to end."""
        self.over.set()
        self.keeper.end()
        self.ticks.stop()


def build_store(settings: Settings, connections: int, sink_connections: int = 0, replay_connections: int = 0) -> Store:
    """Return a store, not yet open: see ``Database``."""
    database = settings.database
    pooler = database.pooler == "transaction"
    return Store(
        database.dsn,
        pooler=pooler,
        connections=connections,
        sink_connections=sink_connections,
        replay_connections=replay_connections,
    )


def build_retention(
    settings: Settings, store: Store, relay: UUID, log: BoundLogger, stopping: threading.Event
) -> Retention:
    """Return the passes of the relay. Raises ``ConfigurationError`` as ``build_archiver``."""
    return Retention(
        *(store, relay, settings.relay.name, settings.stated_retention(), build_archiver(settings), log),
        enabled=settings.retention.enabled,
        stopping=stopping,
    )


def build_archiver(settings: Settings) -> Archiver | None:
    """Return the archiver of days, or None without an archive. Raises ``ConfigurationError`` without pyarrow."""
    database, retention = settings.database, settings.retention
    pooler = database.pooler == "transaction"
    return archiver_for(retention.archive, retention.archive_format, database.dsn, pooler=pooler)


def wakeup_dsn(settings: Settings) -> Callable[[], str] | None:
    """Return a function that returns the connection string for LISTEN, or None if the relay polls."""
    database = settings.database
    return None if database.wakeup_dsn() is None else lambda: database.wakeup_dsn() or ""
