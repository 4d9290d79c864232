"""Writes that fail: tried again, smaller where their size may be the reason, and given up in the end."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

import pytest

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.in_flight import Chunk, InFlight
from outbox_relay.domain.window import Position, Tick
from outbox_relay.postgres.rows import ClaimedRow, NewRow
from outbox_relay.relay.settle import FIRST_PAUSE_SECONDS, MOST_ROWS, MOST_TRIES, Portion, Settler
from outbox_relay.relay.sink_leases import Lease, SinkLeases
from outbox_relay.sinks.contract.handing import an_event
from tests.support.recording import a_recorder

TIMEOUT, DEADLOCK = "57014", "40P01"
NOWHERE = Position(Tick(0, "3:3:", 3), Tick(10**9, "9:9:", 9), 0)


class Write:
    """A write of ``left`` rows, whose tries fail with the states in ``failures``, one after another."""

    def __init__(self, left: int, failures: list[str]) -> None:
        self.left, self.failures, self.asked, self.now = left, failures, list[int](), 0.0
        self.portion = Portion(lambda: self.now)

    def __call__(self, most: int) -> bool:
        self.asked.append(most)
        if self.failures:
            raise StatementFailed("the database ended the statement", self.failures.pop(0))
        self.left -= min(most, self.left)
        return self.left > 0

    def until_written(self) -> None:
        """Try until everything is written, each time after the pause."""
        while not self.portion.write(self.left, self):
            assert not self.portion.write(self.left, self), "a try comes after its pause"
            self.now = self.portion.not_before


def test_portions_that_run_out_of_time_get_smaller_down_to_one_row() -> None:
    write = Write(MOST_ROWS, [TIMEOUT] * MOST_TRIES)
    with pytest.raises(StatementFailed):
        write.until_written()
    assert (write.asked[0], write.asked[-1], len(write.asked)) == (MOST_ROWS, 1, MOST_TRIES)
    assert write.left == MOST_ROWS


def test_portion_after_a_deadlock_is_as_large() -> None:
    write = Write(100, [DEADLOCK] * (MOST_TRIES - 1))
    write.until_written()
    assert write.asked == [100] * MOST_TRIES
    assert write.now >= FIRST_PAUSE_SECONDS * 2 ** (MOST_TRIES - 1)


class Database:
    """A store that fails with settlements while ``locked``, and keeps what it is asked."""

    def __init__(self) -> None:
        self.locked = True
        self.done: list[str] = []

    def settle(self, _sink: str, _owner: UUID, positions: Any, rows: Any, _epochs: Any, **_: Any) -> None:
        """Write positions and rows."""
        if self.locked:
            raise StatementFailed("a lock", "55P03")
        self.done.append(f"{len(rows)} rows, {len(positions)} positions")

    def delete_rows(self, _sink: str, done: Any, **_: Any) -> dict[int, bool]:
        """Delete rows."""
        self.done.append(f"deleted {[row.id for row in done]}")
        return {row.id: False for row in done}


def _ignore(*_: object) -> None: ...


def test_outcomes_of_other_rows_do_not_wait_for_a_settlement_that_fails() -> None:
    """A row that is still to be written is deleted after that, and no position passes it before."""
    now, database, in_flight = [0.0], Database(), InFlight()
    leases = SinkLeases("s", 1)
    leases.grant({1: Lease(1)})
    leases.adopt()
    settler = Settler(
        *(cast("Any", database), leases, UUID(int=1), in_flight, a_recorder(), "1", lambda: now[0], _ignore),
    )
    in_flight.take_over([1], Position(Tick(0, "3:3:", 3)))
    slow, other = (an_event()._replace(id=number, shard=1) for number in (1, 2))
    in_flight.readable[0].position = NOWHERE
    chunk = Chunk([slow], NOWHERE, NOWHERE.at(1))
    in_flight.take(in_flight.readable[0], chunk)
    settler.park(chunk, 0, NewRow(1, 1, "waiting", True), blocks=False)
    lease = UUID(int=2)
    settler.finish(ClaimedRow(other, False, 0, 1, lease), None)
    settler.finish(ClaimedRow(slow, False, 0, 1, lease), None)
    now[0] = 10.0
    assert not settler.settle()
    assert database.done == ["deleted [2]"]
    assert settler.due_at(0) > now[0]
    assert settler.due_at(1) > now[0]
    database.locked, now[0] = False, settler.due_at(0)
    assert settler.settle()
    assert database.done[1:] == ["1 rows, 1 positions", "deleted [1]"]
