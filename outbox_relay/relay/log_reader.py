"""Reading the log for one sink: shards that stand at the same position are read together, window by window.

A round begins with a tick: every reader that stands between two windows opens one that ends there. None begins
while the sink has enough to do: what comes meanwhile is read together. The readers take turns, a chunk each. A shard
just taken over is read on its own; while it is far behind the others go on without it, and once it is near a new
round waits for it, so that all meet at the same tick and go on as one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from outbox_relay.domain.errors import HandedOver, LeaseLost, PositionsMissing, StatementFailed
from outbox_relay.domain.event import StoredEvent, max_wire_bytes, pop_scan_end
from outbox_relay.domain.in_flight import Chunk, ShardGroup
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.domain.window import Position, ScanStep, WindowSlice, next_slice, position_after
from outbox_relay.postgres.rows import MOST_PAYLOAD
from outbox_relay.postgres.store import Store
from outbox_relay.relay.dispatch import SUSPECT_CRASHES, Delivering
from outbox_relay.relay.gate import Gate
from outbox_relay.relay.leases import Holding, Ownership
from outbox_relay.relay.settler import Settling
from outbox_relay.relay.ticker import Ticking

CHUNK_EVENTS = 4000
CHUNK_BYTES = 8 << 20
"""Bounds of one read."""
SUSPECT_EVENTS = 500
"""The same for shards whose owners crashed again and again."""
SPAN_IDS = 50_000
"""How many ids one read looks at, at most, so that a sink that few events are routed to is read in bounded steps."""
MOST_SPAN_IDS = 5_000_000
"""Up to which that is doubled while nothing is found: half a second's work."""
FAR_IDS = 20_000
"""How many ids behind the end of its window a reader is waited for by the others."""
SMALL_PAYLOAD_BYTES = 64 << 10
"""Up to this size a payload is never the reason why a read runs out of time or memory."""
TOO_MUCH = {"57014": "it ran out of time", "53200": "it ran out of memory", "54000": "it met a limit of the database"}
"""SQLSTATEs of reads that asked for too much, and what they say."""
UNLOADABLE = "its answer cannot be loaded"
OVER_LIMIT = ", more than the ceiling"
"""Text that the schema adds after the size of a payload that it did not load."""
AGAIN_SECONDS = 1.0
"""Pause before a single event that could not be read is read again: a moment without memory kills none."""


