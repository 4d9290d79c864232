"""The sinks of one process: each is served by a loop in a thread of its own, and by another one after a reload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.postgres.store import Store
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.loop import SinkLoop
from outbox_relay.relay.measures import RelayMeasures, SinkMeasures
from outbox_relay.relay.outcomes import Parts
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_spec import SinkSpec
from outbox_relay.relay.ticks import Ticks
from outbox_relay.service.supervisor import Supervisor
from outbox_relay.sinks import Sink


class Replacement(NamedTuple):
    """The settings and parts with which a sink is served after a reload."""

    spec: SinkSpec
    generation: int
    sink: Sink


@dataclass(slots=True)
class ServedSink:
    """One sink of this process. ``new_loop`` makes a loop that is not yet running. ``sink`` is open."""

    spec: SinkSpec
    sink: Sink
    leases: SinkLeases
    keeper: Keeper
    new_loop: Callable[[ServedSink], SinkLoop]
    restarts: Counter[str] = field(default_factory=Counter[str])
    """The restarted sessions of all loops, by reason."""
    measures: SinkMeasures = field(default_factory=SinkMeasures)
    loop: SinkLoop = field(init=False)
    """The present loop, or the last one."""
    thread: Thread | None = None
    stopping: bool = False
    removed: bool = False
    """True if the sink is in the settings no more, so that its leases are forgotten once it has drained."""
    _next: Replacement | None = None

    def __post_init__(self) -> None:
        self.loop = self.new_loop(self)

    def run(self) -> None:
        """Serve the sink until ``stop``, in the thread of the sink."""
        if self.loop.ended:  # by an error
            self.sink.open()
            limits, self.loop = self.loop.limits, self.new_loop(self)
            self.loop.limits = limits  # replays of the sink share them
        self._run()
        while (following := self._next) is not None:
            self._next = None
            if self.stopping:
                following.sink.close()
                break
            self.spec, self.sink, spec = following.spec, following.sink, following.spec
            losses = self.leases.losses
            self.leases = self.keeper.add(spec.name, following.generation, spec.limits, spec.routes)
            self.leases.losses = losses
            self.loop = self.new_loop(self)
            self.loop.parts.log.info("sink.reloaded")
            self._run()
        if self.removed:
            self.keeper.discard(self.spec.name)

    def _run(self) -> None:
        if self.stopping or self._next is not None:
            self.loop.stop()
        self.loop.run()

    def replace(self, spec: SinkSpec, generation: int, sink: Sink) -> None:
        """Serve the sink with ``spec`` and ``sink``, which is open, once the present loop has drained."""
        unused, self._next = self._next, Replacement(spec, generation, sink)
        if unused is not None:
            unused.sink.close()
        self.loop.stop()
        self.leases.serve(generation, spec.routes)

    def stop(self) -> None:
        """Drain the shards, and end."""
        self.stopping = True
        self.loop.stop()

    def remove(self) -> None:
        """Drain the shards, end, and forget the sink."""
        self.removed = True
        self.stop()


class ServedSinks(Mapping[str, ServedSink]):
    """The sinks by name. Empty until ``register`` succeeds. Other threads read while the one of reloads changes it."""

    def __init__(
        self,
        store: Store,
        keeper: Keeper,
        ticks: Ticks,
        measures: RelayMeasures,
        supervisor: Supervisor,
        log: BoundLogger,
    ) -> None:
        self._store = store
        self._keeper = keeper
        self._ticks = ticks
        self._measures = measures
        self._supervisor = supervisor
        self._log = log
        self._sinks: Mapping[str, ServedSink] = {}
        self._leaving: Mapping[str, ServedSink] = {}
        """The sinks that were removed from the settings, which may still drain."""

    def __getitem__(self, sink: str) -> ServedSink:
        return self._sinks[sink]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sinks)

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def leaving(self) -> Collection[ServedSink]:
        """The sinks that were removed from the settings, which may still drain."""
        return self._leaving.values()

    def register(self, specs: Mapping[str, SinkSpec], sinks: Mapping[str, Sink]) -> None:
        """Register the sinks in the database. ``start`` serves them.

        Raises ``DatabaseUnavailable``, ``StatementFailed``, ``SessionReset`` or ``DatabaseUnusable``.
        """
        generations = self._register(specs.values())
        self._sinks = {name: self._served(spec, generations[name], sinks[name]) for name, spec in specs.items()}

    def start(self) -> None:
        """Serve every sink in a thread of its own."""
        for served in self._sinks.values():
            self._start(served)

    def reload(self, specs: Mapping[str, SinkSpec], remade: Mapping[str, Sink]) -> list[str]:
        """Register the routes of ``specs``, and serve the sinks ``remade``, new ones among them, with their clients.

        Sinks that ``specs`` lack drain. Return the sinks that a person has removed from the database, which are not
        registered again: nothing of them changes.

        Raises as ``register``, and ``ConfigurationError`` while a sink that comes back still drains. The database may
        then have the routes; repeat the call.
        """
        for name, leaving in self._leaving.items():
            if name in specs and leaving.thread is not None and leaving.thread.is_alive():
                raise ConfigurationError(f"sink {name} still drains since it was removed from the settings")
        known = {row.name for row in self._store.sinks(self._sinks)}
        wanted = [spec for name, spec in specs.items() if name in known or name not in self._sinks]
        generations = self._register(wanted) if wanted else {}
        missing = sorted(name for name in specs if not generations.get(name))
        added = dict[str, ServedSink]()
        for name, client in remade.items():
            if name in missing:
                continue
            if (served := self._sinks.get(name)) is None:
                added[name] = self._served(specs[name], generations[name], client)
            else:
                served.replace(specs[name], generations[name], client)
        removed = {name: served for name, served in self._sinks.items() if name not in specs}
        self._leaving = {**self._leaving, **removed}
        self._sinks = {name: served for name, served in {**self._sinks, **added}.items() if name not in removed}
        for served in removed.values():
            served.remove()
        for served in added.values():
            self._start(served)
        return missing

    def _served(self, spec: SinkSpec, generation: int, sink: Sink) -> ServedSink:
        leases = self._keeper.add(spec.name, generation, spec.limits, spec.routes)
        measures = SinkMeasures(self._measures, spec.name)
        return ServedSink(spec, sink, leases, self._keeper, self._new_loop, measures=measures)

    def _start(self, served: ServedSink) -> None:
        name = served.spec.name
        served.thread = self._supervisor.start(f"sink {name}", served.run, sink=name)

    def _register(self, specs: Collection[SinkSpec]) -> dict[str, int]:
        result = self._store.tick()
        wanted = [(spec.name, spec.patterns, spec.settings.start) for spec in specs]
        queued = [spec.name for spec in specs if spec.queued]
        generations = self._store.register_sinks(wanted, result.tick, queued=queued, server=result.incarnation)
        served = {spec.name: spec.limits for spec in specs if generations.get(spec.name)}
        self._store.state_limits(served, result.incarnation)
        return generations

    def _new_loop(self, served: ServedSink) -> SinkLoop:
        log = self._log.bind(sink=served.spec.name)
        return new_loop(served, self._store, self._keeper, self._ticks, log)


def new_loop(
    served: ServedSink,
    store: Store,
    keeper: Keeper,
    ticks: Ticks,
    log: BoundLogger,
    target: ServedSink | None = None,
) -> SinkLoop:
    """Return a loop that is not yet running. That of a replay sends nothing while its ``target`` is down."""
    parts = Parts(served.spec, served.sink, store, served.leases, keeper.relay, log, measures=served.measures)
    if target is None:
        return SinkLoop(parts, keeper, ticks, restarts=served.restarts)

    def may_run() -> bool:
        return target.loop.circuit == "closed" or not target.loop.in_hand

    return SinkLoop(parts, keeper, ticks, may_run, target.loop.limits, restarts=served.restarts)
