"""The shards that this relay owns: claimed, renewed within their lease, shared fairly, released.

One relay owns a shard of a sink at a time. A lease is the database's time; what this process believes of it is
counted by its own ``lease_clock`` from *before* each claim and renewal was sent, less a margin, so that it stops before
anyone else may start, however long it was stopped, or its machine suspended.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.postgres.connection_slots import LEASES, caller
from outbox_relay.postgres.store import Claimed, SinkRow, Store
from outbox_relay.relay.sink_leases import Lease, SinkLeases

POLL_SECONDS = 1.0
"""How often the database is asked for shards that nobody owns, and for what people have changed."""


def fair_quota(relays: int, before: int) -> int:
    """How many shards of a sink the relay with ``before`` others before it holds, of ``relays`` in all."""
    if relays < 1:
        return SHARDS
    return SHARDS // relays + (before < SHARDS % relays)


class LeaseManager:
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
        self._sinks: dict[str, SinkLeases] = {}
        self._renewed_at = float("-inf")
        self._stopping = False
        self.answered_at = float("-inf")
        """``time.monotonic()`` of the last round that the database answered."""

    def add(self, sink: str, generation: int) -> SinkLeases:
        """Serve ``sink`` under ``generation``; the holding returned fills as shards are claimed."""
        self._sinks[sink] = leases = SinkLeases(sink, generation)
        return leases

    def serve(self, sink: str, generation: int) -> None:
        """The sink is served under another generation from now on."""
        leases = self._sinks[sink]
        leases.generation, leases.unserved = generation, 0
        # Until the next look says so: else the relay would take the sink back from itself, again and again.
        leases.superseded = leases.newest > generation

    @property
    def held(self) -> Mapping[str, int]:
        """sink → number of shards held."""
        return {sink: len(leases.held) for sink, leases in self._sinks.items()}

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
            await self.refresh()
        except StatementFailed as error:
            failed = error
        if renew:
            await self._renew()
        if failed is not None:
            raise failed
        for leases in self._sinks.values():
            await self.give_doubtful_back(leases)
        unowned = [leases for leases in self._sinks.values() if leases.serving and leases.unowned]
        if renew or unowned:
            await self._share(renew)
        for leases in unowned:
            await self._claim(leases)
        self.answered_at = time.monotonic()

    async def refresh(self) -> None:
        """Learn what people and newer configurations have changed."""
        await self._obey(await self._store.sinks(self._sinks, self.lease_seconds / 6))

    async def reclaim(self, leases: SinkLeases) -> None:
        """New epochs for what is held of a sink: whatever was under way for it can no longer be settled."""
        async with leases.claiming:
            sent = lease_clock()
            claimed = await self._store.reclaim_shards(leases.sink, self.relay, self.lease_seconds)
            leases.held = self._granted(claimed, sent)

    async def release(self, leases: SinkLeases, shards: Collection[int], undone: int = 0) -> None:
        """Give up shards: drained, or with ``undone`` events that were in hand of them and are read again."""
        await self._store.release_shards(leases.sink, self.relay, leases.epochs(shards))
        for shard in shards:
            leases.held.pop(shard, None)
        leases.excess = max(0, len(leases.held) - leases.quota)
        told = {"undone": undone} if undone else {}
        self._log.info("released shards", sink=leases.sink, shards=len(shards), held=len(leases.held), **told)

    async def give_doubtful_back(self, leases: SinkLeases) -> None:
        """Give up what claims took that had no answer, which may still take effect.

        Else the shards would wait for the end of their lease, which then counts as a crash.
        """
        if lease_clock() < leases.doubtful_until:
            async with leases.claiming:
                shards = await self._store.release_unknown_shards(leases.sink, self.relay, leases.held)
            leases.unowned += shards
            if shards:
                self._log.info("released shards of a claim without an answer", sink=leases.sink, shards=shards)

    async def stop(self) -> None:
        """Claim nothing more; every holding becomes one to drain."""
        self._stopping = True
        await self._beat()
        for leases in self._sinks.values():
            leases.serving = False
            leases.changed()

    async def leave(self) -> None:
        """Tell the other relays that this one is gone."""
        await self._store.forget_relay(self.relay)

    def _granted(self, claimed: Collection[Claimed], sent: float) -> dict[int, Lease]:
        return {c.shard: Lease(c.epoch, sent + self._believed, c.crashes) for c in claimed}

    async def _obey(self, rows: Collection[SinkRow]) -> None:
        changed = self._miss({row.name for row in rows})
        for row in rows:
            leases = self._sinks[row.name]
            leases.circuit, leases.in_flight_limit, leases.unowned = row.circuit, row.in_flight_limit, row.free
            leases.newest, leases.patterns = row.generation, tuple(row.patterns)
            if row.paused:
                leases.unserved = 0
            # A generation that is behind ours is that of a restored database, unless the answer is older than ours.
            leases.behind = leases.behind + 1 if row.generation < leases.generation else 0
            superseded = row.generation > leases.generation or leases.behind > 1
            serving = not (row.paused or superseded or self._stopping)
            if superseded and not leases.superseded:
                self._log.warning("another configuration of this sink is in force; draining", sink=row.name)
            leases.superseded = superseded
            if serving != leases.serving:
                leases.serving = serving
                changed = True
                leases.changed()
        if changed:
            await self._beat()

    def _miss(self, known: Collection[str]) -> bool:
        """Stop serving the sinks that the database does not know any more; returns whether that changes anything."""
        changed = False
        for sink, leases in self._sinks.items():
            if sink not in known and not leases.removed:
                self._log.warning("this sink was removed from the database; a restart adds it again", sink=sink)
                leases.serving = False
                changed = True
                leases.changed()
            leases.removed = sink not in known
        return changed

    async def _beat(self) -> None:
        serving = [sink for sink, leases in self._sinks.items() if leases.serving and not self._stopping]
        await self._store.heartbeat(self.relay, self._name, self._version, serving, self.lease_seconds / 3)

    async def _renew(self) -> None:
        sent = lease_clock()
        asked = [(s.sink, shard, lease.epoch) for s in self._sinks.values() for shard, lease in s.held.items()]
        kept: set[tuple[str, int, int]] = set()
        if asked:
            kept = await self._store.renew_shards(self.relay, asked, self.lease_seconds, self.lease_seconds / 3)
        lost: Counter[str] = Counter()
        for sink, shard, epoch in asked:
            lost[sink] += self._renewed(self._sinks[sink], shard, epoch, sent, (sink, shard, epoch) in kept)
        for sink, shards in (+lost).items():
            self._log.warning("lost shards", sink=sink, shards=shards, held=len(self._sinks[sink].held))
        await self._beat()
        self._renewed_at = sent

    def _renewed(self, leases: SinkLeases, shard: int, epoch: int, sent: float, kept: bool) -> bool:
        """Take over what the database said of a lease; returns whether it was lost."""
        lease = leases.held.get(shard)
        if lease is None or lease.epoch != epoch:
            return False
        if kept:
            leases.held[shard] = lease._replace(until=sent + self._believed)
            return False
        del leases.held[shard]
        leases.changed()
        return True

    async def _share(self, renewed: bool) -> None:
        for share in await self._store.shares(self.relay, list(self._sinks), self.lease_seconds):
            leases = self._sinks[share.sink]
            if share.relays or not leases.superseded:
                leases.unserved = 0
            else:
                leases.unserved += renewed
            leases.quota = fair_quota(share.relays, share.before)
            excess = max(0, len(leases.held) - leases.quota)
            if excess != leases.excess:
                leases.excess = excess
                leases.changed()

    async def _claim(self, leases: SinkLeases) -> None:
        async with leases.claiming:
            room = leases.quota - len(leases.held)
            if room > 0 and leases.serving:
                await self._claimed(leases, room, 0.0)
            if len(leases.held) < SHARDS and leases.serving:
                await self._claimed(leases, SHARDS, self.lease_seconds)

    async def _claimed(self, leases: SinkLeases, most: int, unowned_for: float) -> None:
        sent = lease_clock()
        claimed = await self._ask(leases, most, unowned_for)
        if claimed and not leases.serving:
            # Asked to stop meanwhile: nobody may be left who would drain and release them.
            await self._store.release_shards(leases.sink, self.relay, {c.shard: c.epoch for c in claimed})
        elif claimed:
            leases.held |= self._granted(claimed, sent)
            self._log.info("claimed shards", sink=leases.sink, shards=len(claimed), held=len(leases.held))
            leases.changed()

    async def _ask(self, leases: SinkLeases, most: int, unowned_for: float) -> list[Claimed]:
        """Claim shards in the database. Without an answer, the claim may be in effect until its lease ends."""
        try:
            return await self._store.claim_shards(
                leases.sink, self.relay, leases.generation, self.lease_seconds, most, unowned_for
            )
        except BaseException:
            leases.doubtful_until = lease_clock() + self.lease_seconds
            raise
