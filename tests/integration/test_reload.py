"""A session that ends for a new configuration, or gives its shards up, repeats no request that is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Unavailable, Verdict
from outbox_relay.domain.sink_spec import SinkSpec
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import auntil

LEASED = "select id from outbox.delivery where lease is not null"
RELEASED = "select 1 where not exists (select from outbox.shard where owner is not null)"


class Slow:
    """A destination that answers the first event when told to, and every other one at once."""

    def __init__(self, others: Verdict = DELIVERED) -> None:
        self.answer = asyncio.Event()
        self.others = others
        self._first: int | None = None

    def __call__(self, event: StoredEvent, _attempt: int) -> Verdict | Awaitable[Verdict]:
        if self._first is None:
            self._first = event.id
        return self._wait() if event.id == self._first else self.others

    async def _wait(self) -> Verdict:
        await self.answer.wait()
        return DELIVERED


async def reloaded(harness: RelayHarness, newer: SinkSpec) -> None:
    """Do with the harness's sink what SIGHUP does."""
    look = await harness.ticker.refresh()
    wanted = [(newer.name, newer.patterns, newer.start)]
    generations = await harness.store.register_sinks(wanted, look.tick, server=look.incarnation)
    harness.relays[0].reload(newer, generations[newer.name])


async def serves(harness: RelayHarness, patterns: tuple[str, ...]) -> None:
    """Wait until the harness serves its sink with these patterns, and owns all of it."""

    async def fact() -> bool:
        return harness.relays[0].spec.patterns == patterns

    await auntil(fact, seconds=30, what=f"the patterns are {patterns}")
    await harness.owns_all()


async def test_a_reload_waits_for_a_request_that_became_a_row(database: Database) -> None:
    """Goes red when the session ends once its shards are released, whatever is under way."""
    script = Slow()
    sink = MemorySink(script, keeps_order=False)
    older = spec("s", patterns=("test.*",), types=("test.%",), park_after_seconds=0.05)
    newer = replace(older, patterns=("test.*", "other.*"), types=("test.%", "other.%"))
    async with running(database.dsn, (older, sink), expects={"reload"}) as harness:
        await harness.owns_all()
        [slow] = emit(database, ["a"])
        await has(database, LEASED)
        await reloaded(harness, newer)
        await has(database, RELEASED)
        rounds = harness.store.calls["sinks"]

        async def looked() -> bool:
            return harness.store.calls["sinks"] >= rounds + 2 or bool(harness.ended)

        await auntil(looked, seconds=20, what="the relay has looked around with nothing in hand")
        assert harness.ended == [], "the request is under way"
        script.answer.set()
        await serves(harness, newer.patterns)
        [quick] = emit(database, ["b"])
        await delivered(sink, [slow, quick])
        await harness.settled()
    assert sink.attempts == [slow, quick]
    assert [str(error) for error in harness.ended] == ["the configuration was reloaded"]


async def test_shards_that_are_given_up_while_the_destination_is_down_wait_for_a_request_that_became_a_row(
    database: Database,
) -> None:
    """Goes red when only the requests that are not parked yet are waited for."""
    script = Slow()
    sink = MemorySink(script, keeps_order=False)
    older = spec("s", patterns=("test.*",), types=("test.%",), park_after_seconds=0.05)
    newer = replace(older, patterns=("*",), types=None)
    async with running(database.dsn, (older, sink), expects={"reload", "handed_over"}) as harness:
        await harness.owns_all()
        [slow] = emit(database, ["a"])
        await has(database, LEASED)
        script.others = Unavailable("down")
        emit(database, [f"k{n}" for n in range(60)])

        async def is_open() -> bool:
            return harness.relays[0].circuit != "closed"

        await auntil(is_open, seconds=20, what="the circuit is open")
        await reloaded(harness, newer)
        rounds = harness.store.calls["sinks"]

        async def looked() -> bool:
            return harness.store.calls["sinks"] >= rounds + 3 or bool(harness.ended)

        await auntil(looked, seconds=20, what="the relay has been told to give its shards up")
        assert harness.ended == [], "the request is under way"
        script.answer.set()
        script.others = DELIVERED
        await serves(harness, newer.patterns)
        await harness.settled()
    assert sink.attempts.count(slow) == 1
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]
