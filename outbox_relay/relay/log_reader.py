"""The reading of the log for one sink, window by window.

Shards at the same position are read together.

A round begins with a tick. Every shard group between two windows opens one that ends at that tick. No round begins
while the sink is saturated, so that events emitted meanwhile are read together. The groups take turns, a chunk each. A
shard that was just taken over is read on its own. While it is far behind, the others continue without it. Once it is
near, a new round waits for it, so that all groups meet at the same tick and are joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias

from outbox_relay.domain.errors import HandedOver, IncarnationChanged, LeaseLost, PositionsMissing, StatementFailed
from outbox_relay.domain.event import FAULT, StoredEvent, cut_unread, max_wire_bytes, pop_scan_end
from outbox_relay.domain.in_flight import Chunk, InFlight, ShardGroup
from outbox_relay.domain.window import Position, ScanStep, Tick, WindowSlice, next_slice, position_after
from outbox_relay.postgres.log import MOST_PAYLOAD, TickResult, WindowRead, WindowRequest
from outbox_relay.relay.dispatch import Dispatcher
from outbox_relay.relay.earlier_outcomes import EarlierOutcomes
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.outcomes import SUSPECT_CRASHES, Outcomes
from outbox_relay.relay.ticks import Ticks

CHUNK_EVENTS = 4000
"""Maximum number of events in one read."""
CHUNK_BYTES = 8 << 20
"""Maximum bytes of events in one read, not counting the last event. A chunk of small events has fewer."""
SUSPECT_EVENTS = 500
"""Maximum number of events in one read of shards with several crashed owners."""
IDS_PER_READ = 50_000
"""Maximum number of ids in one read, so that a sink that few events are routed to is read in bounded steps."""
MOST_IDS_PER_READ = 5_000_000
"""The value up to which that maximum is doubled while no events are found: a read of half a second."""
FAR_IDS = 20_000
"""Number of ids between a group and the end of its window from which on the others do not wait for it."""
AGAIN_SECONDS = 1.0
"""Pause before a single event that could not be read is read again, since memory may be short for a moment only."""
AWAKE_SECONDS = 0.02
"""Time without new events after which the loop rests until a wake-up."""
REST_SECONDS = 1.0
"""Maximum rest. A look then needs no other thread."""
WINDOW_SECONDS = 4.0
"""Time that a tick with a window may take. If less is slow for a tick, ticks come without."""
SLOW_WINDOW_SECONDS = 0.1
"""Duration of a look from which on ticks come without windows for a while."""
NO_WINDOW_SECONDS = 10.0
"""Time without windows after a look with one failed. The window is then read in the usual way, which finds the
reason."""
SMALL_BYTES = 2000
"""Bytes of payload, key and headers up to which an event is small. A chunk of small events needs no other bound."""
SMALL_AGAIN = 1000
"""Number of consecutive small events after which reads are of small events again."""
SMALL_PAYLOAD_BYTES = 64 << 10
"""Payload size up to which a payload is never the reason why a read runs out of time or memory."""
TOO_MUCH = {"57014": "it ran out of time", "53200": "it ran out of memory", "54000": "it met a limit of the database"}
"""SQLSTATEs of reads that asked for too much, and their meaning."""
UNLOADABLE = "its answer cannot be loaded"
OVER_LIMIT = ", more than the ceiling"
"""Text that the schema adds after the size of a payload that it did not load."""
NEVER = float("inf")

Read: TypeAlias = Callable[..., list[StoredEvent]]
"""A method of the store that reads events of a window."""
Answer: TypeAlias = tuple[list[StoredEvent], int | None]
"""The events of one read, and the last id that it covers; None if it covers all that was asked for."""


class LogReader:
    """Reads the owned shards of one sink in one session.

    Everything it reads comes from the server of the tick ``began``. Ids up to ``floor`` are of an older numbering.
    """

    def __init__(
        self,
        outcomes: Outcomes,
        dispatcher: Dispatcher,
        in_flight: InFlight,
        keeper: Keeper,
        ticks: Ticks,
        earlier_outcomes: EarlierOutcomes,
        began: TickResult,
        floor: int,
    ) -> None:
        parts = outcomes.parts
        self._outcomes = outcomes
        self._parts = parts
        self._spec = parts.spec
        self._leases = parts.leases
        self._store = parts.store
        self._settler = outcomes.settler
        self._dispatcher = dispatcher
        self._in_flight = in_flight
        self._keeper = keeper
        self._ticks = ticks
        self._earlier_outcomes = earlier_outcomes
        self._floor = floor
        self._server = began.incarnation
        self._result = began
        self._losses = parts.store.connection_losses
        self._config_versions = -1
        self._window: WindowRead | None = None
        self._max_ids = IDS_PER_READ
        self._steps = ScanStep()
        self._small_events = SMALL_AGAIN
        """The number of consecutive events that were small."""
        self._types = None if self._spec.types is None else tuple(self._spec.types)
        self._not_before = -NEVER
        self._awake_until = parts.clock.monotonic() + AWAKE_SECONDS
        self._windows_at = -NEVER if keeper.lease_seconds / 3 >= WINDOW_SECONDS else NEVER
        """The time until which ticks come with windows."""
        self._look_at = -NEVER
        """The time when the next look is due. Other threads bring it forward."""
        self._held: object = None
        """The leases as of the last step."""

    # -- claim --------------------------------------------------------------------------------------------------

    def adopt(self, now: float) -> None:
        """Take over claimed shards, and drain and release those that leave.

        Raises ``LeaseLost`` if a shard was lost.
        """
        leases = self._leases
        held, known = leases.held, self._held
        if held is not known:
            if leases.lost:
                raise LeaseLost(f"sink {self._spec.name}: a shard was lost")
            if gained := leases.adopt():
                self._take_over(gained)
            self._held = held
        if leaving := leases.leaving():
            self._in_flight.drain(leaving)
        if self._in_flight.leaving:
            self._release(now)

    def _take_over(self, gained: Collection[int]) -> None:
        """Load outcomes of earlier owners and then positions.

        No event of these shards has been read before.
        """
        if not self._in_flight.shards:  # a connection that was lost before concerns nothing that is known
            self._losses = self._store.connection_losses
        self._earlier_outcomes.take_over(gained)
        together: defaultdict[Position, list[int]] = defaultdict(list)
        for shard, position in self._positions(gained).items():
            together[position].append(shard)
        for position, shards in together.items():
            self._in_flight.take_over(shards, position)
        self._look_at = -NEVER

    def _positions(self, gained: Collection[int]) -> dict[int, Position]:
        """Return the stored positions of claimed shards.

        Raises ``PositionsMissing`` if one has none, and ``LeaseLost`` if that is so because the sink is missing.
        """
        try:
            return self._store.positions(self._spec.name, gained, server=self._server)
        except PositionsMissing:
            self._keeper.refresh()
            if self._leases.missing:
                raise LeaseLost(f"sink {self._spec.name}: it is not in the database") from None
            raise

    def _release(self, now: float) -> None:
        """Release drained shards after their last settlement.

        While the destination is down, or the limits of all relays admit few events, no shard drains soon. Shards are
        then handed over with events in flight, and the session ends by ``HandedOver``. Calls in flight are waited
        for, also those whose events are rows by now: the next owner would repeat them.
        """
        leaving = self._in_flight.leaving
        if self._is_stalled(now) and not all(group.idle for group in leaving):
            self._outcomes.handing_over = True
        handing_over = self._outcomes.handing_over
        drained = [group for group in leaving if group.idle or handing_over]
        if not drained or (handing_over and self._dispatcher.in_flight):
            return
        if not self._outcomes.may_release(now):
            return
        if handing_over:
            for chunk, index in self._in_flight.unsettled_before_last_done():
                self._outcomes.defer(chunk, index)  # otherwise the next owner would deliver the settled ones again
        if not self._settler.settle(everything=True):
            return
        for group in drained:
            self._in_flight.drop(group)
            self._keeper.release(self._leases, group.shards, group.undone)
        if handing_over:
            raise HandedOver(f"sink {self._spec.name}: shards were given up with events in flight")

    def _is_stalled(self, now: float) -> bool:
        """Return True if shards would take long to drain."""
        since = self._outcomes.circuit.unavailable_since
        is_down = since is not None and now - since >= self._spec.park_after_seconds
        return is_down or not self._outcomes.flows or self._outcomes.limits.stall(self._in_flight.undone)

    @property
    def draining(self) -> bool:
        """True while shards are to be released."""
        return bool(self._in_flight.leaving)

    # -- ticks --------------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """Return when ``read`` has something to do, in seconds of the clock."""
        if not self._in_flight.readable or self._outcomes.handing_over:
            return NEVER
        if self._open():
            return self._not_before if self._settler.has_capacity() else NEVER
        return NEVER if self._dispatcher.saturated else max(self._look_at, self._not_before)

    def _look_now(self) -> None:
        """Look at once, from another thread: a tick has shown that there may be more."""
        self._look_at = -NEVER
        self._parts.sink.wake()

    def _look(self, now: float) -> None:
        """Begin a round with a newer tick.

        Raises ``IncarnationChanged`` if anything that was read may be wrong.
        """
        before = self._result
        if not self._tick(now):
            return
        result = self._result
        self._in_flight.begin_round(result.tick)
        if self._open() or result.tick.seq != before.tick.seq:
            self._awake_until = now + AWAKE_SECONDS
        rests = now > self._awake_until
        if rests:
            self._look_at = now + REST_SECONDS
        self._ticks.expect(self, self._look_now, result, rests=rests)

    def _tick(self, now: float) -> bool:
        """Take the tick of another loop, or one with the window that is read next if that is small.

        Return False if there is none, or if it may be one of another configuration.
        """
        self._window = None
        result = self._ticks.newer(self._result) or self._take_tick(now)
        if result is None:
            return False
        self._check(result)
        self._result = result
        self._parts.now, self._parts.now_at = result.now, now
        self._look_at = self._ticks.pace(now)
        if self._config_versions == result.config_versions or self._config_is_read(result.config_versions):
            return True
        self._look_at = now + AGAIN_SECONDS
        return False

    def _take_tick(self, now: float) -> TickResult | None:
        """Take a tick, with the next window if that may come with it. Return None if the statement failed.

        The reason may be an event of the window. It is then read in the usual way.
        """
        request = self._next_request(now)
        try:
            result, window, seconds = self._store.look(request)
        except StatementFailed as error:
            self._check_duration(self._parts.clock.monotonic() - now)
            if request is None:
                self._look_at = now + AGAIN_SECONDS
                self._parts.log.warning("database.tick_failed", sink=self._spec.name, reason=str(error))
            else:
                self._windows_at = now + NO_WINDOW_SECONDS
            return None
        self._check_duration(seconds)
        if window is not None and (not window.usable or seconds > SLOW_WINDOW_SECONDS):
            self._windows_at = now + NO_WINDOW_SECONDS
        if window is not None and window.usable:
            self._window = window
            if window.upto is None and not window.is_cut:
                key = self._window_key(window.request.shards, window.request.a, window.b)
                self._ticks.reads.put(key, window.events)
        self._ticks.publish(result, seconds)
        return result

    def _check(self, result: TickResult) -> None:
        before, doubt = self._result, None
        if self._store.connection_losses != self._losses:
            doubt = "a connection was lost"
        elif result.incarnation != self._server:
            doubt = "the server is another incarnation"
        elif result.tick.seq < before.tick.seq or result.tick.next_xid < before.tick.next_xid:
            doubt = "the server's numbers went back"
        if doubt:
            raise IncarnationChanged(f"{doubt}: the server may not be the one that was read from")

    def _check_duration(self, seconds: float) -> None:
        """Raise ``IncarnationChanged`` after a tick so slow that a pooling proxy may have hidden another server."""
        if seconds > self._keeper.lease_seconds / 3:
            raise IncarnationChanged(f"a tick took {seconds:.1f} s: the server may not be the one that was read from")

    def _config_is_read(self, versions: int) -> bool:
        """Ask for another configuration of this sink before a new tick is used. Return False without an answer."""
        try:
            self._keeper.refresh()
            if self._leases.is_behind:
                self._keeper.refresh()
        except StatementFailed:
            return False
        self._config_versions = versions
        return self._leases.serving

    def _next_request(self, now: float) -> WindowRequest | None:
        """Return the window that will be read next, if the next tick may come with it.

        It must not concern events that reads failed for, or that may crash a relay.
        """
        groups = self._in_flight.readable
        if now < self._windows_at or len(groups) != 1 or self._steps.reduced or not self._settler.has_capacity():
            return None
        [group] = groups
        if group.position.b is not None or self._is_suspect(group):
            return None
        size = SMALL_BYTES if self._small_events >= SMALL_AGAIN else None
        return WindowRequest(group.position.a, self._floor, group.shards, self._spec.types, most_size=size)

    # -- read ---------------------------------------------------------------------------------------------------

    def read(self, now: float) -> None:
        """Look if that is due, and read one chunk for one group with an open window, if there is room for it."""
        if not self._in_flight.readable or self._outcomes.handing_over or now < self._not_before:
            return
        is_due = now >= self._look_at and not self._dispatcher.saturated
        if is_due and all(self._is_far(group) for group in self._open()):
            self._look(now)
        group = next(iter(self._open()), None)
        if group is not None and self._settler.has_capacity():
            self._read(group)

    def _open(self) -> list[ShardGroup]:
        return [group for group in self._in_flight.readable if group.position.b is not None]

    def _is_far(self, group: ShardGroup) -> bool:
        a, b, last = group.position
        return b is not None and b.seq - max(a.seq, last) > FAR_IDS

    def _read(self, group: ShardGroup) -> None:
        """Read the next chunk of ``group`` and pass it to the dispatcher."""
        start = group.position
        try:
            found = self._looked_at(group) or self._read_slice(group, start)
            if found is None:
                return
            events, end = found
            deliverable = self._earlier_outcomes.screen(events)
        except StatementFailed as error:
            if error.sqlstate == StatementFailed.NO_CONNECTION:  # its turn comes; no event is the reason
                return
            raise
        self._take(group, Chunk(deliverable, start, end))

    def _take(self, group: ShardGroup, chunk: Chunk) -> None:
        self._in_flight.take(group, chunk)
        if chunk.events:
            self._dispatcher.add(chunk)

    def _looked_at(self, group: ShardGroup) -> tuple[list[StoredEvent], Position] | None:
        """Return the events of a window that came with a tick, and the position after them.

        None if they did not come with it, or if the group is no longer the one that they were requested for.
        """
        start = group.position
        a, b, last = start
        if b is None or last:
            return None
        window, self._window = self._window, None
        if window is None:
            found = self._ticks.reads.find(self._window_key(group.shards, a, b))
            return None if found is None else (found, start.closed())
        if start != Position(window.request.a, window.b) or group.shards != window.request.shards:
            return None
        if window.is_cut:
            self._small_events = 0
        self._count_small(window.events)
        return window.events, start.closed() if window.upto is None else start.at(window.upto)

    def _window_key(self, shards: frozenset[int], a: Tick, b: Tick) -> tuple[object, ...]:
        return ("window", self._server, self._floor, self._types, shards, a, b)

    def _read_slice(self, group: ShardGroup, start: Position) -> tuple[list[StoredEvent], Position] | None:
        """Return the events of the next slice, and the position after them; None if a smaller read is to be tried."""
        piece = self._next_slice(start)
        answer = self._ask_in_steps(group, piece)
        if answer is None:
            return None
        events, upto = answer
        self._steps.succeeded()
        self._max_ids = IDS_PER_READ if events else min(self._max_ids * 2, MOST_IDS_PER_READ)
        return events, position_after(start, piece) if upto is None else start.at(upto)

    def _next_slice(self, start: Position) -> WindowSlice:
        return next_slice(start, self._steps.limit(self._max_ids), self._floor, self._result.tick.seq)

    def _ask_in_steps(self, group: ShardGroup, piece: WindowSlice) -> Answer | None:
        """Return the answer of one read; None if it failed and a smaller one is to be tried.

        Raises ``StatementFailed`` for any other reason.
        """
        try:
            return self._ask(group, piece)
        except StatementFailed as error:
            if reason_of_failed_read(error) is None:
                raise
            self._steps.failed()
            self._max_ids = IDS_PER_READ
            if self._steps.exhausted:
                return ask_without_payload(partial(self._ask, group, piece), self._spec.name, piece.after, error)
            if self._steps.limit(CHUNK_EVENTS) == 1:
                self._not_before = self._parts.clock.monotonic() + AGAIN_SECONDS
            return None

    def _ask(self, group: ShardGroup, piece: WindowSlice, most_payload: int = MOST_PAYLOAD) -> Answer:
        """Return the events of one read, and the last id that it covers.

        The id is None if the read covers all of ``piece``.
        """
        most = self._most_events(group)
        most_bytes = self._steps.limit(CHUNK_BYTES)
        if (answer := self._ask_for_small(group, piece, most, most_payload)) is not None:
            return answer
        events = self._fetch(group, piece, most, most_bytes, most_payload)
        self._count_small(events)
        upto = pop_scan_end(events)
        # A read that just reaches the limit of bytes may be complete. The next read then finds no more events.
        if len(events) >= most or max_wire_bytes(events) >= most_bytes:
            upto = events[-1].id
        return events, upto

    def _most_events(self, group: ShardGroup) -> int:
        return self._steps.limit(SUSPECT_EVENTS if self._is_suspect(group) else CHUNK_EVENTS)

    def _ask_for_small(self, group: ShardGroup, piece: WindowSlice, most: int, most_payload: int) -> Answer | None:
        """Return the answer of a read of small events; None if none is to be made, or if the first event is large.

        Such a read takes the server a third less time. It ends before the first large event. After one, events of every
        size are read until many in a row were small.
        """
        if self._small_events < SMALL_AGAIN or piece.late or self._steps.reduced:
            return None
        events = self._timed(self._store.read_small, "small", group, piece, most, SMALL_BYTES, most_payload)
        if cut_unread(events):
            self._small_events = 0
            return (events, events[-1].id) if events else None
        return events, events[-1].id if len(events) >= most else None

    def _count_small(self, events: Sequence[StoredEvent]) -> None:
        """Count the events of a read towards those that were small, or begin again if one was not."""
        if self._small_events >= SMALL_AGAIN:
            return
        is_large = any(map(FAULT, events)) or max(map(_size, events), default=0) > SMALL_BYTES
        self._small_events = 0 if is_large else self._small_events + len(events)

    def _fetch(
        self, group: ShardGroup, piece: WindowSlice, most: int, most_bytes: int, most_payload: int
    ) -> list[StoredEvent]:
        if piece.late:
            return self._timed(self._store.read_late, "late", group, piece, most, most_bytes, most_payload)
        return self._timed(self._store.read_rest, "rest", group, piece, most, most_bytes, most_payload)

    def _timed(
        self, ask: Read, kind: str, group: ShardGroup, piece: WindowSlice, most: int, most_bytes: int, most_payload: int
    ) -> list[StoredEvent]:
        """Return the events of a read, which another loop may have made."""
        a, b, _ = group.position
        bounds = (piece.after, piece.upto, most, most_bytes)

        def read() -> list[StoredEvent]:
            with self._parts.measures.read.time():
                return ask(
                    *(sorted(group.shards), self._spec.types, a, b, *bounds),
                    most_payload=most_payload,
                    server=self._server,
                )

        key = (kind, self._server, self._types, group.shards, a, b, *bounds, most_payload)
        return self._ticks.reads.get(key, read)

    def _is_suspect(self, group: ShardGroup) -> bool:
        held = self._leases.held
        return any(shard in held and held[shard].crashes >= SUSPECT_CRASHES for shard in group.shards)


def _size(event: StoredEvent) -> int:
    """Return the bytes of an event as the database counts them."""
    return len(event.payload or b"") + _text_bytes(event.key) + _text_bytes(event.headers)


def _text_bytes(text: str | None) -> int:
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode())


def reason_of_failed_read(error: StatementFailed) -> str | None:
    """Return the reason of a failed read if a smaller one may succeed; otherwise None."""
    state = error.sqlstate
    return UNLOADABLE if state is None or state.startswith("22") else TOO_MUCH.get(state)


def ask_without_payload(ask: Callable[[int], Answer], sink: str, after: int, error: StatementFailed) -> Answer:
    """Read one event that could not be read, without its payload. ``ask`` is called with the largest payload to load.

    The reason becomes its fault.

    Raises ``StatementFailed`` if that fails too, since the payload is then not the reason.
    """
    reason = reason_of_failed_read(error)
    try:
        events, upto = ask(0 if reason == UNLOADABLE else SMALL_PAYLOAD_BYTES)
    except StatementFailed as again:
        raise StatementFailed(
            f"sink {sink}: the event behind id {after} cannot be read, with or without its payload: {again}",
            again.sqlstate,
        ) from None
    # The fault names the limit of this read, which is not the ceiling.
    faults = [
        f"reading it failed, {reason}: {event.fault.partition(OVER_LIMIT)[0]}" if event.fault else None
        for event in events
    ]
    return [event._replace(fault=fault) for event, fault in zip(events, faults, strict=True)], upto
