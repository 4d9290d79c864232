"""The shards of one sink in this relay, the sink's state in the database, and its registration.

A lease is measured by the database's time. This process measures it by its own ``lease_clock``, from *before* each
renewal was sent, less a margin. It therefore stops before another relay may start, however long the process
was stopped or its machine suspended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.routing import SinkRoutes
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.postgres.log import TickResult
from outbox_relay.postgres.sinks import SinkRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.sink_spec import SinkSpec

UNSERVED_RENEWALS = 4
"""Number of consecutive renewals, a third of a lease apart, that must find no relay serving a superseded sink."""


def _do_nothing() -> None: ...


class Lease(NamedTuple):
    """An owned shard. ``crashes`` is the number of lapsed leases that was counted when it was claimed."""

    epoch: int
    crashes: int = 0


@dataclass(eq=False)
class SinkLeases:
    """The leases of one sink in this relay, and the sink's state in the database, which is that of its last answer.

    The keeper's thread and the loop of the sink write it. ``held`` is one immutable value, which is replaced and never
    changed. ``adopted`` belongs to the loop: a session works with the epochs that it has adopted, and with no others.
    """

    sink: str
    """The name of the sink in the database."""
    generation: int
    """The generation of the sink's routes that this relay serves."""
    limits: SinkLimits = NO_LIMITS
    """The limits across all relays, as of the database's last answer."""
    routes: SinkRoutes | None = None
    """The routes of this generation here. None for a replay, which is served for as long as its target is."""
    row: SinkRow = field(init=False)
    """The sink in the database, as of its last answer, with what this relay has written since."""
    wake: Callable[[], None] = field(default_factory=lambda: _do_nothing, init=False)
    """Called when a shard is gained or lost, and when the shards to drain change."""
    purge: Callable[[], None] = field(default_factory=lambda: _do_nothing, init=False)
    """Called while a lease of the session has ended: its client must send nothing more."""
    rows_until: float = field(default=float("inf"), init=False)
    """The ``lease_clock()`` value at which the first lease of the rows in flight ends, for the watchdog."""
    claiming: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Held while shards are claimed or reclaimed, so that answers are applied in the order of their questions.

    Otherwise the relay would forget shards that it owns, and they would wait for the end of their leases.
    """
    held: Mapping[int, Lease] = field(default_factory=dict[int, Lease], init=False)
    """The leases of the owned shards, by shard."""
    adopted: Mapping[int, int] = field(default_factory=dict[int, int], init=False)
    """The epochs of the shards of the present session, by shard, as immutable as ``held``."""
    serving: bool = field(default=True, init=False)
    """False while the loop stops, and while the sink is paused, missing, or served with a newer configuration."""
    stopping: bool = field(default=False, init=False)
    """True once every shard is to be drained for good."""
    superseded: bool = field(default=False, init=False)
    """True while relays with another configuration serve the sink."""
    missing: bool = field(default=False, init=False)
    """True while the sink is not in the database."""
    quota: int = field(default=SHARDS, init=False)
    """The number of shards that are this relay's fair share."""
    relays: int = field(default=1, init=False)
    """The number of live relays that serve the sink, at least one."""
    ends_at: float = field(default=0.0, init=False)
    """The ``lease_clock()`` value at which the lease on the sink ends, and so those of all shards."""
    ended: bool = field(default=False, init=False)
    """True once the lease on the sink was given back."""
    claimed_at: float = field(default=0.0, init=False)
    """The ``lease_clock()`` value at which this relay last tried to claim shards."""
    observations: int = field(default=0, init=False)
    """The number of answers of the database that had the sink."""
    turned_at: float = field(default=float("inf"), init=False)
    """The ``lease_clock()`` value of the last turn of the loop. Before the first, it is infinite."""
    losses: int = field(default=0, init=False)
    """The number of shards that this relay lost to the end of their leases, since it started."""
    _writing: threading.RLock = field(default_factory=threading.RLock, init=False)
    """Held while ``held`` is replaced."""
    _releasing: dict[int, int] = field(default_factory=dict[int, int], init=False)
    """The epochs of shards whose release has no answer yet, by shard."""
    _probes: int | None = field(default=None, init=False)
    """The number of requests for a probe that this relay has seen; None before the first answer of the database."""
    _probe_wanted: bool = field(default=False, init=False)
    _unserved: int = field(default=0, init=False)
    _behind: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.row = SinkRow(self.sink, 0, False, "closed", None, SHARDS, ())

    @property
    def unowned(self) -> int:
        """The number of shards that no relay owns, of which this one may not know that it owns them."""
        return SHARDS - self.row.owned - len(self.held)

    @property
    def abandoned(self) -> bool:
        """True if the relays that superseded this one have been gone for a lease."""
        return self.superseded and self._unserved >= UNSERVED_RENEWALS

    @property
    def staying(self) -> int:
        """The number of owned shards that are not to be drained."""
        return min(len(self.held), self.quota) if self.serving else 0

    @property
    def sharing(self) -> int:
        """The number of shards for which this relay has a share of the sink's limits: all if none stays."""
        return self.staying or len(self.held)

    def leaving(self) -> set[int]:
        """Return the shards to drain.

        These are all shards if this relay does not serve the sink, else those above its quota.
        """
        return set(sorted(self.held)[self.staying :])

    # -- the session --------------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """True if a shard of the session was lost, even if it was claimed again.

        Another relay may have owned it meanwhile, so the positions and blocked keys in memory may be wrong.
        """
        held = self.held
        return any(shard not in held or held[shard].epoch != epoch for shard, epoch in self.adopted.items())

    def adopt(self) -> set[int]:
        """Add the shards that were claimed to those of the session, and return them."""
        gained = {shard: lease.epoch for shard, lease in self.held.items() if shard not in self.adopted}
        self.adopted = {**self.adopted, **gained}
        return set(gained)

    def epochs(self, shards: Collection[int]) -> dict[int, int]:
        """Return the epochs of those of ``shards`` that are of the session, by shard."""
        return {shard: self.adopted[shard] for shard in shards if shard in self.adopted}

    def until(self, shards: Collection[int]) -> float:
        """Return the ``lease_clock()`` value at which the leases of these shards end, 0.0 if one was lost."""
        held = self.held
        is_lost = any(shard not in held or held[shard].epoch != self.adopted.get(shard) for shard in shards)
        return 0.0 if is_lost or not shards else self.ends_at

    # -- leases -----------------------------------------------------------------------------------------------

    def grant(self, leases: Mapping[int, Lease]) -> bool:
        """Add shards that were claimed. Return False if the sink is no longer served."""
        with self._writing:
            if not self.serving:
                return False
            self.held = {**self.held, **leases}
        self.wake()
        return True

    def replace(self, leases: Mapping[int, Lease], until: float) -> None:
        """Replace all shards with those that were reclaimed, none of which is adopted."""
        with self._writing:
            self.losses += len(self.held.keys() - leases.keys())
            self.adopted = {}
            self.held = dict(leases)
            self.ends_at = max(self.ends_at, until)

    def renew(self, asked: Mapping[int, int], owned: Mapping[int, int], until: float) -> int:
        """Extend the lease on the sink, and remove the shards of ``asked`` that are not ``owned`` (shard → epoch).

        Return how many were lost. A shard that has another epoch by now stays, as does one that is being released: a
        renewal does not find it once the release is in effect.
        """
        with self._writing:
            lost = {
                shard
                for shard, epoch in asked.items()
                if shard in self.held
                and self.held[shard].epoch == epoch
                and owned.get(shard) != epoch
                and self._releasing.get(shard) != epoch
            }
            self.held = {shard: lease for shard, lease in self.held.items() if shard not in lost}
            self.ends_at = max(self.ends_at, until)
            self.losses += len(lost)
        if lost:
            self.wake()
        return len(lost)

    @contextmanager
    def releasing(self, shards: Collection[int]) -> Generator[dict[int, int]]:
        """Give the epochs of ``shards``, which the block releases, and remove their leases after it.

        A lease that was claimed meanwhile stays.
        """
        with self._writing:
            epochs = {shard: self.held[shard].epoch for shard in shards if shard in self.held}
            self._releasing |= epochs
        try:
            yield epochs
            released = epochs.items()
            with self._writing:
                # In this order, for the watchdog: a shard of the session without a lease is a lost one.
                self.adopted = {shard: epoch for shard, epoch in self.adopted.items() if shard not in epochs}
                self.held = {shard: each for shard, each in self.held.items() if (shard, each.epoch) not in released}
        finally:
            with self._writing:
                for shard in epochs:
                    self._releasing.pop(shard, None)

    def forget_crashes(self, shards: Collection[int]) -> None:
        """Count no more crashes of ``shards``."""
        with self._writing:
            crashed = {shard: lease._replace(crashes=0) for shard, lease in self.held.items() if shard in shards}
            self.held = {**self.held, **crashed}

    # -- the sink in the database -----------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """True if the last answer had an older generation, and it is unknown whether that is the newest."""
        return self._behind == 1

    def serve(self, generation: int, routes: SinkRoutes | None) -> None:
        """Serve the sink under another generation, that of ``routes``.

        The sink counts as superseded only by a generation above this one. The next answer of the database would come
        too late: until then the relay would take the sink back from itself.
        """
        self.generation, self.routes = generation, routes
        self._unserved = 0
        self.superseded = self.row.generation > generation

    def registered(self, generation: int, routes: SinkRoutes | None) -> None:
        """Serve the sink, which was registered again, and discard its state from before that."""
        self.missing, self._behind = False, 0
        self.row = self.row._replace(generation=generation, owned=0)
        self.serve(generation, routes)

    def observe(self, row: SinkRow) -> bool:
        """Apply the sink's state in the database.

        Return True if it changes whether this relay serves the sink.

        A generation below this relay's is that of a restored database, unless the answer is older than the generation.
        It counts the second time. After a restore or a failover the number may be given out again, so the same one with
        other routes is that of other relays.
        """
        self.missing = False
        self.observations += 1
        self.row, self.limits = row, row.limits
        self._observe_probes(row.probes)
        if row.paused:
            self._unserved = 0
        self._behind = self._behind + 1 if row.generation < self.generation else 0
        self.superseded = row.generation > self.generation or self._behind > 1 or self._is_of_others(row)
        return self._set_serving(not (row.paused or self.superseded))

    def _is_of_others(self, row: SinkRow) -> bool:
        is_same = row.generation == self.generation
        return is_same and self.routes not in (None, SinkRoutes(tuple(row.patterns), row.claim))

    def _observe_probes(self, probes: int) -> None:
        """Wake the session's loop if a person has asked for a probe since the last answer."""
        if self._probes is not None and probes != self._probes:
            self._probe_wanted = True
            self.wake()
        self._probes = probes

    def take_probe_request(self) -> bool:
        """Return True, once, if a person has asked for a probe."""
        wanted, self._probe_wanted = self._probe_wanted, False
        return wanted

    def lack(self) -> bool:
        """Stop serving the sink, which is not in the database. Return False if that is known."""
        known, self.missing = self.missing, True
        self._set_serving(False)
        return not known

    def stop(self) -> None:
        """Drain every shard, for good. No shard is granted once this has returned."""
        self.stopping = True
        self._set_serving(False)

    def _set_serving(self, serving: bool) -> bool:
        with self._writing:
            before, self.serving = self.serving, serving and not self.stopping
        if before != self.serving:
            self.wake()
        return before != self.serving

    def set_quota(self, quota: int) -> None:
        """Set the number of shards of this relay, and drain those above it."""
        if quota != self.quota:
            self.quota = quota
            self.wake()

    def observe_relays(self, relays: int, *, renewed: bool) -> None:
        """Record how many relays serve the sink, and count the renewals at which none serves a superseded one."""
        self.relays = max(1, relays)
        if relays or not self.superseded:
            self._unserved = 0
        else:
            self._unserved += renewed

    def record_report(self, circuit: str, in_flight_limit: int | None) -> None:
        """Record the circuit and the limit that are now in the database."""
        self.row = self.row._replace(circuit=circuit, in_flight_limit=in_flight_limit)


