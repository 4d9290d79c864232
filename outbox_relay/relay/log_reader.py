"""The reading of the log for one sink, window by window.

Shards at the same position are read together.

A round begins with a tick. Every shard group between two windows opens one that ends at that tick. No round begins
while the sink is saturated, so that events emitted meanwhile are read together. The groups take turns, a chunk each. A
shard that was just taken over is read on its own. While it is far behind, the others continue without it. Once it is
near, a new round waits for it, so that all groups meet at the same tick and are joined.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Protocol

from outbox_relay.domain.errors import HandedOver, LeaseLost, PositionsMissing, StatementFailed
from outbox_relay.domain.event import StoredEvent, cut_unread, max_wire_bytes, pop_scan_end
from outbox_relay.domain.in_flight import Chunk, InFlight, ShardGroup
from outbox_relay.domain.window import Position, ScanStep, WindowSlice, next_slice, position_after
from outbox_relay.postgres.rows import MOST_PAYLOAD, WindowRequest
from outbox_relay.postgres.store import Store
from outbox_relay.relay.context import SUSPECT_CRASHES, DeliveryContext
from outbox_relay.relay.dispatcher import Dispatcher
from outbox_relay.relay.earlier_outcomes import EarlierOutcomes
from outbox_relay.relay.failed_reads import Answer, ask_without_payload, reason_of_failed_read
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.small_reads import SmallReads
from outbox_relay.relay.ticker import Ticker
from outbox_relay.relay.timing import timed

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


Read = Callable[..., Awaitable[list[StoredEvent]]]
"""A method of the store that reads events of a window."""


class Parked(Protocol):
    """The parked deliveries, of which the reader needs the number."""

    @property
    def under_way(self) -> int:
        """The number of rows that are being delivered here or wait to be settled."""
        ...


class LogReader:
    """Reads the owned shards of one sink in one session.

    Everything it reads belongs to one ``session_epoch`` of the ticks, and so to one server. Ids up to ``floor`` are of
    an older numbering.
    """

    def __init__(
        self,
        context: DeliveryContext,
        store: Store,
        ticker: Ticker,
        lease_manager: LeaseManager,
        in_flight: InFlight,
        dispatcher: Dispatcher,
        parked: Parked,
        earlier_outcomes: EarlierOutcomes,
        floor: int,
        session_epoch: int,
    ) -> None:
        self._context = context
        self._spec = context.spec
        self._leases = context.leases
        self._settler = context.settler
        self._breaker = context.breaker
        self._store = store
        self._ticker = ticker
        self._lease_manager = lease_manager
        self._in_flight = in_flight
        self._dispatcher = dispatcher
        self._parked = parked
        self._earlier_outcomes = earlier_outcomes
        self._floor = floor
        self._session_epoch = session_epoch
        self._server = context.settler.server
        self._config_versions = -1
        self._request: WindowRequest | None = None
        self._max_ids = IDS_PER_READ
        self._steps = ScanStep()
        self._small_reads = SmallReads()

    # -- claim ------------------------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """Take over claimed shards, and drain and release those that leave.

        Raises ``LeaseLost`` if a shard was lost.
        """
        known, held = self._in_flight.shards, self._leases.held.keys()
        if self._leases.lost or not known <= held:
            raise LeaseLost(f"sink {self._spec.name}: a shard was lost")
        if len(known) < len(held):
            await self._take_over(held - known)
        if leaving := self._leases.leaving():
            self._in_flight.drain(leaving)
        if self._in_flight.leaving:
            await self._release()

    async def _take_over(self, gained: Collection[int]) -> None:
        """Load outcomes of earlier owners and then positions.

        No event of these shards has been read before.
        """
        await self._earlier_outcomes.take_over(gained)
        together: defaultdict[Position, list[int]] = defaultdict(list)
        for shard, position in (await self._positions(gained)).items():
            together[position].append(shard)
        for position, shards in together.items():
            self._in_flight.take_over(shards, position)

    async def _positions(self, gained: Collection[int]) -> dict[int, Position]:
        """Return the stored positions of claimed shards.

        Raises ``PositionsMissing`` if one has none, and ``LeaseLost`` if that is so because the sink was removed.
        """
        try:
            return await self._store.positions(self._spec.name, gained, server=self._server)
        except PositionsMissing:
            await self._lease_manager.refresh()
            if self._leases.removed:
                raise LeaseLost(f"sink {self._spec.name}: it was removed") from None
            raise

    async def _release(self) -> None:
        """Release drained shards after their last settlement.

        While the destination is down, or the limits of all relays admit few events, no shard drains soon. Shards are
        then handed over with events in flight, and the session ends by ``HandedOver``. Requests in flight are waited
        for, since the next owner would repeat them.
        """
        leaving = self._in_flight.leaving
        if self._is_stalled() and not all(group.idle for group in leaving):
            self._breaker.begin_handover()
        handing_over = self._breaker.handing_over
        drained = [group for group in leaving if group.idle or handing_over]
        if not drained or (handing_over and (self._dispatcher.under_way or self._parked.under_way)):
            return
        if not self._context.may_release:
            return
        if handing_over:
            self._defer_unsettled()
        await self._settler.flush(everything=True)
        for group in drained:
            self._in_flight.drop(group)
            await self._lease_manager.release(self._leases, group.shards, group.undone)
        if handing_over:
            raise HandedOver(f"sink {self._spec.name}: shards were given up with events in flight")

    def _is_stalled(self) -> bool:
        """Return True if shards would take long to drain."""
        since = self._breaker.unavailable_since
        is_down = since is not None and time.monotonic() - since >= self._spec.park_after_seconds
        return is_down or not self._context.flows or self._context.limits.stall(self._in_flight.undone)

    def _defer_unsettled(self) -> None:
        """Park the events that precede a settled one.

        Otherwise the next owner would read and deliver the settled one again.
        """
        for chunk, index in self._in_flight.unsettled_before_last_done():
            self._context.defer(chunk, index)

    @property
    def draining(self) -> bool:
        """True while shards are to be released."""
        return bool(self._in_flight.leaving)

    # -- read -------------------------------------------------------------------------------------------------

    async def step(self) -> bool:
        """Read one chunk for every group with an open window.

        Return False if the caller should wait before the next step.

        Raises ``IncarnationChanged`` if anything that was read may be wrong.
        """
        if self._breaker.handing_over:
            return False
        tick = self._ticker.since(self._session_epoch)
        if tick is None:
            self._ticker.want(self._leases.wake)
            return False
        if self._config_versions != self._ticker.config_versions:
            return await self._check_configuration()
        saturated = self._dispatcher.saturated
        if not saturated and all(self._is_far(group) for group in self._open()):
            self._begin_round()
        groups = self._open()
        for group in groups:
            if not self._settler.has_capacity():
                return False
            await self._read(group)
        if not groups and self._in_flight.readable and not saturated:
            self.want_tick()
        return bool(groups)

    def want_tick(self) -> None:
        """Set the wake event once there is a newer tick, which may come with the next window."""
        self._request = self._next_request()
        self._ticker.want(self._leases.wake, self._request)

    def _next_request(self) -> WindowRequest | None:
        """Return the window that will be read next, if the next tick may come with it.

        It must not concern events that reads failed for, or that may crash a relay.
        """
        groups = self._in_flight.readable
        if len(groups) != 1 or groups[0].position.b is not None or self._steps.reduced or self._is_suspect(groups[0]):
            return None
        [group] = groups
        size = self._small_reads.size
        return WindowRequest(group.position.a, self._floor, group.shards, self._spec.types, most_size=size)

    async def _check_configuration(self) -> bool:
        """Ask for another configuration of this sink before the new tick is used.

        Return False if the database did not answer. No event is read until it has.
        """
        config_versions = self._ticker.config_versions
        try:
            await self._lease_manager.refresh()
            if self._leases.is_behind:
                await self._lease_manager.refresh()
        except StatementFailed:
            return False
        self._config_versions = config_versions
        return True

    def _open(self) -> list[ShardGroup]:
        return [group for group in self._in_flight.readable if group.position.b is not None]

    def _is_far(self, group: ShardGroup) -> bool:
        a, b, last = group.position
        return b is not None and b.seq - max(a.seq, last) > FAR_IDS

    def _begin_round(self) -> None:
        tick = self._ticker.since(self._session_epoch)
        if tick is not None:
            self._in_flight.begin_round(tick)

    async def _read(self, group: ShardGroup) -> None:
        """Read the next chunk of ``group`` and pass it to the dispatcher."""
        start = group.position
        if start.b is None:
            return
        try:
            found = self._looked_at(group) or await self._read_slice(group, start)
            if found is None:
                return
            events, end = found
            deliverable = await self._earlier_outcomes.screen(events)
            if self._spec.tenants:
                deliverable = await self._store.with_tenants(deliverable)
        except StatementFailed as error:
            if error.sqlstate == StatementFailed.NO_CONNECTION:  # its turn comes; no event is the reason
                return
            raise
        self._ticker.since(self._session_epoch)
        self._hand_over(group, Chunk(deliverable, start, end))

    def _looked_at(self, group: ShardGroup) -> tuple[list[StoredEvent], Position] | None:
        """Return the events that came with the tick at which the window of ``group`` ends, and the position after them.

        None if they did not come with it, or if the group is no longer the one that they were requested for.
        """
        request, start = self._request, group.position
        window = self._ticker.window(request)
        if request is None or window is None or not window.usable:
            return None
        if start != Position(request.a, window.b) or group.shards != request.shards:
            return None
        if window.is_cut:
            self._small_reads.met_large()
        self._small_reads.take(window.events)
        return window.events, start.closed() if window.upto is None else start.at(window.upto)

    async def _read_slice(self, group: ShardGroup, start: Position) -> tuple[list[StoredEvent], Position] | None:
        """Return the events of the next slice, and the position after them; None if a smaller read is to be tried."""
        piece = self._next_slice(start)
        answer = await self._ask_in_steps(group, piece)
        if answer is None:
            return None
        events, upto = answer
        self._steps.succeeded()
        self._max_ids = IDS_PER_READ if events else min(self._max_ids * 2, MOST_IDS_PER_READ)
        return events, position_after(start, piece) if upto is None else start.at(upto)

    def _next_slice(self, start: Position) -> WindowSlice:
        newest = self._ticker.latest
        return next_slice(start, self._steps.limit(self._max_ids), self._floor, newest.seq if newest else 0)

    async def _ask_in_steps(self, group: ShardGroup, piece: WindowSlice) -> Answer | None:
        """Return the answer of one read; None if it failed and a smaller one is to be tried.

        Raises ``StatementFailed`` for any other reason.
        """
        try:
            return await self._ask(group, piece)
        except StatementFailed as error:
            if reason_of_failed_read(error) is None:
                raise
            self._steps.failed()
            self._max_ids = IDS_PER_READ
            if self._steps.exhausted:
                return await ask_without_payload(partial(self._ask, group, piece), self._spec.name, piece.after, error)
            if self._steps.limit(CHUNK_EVENTS) == 1:
                await asyncio.sleep(AGAIN_SECONDS)
            return None

    async def _ask(self, group: ShardGroup, piece: WindowSlice, most_payload: int = MOST_PAYLOAD) -> Answer:
        """Return the events of one read, and the last id that it covers.

        The id is None if the read covers all of ``piece``.
        """
        most = self._steps.limit(self._most_events(group))
        most_bytes = self._steps.limit(CHUNK_BYTES)
        if (answer := await self._ask_for_small(group, piece, most, most_payload)) is not None:
            return answer
        events = await self._fetch(group, piece, most, most_bytes, most_payload)
        self._small_reads.take(events)
        upto = pop_scan_end(events)
        # A read that just reaches the limit of bytes may be complete. The next read then finds no more events.
        if len(events) >= most or max_wire_bytes(events) >= most_bytes:
            upto = events[-1].id
        return events, upto

    async def _ask_for_small(
        self, group: ShardGroup, piece: WindowSlice, most: int, most_payload: int
    ) -> Answer | None:
        """Return the answer of a read of small events; None if none is to be made, or if the first event is large."""
        size = self._small_reads.size
        if size is None or piece.late or self._steps.reduced:
            return None
        events = await self._timed(self._store.read_small, group, piece, most, size, most_payload)
        if cut_unread(events):
            self._small_reads.met_large()
            return (events, events[-1].id) if events else None
        return events, events[-1].id if len(events) >= most else None

    def _most_events(self, group: ShardGroup) -> int:
        return SUSPECT_EVENTS if self._is_suspect(group) else CHUNK_EVENTS

    async def _fetch(
        self, group: ShardGroup, piece: WindowSlice, most: int, most_bytes: int, most_payload: int
    ) -> list[StoredEvent]:
        ask = self._store.read_late if piece.late else self._store.read_rest
        return await self._timed(ask, group, piece, most, most_bytes, most_payload)

    async def _timed(
        self, ask: Read, group: ShardGroup, piece: WindowSlice, most: int, most_bytes: int, most_payload: int
    ) -> list[StoredEvent]:
        a, b, _ = group.position
        if b is None:
            raise ValueError("there is no window to read")
        with timed(self._context.measures.read):
            return await ask(
                sorted(group.shards),
                *(self._spec.types, a, b, piece.after, piece.upto, most, most_bytes),
                most_payload=most_payload,
                server=self._server,
            )

    def _hand_over(self, group: ShardGroup, chunk: Chunk) -> None:
        self._in_flight.take(group, chunk)
        if chunk.events:
            self._dispatcher.put(chunk)

    def _is_suspect(self, group: ShardGroup) -> bool:
        held = self._leases.held
        return any(shard in held and held[shard].crashes >= SUSPECT_CRASHES for shard in group.shards)
