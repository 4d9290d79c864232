"""The leases of this relay, one for each sink, and its shards: claimed, shared fairly and released."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import RelayError
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.domain.routing import SinkRoutes
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.domain.times import lease_clock
from outbox_relay.postgres.shards import Claimed
from outbox_relay.postgres.store import Store
from outbox_relay.relay.sink_leases import Lease, SinkLeases

POLL_SECONDS = 1.0
"""Interval between two questions for shards without an owner and for changes made by people."""
SILENT_SECONDS = 60.0
"""Time without a turn of a loop after which its leases are not renewed: another relay may be able to serve its sink."""
WATCH_SECONDS = 0.25
"""Maximum interval between two looks at the ends of leases, which the relay's clock may reach while it sleeps."""


def fair_quota(relays: int, before: int) -> int:
    """Return the fair number of shards for one of ``relays``.

    ``before`` is the number of relays that come before it.
    """
    if relays < 1:
        return SHARDS
    return SHARDS // relays + (before < SHARDS % relays)


class Keeper:
    """The leases of all sinks in one relay process, which has a random id.

    Its thread claims and renews them, and never waits for a loop. The loop of a sink calls ``refresh``, ``reclaim`` and
    ``release`` from its own. A third thread, which never waits for the database, stops the clients whose leases end.
    """

    def __init__(
        self,
        store: Store,
        relay: UUID,
        name: str,
        version: str,
        lease_seconds: float,
        log: BoundLogger,
        clock: Callable[[], float] = lease_clock,
    ) -> None:
        self._clock = clock
        self._store = store
        self.relay = relay
        self.name = name
        self._version = version
        self.lease_seconds = lease_seconds
        self._margin = min(1.0, lease_seconds / 10)
        self._log = log
        self._seldom = RateLimitedLog(log)
        self._sinks: Mapping[str, SinkLeases] = {}
        """The leases by sink. Replaced and never changed: other threads add and discard while one iterates."""
        self._adding = threading.Lock()
        self._renewed_at = float("-inf")
        self._beat_due = True
        self._refreshing = threading.Lock()
        """Held while the sinks are asked for and the answer is applied: a loop that has asked must not go on with an
        older answer."""
        self._registering = threading.Lock()
        """Held while this relay's row is written or removed: no heartbeat may come after the removal."""
        self._left = False
        self.unrecorded = threading.Event()
        """Set when a heartbeat finds that the settings of this relay are not recorded."""
        self._stopping = False
        self._woken = threading.Event()
        self._over = threading.Event()
        self.answered_at = float("-inf")
        """The ``time.monotonic()`` value of the last complete round."""
        self.turned_at = float("inf")
        """The same of the begin of the last round. Before the first, it is infinite."""

    def add(
        self,
        sink: str,
        generation: int,
        limits: SinkLimits = NO_LIMITS,
        routes: SinkRoutes | None = None,
    ) -> SinkLeases:
        """Serve ``sink`` under ``generation``, that of ``routes``, within ``limits``.

        Return its leases, which come as shards are claimed. A loop that served the sink before must have left.
        """
        leases = SinkLeases(sink, generation, limits, routes)
        if self._stopping:
            leases.stop()
        with self._adding:
            self._sinks = {**self._sinks, sink: leases}
        self._renewed_at = float("-inf")  # nothing is claimed without a lease
        self._wake()
        return leases

    def discard(self, sink: str) -> None:
        """Forget the leases of a sink or replay that this relay no longer serves."""
        with self._adding:
            self._sinks = {name: leases for name, leases in self._sinks.items() if name != sink}
        self._beat_due = True

    @property
    def held(self) -> Mapping[str, int]:
        """The number of owned shards, by sink."""
        return {sink: len(leases.held) for sink, leases in self._sinks.items()}

    # -- the threads --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Renew leases and claim shards, until ``end``.

        A round that failed is repeated. Leases that are not renewed by then end.
        """
        pause = min(POLL_SECONDS, self.lease_seconds / 6)
        self._store.limit_calls(max(1.0, self.lease_seconds / 6))  # renewals do not wait for long
        while not self._over.is_set():
            self._woken.clear()
            self.turned_at = time.monotonic()
            try:
                self.round()
            except RelayError as error:
                self._seldom.warning("leases.failed", reason=str(error))
            self._woken.wait(pause)

    def watch(self) -> None:
        """Purge clients whose leases have ended, until ``end``. See ``purge_lapsed``."""
        while not self._over.wait(self.purge_lapsed()):
            pass

    def end(self) -> None:
        """End ``run`` and ``watch``."""
        self._over.set()
        self._woken.set()

    def _wake(self) -> None:
        self._beat_due = True
        self._woken.set()

    def purge_lapsed(self) -> float:
        """Purge the client of every sink with a lease that has ended by this relay's clock.

        Return the seconds until the next lease may end.

        A client with a queue sends although the thread of its loop is blocked, by which time another relay may own the
        shard, or the rows.
        """
        now = self._clock()
        nearest = now + WATCH_SECONDS
        for leases in self._sinks.values():
            adopted = leases.adopted
            until = min(leases.rows_until, leases.until(adopted) if adopted else nearest)
            if until <= now and leases.adopted is adopted:  # else a shard was released meanwhile
                leases.purge()
            elif until > now:
                nearest = min(nearest, until)
        return nearest - now

    # -- rounds -----------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Renew leases, apply changes, adjust quotas and claim shards, once.

        Leases are renewed after a third of their time.
        """
        if renew := self._renewal_is_due():
            self._renew()
        if self._refreshing.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._refreshing.release()
        if renew or self._beat_due:
            self._beat()
        unowned = [leases for leases in self._sinks.values() if self._serves(leases) and leases.unowned > 0]
        if renew or unowned:
            self._share(renewed=renew)
        # Claims may take so long that a renewal comes first. The sinks that are left out have the next turns.
        for leases in sorted(unowned, key=lambda each: each.claimed_at):
            leases.claimed_at = self._clock()
            self._claim(leases)
            if self._renewal_is_due():
                break
        self.answered_at = time.monotonic()

    def _renewal_is_due(self) -> bool:
        return self._clock() - self._renewed_at >= self.lease_seconds / 3

    def _serves(self, leases: SinkLeases) -> bool:
        return leases.serving and not self._is_silent(leases)

    def _is_silent(self, leases: SinkLeases) -> bool:
        return self._clock() - leases.turned_at > SILENT_SECONDS

    def refresh(self) -> None:
        """Apply what people and newer configurations have changed in the database."""
        with self._refreshing:
            self._refresh()

    def _refresh(self) -> None:
        sinks = self._sinks
        rows = {row.name: row for row in self._store.sinks(sinks, self.lease_seconds / 6, relay=self.relay)}
        for sink, leases in sinks.items():
            if (row := rows.get(sink)) is None:
                if leases.lack() and not sink.startswith("~"):
                    self._log.warning("sink.missing", sink=sink)
                continue
            was_superseded = leases.superseded
            self._beat_due |= leases.observe(row)
            if leases.superseded and not was_superseded:
                self._log.warning("config.superseded", sink=sink)

    def _beat(self) -> None:
        with self._registering:
            if self._left:
                return
            self._beat_due = False
            serving = [leases.sink for leases in self._sinks.values() if self._serves(leases)]
            if not self._store.heartbeat(self.relay, self.name, self._version, serving, self.lease_seconds / 3):
                self.unrecorded.set()

    def _renew(self) -> None:
        """Renew the leases of all sinks, and find out which shards were lost."""
        sent = self._clock()
        sinks = [each for each in self._sinks.values() if not self._is_silent(each) and not each.ended]
        asked = {each.sink: {shard: lease.epoch for shard, lease in each.held.items()} for each in sinks}
        owned = self._store.renew_sessions(self.relay, asked, self.lease_seconds, self.lease_seconds / 6)
        for leases in sinks:
            sink = leases.sink
            if lost := leases.renew(asked[sink], owned[sink], self._end_of_lease(sent)):
                self._log.warning("shards.lost", sink=sink, shards=lost, held=len(leases.held))
        self._renewed_at = sent

    def _end_of_lease(self, sent: float) -> float:
        """Return when a lease ends by this relay's clock that was renewed by a statement of the time ``sent``."""
        return sent + self.lease_seconds - self._margin

    def _share(self, *, renewed: bool) -> None:
        sinks = self._sinks
        for share in self._store.relay_ranks(self.relay, list(sinks), self.lease_seconds):
            leases = sinks[share.sink]
            leases.observe_relays(share.relays, renewed=renewed)
            leases.set_quota(fair_quota(share.relays, share.before))

    # -- claims -----------------------------------------------------------------------------------------------

    def reclaim(self, leases: SinkLeases) -> None:
        """Renew the lease on a sink, and give the owned shards new epochs.

        No settlement of an earlier epoch can be written any more.
        """
        with leases.claiming:
            sent = self._clock()
            self._store.renew_sessions(self.relay, [leases.sink], self.lease_seconds)
            claimed = self._store.reclaim_shards(leases.sink, self.relay)
            leases.replace(_leases(claimed), self._end_of_lease(sent))

    def _claim(self, leases: SinkLeases) -> None:
        """Claim shards up to the quota, and those that are this relay's without its knowledge."""
        if not leases.claiming.acquire(blocking=False):  # the loop reclaims: next time
            return
        try:
            claimed = self._store.claim_shards(
                *(leases.sink, self.relay, leases.generation, max(0, leases.quota - len(leases.held))),
                known=leases.held,
                routes=leases.routes,
            )
            if claimed and leases.grant(_leases(claimed)):
                self._log.info("shards.claimed", sink=leases.sink, shards=len(claimed), held=len(leases.held))
            elif claimed:  # meanwhile the relay has begun to stop, so the loop may be over that would release them
                self._store.release_shards(leases.sink, self.relay, {c.shard: c.epoch for c in claimed})
        finally:
            leases.claiming.release()

    # -- releases ---------------------------------------------------------------------------------------------

    def release(self, leases: SinkLeases, shards: Collection[int], undone: int = 0) -> None:
        """Release shards, which are drained or have ``undone`` events in flight.

        The next owner reads events in flight again.
        """
        with leases.releasing(shards) as epochs:
            self._store.release_shards(leases.sink, self.relay, epochs)
        left = {"undone": undone} if undone else {}
        self._log.info("shards.released", sink=leases.sink, shards=len(shards), held=len(leases.held), **left)

    def end_session(self, leases: SinkLeases) -> None:
        """Release every shard of a sink whose loop is over, also those of claims without an answer."""
        leases.ended = True
        with leases.claiming, leases.releasing(leases.held) as epochs:
            self._store.end_session(leases.sink, self.relay)
        if epochs:
            self._log.info("shards.released", sink=leases.sink, shards=len(epochs), held=0)

    def stop(self) -> None:
        """Claim no more shards, drain all of them, and tell the other relays."""
        self._stopping = True
        for leases in self._sinks.values():
            leases.stop()
        self._wake()

    def leave(self) -> None:
        """Remove this relay from the database, for good, so that other relays take over its share."""
        with self._registering:
            self._left = True
            self._store.forget_relay(self.relay)


def _leases(claimed: Collection[Claimed]) -> dict[int, Lease]:
    return {each.shard: Lease(each.epoch, each.crashes) for each in claimed}
