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

from outbox_relay.delivering import SUSPECT_CRASHES, Delivering
from outbox_relay.errors import LeaseLost, PositionsMissing, StartAgain
from outbox_relay.event import PAYLOAD
from outbox_relay.gate import Gate
from outbox_relay.ordering import Chunk, Reader
from outbox_relay.ownership import Holding, Ownership
from outbox_relay.settling import Settling
from outbox_relay.spec import SinkSpec
from outbox_relay.store import Store
from outbox_relay.ticking import Ticking
from outbox_relay.window import Position, part, read, stride

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
    ) -> None:
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
        self._readers: list[Reader] = []
        self._leaving: list[Reader] = []
        self._span = SPAN_IDS
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
            reader = Reader(shards, position)
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

    def _drain(self, reader: Reader, leaving: set[int]) -> None:
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
        if not drained or (self._gate.is_shut and self._direct.under_way):
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
            raise StartAgain(f"sink {self._spec.name}: shards were given up while the destination is down")

    def _put_off_gaps(self) -> None:
        """Make what is not done before something that is into rows: else what is done behind it would be read again."""
        gaps = [gap for reader in self._settling.readers for gap in reader.gaps()]
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
            await self._obey()
            return True
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

    async def _obey(self) -> None:
        """Some sink has another configuration: see whether it is this one before a window ends at the new tick."""
        generations = self._ticking.generations
        await self._ownership.look()
        self._generations = generations

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
            other = next((r for r in self._readers if r is not reader and r.meets(reader)), None)
            if other is not None:
                other.join(reader)
                self._readers.remove(reader)
                self._settling.readers.remove(reader)

    def _far(self, reader: Reader) -> bool:
        a, b, last = reader.position
        return b is not None and b.seq - max(a.seq, last) > FAR_IDS

    async def _read(self, reader: Reader) -> None:
        """Read the next chunk of ``reader`` and hand it over."""
        start = reader.position
        if start.b is None:
            return
        piece = part(start, self._span, self._floor, reader.stride)
        most = SUSPECT_EVENTS if self._suspect(reader) else CHUNK_EVENTS
        ask = self._store.read_late if piece.late else self._store.read_rest
        shards = sorted(reader.shards)
        events = await ask(
            shards, self._spec.types, start.a, start.b, piece.after, piece.upto, most, CHUNK_BYTES, server=self._server
        )
        self._ticking.since(self._era)
        cut = len(events) >= most or sum(map(len, map(PAYLOAD, events))) >= CHUNK_BYTES
        end = start.at(events[-1].id) if cut else read(start, piece)
        reader.stride = stride(start, piece, len(events), events[0].id, events[-1].id) if cut else 0
        self._span = SPAN_IDS if events else min(self._span * 2, MOST_SPAN_IDS)
        self._hand_over(reader, Chunk(events, start, end))

    def _hand_over(self, reader: Reader, chunk: Chunk) -> None:
        self._settling.take(reader, chunk)
        if chunk.events:
            self._direct.put(chunk)

    def _suspect(self, reader: Reader) -> bool:
        held = self._holding.held
        return any(shard in held and held[shard].crashes >= SUSPECT_CRASHES for shard in reader.shards)
