"""The shards that this relay owns: claimed, renewed within their lease, shared fairly, released.

One relay owns a shard of a sink at a time. A lease is the database's time; what this process believes of it is
counted by its own ``lease_clock`` from *before* each claim and renewal was sent, less a margin, so that it stops before
anyone else may start, however long it was stopped, or its machine suspended.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.connection_slots import LEASES, caller
from outbox_relay.postgres.rows import Claimed, SinkRow
from outbox_relay.postgres.store import Store

UNSERVED_RENEWALS = 4
"""How many renewals in a row, a third of a lease apart, must find a sink without a relay that serves it."""
POLL_SECONDS = 1.0
"""How often the database is asked for shards that nobody owns, and for what people have changed."""


class Lease(NamedTuple):
    """An owned shard: its epoch, when to stop by ``lease_clock()``, and the crashes counted at its claim."""

    epoch: int
    until: float
    crashes: int


@dataclass(slots=True)
class Holding:
    """What this relay has of one sink. ``changed`` is called whenever any of it changes."""

    sink: str
    generation: int
    changed: Callable[[], None] = lambda: None
    held: dict[int, Lease] = field(default_factory=dict[int, Lease])
    serving: bool = True
    """False while the sink is paused, or served by relays with a newer configuration."""
    superseded: bool = False
    patterns: tuple[str, ...] = ()
    newest: int = 0
    """The sink's newest generation, and its patterns, as far as is known."""
    unserved: int = 0
    """At how many renewals in a row the sink was superseded here and no live relay served it."""
    behind: int = 0
    """At how many looks in a row the sink's generation was an earlier one than this relay's."""
    removed: bool = False
    """Whether the database does not know the sink any more."""
    fault: str | None = None
    """Why the shards that were claimed last cannot be served; None when they can."""
    surplus: int = 0
    """How many shards to drain and release."""
    share: int = SHARDS
    """How many shards are this relay's share."""
    free: int = 0
    """How many of its shards nobody owns, as far as is known."""
    circuit: str = "closed"
    """What the database says of the sink's circuit."""
    in_flight_limit: int | None = None
    """What it says of how many requests a relay may have under way; nothing: as many as the settings say."""
    doubtful_until: float = 0.0
    """Until when, by ``lease_clock()``, this relay may own shards that it does not know of: a claim had no answer."""
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while shards are claimed or claimed anew: the answers say what is held in the order in which they were asked
    for, or shards would be forgotten that are this relay's, and stand still for a lease."""

    def epochs(self, shards: Collection[int]) -> dict[int, int]:
        """shard → epoch of those of ``shards`` that are held."""
        return {shard: self.held[shard].epoch for shard in shards if shard in self.held}

    def until(self, shards: Collection[int]) -> float:
        """The ``lease_clock()`` value at which the first of ``shards`` must stop; 0.0 when one is not held."""
        return min((self.held[s].until if s in self.held else 0.0 for s in shards), default=0.0)

    @property
    def abandoned(self) -> bool:
        """Whether the relays that superseded this one have been gone for a lease."""
        return self.superseded and self.unserved >= UNSERVED_RENEWALS

    def leaving(self) -> set[int]:
        """The shards to drain now: all when this relay does not serve the sink, else the surplus."""
        if not self.serving:
            return set(self.held)
        return set(sorted(self.held)[len(self.held) - self.surplus :]) if self.surplus else set()


def fair_share(relays: int, before: int) -> int:
    """How many shards of a sink the relay with ``before`` others before it holds, of ``relays`` in all."""
    if relays < 1:
        return SHARDS
    return SHARDS // relays + (before < SHARDS % relays)


