"""The replays of one process: those whose target sink it serves, each delivered by a loop in a thread of its own.

A replay is delivered by a client of its own with the settings of the target. Ending a session discards what its client
has not sent, which must not affect the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import ConfigurationError, RelayError, StatementFailed
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.postgres.replays import ReplayRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.sink_spec import ReplaySpec, SinkSpec
from outbox_relay.relay.ticks import Ticks
from outbox_relay.service.sinks import ServedSink, new_loop
from outbox_relay.service.supervisor import Supervisor
from outbox_relay.sinks import Sink

LOOK_SECONDS = 1.0
"""Interval between two questions for replays."""
SHARE = 4
"""Divisor of the number of concurrent calls of the target. Its replays together may take that part of them."""
MOST_AT_ONCE = 8
"""Maximum number of replays of one target at the same time. The others wait for their turn."""
TEND_SECONDS = 0.5
"""Time after which the remaining replays are looked after in the next round."""

MakeClient = Callable[[str, int, int], Sink]
"""Returns a client for (name of the sink, number of the replay, maximum of concurrent calls)."""


class ReplayInputs(NamedTuple):
    """Everything of its target on which the loop of a replay depends. It is made again when any of it changes."""

    spec: SinkSpec
    generation: int
    target: Sink
    slots: int


class Replays:
    """The replays that are delivered here. ``targets`` are the sinks by name.

    Only the thread of ``run`` begins and forgets replays.
    """

    def __init__(
        self,
        store: Store,
        keeper: Keeper,
        ticks: Ticks,
        targets: Mapping[str, ServedSink],
        make_client: MakeClient,
        supervisor: Supervisor,
        log: BoundLogger,
    ) -> None:
        self._store = store
        self._keeper = keeper
        self._ticks = ticks
        self._targets = targets
        self.make_client = make_client
        self._supervisor = supervisor
        self._log = log
        self._seldom = RateLimitedLog(log)
        self._served: dict[int, tuple[ReplayInputs, ServedSink]] = {}
        self._tended = 0

    @property
    def sinks(self) -> Mapping[int, ServedSink]:
        """The replays that are delivered here, by number."""
        return {number: sink for number, (_, sink) in list(self._served.items())}

    def run(self) -> None:
        """Begin and end loops as replays and their targets change, until the process stops, and then drain them."""
        while not self._supervisor.stopping.is_set():
            try:
                self.look()
            except RelayError as error:
                self._seldom.warning("replays.failed", reason=str(error))
            self._supervisor.stopping.wait(LOOK_SECONDS)
        for sink in self.sinks.values():
            sink.stop()
        for sink in self.sinks.values():
            if sink.thread is not None:
                sink.thread.join()

    def look(self) -> None:
        """Begin the replays that are to be delivered here, end the others, and look after all."""
        rows = self._store.replays()
        wanted = self._wanted(rows)
        for number, (inputs, sink) in list(self._served.items()):
            if sink.thread is None or not sink.thread.is_alive():
                self._keeper.discard(sink.spec.name)
                del self._served[number]
            elif number not in wanted or inputs != wanted[number][1]:
                sink.stop()
        for number, (row, inputs) in wanted.items():
            if number not in self._served:
                self._begin(row, inputs)
        self._tend(sorted(rows, key=lambda row: (row.id <= self._tended, row.id)))

    def _tend(self, rows: Sequence[ReplayRow]) -> None:
        """Look after the replays in turn, each in a transaction of its own, for a limited time."""
        until = time.monotonic() + TEND_SECONDS
        for row in rows:
            self._tended = row.id
            try:
                self._store.tend_replay(row.id)
            except StatementFailed as error:
                self._seldom.warning("replay.failed", replay=row.id, reason=str(error))
            if time.monotonic() > until:
                return

    def _wanted(self, rows: Sequence[ReplayRow]) -> dict[int, tuple[ReplayRow, ReplayInputs]]:
        """Return the replays to be delivered here, those that read the log first, with what their loops depend on."""
        wanted: dict[int, tuple[ReplayRow, ReplayInputs]] = {}
        for name, target in self._targets.items():
            mine = [row for row in rows if row.running and row.target == name and target.leases.serving]
            # Not by their number: each replay that ends would have the clients of all others made again.
            slots = max(1, target.sink.max_in_flight // SHARE // (1 if len(mine) == 1 else MOST_AT_ONCE))
            inputs = ReplayInputs(target.spec, target.leases.generation, target.sink, slots)
            chosen = sorted(mine, key=lambda row: not row.walking)[:MOST_AT_ONCE]
            wanted |= {row.id: (row, inputs) for row in chosen}
        return wanted

    def _begin(self, row: ReplayRow, inputs: ReplayInputs) -> None:
        name, target = f"~{row.id}", self._targets[row.target]
        spec = replace(inputs.spec, name=name, replay=ReplaySpec(row.id, row.named, row.rate))
        try:
            client = self.make_client(row.target, row.id, inputs.slots)
            client.open()
        except ConfigurationError as error:
            self._seldom.warning("replay.unserved", replay=row.id, reason=str(error))
            return
        log = self._log.bind(sink=row.target, replay=row.id)
        leases = self._keeper.add(name, inputs.generation)
        sink = ServedSink(
            *(spec, client, leases, self._keeper),
            lambda served: new_loop(served, self._store, self._keeper, self._ticks, log, target),
        )
        sink.thread = self._supervisor.start(f"replay {row.id}", sink.run, sink=name)
        self._served[row.id] = inputs, sink
        self._log.info("replay.serving", sink=row.target, replay=row.id)
