"""The rate of all relays together over ten seconds of the database's clock: within a tenth of what the settings say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outbox_relay.domain.sink_limits import SinkLimits
from tests.support.database import Database, query
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, spec
from tests.support.wait import auntil

RATE = 50.0
SECONDS = 10.0
PART = 0.1
EVENTS = 4500


class Relays:
    """Relays of one sink with a rate, and the events that all of them have delivered."""

    def __init__(self, database: Database, **changes: Any) -> None:
        self._database = database
        self._spec = spec("s", limits=SinkLimits(RATE), **changes)
        self._sinks: list[MemorySink] = []
        self.alive: list[RelayHarness] = []

    @property
    def delivered(self) -> int:
        """The number of events that were delivered."""
        return sum(len(sink.delivered) for sink in self._sinks)

    async def join(self, relays: int = 1) -> None:
        """Start further relays."""
        for _ in range(relays):
            self._sinks.append(MemorySink(keeps_order=False))
            relay = RelayHarness(
                self._database.dsn, [(self._spec, self._sinks[-1])], lease_seconds=3.0, expects={"handed_over"}
            )
            await relay.start()
            self.alive.append(relay)

    async def leave(self, relays: int = 1) -> None:
        """Stop the relays that have been there longest."""
        for _ in range(relays):
            await self.alive.pop(0).stop()

    async def sharing(self) -> None:
        """Wait until each relay has its shards."""
        share = 64 // len(self.alive)

        async def fact() -> bool:
            return all(relay.lease_manager.held.get("s", 0) == share for relay in self.alive)

        await auntil(fact, seconds=60, what=f"each relay has {share} shards")

    def clock(self) -> float:
        """Return the database's time in seconds."""
        [(seconds,)] = query(self._database, "select extract(epoch from clock_timestamp())::double precision")
        return seconds


async def measured(relays: Relays, changes: Sequence[int] = ()) -> tuple[int, float]:
    """Return the number of events of ten seconds, in which relays join (above 0) and leave, and the seconds."""
    began, before = relays.clock(), relays.delivered
    for change in changes:
        await (relays.join(change) if change > 0 else relays.leave(-change))

    async def fact() -> bool:
        return relays.clock() >= began + SECONDS

    await auntil(fact, seconds=90, what="ten seconds pass")
    return relays.delivered - before, relays.clock() - began


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["log", "rows"])
@pytest.mark.parametrize("key", ["'k'", "n::text"], ids=["one-key", "many-keys"])
async def test_the_rate_is_exact_with_one_two_and_four_relays_and_while_they_join_and_leave(
    database: Database, claim: str, key: str
) -> None:
    """Goes red with a rate for each relay, and with one that is divided by the number of relays or of shards."""
    query(database, f"select outbox.emit('job', '1', key => {key}) from generate_series(1, {EVENTS}) n")
    relays = Relays(database, claim=claim, ordered=claim == "log")
    await relays.join()
    await auntil(lambda: _is(relays.delivered > RATE), seconds=60, what="events flow")
    found = {"one": await measured(relays)}
    await relays.join()
    await relays.sharing()
    found["two"] = await measured(relays)
    found["join"] = await measured(relays, [1, 1])
    await relays.sharing()
    found["four"] = await measured(relays)
    found["leave"] = await measured(relays, [-1, -1])
    assert relays.delivered < EVENTS
    paces = {name: round(count / seconds / RATE, 3) for name, (count, seconds) in found.items()}
    assert all(1 - PART <= pace <= 1 + PART for pace in paces.values()), paces
    await relays.leave(2)


async def _is(fact: bool) -> bool:
    return fact
