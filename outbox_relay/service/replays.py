"""The replays of one process: those whose target sink it serves, each delivered by a relay of its own.

A replay is delivered by a client of its own with the settings of the target. Ending a session discards what its client
has not sent, which must not affect the target's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import ConfigurationError, RelayError, StatementFailed
from outbox_relay.domain.file_reading import sink_files
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.domain.sink_spec import ReplaySpec, SinkSpec
from outbox_relay.domain.thread_shortage import is_thread_shortage
from outbox_relay.postgres.replay_statements import ReplayRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.sink_relay import SinkRelay
from outbox_relay.relay.ticker import Ticker
from outbox_relay.sinks import Sink

LOOK_SECONDS = 1.0
"""Interval between two questions for replays."""
SHARE = 4
"""Divisor of the number of concurrent requests of the target. Its replays together may take that part of them."""
MOST_WALKING, MOST_AT_ONCE = 4, 8
"""Maximum number of replays of one target that read the log at the same time, and with those of which only rows are
left. The others wait for their turn."""
TEND_SECONDS = 0.5
"""Time after which the remaining replays are looked after in the next round."""

MakeClient = Callable[[str, int, int], Sink]
"""Returns a client for (name of the sink in the settings, number of the replay, maximum of concurrent requests)."""
Supervise = Callable[[str, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs a part until it returns, and starts it again after errors."""


class Basis(NamedTuple):
    """Everything on which the relay of a replay depends. It is made again when any of it changes."""

    configured: str
    """The name of the target in the settings."""
    spec: SinkSpec
    generation: int
    target: Sink
    slots: int
    version: int
    """The number of reloads that were applied."""


@dataclass(slots=True)
class _Served:
    """A replay that is delivered here."""

    basis: Basis
    relay: SinkRelay
    task: asyncio.Task[None]
    stopping: asyncio.Event

    def stop(self) -> None:
        """Drain its shards, and end its relay."""
        self.stopping.set()
        self.relay.leases.reconfigure()


