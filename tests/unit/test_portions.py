"""Writes that fail: tried again, smaller where their size may be the reason, and given up in the end."""

from __future__ import annotations

import pytest

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.relay.portions import MOST_TRIES, write_in_portions
from outbox_relay.relay.settler import MOST_EVENTS

TIMEOUT, DEADLOCK = "57014", "40P01"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between tries."""
    monkeypatch.setattr("outbox_relay.relay.portions.FIRST_PAUSE_SECONDS", 0.0)


class Writes:
    """A write of ``left`` rows; its tries fail with the states in ``failures``, one after another."""

    def __init__(self, left: int, failures: list[str]) -> None:
        self.left, self.failures, self.asked = left, failures, list[int]()

    async def __call__(self, most: int) -> bool:
        self.asked.append(most)
        if self.failures:
            raise StatementFailed("the database ended the statement", self.failures.pop(0))
        self.left -= min(most, self.left)
        return self.left > 0


async def test_portions_that_run_out_of_time_get_smaller_down_to_one_row() -> None:
    writes = Writes(MOST_EVENTS, [TIMEOUT] * MOST_TRIES)
    with pytest.raises(StatementFailed):
        await write_in_portions(MOST_EVENTS, writes)
    assert (writes.asked[0], writes.asked[-1], len(writes.asked)) == (MOST_EVENTS, 1, MOST_TRIES)
    assert writes.left == MOST_EVENTS


async def test_portion_after_a_deadlock_is_as_large() -> None:
    writes = Writes(100, [DEADLOCK] * (MOST_TRIES - 1))
    await write_in_portions(100, writes)
    assert (writes.left, writes.asked) == (0, [100] * MOST_TRIES)


async def test_what_is_left_follows_in_portions_of_the_size_that_succeeded() -> None:
    writes = Writes(20, [TIMEOUT])
    await write_in_portions(64, writes)
    assert writes.asked == [64, 8, 8, 8]