class SinkRegistration:
    """The registration of one sink, which a restore of the database may take back, over all sessions."""

    def __init__(self, store: Store, leases: SinkLeases, lease_seconds: float) -> None:
        self._store = store
        self._leases = leases
        self._patience = 2 * lease_seconds
        self.began: TickResult | None = None
        """The tick with which the session began."""
        self.seen_in: str | None = None
        """The incarnation of the server that had the sink last; None if it is not to be registered again."""
        self._observations = 0
        """The number of answers that had the sink before the session."""
        self._start = "now"
        """The place in the log where the sink began, as of that server."""
        self._missing_since = 0.0
        """``time.monotonic()`` of the last look at which the database had the sink."""

    def begin_session(self, began: TickResult) -> None:
        """Record that a session begins with the tick ``began``."""
        self.began, self._observations = began, self._leases.observations

    def was_taken_back(self) -> bool:
        """Return True if a restore has taken the registration back, so that the sink is to be registered again.

        A sink that is missing on the server that had it was removed, and stays away. A relay that was superseded leaves
        it to the others for a while.
        """
        leases, began = self._leases, self.began
        if began is None:
            return False
        if not leases.missing:
            self._missing_since = time.monotonic()
            if leases.observations > self._observations:
                self.seen_in, self._start = began.incarnation, leases.row.start or "now"
            return False
        if self.seen_in is None:
            return False
        server = self._store.tick().incarnation  # the last tick may be older than what is missing
        if server == self.seen_in:
            self.seen_in = None
        if self.seen_in is None or server != began.incarnation:
            return False
        return time.monotonic() - self._missing_since >= self._patience * leases.superseded

    def register(self, spec: SinkSpec, log: BoundLogger) -> bool:
        """Register the sink. Return False if it is there by now, since another relay has registered it.

        It begins as it had begun: at the beginning of the log, or with this session.
        """
        began = self.began
        assert began is not None  # noqa: S101 - ``was_taken_back`` has looked
        server = began.incarnation
        generation = self._store.register_missing_sink(
            spec.name, spec.patterns, self._start, began.tick, queued=spec.queued, server=server
        )
        if generation is None:
            return False
        self._leases.registered(generation, spec.routes)
        self.seen_in = server
        log.warning("sink.registered_again", start=self._start, since=began.now.isoformat())
        self._store.state_limits({spec.name: spec.limits}, server)
        return True

    def serve_again(self, spec: SinkSpec, log: BoundLogger, *, idle: bool) -> bool:
        """Serve a sink again that was lost to a restore or to relays that are gone. Return True if it is served.

        Rows of a queue may still be in hand: until the session is ``idle``, another would repeat them.
        """
        leases = self._leases
        if spec.replay is not None or leases.stopping:
            return False
        taken_back = self.was_taken_back()
        if not idle:
            return False
        if taken_back:
            return self.register(spec, log)
        if not leases.superseded or leases.held:
            return False
        differs = tuple(leases.row.patterns) != tuple(spec.patterns) or leases.row.claim != spec.settings.claim
        if differs and not leases.abandoned:
            return False
        result = self._store.tick()
        generation = self._store.reregister_sink(
            *(spec.name, spec.patterns, leases.row.generation, result.tick),
            queued=spec.queued,
            server=result.incarnation,
        )
        if generation is None:
            return False
        leases.serve(generation, spec.routes)
        return True
