"""Takes each fence of the product out, and sees that the simulation finds it: ``python -m tests.simulation fences``.

A fence that stands in the schema is taken out of the simulated database. That the schema has it is asked of a server,
by ``tests.property.mutations``: fences of ``settle``, ``claim_rows``, ``delete_rows``, ``update_rows`` and positions.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any, cast
from uuid import UUID

from outbox_relay.domain.in_flight import BlockedKeys
from outbox_relay.domain.window import Tick
from outbox_relay.postgres.rows import DeliveredRow
from outbox_relay.relay.earlier_outcomes import EarlierOutcomes
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.log_reader import LogReader
from outbox_relay.relay.outcomes import Outcomes
from outbox_relay.relay.sink_leases import SinkLeases
from tests.simulation import world
from tests.simulation.database import BEGINNING, MemoryDatabase
from tests.simulation.world import Faults

SECONDS = 60.0
"""Time of the processor in which a fence that is missing has to be found."""


def _keys_are_freed_before_their_rows_are_written() -> None:
    """Leave out: the owner delivers a key directly again only after a query that began after it settled the key."""
    original = Outcomes.park

    def park(self: Outcomes, chunk: Any, index: int, *arguments: Any, **named: Any) -> None:
        original(self, chunk, index, *arguments, **named)
        key = chunk.events[index].key
        if key in self.blocked and not self.parts.store.still_blocked("a", [key], self.parts.spec.hold):
            self.blocked._keys.pop(key)  # pyright: ignore[reportPrivateUsage]

    Outcomes.park = park  # type: ignore[method-assign]


def _settlements_take_the_newest_epoch() -> None:
    """Leave out: a settlement is written at the epochs that the session has adopted."""

    def settle(
        self: MemoryDatabase, sink: str, owner: UUID, positions: Any, rows: Any, epochs: Any, **named: Any
    ) -> None:
        epochs = {number: shard.epoch for number, shard in enumerate(self.contents.shards)}
        positions = {shard: (epochs[shard], position) for shard, (_, position) in positions.items()}
        original(self, sink, self.contents.shards[0].owner, positions, rows, epochs, **named)  # type: ignore[arg-type]

    original = MemoryDatabase.settle
    MemoryDatabase.settle = settle  # type: ignore[method-assign]


def _clients_look_at_no_lease() -> None:
    """Leave out: a sink passes no event on once the lease of its call has ended."""
    sink = world.SimulatedSink
    original = sink._pass  # pyright: ignore[reportPrivateUsage]

    def _pass(self: Any, call: Any, index: int) -> None:
        call.until = float("inf")
        original(self, call, index)

    sink._pass = _pass  # type: ignore[method-assign]


def _leases_do_not_end() -> None:
    """Leave out: a loop hands nothing over after the end of a lease by its own clock."""
    SinkLeases.until = lambda self, shards: float("inf")  # type: ignore[method-assign] # noqa: ARG005


def _nobody_purges() -> None:
    """Leave out: a thread beside the loop purges the client when a lease ends."""
    Keeper.purge_lapsed = lambda self: 0.25  # type: ignore[method-assign] # noqa: ARG005


def _calls_outlast_their_session() -> None:
    """Leave out: a session begins once the calls of the last one can no longer be sent."""
    world.SimulatedSink.withdraw = lambda self: None  # type: ignore[method-assign] # noqa: ARG005


def _row_leases_are_not_compared() -> None:
    """Leave out: an outcome of a row counts only under its lease."""
    original = MemoryDatabase.delete_rows

    def delete_rows(self: MemoryDatabase, sink: str, done: Sequence[DeliveredRow], **named: object) -> dict[int, bool]:
        ours = [
            each._replace(lease=self.contents.rows[each.id].lease) for each in done if each.id in self.contents.rows
        ]  # type: ignore[arg-type]
        return original(self, sink, ours, **named)

    MemoryDatabase.delete_rows = delete_rows  # type: ignore[method-assign]


def _keys_are_not_loaded() -> None:
    """Leave out: blocked keys are known before anything of a claimed shard is read."""
    EarlierOutcomes.take_over = lambda self, shards: None  # type: ignore[method-assign] # noqa: ARG005


def _newest_position_counts() -> None:
    """Leave out: of the positions of a shard the one with the highest epoch counts."""

    def position(self: MemoryDatabase, shard: int) -> Any:
        entries = self.contents.ledger.get(shard)
        return entries[-1][1] if entries else BEGINNING

    MemoryDatabase.position = position  # type: ignore[method-assign]


def _epochs_stay() -> None:
    """Leave out: a session that ended is fenced off by new epochs."""

    def reclaim(self: Keeper, leases: SinkLeases) -> None:
        leases.replace({}, 0.0)

    Keeper.reclaim = reclaim  # type: ignore[method-assign]


def _windows_close_unread() -> None:
    """Leave out: a tick that shows no new id may still show a late commit."""
    from outbox_relay.domain import in_flight

    def nothing_new(a: Tick, b: Tick) -> bool:
        return a.seq == b.seq

    in_flight.nothing_new = nothing_new


def _older_ticks_are_followed() -> None:
    """Leave out: a relay that takes over a shard never follows a tick older than its position."""
    from outbox_relay.domain import window

    def older(*_: Tick) -> bool:
        return False

    cast(Any, window)._older = older


def _no_latecomers() -> None:
    """Leave out: a window begins with those that were running at its first tick."""
    Tick.has_pending = property(lambda self: False)  # type: ignore[method-assign,assignment] # noqa: ARG005


def _rows_of_a_key_overtake() -> None:
    """Leave out: a row is claimed only if no earlier one of its key takes part in the order."""
    MemoryDatabase._may_go = lambda self, i, row: True  # type: ignore[method-assign] # noqa: ARG005


def _blocked_keys_are_sent() -> None:
    """Leave out: events of a blocked key become rows."""
    BlockedKeys.__contains__ = lambda self, key: False  # type: ignore[method-assign] # noqa: ARG005


def _keys_do_not_wait() -> None:
    """Leave out: without a client that keeps order, one event of a key is in flight at a time."""
    Outcomes.keyed = lambda self, event: False  # type: ignore[method-assign] # noqa: ARG005


def _losses_go_unseen() -> None:
    """Leave out: a session ends when it lost a shard, even if it claimed it again."""

    def lost(self: SinkLeases) -> bool:
        self.adopted = {shard: lease.epoch for shard, lease in self.held.items() if shard in self.adopted}
        return False

    SinkLeases.lost = property(lost)  # type: ignore[method-assign,assignment]


def _servers_are_not_compared() -> None:
    """Leave out: a session reads and settles at the server that it began with."""
    MemoryDatabase._only_at = lambda self, server: None  # type: ignore[method-assign] # noqa: ARG005
    LogReader._check = lambda self, result: None  # type: ignore[method-assign] # noqa: ARG005


def _configurations_are_not_compared() -> None:
    """Leave out: no window of an older configuration ends behind a newer one."""
    LogReader._config_is_read = lambda self, versions: True  # type: ignore[method-assign] # noqa: ARG005


def _marks_are_not_read() -> None:
    """Leave out: what is read again is compared with the marks of discarded events."""
    EarlierOutcomes._without_discarded = lambda self, events: events  # type: ignore[method-assign] # noqa: ARG005


def _dead_keys_flow() -> None:
    """Leave out: with when_dead = hold, the keys of dead rows are asked for before a read is handed over."""
    EarlierOutcomes._block_keys = lambda self, events: None  # type: ignore[method-assign] # noqa: ARG005


def _positions_cover_what_is_in_flight() -> None:
    """Leave out: a position covers an event only once it is done, or a row of the same or an earlier settlement."""
    from outbox_relay.domain.in_flight import Chunk

    Chunk.reached = lambda self: self.end  # type: ignore[method-assign]
    from outbox_relay.domain.in_flight import ShardGroup

    ShardGroup.settled = property(lambda self: self.position)  # type: ignore[method-assign,assignment]


STALLS = Faults(freeze=0.004, crash=0.0, restore=0.0, seek=0.0)
LOSSES = Faults(unavailable=0.03, restore=0.0, seek=0.0)
RESTORES = Faults(restore=0.5, hidden=1.0, seek=0.0)
FENCES: dict[str, tuple[Callable[[], None], dict[str, Any]]] = {
    "keys are freed before their rows are written": (_keys_are_freed_before_their_rows_are_written, {}),
    "settlements take the newest epoch": (_settlements_take_the_newest_epoch, {"given_faults": LOSSES}),
    "clients look at no lease": (_clients_look_at_no_lease, {"given_faults": STALLS, "kind": "batches"}),
    "leases do not end": (_leases_do_not_end, {"given_faults": STALLS}),
    "nobody purges": (_nobody_purges, {"given_faults": STALLS, "kind": "batches"}),
    "calls outlast their session": (_calls_outlast_their_session, {"given_faults": LOSSES}),
    "leases of rows are not compared": (_row_leases_are_not_compared, {"given_faults": STALLS}),
    "keys are not loaded": (_keys_are_not_loaded, {}),
    "the newest position counts": (_newest_position_counts, {"given_faults": LOSSES}),
    "epochs stay": (_epochs_stay, {}),
    "windows close unread": (_windows_close_unread, {}),
    "older ticks are followed": (_older_ticks_are_followed, {}),
    "there are no latecomers": (_no_latecomers, {}),
    "rows of a key overtake": (_rows_of_a_key_overtake, {}),
    "blocked keys are sent": (_blocked_keys_are_sent, {}),
    "keys do not wait": (_keys_do_not_wait, {"kind": "requests"}),
    "losses go unseen": (_losses_go_unseen, {"given_faults": STALLS}),
    "servers are not compared": (_servers_are_not_compared, {"given_faults": RESTORES, "kind": "requests"}),
    "configurations are not compared": (
        _configurations_are_not_compared,
        {"given_faults": Faults(0, 0, 0, 0, 0, 0, 0, 0), "acts": ("configure", "reload", "stop", "resume")},
    ),
    "marks are not read": (
        _marks_are_not_read,
        {
            "kind": "requests",
            "holds": True,
            "acts": ("discard", "discard", "pause", "resume"),
            "given_faults": Faults(seek=0.5, restore=0.0),
        },
    ),
    "dead keys flow": (_dead_keys_flow, {"holds": True, "kind": "requests"}),
    "positions cover what is in flight": (_positions_cover_what_is_in_flight, {}),
}
"""The fences by what holds without them: how they are taken out, and the schedules that are looked through."""


def _search(name: str, results: Any) -> None:
    from tests.simulation.__main__ import search

    take_out, schedules = FENCES[name]
    take_out()
    seed, error = search(SECONDS, **schedules)[1:]
    results.put(None if error is None else f"seed {seed}: {error}")


def try_all(names: Sequence[str]) -> int:
    """Take out the fences of these names, or all, each in a process of its own. Return the exit code."""
    missed = 0
    for name in names or FENCES:
        results = cast(Any, multiprocessing.SimpleQueue())
        began = time.perf_counter()
        process = multiprocessing.get_context("fork").Process(target=_search, args=(name, results))
        process.start()
        process.join()
        found = None if results.empty() else results.get()
        missed += found is None
        print(f"{name} ({time.perf_counter() - began:.1f} s): {found or 'NOT FOUND'}", flush=True)
    return 1 if missed else 0
