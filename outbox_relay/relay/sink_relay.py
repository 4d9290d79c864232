"""The relay of one sink: claim → deliver → settle.

A session ends when its state in memory may be wrong, and the next one starts from the stored positions.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import DatabaseUnusable, PositionsMissing, RelayError, Reloaded, first
from outbox_relay.domain.measures import SinkMeasures
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.connection_slots import REPLAYS, caller, sink_caller
from outbox_relay.postgres.rows import TickResult
from outbox_relay.postgres.store import Store
from outbox_relay.relay.attempt_recorder import AttemptRecorder
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.parked import ParkedDeliveries
from outbox_relay.relay.queue_claims import RowsInHand
from outbox_relay.relay.session import Session, Start
from outbox_relay.relay.shared_limits import SharedLimits
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.ticker import Ticker
from outbox_relay.sinks import RunsHandlers, Sink

LOOK_SECONDS = 1.0
"""Maximum wait of the loop if no event wakes it."""
TELL_SECONDS = 5.0
"""Time after which the log says that new settings wait for requests in flight."""
DRAIN_SECONDS = 0.01
"""Maximum wait of the loop while shards are drained."""
FORMER = (
    "the sink was removed or renamed: take its name out of the settings, or run outbox-relay sinks remove NAME --forget"
)
"""The fault of a sink whose name is not registered again."""
OTHER_CLAIM = (
    'the sink has claim = "{}" in the database, which changes once no relay serves it and none of its rows is to be '
    "delivered: set it back until then, or give the sink a new name"
)
"""The fault of a sink that cannot be served with the ``claim`` of the settings yet."""


def always() -> bool:
    """Return True."""
    return True


class NextConfiguration(NamedTuple):
    """The configuration of the next session."""

    spec: SinkSpec
    generation: int
    sink: Sink | None
    """The sink that was made again, open; None if the present one stays."""


@dataclass(slots=True)
class SinkRelay:
    """One sink, served in one session after another until the relay stops."""

    spec: SinkSpec
    sink: Sink
    store: Store
    ticker: Ticker
    lease_manager: LeaseManager
    leases: SinkLeases
    log: BoundLogger
    stopping: asyncio.Event
    noise: Callable[[], float] = lambda: random.uniform(-1.0, 1.0)  # noqa: S311 - jitter is no secret
    may_send: Callable[[], bool] = always
    """False while nothing may be sent, whatever the circuit says."""
    session: Session | None = None
    """The current session, or the last one until the next begins."""
    restarts: Counter[str] = field(default_factory=Counter[str])
    """The number of sessions that ended other than by the relay's stop, by ``RelayError.reason``."""
    measures: SinkMeasures = field(default_factory=SinkMeasures)
    """The counts and durations of all sessions."""
    target_limits: SharedLimits | None = None
    """The limits of the target of a replay; None for a sink, which has its own."""
    limits: SharedLimits = field(init=False)
    """The limits across all relays, which outlast every session."""
    recorder: AttemptRecorder = field(init=False)
    _next: NextConfiguration | None = None
    _retired: list[Sink] = field(default_factory=list[Sink])
    _drained: bool = True
    _refusal: DatabaseUnusable | None = None
    _caller: str = ""
    _waits_since: float = float("inf")
    """``time.monotonic()`` of the last reload, until it is logged that its settings wait."""
    _began: TickResult | None = None
    """The tick with which the session began."""
    _observations: int = 0
    """The number of answers that had the sink before this session."""
    _seen_in: str | None = None
    """The incarnation of the server that had the sink last; None if it is not to be registered again."""
    _start: str = "now"
    """The place in the log where the sink began, as of that server."""
    _missing_since: float = 0.0
    """``time.monotonic()`` of the last look at which the database had the sink."""
    _former_names: list[str] = field(default_factory=list[str])
    _in_hand: RowsInHand = field(default_factory=RowsInHand)

    def __post_init__(self) -> None:
        """Take connections as one caller, whatever the sink is renamed to."""
        self._caller = sink_caller(self.spec.name) if self.spec.replay is None else REPLAYS
        manager = self.lease_manager
        self.recorder = AttemptRecorder(manager.name, self.log)
        self.limits = self.target_limits or SharedLimits(
            self.store, manager.relay, self.leases, manager.lease_seconds, self.log
        )

    @property
    def circuit(self) -> str:
        """The state of the sink's circuit in this process."""
        return self.session.breaker.state if self.session else "closed"

    @property
    def in_flight_limit(self) -> int:
        """The current limit of concurrent requests.

        It is reduced for a while after the destination throttled.
        """
        return self.session.limiter.limit if self.session else self.sink.max_in_flight

    @property
    def in_hand(self) -> int:
        """The number of events that were read and are neither delivered nor parked."""
        return self.session.in_flight.undone if self.session else 0

    @property
    def fault(self) -> str | None:
        """The reason why this process cannot serve the sink; None if it can."""
        if self.leases.removed:
            return FORMER if self.leases.former else "the sink was removed from the database"
        if self.leases.superseded and self.leases.row.claim != self.spec.claim:
            return OTHER_CLAIM.format(self.leases.row.claim)
        if self._refusal:
            return str(self._refusal)
        return self.sink.fault if isinstance(self.sink, RunsHandlers) else None

    @property
    def sinks(self) -> list[Sink]:
        """The sinks that are open: the present one, earlier ones to be closed, and the one of the next session."""
        following = self._next.sink if self._next else None
        return [self.sink, *self._retired, *([] if following is None else [following])]

    def reload(self, spec: SinkSpec, generation: int, sink: Sink | None = None) -> None:
        """Use ``spec``, and ``sink`` if it was made again, once every shard is drained and released.

        ``generation`` is already in the database. Until then this relay counts as one with an older configuration, or
        as one that does not serve the sink.
        """
        newer = replace(spec, name=self.spec.name, start=self.spec.start)
        if self._next is None and sink is None and generation == self.leases.generation and newer == self.spec:
            return
        pending = self._next.sink if self._next else None
        if sink is not None and pending is not None:
            self._retired.append(pending)
        self._next = NextConfiguration(newer, generation, sink or pending)
        self._waits_since = time.monotonic()
        self.leases.reconfigure()

    async def run(self) -> None:
        """Run one session, until the relay has stopped and drained its shards.

        Raises, and counts, ``SessionReset``, ``DatabaseUnavailable``, ``StatementFailed`` or ``DatabaseUnusable``. The
        next session then starts from the stored positions.
        """
        caller.set(self._caller)
        try:
            await self._run_session()
        except RelayError as error:
            self._refuse(error)
            if not self.stopping.is_set():
                self.restarts[error.reason] += 1
            raise

    async def _run_session(self) -> None:
        self._drained = False
        start = await self._prepare()
        self._forget_refusal()
        self.session = Session(
            *(self.spec, self.sink, self.store, self.ticker, self.lease_manager, self.leases, self.log, self.noise),
            *(self.recorder, start, self.may_send, self.measures, self.limits, self._in_hand),
        )
        await self.session.run(self._claim_deliver_settle)
        self._drained = True

    async def _prepare(self) -> Start:
        """Clear what an earlier session left behind, and return the starting point.

        These are requests in the client, epochs of shards, and leases of rows.
        """
        await self._close_retired()
        await self.sink.reset()
        self._adopt_name()
        await self.store.check_session()
        self._began = await self.ticker.refresh()
        self._observations = self.leases.observations
        server, session_epoch = self._began.incarnation, self.ticker.session_epoch
        await self.lease_manager.reclaim(self.leases)
        await self._give_rows_back()
        return Start(server, session_epoch, await self.store.floor())

    async def _give_rows_back(self) -> None:
        """Give back the rows that earlier sessions have claimed and not settled."""
        name, relay = self.spec.name, self.lease_manager.relay
        await self._in_hand.give_back(self.store, name, relay)
        if not self.spec.queued:
            await self.store.give_rows_back(name, relay)

    async def _close_retired(self) -> None:
        while self._retired:
            await self._retired.pop().close()

    def _adopt_name(self) -> None:
        """Serve the sink under its new name if it was renamed. The epochs of the old one are invalid."""
        if (name := self.leases.rename()) is not None:
            self._former_names.append(self.spec.name)
            self.log.info("sink.new_name", renamed_to=name)
            self.spec = replace(self.spec, name=name)
            self.log = self.log.bind(sink=name)
            self.recorder.use_log(self.log)

    async def _claim_deliver_settle(self, session: Session) -> None:
        """Read the log for the dispatcher, until the relay has stopped.

        What becomes of events is settled as it comes.

        Only this loop waits for the wake event and clears it.
        """
        log_reader, parked, wake = session.log_reader, session.parked, self.leases.wake
        while not self.stopping.is_set() or self.leases.held or parked.under_way:
            self._adopt_reload(parked)
            await self._register_again()
            await self._serve_again()
            wake.clear()
            if self.leases.take_probe_request():
                session.breaker.probe_now()
            await log_reader.adopt()
            if self.leases.held:
                self._refusal = None
            if not await log_reader.step():
                draining = log_reader.draining or self.stopping.is_set()
                await _within(DRAIN_SECONDS if draining else LOOK_SECONDS, wake)

    def _adopt_reload(self, parked: ParkedDeliveries) -> None:
        """End the session for one with the new configuration, or under the new name of the sink.

        It must have no shards and no rows under way.
        """
        if self.leases.held or parked.under_way:
            self._tell_wait(parked.under_way + self.in_hand)
            return
        if self.leases.renamed_to is not None:
            raise Reloaded("the sink was renamed")
        if self._next is None:
            return
        following, self._next = self._next, None
        self.spec = replace(following.spec, name=self.spec.name)
        if following.sink is not None:
            self._retired.append(self.sink)
            self.sink = following.sink
        self.leases.serve(following.generation, self.spec.routes)
        raise Reloaded("the configuration was reloaded")

    def _tell_wait(self, requests: int) -> None:
        """Log once that the new settings wait for requests in flight. Until then the sink starts no other event."""
        if self._next is not None and time.monotonic() - self._waits_since > TELL_SECONDS:
            self._waits_since = float("inf")
            self.log.warning("config.waits", requests=requests)

    async def _register_again(self) -> None:
        """Register the sink again if a restore has taken its registration back.

        A sink that was removed, or whose row was deleted, stays away. A relay that was superseded leaves it to the
        others for a while.
        """
        leases, began = self.leases, self._began
        if began is None or self.spec.replay is not None:
            return
        if not leases.removed:
            self._missing_since = time.monotonic()
            if leases.observations > self._observations:
                self._seen_in, self._start = began.incarnation, leases.row.start or "now"
            return
        if self._seen_in is None or leases.renamed_to is not None or leases.former:
            return
        server = (await self.ticker.refresh()).incarnation  # the last tick may be older than what is missing
        if server == self._seen_in:
            self._seen_in = None
        if self._seen_in is None or server != began.incarnation or self._next or self.stopping.is_set():
            return
        if time.monotonic() - self._missing_since >= 2 * self.lease_manager.lease_seconds * leases.superseded:
            await self._register(began)

    async def _register(self, began: TickResult) -> None:
        """Register the sink unless it is there by now, and begin a session that serves it.

        It begins as it had begun: at the beginning of the log, or with this session. Names that it got later are gone.
        """
        leases, earlier = self.leases, dict.fromkeys((self.leases.configured, *self._former_names))
        names = [name for name in earlier if name != self.spec.name]
        present = await self.lease_manager.former_name(leases, names) if names else None
        if names:
            leases.remove(renamed_to=present or leases.configured)
            self._adopt_name()
        if present is not None:
            raise Reloaded("the rename of the sink was taken back")
        spec, server = self.spec, began.incarnation
        generation = await self.store.register_missing_sink(
            spec.name, spec.patterns, self._start, began.tick, queued=spec.queued, server=server
        )
        if generation is None:  # another relay has registered it meanwhile
            if names:
                raise Reloaded("the sink has its name in the settings again")
            return
        leases.registered(generation, spec.routes)
        self._seen_in = server
        self.log.warning("sink.registered_again", start=self._start, since=began.now.isoformat())
        for reason in (await self.store.state_limits({spec.name: spec.limits}, server)).values():
            self.log.warning("limits.refused", reason=reason)
        raise Reloaded("the sink was registered again")

    async def _serve_again(self) -> None:
        """Take a superseded sink back, once its routes match or its relays are gone."""
        leases, spec = self.leases, self.spec
        if not leases.superseded or leases.held or self._next is not None or self.stopping.is_set():
            return
        differs = tuple(leases.row.patterns) != tuple(spec.patterns) or leases.row.claim != spec.claim
        if differs and not leases.abandoned:
            return
        result = await self.ticker.refresh()
        generation = await self.store.reregister_sink(
            *(spec.name, spec.patterns, leases.row.generation, result.tick),
            queued=spec.queued,
            server=result.incarnation,
        )
        if generation is not None:
            leases.serve(generation, spec.routes)
            raise Reloaded("the relays with the other configuration are gone")

    async def leave(self) -> None:
        """Release what the last session left behind. The sink sends nothing of it later."""
        if not self._drained:
            await self.sink.reset()
        await self._give_rows_back()
        await self.lease_manager.give_doubtful_back(self.leases)
        if self.leases.held:
            await self.lease_manager.release(self.leases, set(self.leases.held))

    # -- limits across relays ---------------------------------------------------------------------------------

    async def keep_limits(self) -> None:
        """Keep the limits of the sink for all its sessions, and for those of its replays, until cancelled.

        Raises ``DatabaseUnavailable``.
        """
        caller.set(self._caller)
        try:
            await self.limits.run()
        except BaseExceptionGroup as group:
            raise first(group) from None

    async def leave_limits(self) -> None:
        """Give up what this relay has of the limits, once ``keep_limits`` and all replays have ended."""
        await self.limits.leave()

    # -- refusals of the database -----------------------------------------------------------------------------

    def _refuse(self, error: RelayError) -> None:
        """Keep a refusal of the database as the reason of the fault. Missing positions outlast any other one."""
        self._forget_refusal()
        if isinstance(error, DatabaseUnusable) and (self._refusal is None or isinstance(error, PositionsMissing)):
            self._refusal = error

    def _forget_refusal(self) -> None:
        """Forget a refusal, except missing positions.

        Those last until the positions of owned shards are known.
        """
        if not isinstance(self._refusal, PositionsMissing):
            self._refusal = None


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait for ``event``, and set it after ``seconds``: the loop cannot tell who woke it. A timeout would cost more."""
    waking = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        waking.cancel()