class Ownership:
    """All shards of one relay process, under a random id of its own."""

    def __init__(
        self, store: Store, relay: UUID, name: str, version: str, lease_seconds: float, log: BoundLogger
    ) -> None:
        self._store = store
        self.relay = relay
        self._name = name
        self._version = version
        self.lease_seconds = lease_seconds
        self._believed = lease_seconds - min(1.0, lease_seconds / 10)
        self._log = log
        self._seldom = RateLimitedLog(log)
        self._holdings: dict[str, Holding] = {}
        self._renewed_at = float("-inf")
        self._stopping = False
        self.heard_at = float("-inf")
        """``time.monotonic()`` of the last round that the database answered."""

    def add(self, sink: str, generation: int) -> Holding:
        """Serve ``sink`` under ``generation``; the holding returned fills as shards are claimed."""
        self._holdings[sink] = holding = Holding(sink, generation)
        return holding

    def serve(self, sink: str, generation: int) -> None:
        """The sink is served under another generation from now on."""
        holding = self._holdings[sink]
        holding.generation, holding.unserved = generation, 0
        # Until the next look says so: else the relay would take the sink back from itself, again and again.
        holding.superseded = holding.newest > generation

    @property
    def held(self) -> Mapping[str, int]:
        """sink → number of shards held."""
        return {sink: len(holding.held) for sink, holding in self._holdings.items()}

    async def run(self) -> None:
        """Keep what is held and claim what is due, until cancelled. Raises ``DatabaseUnavailable``.

        A round whose statements fail is tried again; leases that could not be renewed by then end by their own time.
        """
        caller.set(LEASES)
        pause = min(POLL_SECONDS, self.lease_seconds / 6)
        while True:
            try:
                await self.round()
            except StatementFailed as error:
                self._seldom.warning("leases will be looked after again", reason=str(error))
            await asyncio.sleep(pause)

    async def round(self) -> None:
        """One look: renew when a third of the lease has passed, obey what people changed, share, claim."""
        renew = lease_clock() - self._renewed_at >= self.lease_seconds / 3
        failed: StatementFailed | None = None
        try:
            await self.look()
        except StatementFailed as error:
            failed = error
        if renew:
            await self._renew()
        if failed is not None:
            raise failed
        for holding in self._holdings.values():
            await self.give_doubtful_back(holding)
        free = [holding for holding in self._holdings.values() if holding.serving and holding.free]
        if renew or free:
            await self._share(renew)
        for holding in free:
            await self._claim(holding)
        self.heard_at = time.monotonic()

    async def look(self) -> None:
        """Learn what people and newer configurations have changed."""
        await self._obey(await self._store.sinks(self._holdings, self.lease_seconds / 6))

    async def reclaim(self, holding: Holding) -> None:
        """New epochs for what is held of a sink: whatever was under way for it can no longer be settled."""
        async with holding.claiming:
            sent = lease_clock()
            claimed = await self._store.reclaim_shards(holding.sink, self.relay, self.lease_seconds)
            holding.held = self._leases(claimed, sent)

    async def release(self, holding: Holding, shards: Collection[int], undone: int = 0) -> None:
        """Give up shards: drained, or with ``undone`` events that were in hand of them and are read again."""
        await self._store.release_shards(holding.sink, self.relay, holding.epochs(shards))
        for shard in shards:
            holding.held.pop(shard, None)
        holding.surplus = max(0, len(holding.held) - holding.share)
        told = {"undone": undone} if undone else {}
        self._log.info("released shards", sink=holding.sink, shards=len(shards), held=len(holding.held), **told)

    async def give_doubtful_back(self, holding: Holding) -> None:
        """Give up what claims took that had no answer, which may still take effect.

        Else the shards would wait for the end of their lease, which then counts as a crash.
        """
        if lease_clock() < holding.doubtful_until:
            async with holding.claiming:
                shards = await self._store.release_unknown_shards(holding.sink, self.relay, holding.held)
            holding.free += shards
            if shards:
                self._log.info("released shards of a claim without an answer", sink=holding.sink, shards=shards)

    async def stop(self) -> None:
        """Claim nothing more; every holding becomes one to drain."""
        self._stopping = True
        await self._beat()
        for holding in self._holdings.values():
            holding.serving = False
            holding.changed()

    async def leave(self) -> None:
        """Tell the other relays that this one is gone."""
        await self._store.forget_relay(self.relay)

    def _leases(self, claimed: Collection[Claimed], sent: float) -> dict[int, Lease]:
        return {c.shard: Lease(c.epoch, sent + self._believed, c.crashes) for c in claimed}

    async def _obey(self, rows: Collection[SinkRow]) -> None:
        changed = self._miss({row.name for row in rows})
        for row in rows:
            holding = self._holdings[row.name]
            holding.circuit, holding.in_flight_limit, holding.free = row.circuit, row.in_flight_limit, row.unowned
            holding.newest, holding.patterns = row.generation, tuple(row.patterns)
            if row.paused:
                holding.unserved = 0
            # A generation that is behind ours is that of a restored database, unless the answer is older than ours.
            holding.behind = holding.behind + 1 if row.generation < holding.generation else 0
            superseded = row.generation > holding.generation or holding.behind > 1
            serving = not (row.paused or superseded or self._stopping)
            if superseded and not holding.superseded:
                self._log.warning("another configuration of this sink is in force; draining", sink=row.name)
            holding.superseded = superseded
            if serving != holding.serving:
                holding.serving = serving
                changed = True
                holding.changed()
        if changed:
            await self._beat()

    def _miss(self, known: Collection[str]) -> bool:
        """Stop serving the sinks that the database does not know any more; returns whether that changes anything."""
        changed = False
        for sink, holding in self._holdings.items():
            if sink not in known and not holding.removed:
                self._log.warning("this sink was removed from the database; a restart adds it again", sink=sink)
                holding.serving = False
                changed = True
                holding.changed()
            holding.removed = sink not in known
        return changed

    async def _beat(self) -> None:
        serving = [sink for sink, holding in self._holdings.items() if holding.serving and not self._stopping]
        await self._store.heartbeat(self.relay, self._name, self._version, serving, self.lease_seconds / 3)

    async def _renew(self) -> None:
        sent = lease_clock()
        asked = [(h.sink, shard, lease.epoch) for h in self._holdings.values() for shard, lease in h.held.items()]
        kept: set[tuple[str, int, int]] = set()
        if asked:
            kept = await self._store.renew_shards(self.relay, asked, self.lease_seconds, self.lease_seconds / 3)
        lost: Counter[str] = Counter()
        for sink, shard, epoch in asked:
            lost[sink] += self._renewed(self._holdings[sink], shard, epoch, sent, (sink, shard, epoch) in kept)
        for sink, shards in (+lost).items():
            self._log.warning("lost shards", sink=sink, shards=shards, held=len(self._holdings[sink].held))
        await self._beat()
        self._renewed_at = sent

    def _renewed(self, holding: Holding, shard: int, epoch: int, sent: float, kept: bool) -> bool:
        """Take over what the database said of a lease; returns whether it was lost."""
        lease = holding.held.get(shard)
        if lease is None or lease.epoch != epoch:
            return False
        if kept:
            holding.held[shard] = lease._replace(until=sent + self._believed)
            return False
        del holding.held[shard]
        holding.changed()
        return True

    async def _share(self, renewed: bool) -> None:
        for share in await self._store.relay_ranks(self.relay, list(self._holdings), self.lease_seconds):
            holding = self._holdings[share.sink]
            if share.relays or not holding.superseded:
                holding.unserved = 0
            else:
                holding.unserved += renewed
            holding.share = fair_share(share.relays, share.before)
            surplus = max(0, len(holding.held) - holding.share)
            if surplus != holding.surplus:
                holding.surplus = surplus
                holding.changed()

    async def _claim(self, holding: Holding) -> None:
        async with holding.claiming:
            room = holding.share - len(holding.held)
            if room > 0 and holding.serving:
                await self._claimed(holding, room, 0.0)
            if len(holding.held) < SHARDS and holding.serving:
                await self._claimed(holding, SHARDS, self.lease_seconds)

    async def _claimed(self, holding: Holding, most: int, unowned_for: float) -> None:
        sent = lease_clock()
        claimed = await self._ask(holding, most, unowned_for)
        if claimed and not holding.serving:
            # Asked to stop meanwhile: nobody may be left who would drain and release them.
            await self._store.release_shards(holding.sink, self.relay, {c.shard: c.epoch for c in claimed})
        elif claimed:
            holding.held |= self._leases(claimed, sent)
            self._log.info("claimed shards", sink=holding.sink, shards=len(claimed), held=len(holding.held))
            holding.changed()

    async def _ask(self, holding: Holding, most: int, unowned_for: float) -> list[Claimed]:
        """Claim shards in the database. Without an answer, the claim may be in effect until its lease ends."""
        try:
            return await self._store.claim_shards(
                holding.sink, self.relay, holding.generation, self.lease_seconds, most, unowned_for
            )
        except BaseException:
            holding.doubtful_until = lease_clock() + self.lease_seconds
            raise
