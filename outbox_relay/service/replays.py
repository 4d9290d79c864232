"""The replays of one process: those whose target sink it serves, each delivered by a loop in a thread of its own.

A replay is delivered by a client of its own with the settings of the target. Ending a session discards what its client
has not sent, which must not affect the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Thread
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import ConfigurationError, RelayError, StatementFailed
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.domain.thread_shortage import is_thread_shortage
from outbox_relay.postgres.replay_statements import ReplayRow
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
MOST_WALKING, MOST_AT_ONCE = 4, 8
"""Maximum number of replays of one target that read the log at the same time, and with those of which only rows are
left. The others wait for their turn."""
TEND_SECONDS = 0.5
"""Time after which the remaining replays are looked after in the next round."""

MakeClient = Callable[[str, int, int], Sink]
"""Returns a client for (name of the sink in the settings, number of the replay, maximum of concurrent calls)."""


class ReplayInputs(NamedTuple):
    """Everything on which the loop of a replay depends. It is made again when any of it changes."""

    configured: str
    """The name of the target in the settings."""
    spec: SinkSpec
    generation: int
    target: Sink
    slots: int


@dataclass(slots=True)
class _Served:
    """A replay that is delivered here."""

    inputs: ReplayInputs
    sink: ServedSink
    thread: Thread


class Replays:
    """The replays that are delivered here. ``targets`` are the sinks by their names in the settings.

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
        self._served: dict[int, _Served] = {}
        self._tended = 0

    @property
    def sinks(self) -> Mapping[int, ServedSink]:
        """The replays that are delivered here, by number."""
        return {number: served.sink for number, served in list(self._served.items())}

    def run(self) -> None:
        """Begin and end loops as replays and their targets change, until the process stops, and then drain them."""
        while not self._supervisor.stopping.is_set():
            try:
                self.look()
            except RelayError as error:
                self._seldom.warning("replays.failed", reason=str(error))
            self._supervisor.stopping.wait(LOOK_SECONDS)
        for served in self._served.values():
            served.sink.stop()
        for served in self._served.values():
            served.thread.join()

    def look(self) -> None:
        """Begin the replays that are to be delivered here, end the others, and look after all."""
        rows = self._store.replays()
        wanted = self._wanted(rows)
        for number, served in list(self._served.items()):
            if not served.thread.is_alive():
                self._keeper.discard(served.sink.spec.name)
                del self._served[number]
            elif number not in wanted or served.inputs != wanted[number][1]:
                served.sink.stop()
        for number, (row, inputs) in wanted.items():
            if number not in self._served:
                self._begin(row, inputs)
        self._tend([row.id for row in rows])

    def _tend(self, numbers: list[int]) -> None:
        """Look after the replays in turn, each in a transaction of its own, for a limited time."""
        began, following = time.monotonic(), [number for number in numbers if number > self._tended]
        for number in (*following, *(number for number in numbers if number <= self._tended)):
            self._tended = number
            try:
                self._store.tend_replay(number)
            except StatementFailed as error:
                self._seldom.warning("replay.failed", replay=number, reason=str(error))
            if time.monotonic() - began > TEND_SECONDS:
                return

    def _wanted(self, rows: Sequence[ReplayRow]) -> dict[int, tuple[ReplayRow, ReplayInputs]]:
        """Return the replays to be delivered here, with what their loops depend on."""
        wanted: dict[int, tuple[ReplayRow, ReplayInputs]] = {}
        for configured, target in self._targets.items():
            if not target.leases.serving:
                continue
            mine = [row for row in rows if row.running and row.target == target.spec.name]
            walking = [row for row in mine if row.walking][:MOST_WALKING]
            chosen = [*walking, *(row for row in mine if not row.walking)][:MOST_AT_ONCE]
            # Not by their number: each replay that ends would have the clients of all others made again.
            slots = max(1, target.sink.max_in_flight // SHARE // (1 if len(mine) == 1 else MOST_AT_ONCE))
            for row in chosen:
                inputs = ReplayInputs(configured, target.spec, target.leases.generation, target.sink, slots)
                wanted[row.id] = row, inputs
        return wanted

    def _begin(self, row: ReplayRow, inputs: ReplayInputs) -> None:
        name, target = f"~{row.id}", self._targets[inputs.configured]
        spec = replace(inputs.spec, name=name, replay=ReplaySpec(row.id, row.named, row.rate))
        try:
            client = self._client(row.id, inputs)
        except (ConfigurationError, RuntimeError) as error:
            if not isinstance(error, ConfigurationError) and not is_thread_shortage(error):
                raise
            self._seldom.warning("replay.unserved", replay=row.id, reason=str(error))
            return
        log = self._log.bind(sink=row.target, replay=row.id)
        sink = ServedSink(
            *(spec, client, self._keeper.add(name, inputs.generation), self._keeper),
            lambda served: new_loop(served, self._store, self._keeper, self._ticks, log, target),
        )
        thread = self._supervisor.start(f"replay {row.id}", sink.run, sink=name)
        self._served[row.id] = _Served(inputs, sink, thread)
        self._log.info("replay.serving", sink=row.target, replay=row.id)

    def _client(self, number: int, inputs: ReplayInputs) -> Sink:
        """Return an open client. Raises ``ConfigurationError``."""
        make = self.make_client
        client = make(inputs.configured, number, inputs.slots)
        try:
            client.open()
        except BaseException:
            client.close()
            raise
        return client