class ReplayRelays:
    """The relays of replays, by number. ``targets`` are the relays of the sinks by their names in the settings."""

    def __init__(
        self,
        store: Store,
        ticker: Ticker,
        lease_manager: LeaseManager,
        targets: Mapping[str, SinkRelay],
        make_client: MakeClient,
        log: BoundLogger,
        stopping: asyncio.Event,
    ) -> None:
        self._store = store
        self._ticker = ticker
        self._lease_manager = lease_manager
        self._targets = targets
        self._make_client = make_client
        self._log = log
        self._rate_limited_log = RateLimitedLog(log)
        self._stopping = stopping
        self._served: dict[int, _Served] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._ending = asyncio.Lock()
        self._version = 0
        self._tended = 0

    @property
    def relays(self) -> Mapping[int, SinkRelay]:
        """The relays of the replays that are delivered here, by number."""
        return {number: served.relay for number, served in self._served.items()}

    def reloaded(self) -> None:
        """Make every client again, since settings or secrets changed."""
        self._version += 1

    async def run(self, supervise: Supervise) -> None:
        """Begin and end relays as replays and their targets change, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    await self._look(group, supervise)
                except (RelayError, RuntimeError) as error:
                    if not isinstance(error, RelayError) and not is_thread_shortage(error):
                        raise
                    self._rate_limited_log.warning("replays.failed", reason=str(error))
                await asyncio.sleep(LOOK_SECONDS)

    async def stop(self) -> None:
        """Drain the replays of a process that stops, and wait until their relays have ended."""
        for served in self._served.values():
            served.stop()
        if self._served:
            await asyncio.wait([served.task for served in self._served.values()])

    async def leave(self) -> None:
        """Release what the relays left behind, and close their clients."""
        for number in list(self._served):
            try:
                await self._end(number)
            except RelayError as error:
                self._log.warning("relay.left_behind", what=f"replay {number}", reason=str(error))

    async def close(self) -> None:
        """Close the clients that ``leave`` did not come to. Nothing else of this object runs any more."""
        while self._served:
            await self._close(self._served.popitem()[1])

    async def _look(self, group: asyncio.TaskGroup, supervise: Supervise) -> None:
        rows = await self._store.replays()
        wanted = self._wanted(rows)
        for number, served in list(self._served.items()):
            if served.task.done():
                await self._end(number)
            elif served.basis != wanted.get(number, (None, None))[1]:
                served.stop()
        for number, (row, basis) in wanted.items():
            if number not in (*self._served, *self._opening) and not self._stopping.is_set():
                # A task of its own: a file of the target that blocks must not hold up the other replays.
                self._opening[number] = task = group.create_task(self._begin(row, basis, group, supervise))
                task.add_done_callback(lambda _, number=number: self._opening.pop(number))
        await self._tend([row.id for row in rows])

    async def _tend(self, numbers: list[int]) -> None:
        """Look after the replays in turn, each in a transaction of its own, for a limited time."""
        began, following = time.monotonic(), [number for number in numbers if number > self._tended]
        for number in (*following, *(number for number in numbers if number <= self._tended)):
            self._tended = number
            try:
                await self._store.tend_replay(number)
            except StatementFailed as error:
                self._rate_limited_log.warning("replay.failed", replay=number, reason=str(error))
            if time.monotonic() - began > TEND_SECONDS:
                return

    def _wanted(self, rows: list[ReplayRow]) -> dict[int, tuple[ReplayRow, Basis]]:
        """Return the replays to be delivered here, with what their relays depend on."""
        wanted: dict[int, tuple[ReplayRow, Basis]] = {}
        for configured, target in self._targets.items():
            if not target.leases.serving:
                continue
            mine = [row for row in rows if row.running and row.target == target.spec.name]
            walking = [row for row in mine if row.walking][:MOST_WALKING]
            chosen = [*walking, *(row for row in mine if not row.walking)][:MOST_AT_ONCE]
            # Not by their number: each replay that ends would have the clients of all others made again.
            slots = max(1, target.sink.max_in_flight // SHARE // (1 if len(mine) == 1 else MOST_AT_ONCE))
            for row in chosen:
                generation = target.leases.generation
                wanted[row.id] = row, Basis(configured, target.spec, generation, target.sink, slots, self._version)
        return wanted

    async def _begin(self, row: ReplayRow, basis: Basis, group: asyncio.TaskGroup, supervise: Supervise) -> None:
        try:
            client = await self._client(row.id, basis)
        except (ConfigurationError, RuntimeError) as error:
            if not isinstance(error, ConfigurationError) and not is_thread_shortage(error):
                raise
            self._rate_limited_log.warning("replay.unserved", replay=row.id, reason=str(error))
            return
        if self._stopping.is_set():
            await client.close()
            return
        stopping, target = asyncio.Event(), self._targets[basis.configured]
        name = f"~{row.id}"
        relay = SinkRelay(
            replace(basis.spec, name=name, hold=False, claim="log", replay=ReplaySpec(row.id, row.named, row.rate)),
            *(client, self._store, self._ticker, self._lease_manager),
            self._lease_manager.add(name, basis.generation),
            *(self._log.bind(sink=row.target, replay=row.id), stopping),
            may_send=lambda: target.circuit == "closed" or target.in_hand == 0,
            target_limits=target.limits,
        )
        task = group.create_task(self._supervised(supervise, row.id, relay))
        self._served[row.id] = _Served(basis, relay, task, stopping)
        self._log.info("replay.serving", sink=row.target, replay=row.id)

    async def _client(self, number: int, basis: Basis) -> Sink:
        """Return an open client. Raises ``ConfigurationError``."""
        files = sink_files(basis.configured)
        client = await files.acall(lambda: self._make_client(basis.configured, number, basis.slots))
        try:
            await client.open()
        except BaseException:  # also if the relay stops meanwhile
            await client.close()
            raise
        return client

    async def _supervised(self, supervise: Supervise, number: int, relay: SinkRelay) -> None:
        await supervise(f"replay {number}", relay.run)

    async def _end(self, number: int) -> None:
        """Release what the relay of a replay left behind, and close its client, once.

        A process that stops may find the replay while the round ends it.
        """
        async with self._ending:
            if (served := self._served.get(number)) is None:
                return
            served.task.cancel()
            await asyncio.wait([served.task])
            await served.relay.leave()
            self._lease_manager.discard(f"~{number}")
            del self._served[number]
            await self._close(served)

    async def _close(self, served: _Served) -> None:
        for sink in served.relay.sinks:
            await sink.close()