class Reading:
    """The readers of one sink, in one session: of one ``era`` of the ticks, and so of one server."""

    def __init__(
        self,
        spec: SinkSpec,
        store: Store,
        ticking: Ticking,
        ownership: Ownership,
        holding: Holding,
        settling: Settling,
        gate: Gate,
        direct: Delivering,
        put_off: Callable[[Chunk, int], None],
        floor: int,
        era: int,
        rows_under_way: Callable[[], int] = lambda: 0,
    ) -> None:
        self._rows_under_way = rows_under_way
        self._spec = spec
        self._store = store
        self._ticking = ticking
        self._ownership = ownership
        self._holding = holding
        self._settling = settling
        self._gate = gate
        self._direct = direct
        self._put_off = put_off
        self._era = era
        self._server = settling.server
        self._generations = -1
        self._readers: list[ShardGroup] = []
        self._leaving: list[ShardGroup] = []
        self._span = SPAN_IDS
        self._steps = ScanStep()
        self._floor = floor
        self.wake = asyncio.Event()
        """Set when there may be something to do."""

    def changed(self) -> None:
        """What this relay has of the sink is another now: that comes before anything is waited for."""
        self.wake.set()
        self._settling.nudge()

    # -- claim ------------------------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """Take over shards that were claimed, and drain and release those that are to go."""
        known = {shard for reader in self._settling.readers for shard in reader.shards}
        if known - self._holding.held.keys():
            raise LeaseLost(f"sink {self._spec.name}: a shard was lost")
        if gained := self._holding.held.keys() - known:
            await self._take_over(gained)
        leaving = self._holding.leaving()
        for reader in list(self._readers):
            if reader.shards & leaving:
                self._drain(reader, leaving)
        await self._release()

    async def _take_over(self, gained: set[int]) -> None:
        """Blocked keys first, then positions; nothing of these shards has been read before."""
        if self._spec.ordered:
            sink, hold = self._spec.name, self._spec.hold
            self._settling.blocked.load(await self._store.blocked_keys(sink, gained, hold, server=self._server))
        together: defaultdict[Position, list[int]] = defaultdict(list)
        standing = await self._positions(gained)
        for shard, position in standing.items():
            together[position].append(shard)
        for position, shards in together.items():
            reader = ShardGroup(shards, position)
            self._readers.append(reader)
            self._settling.adopt(reader)

    async def _positions(self, gained: set[int]) -> dict[int, Position]:
        """Return where shards stand that were claimed.

        Raises ``PositionsMissing`` when that is not known, ``LeaseLost`` when the sink was removed meanwhile.
        """
        try:
            standing = await self._store.positions(self._spec.name, gained, server=self._server)
        except PositionsMissing as error:
            await self._ownership.look()
            if self._holding.removed:
                raise LeaseLost(f"sink {self._spec.name}: it was removed") from None
            self._holding.fault = str(error)
            raise
        self._holding.fault = None
        return standing

    def _drain(self, reader: ShardGroup, leaving: set[int]) -> None:
        """Read ``leaving`` shards no further."""
        out = reader.split(leaving)
        self._settling.readers.append(out)
        self._leaving.append(out)
        if not reader.shards:
            self._readers.remove(reader)
            self._settling.readers.remove(reader)

    async def _release(self) -> None:
        """Release drained shards, after their last settlement.

        While the destination is down nothing drains: then shards go as they stand, and the session ends.
        """
        if not self._gate.flows and not all(reader.idle for reader in self._leaving):
            self._gate.shut()
        drained = [reader for reader in self._leaving if reader.idle or self._gate.is_shut]
        under_way = self._direct.under_way or self._rows_under_way()
        if not drained or (self._gate.is_shut and under_way):
            return
        if self._gate.is_shut:
            self._put_off_gaps()
        await self._settling.flush(everything=True)
        for reader in drained:
            shards = set(reader.shards)
            self._leaving.remove(reader)
            self._settling.drop(reader)
            await self._ownership.release(self._holding, shards, reader.undone)
        if self._gate.is_shut:
            raise HandedOver(f"sink {self._spec.name}: shards were given up while the destination is down")

    def _put_off_gaps(self) -> None:
        """Make what is not done before something that is into rows: else what is done behind it would be read again."""
        gaps = [gap for reader in self._settling.readers for gap in reader.unsettled_before_last_done()]
        for chunk, index in dict.fromkeys(gaps):
            self._put_off(chunk, index)

    @property
    def draining(self) -> bool:
        """Whether shards wait to be released."""
        return bool(self._leaving)

    # -- read -------------------------------------------------------------------------------------------------

    async def step(self) -> bool:
        """Read one chunk for every reader that has an open window; returns whether there was any.

        Raises ``IncarnationChanged`` when what was read may be wrong.
        """
        if self._gate.is_shut:
            return False
        tick = self._ticking.since(self._era)
        if tick is None:
            self._ticking.want(self.wake)
            return False
        if self._generations != self._ticking.generations:
            return await self._obey()
        sated = self._direct.sated
        if not sated and not any(reader.position.b is not None and not self._far(reader) for reader in self._readers):
            self._begin_round()
        open_readers = [reader for reader in self._readers if reader.position.b is not None]
        for reader in open_readers:
            if not await self._settling.room(self.wake):
                return True
            await self._read(reader)
        if not open_readers and self._readers and not sated:
            self._ticking.want(self.wake)
        return bool(open_readers)

    async def _obey(self) -> bool:
        """Some sink has another configuration: see whether it is this one before a window ends at the new tick.

        Returns whether that is known. Until it is, nothing is read.
        """
        generations = self._ticking.generations
        try:
            await self._ownership.look()
        except StatementFailed:
            return False
        self._generations = generations
        return True

    def _begin_round(self) -> None:
        tick = self._ticking.since(self._era)
        if tick is None:
            return
        self._merge()
        for reader in self._readers:
            reader.follow(tick)

    def _merge(self) -> None:
        """Readers that stand at the same place with nothing in hand go on as one."""
        for reader in list(self._readers):
            other = next((r for r in self._readers if r is not reader and r.can_join(reader)), None)
            if other is not None:
                other.join(reader)
                self._readers.remove(reader)
                self._settling.readers.remove(reader)

    def _far(self, reader: ShardGroup) -> bool:
        a, b, last = reader.position
        return b is not None and b.seq - max(a.seq, last) > FAR_IDS

    async def _read(self, reader: ShardGroup) -> None:
        """Read the next chunk of ``reader`` and hand it over."""
        start = reader.position
        if start.b is None:
            return
        newest = self._ticking.latest
        piece = next_slice(start, self._steps.limit(self._span), self._floor, newest.seq if newest else 0)
        try:
            events, upto = await self._ask(reader, piece)
        except StatementFailed as error:
            if error.sqlstate == StatementFailed.NO_CONNECTION:  # its turn comes; no event is the reason
                return
            if _reason(error) is None:
                raise
            self._steps.failed()
            self._span = SPAN_IDS
            if not self._steps.exhausted:
                if self._steps.limit(CHUNK_EVENTS) == 1:
                    await asyncio.sleep(AGAIN_SECONDS)
                return
            events, upto = await self._ask_without_payload(reader, piece, error)
        self._steps.succeeded()
        self._ticking.since(self._era)
        end = position_after(start, piece) if upto is None else start.at(upto)
        self._span = SPAN_IDS if events else min(self._span * 2, MOST_SPAN_IDS)
        self._hand_over(reader, Chunk(events, start, end))

    async def _ask(
        self, reader: ShardGroup, piece: WindowSlice, most_payload: int = MOST_PAYLOAD
    ) -> tuple[list[StoredEvent], int | None]:
        """Return the events of one read, and the id up to which it got; None when it got to the end of ``piece``."""
        a, b, _ = reader.position
        if b is None:
            raise ValueError("there is no window to read")
        most = self._steps.limit(SUSPECT_EVENTS if self._suspect(reader) else CHUNK_EVENTS)
        most_bytes = self._steps.limit(CHUNK_BYTES)
        ask = self._store.read_late if piece.late else self._store.read_rest
        events = await ask(
            sorted(reader.shards),
            *(self._spec.types, a, b, piece.after, piece.upto, most, most_bytes),
            most_payload=most_payload,
            server=self._server,
        )
        upto = pop_scan_end(events)
        # The bound of bytes may be met without being cut: then the next read finds what is left, if anything.
        if len(events) >= most or max_wire_bytes(events) >= most_bytes:
            upto = events[-1].id
        return events, upto

    async def _ask_without_payload(
        self, reader: ShardGroup, piece: WindowSlice, error: StatementFailed
    ) -> tuple[list[StoredEvent], int | None]:
        """Read one event that could not be read, without its payload: it gets the reason as its fault.

        Raises ``StatementFailed`` if that fails too: then the payload is not the reason.
        """
        reason = _reason(error)
        try:
            events, upto = await self._ask(reader, piece, 0 if reason == UNLOADABLE else SMALL_PAYLOAD_BYTES)
        except StatementFailed as again:
            raise StatementFailed(
                f"sink {self._spec.name}: the event behind id {piece.after} cannot be read, with or without its "
                f"payload: {again}",
                again.sqlstate,
            ) from None
        # The limit that the fault names is that of this read, not the ceiling.
        faults = [
            f"reading it failed, {reason}: {event.fault.partition(OVER_LIMIT)[0]}" if event.fault else None
            for event in events
        ]
        return [event._replace(fault=fault) for event, fault in zip(events, faults, strict=True)], upto

    def _hand_over(self, reader: ShardGroup, chunk: Chunk) -> None:
        self._settling.take(reader, chunk)
        if chunk.events:
            self._direct.put(chunk)

    def _suspect(self, reader: ShardGroup) -> bool:
        held = self._holding.held
        return any(shard in held and held[shard].crashes >= SUSPECT_CRASHES for shard in reader.shards)


def _reason(error: StatementFailed) -> str | None:
    """Why a read failed, if one that asks for less may succeed; else None."""
    state = error.sqlstate
    return UNLOADABLE if state is None or state.startswith("22") else TOO_MUCH.get(state)
