"""The loop of one sink: claim, read, hand over, take verdicts, settle. It has a thread of its own.

A session ends when its state in memory may be wrong, and the next one starts from the stored positions. The state of
a session is plain attributes that no other thread touches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from outbox_relay.domain.circuit import Circuit
from outbox_relay.domain.errors import (
    DatabaseUnavailable,
    DatabaseUnusable,
    IncarnationChanged,
    RelayError,
    Reloaded,
    SessionReset,
    StatementFailed,
)
from outbox_relay.domain.in_flight import InFlight
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.postgres.log import TickResult
from outbox_relay.relay.dispatch import Dispatcher
from outbox_relay.relay.earlier_outcomes import EarlierOutcomes
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.limits import WAIT_SECONDS as LIMIT_SECONDS
from outbox_relay.relay.limits import RateShare, RowBound, Slots
from outbox_relay.relay.log_reader import NEVER, LogReader
from outbox_relay.relay.outcomes import LEASE_MARGIN_SECONDS, Outcomes, Parts
from outbox_relay.relay.queue_reader import QueueReader
from outbox_relay.relay.replay_reader import ReplayLog, ReplayReader
from outbox_relay.relay.report import Report, SinkFault, SinkLog
from outbox_relay.relay.rows import Rows
from outbox_relay.relay.settle import MOST_ROWS as MOST_UNSETTLED
from outbox_relay.relay.settle import AttemptRecorder, Settler
from outbox_relay.relay.sink_leases import Lease, SinkRegistration
from outbox_relay.relay.ticks import Ticks

WAIT_SECONDS = 1.0
"""Maximum wait of the loop if nothing is due."""
DRAIN_SECONDS = 0.01
"""Maximum wait of the loop while shards are drained."""
PAUSE_SECONDS = 1.0
"""Pause after a session that the database ended, or that was not longer than this."""
CATCH_UP_SECONDS = 0.005
"""Time without an exchange of calls after which one comes before the next statement."""
TELL_SECONDS = 5.0
"""Time after which the log says that the end of the loop waits for calls in flight."""
SURVIVED = (DatabaseUnavailable, StatementFailed, SessionReset, DatabaseUnusable)
"""The errors that end a session and not the loop."""


class Session:
    """The parts that live from one start at the stored positions to its end.

    ``began`` is the tick with which it begins, and ``floor`` the last id of an older numbering.
    """

    def __init__(self, loop: SinkLoop, began: TickResult, floor: int) -> None:
        parts = self.parts = loop.parts
        spec, store, leases, clock = parts.spec, parts.store, parts.leases, parts.clock
        parts.now, parts.now_at = began.now, clock.monotonic()
        self.in_flight = InFlight()
        self.circuit = Circuit(spec.settings.circuit)
        replay_log = None if spec.replay is None else ReplayLog(store, spec.replay)
        self.settler = Settler(
            *(replay_log or store, leases, parts.relay, self.in_flight, loop.recorder, began.incarnation),
            clock.monotonic,
            self._written,
            hold=spec.hold,
            only_tried=spec.settings.record_attempts == "failures",
            measures=parts.measures,
            of_replay=replay_log is not None,
        )
        bound = RowBound(store, spec, leases, lambda: self.settler.unsettled, clock.monotonic)
        sink_log = SinkLog(parts.log, spec.name)
        self.outcomes = Outcomes(
            *(parts, self.circuit, self.settler, self.in_flight.blocked, Slots(parts.sink.max_in_flight)),
            *(loop.limits, bound, sink_log.dead, loop.may_run),
        )
        self.dispatcher = Dispatcher(self.outcomes)
        self.rows = Rows(self.outcomes)
        earlier = EarlierOutcomes(store, spec, self.in_flight, began.incarnation)
        reading = (self.outcomes, self.dispatcher, self.in_flight, loop.keeper, loop.ticks, earlier, began, floor)
        if replay_log is not None:
            self.reader: LogReader = ReplayReader(replay_log, *reading)
        else:
            self.reader = QueueReader(*reading) if spec.queued else LogReader(*reading)
        self.report = Report(self.outcomes, sink_log, parts.log)
        self._held: Mapping[int, Lease] = {}
        self._claim_at = self._extend_at = self._unblock_at = self._report_at = -NEVER
        self._exchanged_at = -NEVER
        self._busy_seconds = 0.0
        """Duration of the last step without its wait."""

    def _written(self, *written: object) -> None:
        self.rows.written(*written)  # type: ignore[arg-type]

    @property
    def unfinished(self) -> int:
        """The number of calls in flight, of claimed rows without an outcome, and of rows to be written."""
        settler = self.settler
        return self.dispatcher.in_flight + self.outcomes.awaited + settler.changed_rows + settler.unsettled

    def step(self) -> None:
        """Do what is due, hand over what may be sent, and take the verdicts that have come by then.

        Raises ``RelayError`` if the session has to end.
        """
        clock = self.parts.clock
        now = began = clock.monotonic()
        self.reader.adopt(now)
        if (held := self.parts.leases.held) is not self._held:
            self._held = held
            self.parts.sink.extend(self.parts.leases.until(self.parts.leases.adopted))
        hurried = self._catch_up()
        self.reader.read(now)
        hurried |= self._catch_up()
        self._claim_at = self._claim(now)
        # An exchange may have ended the wait that another thread wanted to end.
        waited = self._exchange(DRAIN_SECONDS if hurried or self.reader.draining else WAIT_SECONDS)
        now = clock.monotonic()
        if now >= self.settler.due_at(self.outcomes.awaited):
            self.outcomes.measure()
            self.settler.settle()
        if now >= self._extend_at:
            self._extend_at = self.rows.extend(self.dispatcher.rows_under_way())
            self.dispatcher.watch_rows(self.rows.extended)
        self._unblock_at = self.rows.unblock()
        self._report_at = self.report.write(now)
        self._busy_seconds = clock.monotonic() - began - waited

    def _catch_up(self) -> bool:
        """Exchange calls if the last time was long ago: no call shall wait for more than one statement."""
        is_late = self.parts.clock.monotonic() - self._exchanged_at >= CATCH_UP_SECONDS
        if is_late:
            self._exchange(0.0)
        return is_late

    def _exchange(self, most: float) -> float:
        """Hand over what may be sent, and take verdicts, which may come within ``most`` seconds if nothing else is due.

        Return the seconds of the wait for them.
        """
        clock = self.parts.clock
        now = clock.monotonic()
        self.dispatcher.submit(now)
        ended = self.parts.sink.completed(min(most, self._patience(now)) if most else 0.0)
        self._exchanged_at = clock.monotonic()
        for call in ended:
            self.dispatcher.completed(call)
        return self._exchanged_at - now

    def _claim(self, now: float) -> float:
        """Claim rows that are due, as many as can be handed over soon. Return when to look again.

        If a verdict, or a settlement, has to come first, that is never: the loop continues with them.
        """
        outcomes, dispatcher = self.outcomes, self.dispatcher
        if not self.parts.leases.serving or self.settler.changed_rows >= MOST_UNSETTLED:
            return NEVER
        if now < (due := self.rows.due_at()):
            return due
        room = dispatcher.row_room(now, self._busy_seconds)
        if room <= 0:
            return now + LIMIT_SECONDS if outcomes.limits.active else self.circuit.next_probe_at(now)
        sent = self.parts.clock.lease()
        claimed = self.rows.claim(room, rests=dispatcher.yields)
        if rows := outcomes.deliverable(claimed):
            dispatcher.add_rows(rows, sent + LEASE_MARGIN_SECONDS, suspect=self.rows.suspect_was_last)
        return self.rows.due_at()

    def _patience(self, now: float) -> float:
        """Return the seconds until something else than a verdict is due."""
        due = min(
            self.reader.next_at(),
            self.dispatcher.next_at,
            self.settler.due_at(self.outcomes.awaited),
            self._claim_at,
            self._unblock_at,
            self._report_at,
        )
        return max(0.0, due - now)


@dataclass(slots=True)
class SinkLoop:
    """One sink, served in one session after another until it is stopped.

    Other threads call ``stop`` and ``abandon``, and read the attributes and properties.
    """

    parts: Parts
    keeper: Keeper
    ticks: Ticks
    may_run: Callable[[], bool] = lambda: True
    """False while nothing may be sent, whatever the circuit says. Any thread may ask."""
    target_limits: RateShare | None = None
    """The limits of the target of a replay; None for a sink, which has its own."""
    session: Session | None = None
    """The present session, or the last one until the next begins."""
    restarts: Counter[str] = field(default_factory=Counter[str])
    """The number of sessions that ended other than by a stop, by ``RelayError.reason``."""
    limits: RateShare = field(init=False)
    recorder: AttemptRecorder = field(init=False)
    registration: SinkRegistration = field(init=False)
    in_hand: int = 0
    """The number of events that were read and are neither delivered nor rows, as of a moment ago."""
    stopping: bool = False
    abandoned: bool = False
    ended: bool = False
    """True once the loop has drained and released its shards, or given up."""
    _fault: SinkFault = field(init=False)
    _seldom: RateLimitedLog = field(init=False)
    _stopped_at: float = NEVER

    def __post_init__(self) -> None:
        """Make what outlasts every session."""
        parts = self.parts
        self.limits = self.target_limits or RateShare(parts.leases, parts.clock.monotonic())
        self.recorder = AttemptRecorder(self.keeper.name, parts.log)
        self.registration = SinkRegistration(parts.store, parts.leases, self.keeper.lease_seconds)
        self._fault = SinkFault(parts.leases)
        self._seldom = RateLimitedLog(parts.log)
        parts.leases.wake, parts.leases.purge = parts.sink.wake, parts.sink.purge

    # -- for other threads --------------------------------------------------------------------------------------

    @property
    def circuit(self) -> str:
        """The state of the sink's circuit in this process."""
        return self.session.circuit.state if self.session else "closed"

    @property
    def in_flight_limit(self) -> int:
        """The current limit of concurrent calls, which is reduced for a while after the destination throttled."""
        return self.session.outcomes.slots.limit if self.session else self.parts.sink.max_in_flight

    @property
    def fault(self) -> str | None:
        """The reason why this process cannot serve the sink; None if it can."""
        return self._fault.of(self.parts.spec, self.parts.sink)

    def stop(self) -> None:
        """Drain the shards and end the loop."""
        self.parts.leases.stop()
        self.stopping = True

    def abandon(self) -> None:
        """End the loop soon, with shards and calls in flight."""
        self.stopping = self.abandoned = True
        self.parts.sink.wake()

    # -- the thread ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the sink until ``stop``, in the thread of the loop."""
        self.parts.store.as_sink(replay=self.parts.spec.replay is not None)
        try:
            for _ in self.steps():
                pass
        finally:
            self.ended = True
            self.leave()

    def steps(self) -> Iterator[None]:
        """Serve the sink, a step at a time. An error of the database, or of what was read, ends a session only."""
        while not self.ended:
            self.parts.leases.turned_at = self.parts.clock.lease()
            began = self.parts.clock.monotonic()
            try:
                yield from self._serve()
            except SURVIVED as error:
                self._fault.refuse(error)
                if self.stopping:
                    return
                self.restarts[error.reason] += 1
                self._seldom.warning("sink.restarted", sink=self.parts.spec.name, reason=str(error), cause=error.reason)
                is_short = self.parts.clock.monotonic() - began < PAUSE_SECONDS
                if not self._withdraw() or is_short or not isinstance(error, SessionReset):
                    self.parts.sink.completed(PAUSE_SECONDS)
                yield

    def _serve(self) -> Iterator[None]:
        """Run one session until it is stopped. Raises one of ``SURVIVED`` if it has to begin again."""
        session = self._begin()
        leases = self.parts.leases
        while not self.abandoned and not (self.stopping and not leases.held and not session.unfinished):
            leases.turned_at = self.parts.clock.lease()
            if self.registration.serve_again(self.parts.spec, self.parts.log, idle=not session.unfinished):
                raise Reloaded("the sink was registered again")
            if leases.take_probe_request() and session.outcomes.gone is None:
                session.circuit.probe_now()
            if leases.held:
                self._fault.shards_are_owned()
            session.step()
            self._tell_wait(session)
            self.in_hand = session.in_flight.undone
            yield
        self.ended = True

    def _tell_wait(self, session: Session) -> None:
        """Log once that the end of the loop waits for calls in flight. Meanwhile no other event is sent."""
        now = self.parts.clock.monotonic()
        if not self.stopping:
            self._stopped_at = now
        elif now - self._stopped_at > TELL_SECONDS:
            self._stopped_at = NEVER
            self.parts.log.warning("config.waits", requests=session.dispatcher.in_flight)

    def _begin(self) -> Session:
        """Clear what the last session left behind, and begin the next.

        These are calls in the client, epochs of shards, and leases of rows.
        """
        parts = self.parts
        if not self._withdraw():
            raise SessionReset(f"sink {parts.spec.name}: the calls in flight did not end in time")
        parts.store.check_session()
        parts.store.arm()
        losses = parts.store.connection_losses
        began = parts.store.tick()
        self.registration.begin_session(began)
        self.keeper.reclaim(parts.leases)
        if self.session is not None:
            self.session.rows.give_all_back()
        elif not parts.spec.queued:
            parts.store.give_rows_back(parts.spec.name, parts.relay)
        self._fault.session_begins()
        self.session = Session(self, began, parts.store.floor())
        if parts.store.connection_losses != losses:  # from now on, the session notices it
            raise IncarnationChanged("a connection was lost: the server may not be the one that was read from")
        return self.session

    def _withdraw(self) -> bool:
        """End all calls of the last session. Return False if the client still has some, which may be sent."""
        if self.session is not None:
            self.ticks.forget(self.session.reader)
        try:
            self.parts.sink.withdraw()
        except SessionReset:
            return False
        if self.session is not None:
            self.session.dispatcher.withdrawn()
        return True

    def leave(self) -> None:
        """Release what the last session had, once its sink can no longer send."""
        parts = self.parts
        try:
            if not self._withdraw():
                raise SessionReset("the calls in flight did not end in time")
            if self.session is not None:
                self.session.rows.give_all_back()
            self.keeper.end_session(parts.leases)
        except RelayError as error:
            parts.log.warning("relay.left_behind", what=f"sink {parts.spec.name}", reason=str(error))
        finally:
            parts.sink.close()
