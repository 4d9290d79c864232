"""The leases of one sink in this relay, and the sink's state in the database.

A lease is measured by the database's time. This process measures it by its own ``lease_clock``, from *before* each
claim and renewal was sent, less a margin. It therefore stops before another relay may start, however long the process
was stopped or its machine suspended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.domain.sink_spec import SinkRoutes
from outbox_relay.postgres.rows import SinkRow

UNSERVED_RENEWALS = 4
"""Number of consecutive renewals, a third of a lease apart, that must find no relay serving a superseded sink."""


class Lease(NamedTuple):
    """An owned shard.

    ``until`` is the ``lease_clock()`` value at which the lease ends, and ``crashes`` the number of lapsed leases that
    was counted when the shard was claimed.
    """

    epoch: int
    until: float
    crashes: int


@dataclass(eq=False)
class SinkLeases:
    """The leases of one sink in this relay, and the sink's state in the database.

    The state is that of the database's last answer.

    ``wake`` is set when a shard is gained or lost and when the shards to drain change. Only the session's loop waits
    for it and clears it.
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
    wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while shards are claimed or reclaimed, so that answers are applied in the order of their questions.

    Otherwise the relay would forget shards that it owns, and they would wait for the end of their leases.
    """
    serving: bool = field(default=True, init=False)
    """False while the sink is paused, removed, or served by relays with a newer configuration."""
    reconfiguring: bool = field(default=False, init=False)
    """True from a reload until the session that uses its settings."""
    superseded: bool = field(default=False, init=False)
    """True while relays with another configuration serve the sink."""
    removed: bool = field(default=False, init=False)
    """True if the sink is no longer in the database."""
    former: bool = field(default=False, init=False)
    """True if a sink had the name and was removed or renamed, so that the name is not registered again."""
    renamed_to: str | None = field(default=None, init=False)
    """The new name of a renamed sink, which this relay does not serve."""
    quota: int = field(default=SHARDS, init=False)
    """The number of shards that are this relay's fair share."""
    relays: int = field(default=1, init=False)
    """The number of live relays that serve the sink, at least one."""
    excess: int = field(default=0, init=False)
    """The number of shards to drain and release."""
    doubtful_until: float = field(default=0.0, init=False)
    """The ``lease_clock()`` value until which a claim without an answer may have taken effect."""
    observations: int = field(default=0, init=False)
    """The number of answers of the database that had the sink."""
    losses: int = field(default=0, init=False)
    """The number of shards that this relay lost to the end of their leases, since it started."""
    _held: dict[int, Lease] = field(default_factory=dict[int, Lease], init=False)
    _releasing: dict[int, int] = field(default_factory=dict[int, int], init=False)
    """The epochs of shards whose release has no answer yet, by shard."""
    _probes: int | None = field(default=None, init=False)
    """The number of requests for a probe that this relay has seen; None before the first answer of the database."""
    _probe_wanted: bool = field(default=False, init=False)
    _lost: bool = field(default=False, init=False)
    _unserved: int = field(default=0, init=False)
    _behind: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.row = SinkRow(self.sink, 0, False, "closed", None, 0, ())

    async def wait_for_wake(self, seconds: float) -> None:
        """Wait for ``wake``, and set it after ``seconds``: the loop cannot tell who woke it.

        A timeout would cost more.
        """
        waking = asyncio.get_running_loop().call_later(seconds, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            waking.cancel()

    @property
    def held(self) -> Mapping[int, Lease]:
        """The leases of the owned shards, by shard."""
        return self._held

    @property
    def lost(self) -> bool:
        """True if a shard was lost in this session, even if it was claimed again.

        Another relay may have owned it meanwhile, so the positions and blocked keys in memory may be wrong.
        """
        return self._lost

    @property
    def abandoned(self) -> bool:
        """True if the relays that superseded this one have been gone for a lease."""
        return self.superseded and self._unserved >= UNSERVED_RENEWALS

    def epochs(self, shards: Collection[int]) -> dict[int, int]:
        """Return the epochs of those of ``shards`` that are owned, by shard."""
        return {shard: self._held[shard].epoch for shard in shards if shard in self._held}

    def until(self, shards: Collection[int]) -> float:
        """Return the ``lease_clock()`` value at which the first of the leases ends.

        It is 0.0 if one of ``shards`` is not owned, or if any shard was lost.
        """
        if self.lost:
            return 0.0
        return min((self._held[s].until if s in self._held else 0.0 for s in shards), default=0.0)

    @property
    def staying(self) -> int:
        """The number of owned shards that are not to be drained."""
        return max(0, len(self._held) - self.excess) if self.serving else 0

    @property
    def sharing(self) -> int:
        """The number of shards for which this relay has a share of the sink's limits: all if none stays."""
        return self.staying or len(self._held)

    def leaving(self) -> set[int]:
        """Return the shards to drain.

        These are all shards if this relay does not serve the sink, else those above its quota.
        """
        if not self.serving:
            return set(self._held)
        return set(sorted(self._held)[len(self._held) - self.excess :]) if self.excess else set()

    # -- leases -----------------------------------------------------------------------------------------------

    def grant(self, leases: Mapping[int, Lease]) -> None:
        """Add the leases of shards that were claimed."""
        self._held |= leases
        self.wake.set()

    def replace(self, leases: Mapping[int, Lease]) -> None:
        """Replace all leases with those that were reclaimed."""
        self.losses += len(self._held.keys() - leases.keys())
        self._held = dict(leases)
        self._lost = False

    def confirm(self, shard: int, epoch: int, until: float) -> None:
        """Extend a renewed lease.

        The answer is ignored if the shard has another epoch by now.
        """
        lease = self._held.get(shard)
        if lease is not None and lease.epoch == epoch:
            self._held[shard] = lease._replace(until=until)

    def lose(self, shard: int, epoch: int) -> bool:
        """Remove a lease that was not renewed.

        Return False, and remove none, if the shard has another epoch by now or is being released: a renewal finds no
        lease of it once the release is in effect.
        """
        lease = self._held.get(shard)
        if lease is None or lease.epoch != epoch or self._releasing.get(shard) == epoch:
            return False
        del self._held[shard]
        self._lost = True
        self.losses += 1
        self.wake.set()
        return True

    @contextmanager
    def releasing(self, shards: Collection[int]) -> Generator[dict[int, int]]:
        """Give the epochs of ``shards``, which the block releases, and remove their leases after it.

        A lease that was claimed meanwhile stays.
        """
        epochs = self.epochs(shards)
        self._releasing |= epochs
        try:
            yield epochs
            released = epochs.items()
            self._held = {shard: each for shard, each in self._held.items() if (shard, each.epoch) not in released}
            self.excess = max(0, len(self._held) - self.quota)
        finally:
            for shard in epochs:
                self._releasing.pop(shard, None)

    def forget_crashes(self, shards: Collection[int]) -> None:
        """Count no more crashes of ``shards``, which are owned."""
        for shard in shards:
            self._held[shard] = self._held[shard]._replace(crashes=0)

    def doubt_claim(self, until: float) -> None:
        """Record that a claim without an answer may be in effect.

        It ends at the latest at the ``lease_clock()`` value ``until``.
        """
        self.doubtful_until = until

    def add_unowned(self, shards: int) -> None:
        """Count shards that this relay has just released."""
        self.row = self.row._replace(unowned=self.row.unowned + shards)

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
        self.reconfiguring = False
        self._unserved = 0
        self.superseded = self.row.generation > generation

    def registered(self, generation: int, routes: SinkRoutes | None) -> None:
        """Serve the sink, which was registered again, and discard its state from before that."""
        self.removed, self._behind = False, 0
        self.row = self.row._replace(generation=generation, unowned=SHARDS)
        self.serve(generation, routes)

    def observe(self, row: SinkRow, *, stopping: bool) -> bool:
        """Apply the sink's state in the database.

        Return True if it changes whether this relay serves the sink.

        A generation below this relay's is that of a restored database, unless the answer is older than the generation.
        It counts the second time. After a restore or a failover the number may be given out again, so the same one with
        other routes is that of other relays.
        """
        self.removed = self.former = False
        self.renamed_to = None
        self.observations += 1
        self.row, self.limits = row, row.limits
        self._observe_probes(row.probes)
        if row.paused:
            self._unserved = 0
        self._behind = self._behind + 1 if row.generation < self.generation else 0
        self.superseded = row.generation > self.generation or self._behind > 1 or self._is_of_others(row)
        serving = not (row.paused or self.superseded or self.reconfiguring or stopping)
        changed = serving != self.serving
        if changed:
            self.serving = serving
            self.wake.set()
        return changed

    def _is_of_others(self, row: SinkRow) -> bool:
        is_same = row.generation == self.generation
        return is_same and self.routes not in (None, SinkRoutes(tuple(row.patterns), row.claim))

    def _observe_probes(self, probes: int) -> None:
        """Wake the session's loop if a person has asked for a probe since the last answer."""
        if self._probes is not None and probes != self._probes:
            self._probe_wanted = True
            self.wake.set()
        self._probes = probes

    def take_probe_request(self) -> bool:
        """Return True, once, if a person has asked for a probe."""
        wanted, self._probe_wanted = self._probe_wanted, False
        return wanted

    def remove(self, *, former: bool = False, renamed_to: str | None = None) -> bool:
        """Stop serving the sink, which is no longer in the database.

        ``former`` and ``renamed_to`` are as the attributes. Return False if that is known.
        """
        self.former, self.renamed_to = former, renamed_to
        if self.removed:
            return False
        self.removed = True
        self.stop()
        return True

    def reconfigure(self) -> None:
        """Drain every shard, until a session serves the sink with new settings."""
        self.reconfiguring = True
        self.stop()

    def stop(self) -> None:
        """Drain every shard."""
        self.serving = False
        self.wake.set()

    def set_quota(self, quota: int) -> None:
        """Set the number of shards of this relay, and drain those above it."""
        self.quota = quota
        excess = max(0, len(self._held) - quota)
        if excess != self.excess:
            self.excess = excess
            self.wake.set()

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
