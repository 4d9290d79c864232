"""The shards of this relay: claimed, renewed, shared fairly and released.

One relay owns a shard of a sink at a time.
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
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.domain.sink_spec import SinkRoutes
from outbox_relay.postgres.connection_slots import LEASES, caller
from outbox_relay.postgres.rows import Claimed, SinkRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.sink_leases import Lease, SinkLeases

POLL_SECONDS = 1.0
"""Interval between two questions for shards without an owner and for changes made by people."""


def fair_quota(relays: int, before: int) -> int:
    """Return the fair number of shards for one of ``relays``.

    ``before`` is the number of relays that come before it.
    """
    if relays < 1:
        return SHARDS
    return SHARDS // relays + (before < SHARDS % relays)


class LeaseManager:
    """The leases of all sinks in one relay process, which has a random id."""

    def __init__(
        self, store: Store, relay: UUID, name: str, version: str, lease_seconds: float, log: BoundLogger
    ) -> None:
        self._store = store
        self.relay = relay
        self.name = name
        self._version = version
        self.lease_seconds = lease_seconds
        self._margin = min(1.0, lease_seconds / 10)
        self._log = log
        self._seldom = RateLimitedLog(log)
        self._sinks: dict[str, SinkLeases] = {}
        self._renewed_at = float("-inf")
        self._stopping = False
        self._registering = asyncio.Lock()
        """Held while this relay's row is written or removed: no heartbeat may come after the removal."""
        self._left = False
        self.unrecorded = asyncio.Event()
        """Set when a heartbeat finds that the settings of this relay are not recorded."""
        self.answered_at = float("-inf")
        """The ``time.monotonic()`` value of the last complete round."""

    def add(
        self,
        sink: str,
        generation: int,
        limits: SinkLimits = NO_LIMITS,
        routes: SinkRoutes | None = None,
    ) -> SinkLeases:
        """Serve ``sink`` under ``generation``, that of ``routes``, within ``limits``.

        Return its leases, which come as shards are claimed.
        """
        self._sinks[sink] = leases = SinkLeases(sink, generation, limits, routes)
        return leases

    def discard(self, sink: str) -> None:
        """Forget the leases of a replay that this relay no longer serves."""
        self._sinks.pop(sink, None)

    @property
    def held(self) -> Mapping[str, int]:
        """The number of owned shards, by sink."""
        return {sink: len(leases.held) for sink, leases in self._sinks.items()}

    # -- rounds -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Renew leases and claim shards, until cancelled. Raises ``DatabaseUnavailable``.

        A round with a failed statement is repeated. Leases that are not renewed by then end.
        """
        caller.set(LEASES)
        pause = min(POLL_SECONDS, self.lease_seconds / 6)
        while True:
            try:
                await self.round()
            except StatementFailed as error:
                self._seldom.warning("leases.failed", reason=str(error))
            await asyncio.sleep(pause)

    async def round(self) -> None:
        """Apply changes, renew leases, adjust quotas and claim shards, once.

        Leases are renewed after a third of their time.
        """
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
        for leases in list(self._sinks.values()):
            await self.give_doubtful_back(leases)
        unowned = [leases for leases in self._sinks.values() if leases.serving and leases.row.unowned]
        if renew or unowned:
            await self._share(renewed=renew)
        for leases in unowned:
            await self._claim(leases)
        self.answered_at = time.monotonic()

    async def refresh(self) -> None:
        """Apply what people and newer configurations have changed in the database."""
        asked = dict(self._sinks)
        rows = await self._store.sinks(asked, self.lease_seconds / 6)
        missing = {sink: leases for sink, leases in asked.items() if sink not in {row.name for row in rows}}
        if missing:
            await self._remove(missing)
        await self._observe(rows, asked)

    async def _observe(self, rows: Collection[SinkRow], asked: Mapping[str, SinkLeases]) -> None:
        changed = False
        for row in rows:
            changed |= self._apply(row, asked[row.name])
        if changed:
            await self._beat()

    def _apply(self, row: SinkRow, leases: SinkLeases) -> bool:
        was_superseded = leases.superseded
        changed = leases.observe(row, stopping=self._stopping)
        if leases.superseded and not was_superseded:
            self._log.warning("config.superseded", sink=row.name)
        return changed

    async def _remove(self, missing: Mapping[str, SinkLeases]) -> None:
        """Stop serving sinks that are not in the database, and find out whether they were removed or renamed."""
        former = await self._store.former_sinks(missing, self.lease_seconds / 6)
        for sink, leases in missing.items():
            if leases.remove(former=sink in former, renamed_to=former.get(sink)):
                self._log_removal(leases)

    def _log_removal(self, leases: SinkLeases) -> None:
        if leases.sink.startswith("~"):
            return
        if leases.renamed_to is not None:
            self._log.warning("sink.renamed", sink=leases.sink, renamed_to=leases.renamed_to)
        elif leases.former:
            self._log.warning("sink.removed", sink=leases.sink)
        else:
            self._log.warning("sink.missing", sink=leases.sink)

    async def _beat(self) -> None:
        async with self._registering:
            if self._left:
                return
            serving = [leases.sink for leases in self._sinks.values() if leases.serving and not self._stopping]
            if not await self._store.heartbeat(self.relay, self.name, self._version, serving, self.lease_seconds / 3):
                self.unrecorded.set()

    async def _renew(self) -> None:
        """Renew the leases of the sinks, then those of replays: settlements of a replay hold up only its own."""
        sent = lease_clock()
        sinks = dict(self._sinks)
        await self._renew_leases({name: each for name, each in sinks.items() if not name.startswith("~")}, sent, 3)
        try:
            await self._renew_leases({name: each for name, each in sinks.items() if name.startswith("~")}, sent, 6)
        except StatementFailed as error:
            self._seldom.warning("replays.leases_failed", reason=str(error))
        await self._beat()
        self._renewed_at = sent

    async def _renew_leases(self, sinks: Mapping[str, SinkLeases], sent: float, part: int) -> None:
        """Renew leases within one ``part`` of their time."""
        asked = [(sink, shard, lease.epoch) for sink, each in sinks.items() for shard, lease in each.held.items()]
        if not asked:
            return
        kept = await self._store.renew_shards(self.relay, asked, self.lease_seconds, self.lease_seconds / part)
        lost: Counter[str] = Counter()
        for sink, shard, epoch in asked:
            if (seconds := kept.get((sink, shard, epoch))) is not None:
                # The database may lease a shard for longer, which saves versions of rows and is nothing to rely on.
                sinks[sink].confirm(shard, epoch, sent + min(seconds, self.lease_seconds) - self._margin)
            else:
                lost[sink] += sinks[sink].lose(shard, epoch)
        for sink, shards in (+lost).items():
            self._log.warning("shards.lost", sink=sink, shards=shards, held=len(sinks[sink].held))

    async def _share(self, *, renewed: bool) -> None:
        sinks = dict(self._sinks)
        for share in await self._store.relay_ranks(self.relay, list(sinks), self.lease_seconds):
            leases = sinks[share.sink]
            leases.observe_relays(share.relays, renewed=renewed)
            leases.set_quota(fair_quota(share.relays, share.before))

    # -- claims -----------------------------------------------------------------------------------------------

    async def reclaim(self, leases: SinkLeases) -> None:
        """Give the owned shards of a sink new epochs.

        No settlement of an earlier epoch can be written any more.
        """
        async with leases.claiming:
            sent = lease_clock()
            claimed = await self._store.reclaim_shards(leases.sink, self.relay, self.lease_seconds)
            leases.replace(self._granted(claimed, sent))

    async def _claim(self, leases: SinkLeases) -> None:
        """Claim shards up to the quota, and any shard without an owner for a lease."""
        async with leases.claiming:
            wanted = leases.quota - len(leases.held)
            if wanted > 0 and leases.serving:
                await self._claim_unowned(leases, wanted, 0.0)
            if len(leases.held) < SHARDS and leases.serving:
                await self._claim_unowned(leases, SHARDS, self.lease_seconds)

    async def _claim_unowned(self, leases: SinkLeases, most: int, unowned_for: float) -> None:
        sent = lease_clock()
        claimed = await self._ask(leases, most, unowned_for)
        if claimed and not leases.serving:
            # The relay began to stop meanwhile, so the sink may have no session left to release them.
            await self._store.release_shards(leases.sink, self.relay, {c.shard: c.epoch for c in claimed})
        elif claimed:
            leases.grant(self._granted(claimed, sent))
            self._log.info("shards.claimed", sink=leases.sink, shards=len(claimed), held=len(leases.held))

    async def _ask(self, leases: SinkLeases, most: int, unowned_for: float) -> list[Claimed]:
        """Claim shards in the database.

        Without an answer, the claim may be in effect until its lease ends.
        """
        try:
            return await self._store.claim_shards(
                leases.sink, self.relay, leases.generation, self.lease_seconds, most, unowned_for, routes=leases.routes
            )
        except BaseException:
            leases.doubt_claim(lease_clock() + self.lease_seconds)
            raise

    def _granted(self, claimed: Collection[Claimed], sent: float) -> dict[int, Lease]:
        until = sent + self.lease_seconds - self._margin
        return {c.shard: Lease(c.epoch, until, c.crashes) for c in claimed}

    # -- releases ---------------------------------------------------------------------------------------------

    async def release(self, leases: SinkLeases, shards: Collection[int], undone: int = 0) -> None:
        """Release shards, which are drained or have ``undone`` events in flight.

        The next owner reads events in flight again.
        """
        with leases.releasing(shards) as epochs:
            await self._store.release_shards(leases.sink, self.relay, epochs)
        left = {"undone": undone} if undone else {}
        self._log.info("shards.released", sink=leases.sink, shards=len(shards), held=len(leases.held), **left)

    async def give_doubtful_back(self, leases: SinkLeases) -> None:
        """Release shards of claims without an answer, which may still take effect.

        Otherwise they would wait for the end of their lease, which then counts as a crash.
        """
        if lease_clock() < leases.doubtful_until:
            async with leases.claiming:
                shards = await self._store.release_unknown_shards(leases.sink, self.relay, leases.held)
            leases.add_unowned(shards)
            if shards:
                self._log.info("shards.claim_undone", sink=leases.sink, shards=shards)

    async def stop(self) -> None:
        """Claim no more shards, drain all of them, and tell the other relays.

        Raises as ``Store``, while the shards are drained all the same.
        """
        self._stopping = True
        for leases in self._sinks.values():
            leases.stop()
        await self._beat()

    async def leave(self) -> None:
        """Remove this relay from the database, for good, so that other relays take over its share."""
        async with self._registering:
            self._left = True
            await self._store.forget_relay(self.relay)
